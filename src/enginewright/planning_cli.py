"""`optimize MODEL --plan`: the options, and the way from them to tables or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from enginewright.recipes.errors import InputError
from enginewright.serving import Bytes

__all__ = [
    "JsonCommand",
    "planning_options",
    "refuse_planning_options",
    "run_plan",
    "write_file",
    "write_json",
]

_PLAN_ONLY = ("device", "memory", "max_context")
_BUILD_ONLY = ("output", "dump", "report", "force", "cache", "check_reproducible", "allow_unverified", "html")

_OPTIONS = [
    click.option(
        "--plan",
        "planned",
        is_flag=True,
        help="Build nothing: tell from the configuration alone what would be built, its bytes and best speed (docs/planning.md).",
    ),
    click.option(
        "--device", metavar="NAME", help="With --plan: a device, as A100-80GB.  [default: this machine]"
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        type=Bytes(),
        help="With --plan: what may be used.  [default: the device's]",
    ),
    click.option(
        "--context",
        "max_context",
        metavar="N",
        type=click.IntRange(min=1),
        help="With --plan: the engine's longest text, in tokens.  [default: the recipe's or the model's]",
    ),
]


def planning_options(command: Any) -> Any:
    """Add them to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class JsonCommand(click.Command):
    """A command whose --json may name a file: a word after it that ends in .json; else it stands for stdout."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        for place, word in enumerate(words):
            if word == "--":
                break
            if word == "--json" and not (words[place + 1 :] and words[place + 1].endswith(".json")):
                words[place] = "--json=-"
        return super().parse_args(ctx, words)


def write_json(record: dict[str, Any], target: str) -> None:
    """Print a JSON object, or write it to a file."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    if target == "-":
        click.echo(text)
        return
    write_file(Path(target), (text + "\n").encode(errors="backslashreplace"))


def write_file(file: Path, content: bytes) -> None:
    """Write a file that the command line names; raises InputError where that cannot be."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise InputError(f"{file} cannot be written", found=error.strerror) from error


def _given(context: click.Context, names: tuple[str, ...]) -> list[str]:
    told = [name for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    return [option.opts[-1] for name in told for option in context.command.params if option.name == name]


def refuse_planning_options(context: click.Context) -> None:
    """Refuse what means nothing without --plan."""
    given = _given(context, _PLAN_ONLY)
    if given:
        raise InputError(
            f"{given[0]} means nothing here", found="no --plan", action=f"add --plan, or leave {given[0]} out"
        )


def run_plan(context: click.Context, as_json: str | None) -> None:
    """Plan what the command line asks for. It ends with exit code 2 where a build would."""
    from enginewright.inspection import print_tables
    from enginewright.planning.plan import plan
    from enginewright.planning.tables import plan_tables
    from enginewright.progress import Progress

    given = _given(context, _BUILD_ONLY)
    if given:
        raise InputError(
            f"{given[0]} means nothing here",
            found="--plan, which builds nothing",
            action=f"leave {given[0]} out",
        )
    asked = context.params
    named = context.get_parameter_source("backend") == ParameterSource.COMMANDLINE
    made = plan(
        asked["model"],
        asked["recipe"],
        backend=asked["backend"] if named else None,
        target=asked.get("target"),
        overrides=asked["overrides"],
        calibration=asked["calibration"],
        adapter=asked["adapter"],
        device=asked["device"],
        memory=asked["memory"],
        context=asked["max_context"],
        progress=Progress(Console(stderr=True)) if as_json is None else None,
    )
    if as_json is not None:
        write_json(made.to_dict(), as_json)
    else:
        print_tables(plan_tables(made))
    if made.refused:
        context.exit(InputError.exit_code)
