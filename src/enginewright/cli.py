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

from .planning_cli import (
    JsonCommand,
    planning_options,
    refuse_planning_options,
    run_plan,
    write_file,
    write_json,
)
from .speculation_cli import speculation_options
from .verify_cli import verify_command
from .workload_cli import LengthsType, bench_workload, refuse_workload_options, workload_options

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
            click.echo("interrupted: nothing was left behind", err=True)
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
    help="The engine's folder.  [default: engines/MODEL-RECIPE]",
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


_threads = click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=1),
    help="Threads that compute.  [default: the cores that the process may use]",
)
_weights = click.option(
    "--weights",
    type=click.Choice(["mmap", "copy"]),
    default="mmap",
    show_default=True,
    help="Map the file, shared with other processes, or copy it into memory.",
)
_provider = click.option(
    "--provider",
    metavar="NAME",
    help="What an onnx engine runs on: cpu, cuda or tensorrt-rtx.  [default: cpu]",
)


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


@engine.command()
@click.argument("path", metavar="ENGINE")
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@click.option(
    "--chat", is_flag=True, help="Each PROMPT is a user's message: apply the model's chat template."
)
@click.option("--system", metavar="TEXT", help="A system message before each PROMPT; only with --chat.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="At most so many new tokens a prompt.",
)
@click.option(
    "--temperature",
    metavar="X",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    metavar="X",
    type=click.FloatRange(0, 1),
    default=1.0,
    help="Draw among the likeliest tokens that hold this share of the probability.  [default: 1, all]",
)
@click.option(
    "--top-k",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Draw among the N likeliest.  [default: 0, all]",
)
@click.option(
    "--min-p",
    metavar="X",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Draw among tokens at least X times as likely as the likeliest.  [default: 0, all]",
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Sampling noise is a function of seed and position.",
)
@click.option(
    "--stop", metavar="TEXT", multiple=True, help="End before this text; may be given several times."
)
@_threads
@_weights
@_provider
@speculation_options
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each prompt.")
@_reports_errors
def generate(
    path: str,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    stop: tuple[str, ...],
    threads: int | None,
    weights: str,
    provider: str | None,
    speculate: str | None,
    draft_tokens: int | str,
    draft_rule: str,
    ignore_eos: bool,
    as_json: bool,
) -> None:
    """Continue each PROMPT with ENGINE; text streams as it comes."""
    from enginewright.runtime.engine import load

    if system is not None and not chat:
        raise InputError(
            "--system means nothing here", found="no --chat", action="add --chat, or leave --system out"
        )
    asked: list[Any] = list(prompts)
    if system is not None:
        asked = [
            [{"role": "system", "content": system}, {"role": "user", "content": text}] for text in prompts
        ]
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "chat": chat,
        "ignore_eos": ignore_eos,
    }
    with load(
        path,
        threads=threads,
        weights=weights,
        provider=provider,
        speculate=speculate,
        draft_tokens=draft_tokens,
        draft_rule=draft_rule,
    ) as loaded:
        if as_json:
            for completion in loaded.generate(asked, **options):
                click.echo(json.dumps(completion.to_dict(), ensure_ascii=False))
            return
        _stream(loaded, asked, list(prompts), options)
        if speculate is not None:
            _tell_speculation(loaded.loop.statistics().speculation)


def _tell_speculation(figures: Any) -> None:
    """Say what proposing was worth, on standard error: standard output is the answer's."""
    told = "nothing was proposed"
    if figures.drafted:
        told = (
            f"{figures.accepted:,} of {figures.drafted:,} proposed tokens came true ({figures.acceptance_rate:.0%}): "
            f"{figures.tokens_per_proposal:.2f} tokens a step that proposed"
        )
    click.secho(f"{figures.drafter}: {told}", dim=True, err=True)


def _stream(loaded: Any, asked: list[Any], prompts: list[str], options: dict[str, Any]) -> None:
    """Print the text of one prompt as it comes; of several, the first as it comes and the others in order after it."""
    waiting: dict[int, list[str]] = {index: [] for index in range(len(prompts))}
    finished: set[int] = set()
    current = 0
    if len(prompts) > 1:
        click.secho(f"[1] {prompts[0]}", dim=True)
    for event in loaded.stream(asked, **options):
        if event.index == current:
            click.echo(event.text, nl=False)
            sys.stdout.flush()
        else:
            waiting[event.index].append(event.text)
        if event.finish_reason is not None:
            finished.add(event.index)
        while current in finished:
            click.echo()
            current += 1
            if current < len(prompts):
                click.secho(f"\n[{current + 1}] {prompts[current]}", dim=True)
                click.echo("".join(waiting.pop(current)), nl=False)


@engine.command(short_help="Measure ENGINE's speed and memory.")
@click.argument("path", metavar="ENGINE")
@click.option(
    "--batch",
    "batches",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Decode so many sequences at once; may be given several times.  [default: 1 4 16 32]",
)
@click.option(
    "--prompt-tokens",
    metavar="N",
    type=LengthsType(),
    default="512",
    help="Length of the prompt that prefill is timed on; of a workload's prompts, also LOW:HIGH, log-uniform.  "
    "[default: 512; 32:512]",
)
@click.option(
    "--new-tokens",
    metavar="N",
    type=LengthsType(),
    default="64",
    help="Decoding steps that are timed; a workload's answers, also LOW:HIGH, log-uniform.  [default: 64; 16:256]",
)
@click.option(
    "--repeat",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="The median of this many runs is given.",
)
@_threads
@_weights
@_provider
@speculation_options
@workload_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
@_reports_errors
def bench(
    context: click.Context,
    path: str,
    batches: tuple[int, ...],
    prompt_tokens: Any,
    new_tokens: Any,
    repeat: int,
    threads: int | None,
    weights: str,
    provider: str | None,
    speculate: str | None,
    draft_tokens: int | str,
    draft_rule: str,
    workload: str | None,
    as_json: bool,
    **_of_workload: Any,
) -> None:
    """Measure ENGINE: prefill and decode tokens/s, load time, memory, with the machine's read bandwidth beside.

    What is decoded is made up: with --speculate it shows that speculation works, and not what it is worth on your texts.

    With --workload: requests that arrive in time, played in this process or (--url) against a server. A FILE has one JSON
    object a line: {"at": seconds, "prompt_tokens": N, "max_tokens": N}.
    """
    from enginewright.inspection import bench_table, print_tables
    from enginewright.runtime.bench import bench as measure

    if workload is not None:
        bench_workload(context)
        return
    refuse_workload_options(context)
    figures = measure(
        path,
        batches=list(batches) or [1, 4, 16, 32],
        prompt_tokens=_one_length("--prompt-tokens", prompt_tokens),
        new_tokens=_one_length("--new-tokens", new_tokens),
        repeat=repeat,
        threads=threads,
        weights=weights,
        provider=provider,
        speculate=speculate,
        draft_tokens=draft_tokens,
        draft_rule=draft_rule,
    )
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        print_tables([bench_table(figures)])


def _one_length(option: str, lengths: Any) -> int:
    if lengths.low != lengths.high:
        raise InputError(f"{option} is one number without --workload", found=f"{lengths.low}:{lengths.high}")
    return int(lengths.low)


for command in (serve, verify_command):
    command.callback = _reports_errors(command.callback)  # type: ignore[arg-type]
    engine.add_command(command)
