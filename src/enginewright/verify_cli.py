"""`engine verify`: the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from enginewright.planning_cli import write_file
from enginewright.recipes.errors import InputError

__all__ = ["verify_command"]

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("verify", short_help="Hold ENGINE against its files, its source model, an earlier engine.")
@click.argument("path", metavar="ENGINE")
@click.option(
    "--against",
    metavar="MODEL",
    help="The model that it was built from: a folder, a .gguf file, or a hub name.",
)
@click.option("--adapter", metavar="DIR", help="The LoRA adapter that was merged into it.")
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="full: longer samples as well (minutes).",
)
@click.option(
    "--baseline",
    metavar="FILE",
    type=_FILE,
    help="What --json wrote of an earlier engine: fail where quality or size has become worse by more than it allows.",
)
@click.option(
    "--threads", metavar="N", type=click.IntRange(min=1), help="Threads of the engine.  [default: all cores]"
)
@click.option(
    "--bisect",
    is_flag=True,
    help="Run the engine's passes again, and name the first pass or op at fault (as long as a build).",
)
@click.option(
    "--calibration", metavar="FILE", help="With --bisect: the text that the recipe was calibrated on."
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write everything that was found.")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=_FILE,
    help="Write a page about the engine and what was found.",
)
@click.option("--junit", "junit_file", metavar="FILE", type=_FILE, help="Write the checks as JUnit XML.")
def verify_command(
    path: str,
    against: str | None,
    adapter: str | None,
    level: str,
    baseline: Path | None,
    bisect: bool,
    calibration: str | None,
    threads: int | None,
    json_file: Path | None,
    html_file: Path | None,
    junit_file: Path | None,
) -> None:
    """Verify ENGINE: every file is what was built; with --against MODEL, its answers are the model's within the recipe's
    limits, and the same however requests are scheduled.

    Exit code 0 where everything passed, 1 where a check failed.
    """
    from enginewright.html_report import damaged_page, page
    from enginewright.inspection import print_tables
    from enginewright.progress import Progress
    from enginewright.verification.checks import junit
    from enginewright.verification.on_disk import verify_engine

    for file in (json_file, junit_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError(f"{file} cannot be written", found="no such folder", action="create it first")
    report = verify_engine(
        path,
        against,
        adapter=adapter,
        level=level,
        baseline=baseline,
        bisect=bisect,
        calibration=calibration,
        threads=threads,
        progress=Progress(Console(stderr=True)),
    )
    written: dict[Path, bytes] = {}
    if json_file is not None:
        written[json_file] = (json.dumps(report.to_dict(), indent=1) + "\n").encode()
    if junit_file is not None:
        written[junit_file] = junit(report)
    if html_file is not None:
        text = (
            page(report.manifest, report.build, report.checks, report.verification)
            if report.manifest
            else damaged_page(report.engine, report.checks)
        )
        written[html_file] = text.encode(errors="backslashreplace")
    for file, content in written.items():
        write_file(file, content)
    print_tables([_table(report)])
    if report.bisection is not None:
        click.echo(report.bisection.text())
    report.raise_if_failed()


def _table(report: Any) -> Table:
    verdict = "[green]passed[/green]" if report.passed else "[red]failed[/red]"
    table = Table("check", "found", "expected", box=None, pad_edge=False, title=f"{report.engine}: {verdict}")
    table.title_justify = "left"
    group = None
    for check in report.checks:
        if check.group != group:
            table.add_row(f"[bold]{check.group}[/bold]")
            group = check.group
        mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "–"}[check.passed]
        table.add_row(f"  {mark} {check.name}", check.found, check.expected)
    return table
