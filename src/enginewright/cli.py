"""The two command lines: `optimize` builds an engine, `engine` looks at one and runs it.

Exit codes: 0 done; 1 verification failed (nothing was published); 2 what was given cannot be used. 130 on Ctrl-C, 143 on SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import enginewright
from enginewright.recipes.errors import EnginewrightError, InputError
from enginewright.serving import serve

from .generation_cli import bench, generate
from .planning_cli import (
    JsonCommand,
    planning_options,
    refuse_planning_options,
    run_plan,
    write_file,
    write_json,
)
from .verify_cli import verify_command

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@contextlib.contextmanager
def _asked_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that an unfinished build is removed, as on Ctrl-C."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signals: list[int] = []
    if threading.current_thread() is threading.main_thread():
        known = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
        signals = [number for number in known if number and signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def _reports_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """One clear message on stderr instead of a traceback, and the exit code that belongs to it."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _asked_to_end():
                return command(*args, **kwargs)
        except EnginewrightError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted: nothing unfinished was left behind", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(141)

    return run


# ------------------------------------------------------------------------------------------------ optimize


def _list_recipes(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from enginewright.inspection import print_tables
    from enginewright.recipes.recipe import list_recipes, load_recipe

    table = Table(
        "recipe", "linears", "embedding", "head", "KV cache", "description", box=None, pad_edge=False
    )
    for name in list_recipes():
        recipe = load_recipe(name)
        table.add_row(
            name,
            recipe.linear.weight,
            recipe.embedding.weight,
            recipe.head.weight,
            recipe.kv_cache.format,
            recipe.description,
        )
    print_tables([table])
    context.exit(0)


@click.command(cls=JsonCommand, context_settings=_CONTEXT)
@click.argument("model")
@click.option(
    "-r", "--recipe", default="int4", show_default=True, help="A recipe's name, or the path of a YAML file."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The engine's folder.  [default: engines/MODEL-RECIPE, and -BACKEND if not cpu]",
)
@click.option(
    "--backend",
    default="cpu",
    show_default=True,
    help="Where the engine will run: cpu, tensorrt, onnx or checkpoint.",
)
@click.option(
    "--target",
    metavar="NAME[,NAME]",
    help="The machines that it will run on, for --backend tensorrt: GPU architectures, as sm80,sm89.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field of the recipe, as linear.weight=int8.",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="Text for recipes that calibrate: .txt, .jsonl or .parquet, or `self`: the model writes it.  "
    "[default: the recipe's, self]",
)
@click.option(
    "--adapter",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Merge the LoRA adapter in this folder (as PEFT writes it) into the model.",
)
@click.option(
    "--dump",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the graph after every pass to this folder.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Measure what rounding costs each layer: a table, and layers.csv and layers.png in this folder.",
)
@click.option("--force", is_flag=True, help="Replace an engine that stands at the output.")
@click.option(
    "--cache",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Take the engine from this folder if it was built before from the same inputs; else build it, and keep it there.",
)
@click.option(
    "--check-reproducible",
    is_flag=True,
    help="Build twice, and publish the engine only if both have the same bytes.",
)
@click.option(
    "--bisect",
    is_flag=True,
    help="Where verification fails, name the pass, or the op and module, that is at fault.",
)
@click.option(
    "--allow-unverified", is_flag=True, help="Publish the engine even if verification fails; it says so."
)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page about the engine: passes, graph, sizes, verification, memory, provenance.",
)
@planning_options
@click.option(
    "--json",
    "as_json",
    metavar="[FILE.json]",
    help="Print one JSON object on stdout instead of the tables, or write it to the file.",
)
@click.option(
    "--list-recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="List the recipes and stop.",
)
@click.version_option(package_name="enginewright", prog_name="enginewright")
@click.pass_context
@_reports_errors
def optimize(
    context: click.Context,
    model: str,
    recipe: str,
    output: Path | None,
    backend: str,
    target: str | None,
    overrides: tuple[str, ...],
    calibration: str | None,
    adapter: Path | None,
    dump: Path | None,
    report: Path | None,
    force: bool,
    cache: Path | None,
    check_reproducible: bool,
    bisect: bool,
    allow_unverified: bool,
    html: Path | None,
    planned: bool,
    as_json: str | None,
    **_of_the_plan: Any,
) -> None:
    """Build a verified engine from MODEL: a Hugging Face folder, a .gguf file, or a hub name."""
    if planned:
        run_plan(context, as_json)
        return
    refuse_planning_options(context)
    from enginewright.inspection import build_tables, print_tables
    from enginewright.progress import Progress

    if html is not None and not html.absolute().parent.is_dir():
        raise InputError(f"{html} cannot be written", found="no such folder", action="create it first")
    built = enginewright.optimize(
        model,
        recipe=recipe,
        out=output,
        backend=backend,
        target=target,
        overrides=overrides,
        calibration=calibration,
        adapter=adapter,
        dump=dump,
        report=report,
        force=force,
        allow_unverified=allow_unverified,
        bisect=bisect,
        cache=cache,
        check_reproducible=check_reproducible,
        progress=Progress(Console(stderr=True)),
    )
    if html is not None:
        from enginewright.backends.artifact import open_engine
        from enginewright.html_report import page

        text = page(built.manifest, open_engine(built.path).build, layers=built.layers)
        write_file(html, text.encode(errors="backslashreplace"))
    if as_json is not None:
        write_json(built.to_dict(), as_json)
        return
    print_tables(build_tables(built), stderr=True)
    click.echo(str(built.path))


# -------------------------------------------------------------------------------------------------- engine


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="enginewright", prog_name="enginewright")
def engine() -> None:
    """Look at an engine and run it."""


@engine.command(short_help="Show what ENGINE is.")
@click.argument("path", metavar="ENGINE")
@click.option("--check", is_flag=True, help="Hash every file, and refuse an engine that was changed.")
@click.option(
    "--layers",
    is_flag=True,
    help="Show what calibration measured: candidates of formats, errors of matrices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@_reports_errors
def inspect(path: str, check: bool, layers: bool, as_json: bool) -> None:
    """Show what ENGINE is: model, recipe, passes, KV groups, calibration, sizes, verification."""
    from enginewright.backends.artifact import open_engine
    from enginewright.inspection import calibrated_tables, engine_tables, print_tables

    artifact = open_engine(path, check=check)
    if as_json:
        click.echo(json.dumps(artifact.manifest, indent=1, ensure_ascii=False))
        return
    tables = calibrated_tables(artifact.manifest) if layers else engine_tables(artifact)
    print_tables(tables)
    if not tables:
        click.echo(
            "nothing was measured of this engine's layers: its recipe does not calibrate (see `optimize --report`)"
        )
    if check:
        click.echo("every file's hash is right")


for command in (generate, serve, bench, verify_command):
    command.callback = _reports_errors(command.callback)  # type: ignore[arg-type]
    engine.add_command(command)
