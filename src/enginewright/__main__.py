"""`python -m enginewright …` is `engine …`, for environments whose scripts are not on the path."""

from enginewright.cli import engine

if __name__ == "__main__":
    engine(prog_name="python -m enginewright")
