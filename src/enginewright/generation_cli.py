"""`engine generate` and `engine bench`: the commands that run an engine in this process."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from enginewright.recipes.errors import InputError

from .speculation_cli import speculation_options
from .workload_cli import LengthsType, bench_workload, refuse_workload_options, workload_options

__all__ = ["bench", "generate"]

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


@click.command()
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


@click.command(short_help="Measure ENGINE's speed and memory.")
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
