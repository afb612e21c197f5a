"""The HTTP server: OpenAI's interfaces over an AsyncEngine (`app.py` has the routes, `run.py` the process)."""
