"""What speculation is worth: tokens a second with it and without, by kind of work, drafter and batch.

    python benchmarks/speculation.py --engine DIR [--speculate ngram …] [--batch 1 --batch 8] [--json FILE] [--plot FILE.png]

| work | prompts (`speculation_texts.py`) |
|---|---|
| `json` | a text becomes JSON, bound to a schema |
| `edit` | a file is written again with one small change |
| `quote` | a summary that quotes the given text |
| `free` | stories and advice, greedy: drafts mostly fail |
| `free 0.8` | the same at temperature 0.8, a seed a prompt |

One loaded engine does both: the same requests are decoded with its drafter and without, in turn, and who begins alternates. Timed
is decoding. At batch 1 that is from an answer's first token to its end. A larger batch is kept full: the next prompt takes the
place of a sequence that has ended, and timed is what lies between the moment when every place has its first token and the one
when no prompt is left to fill a place. (A batch that runs empty would show how its longest answer fares alone.) A rate is the
median of the rounds, a ratio that of two medians. Before the rounds each kind of work is done once with the drafter, so that
draft lengths that are measured have settled. `same` says whether tokens and log-probabilities were always equal, bit for bit.
--small is a try with little work, whose times mean nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import enginewright
from benchmarks.speculation_plot import draw
from benchmarks.speculation_texts import EDITS, FREE, JSON, QUOTES
from enginewright.recipes.errors import RequestError
from enginewright.runtime.bench import read_bandwidth
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.statistics import speculation_between

WORK = ("json", "edit", "quote", "free", "free 0.8")


@dataclass
class Asked:
    """One prompt of a kind of work, ready to become a Request again and again."""

    ids: list[int]
    options: SamplingOptions
    grammar: Any = None

    def request(self) -> Request:
        return Request(list(self.ids), self.options, grammar=self.grammar)


@dataclass
class Decoded:
    """What one pass over a kind of work gave: answers; the tokens that were timed, those gained among them; seconds."""

    answers: list[tuple[list[int], list[float]]] = field(default_factory=list)
    tokens: int = 0
    gained: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where nothing was timed."""
        return self.tokens / self.seconds if self.seconds else 0.0


def asked(engine: Engine, work: str, tokens: int) -> list[Asked]:
    """The prompts of a kind of work, as the engine's model takes them: through its chat template, if it has one."""
    template = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
    prompts: list[tuple[str, Any]] = {
        "json": JSON,
        "edit": [(prompt, None) for prompt in EDITS],
        "quote": [(prompt, None) for prompt in QUOTES],
    }.get(work, [(prompt, None) for prompt in FREE])
    compiled: dict[int, Any] = {}
    found = []
    for seed, (prompt, schema) in enumerate(prompts):
        constraint = Constraint.json_schema(schema) if schema is not None else None
        if constraint is not None and id(schema) not in compiled:
            compiled[id(schema)] = engine.compile(constraint)
        options = SamplingOptions(
            max_tokens=tokens,
            temperature=0.8 if work == "free 0.8" else 0.0,
            seed=seed,
            constraint=constraint,
        )
        ids = engine.encode(prompt, chat=template)[1]
        found.append(Asked(ids, options, compiled.get(id(schema))))
    longest = max(len(one.ids) for one in found) + tokens
    if longest > engine.max_context:
        raise SystemExit(
            f"{work}: {longest} tokens are more than the engine's context of {engine.max_context}"
        )
    return found


FILLINGS = 4
"""How often every place of a batch is taken."""


def groups(prompts: Sequence[Asked], batch: int) -> list[list[Asked]]:
    """What is timed in one piece: each prompt alone, or all of them, repeated until every place is filled often enough."""
    if batch == 1:
        return [[prompt] for prompt in prompts]
    return [(list(prompts) * -(-FILLINGS * batch // len(prompts)))]


def decode(engine: Engine, prompts: Sequence[Asked], batch: int) -> Decoded:
    """Answer the prompts, so many at a time."""
    done = Decoded()
    loop = engine.loop
    for group in groups(prompts, batch):
        requests = [one.request() for one in group]
        waiting = requests[::-1]
        running = [waiting.pop() for _ in range(batch)]
        for request in running:
            loop.submit(request)
        while not all(request.output or request.finished for request in running):
            loop.step()
        before = loop.statistics()
        started = time.perf_counter()
        while True:
            loop.step()
            running = [request for request in running if not request.finished]
            while waiting and len(running) < batch:
                running.append(waiting.pop())
                loop.submit(running[-1])
            if len(running) < batch:
                break
        done.seconds += time.perf_counter() - started
        after = loop.statistics()
        while not loop.idle:
            loop.step()
        done.tokens += after.tokens_generated - before.tokens_generated
        if before.speculation is not None and after.speculation is not None:
            done.gained += after.speculation.gained - before.speculation.gained
        for request in requests:
            if request.error is not None:
                raise request.error
            done.answers.append((request.output, request.logprobs))
    return done


def compare(engine: Engine, prompts: Sequence[Asked], batch: int, rounds: int) -> dict[str, Any]:
    """Plain values of one kind of work at one batch: both rates, their ratio, what came true, whether answers were the same."""
    loop = engine.loop
    speculator = loop.speculator
    assert speculator is not None

    def run(fast: bool) -> Decoded:
        loop.speculator = speculator if fast else None
        try:
            return decode(engine, prompts, batch)
        finally:
            loop.speculator = speculator

    run(True)
    before = loop.statistics()
    runs: dict[bool, list[Decoded]] = {False: [], True: []}
    for number in range(rounds):
        for fast in (number % 2 == 1, number % 2 == 0):
            runs[fast].append(run(fast))
    after = loop.statistics()
    found = speculation_between(before, after)
    assert before.speculation is not None and after.speculation is not None
    drafting = after.speculation.drafting_seconds - before.speculation.drafting_seconds
    plain, fast = (statistics.median(one.rate for one in runs[which]) for which in (False, True))
    tokens, gained, seconds = (
        sum(getattr(one, name) for one in runs[True]) for name in ("tokens", "gained", "seconds")
    )
    expected = runs[False][0]
    return {
        "batch": batch,
        "tokens": expected.tokens,
        "plain_tokens_per_second": plain,
        "tokens_per_second": fast,
        "ratio": fast / plain if plain else None,
        "ratios": [b.rate / a.rate for a, b in zip(runs[False], runs[True], strict=True) if a.rate],
        "acceptance_rate": found["acceptance_rate"],
        "acceptance_by_position": found["acceptance_by_position"],
        "drafted_tokens": found["drafted_tokens"],
        "accepted_tokens": found["accepted_tokens"],
        "tokens_per_step": tokens / (tokens - gained) if tokens else 1.0,
        "drafting_share": drafting / seconds if seconds else None,
        "same": all(one.answers == expected.answers for which in runs.values() for one in which),
    }


def report(drafter: str, rows: Sequence[dict[str, Any]]) -> Table:
    headers = ("work", "batch", "plain", drafter, "ratio", "accepted", "by position", "tokens a step", "same")
    table = Table(
        *headers, title=f"{drafter}: decoding, tokens/s", title_justify="left", title_style="bold", box=None, pad_edge=False
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        by_position = " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_position"][:8])
        accepted = row["acceptance_rate"]
        table.add_row(
            row["work"],
            str(row["batch"]),
            f"{row['plain_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            "–" if row["ratio"] is None else f"{row['ratio']:.2f}×",
            "–" if accepted is None else f"{accepted:.0%} of {row['drafted_tokens']:,}",
            by_position,
            f"{row['tokens_per_step']:.2f}",
            "yes" if row["same"] else "NO",
        )
    return table


def measure(
    engine: Engine, work: Sequence[str], batches: Sequence[int], rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """A row for each kind of work and batch. What needs a package that is not here is left out, and said."""
    rows = []
    for name in work:
        try:
            prompts = asked(engine, name, tokens)
        except RequestError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        for batch in batches:
            print(f"{name}, batch {batch}", file=sys.stderr)
            rows.append({"work": name, **compare(engine, prompts, batch, rounds)})
    return rows


@click.command()
@click.option("--engine", "path", required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--speculate",
    "drafters",
    multiple=True,
    default=["ngram"],
    show_default=True,
    help="As of `engine serve`; several times for several.",
)
@click.option("--draft-tokens", default="auto", show_default=True, help="auto, or always so many.")
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(min=1), default=[1, 8], show_default=True
)
@click.option(
    "--work", multiple=True, type=click.Choice(WORK), help="Several times for several.  [default: all]"
)
@click.option(
    "--tokens", default=200, show_default=True, type=click.IntRange(min=2), help="Of an answer at most."
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--small", is_flag=True, help="Little work: to see that it runs.")
@click.option("--json", "out", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path))
def main(
    path: Path,
    drafters: tuple[str, ...],
    draft_tokens: str,
    batches: tuple[int, ...],
    work: tuple[str, ...],
    tokens: int,
    rounds: int,
    threads: int | None,
    small: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure what speculation is worth; see the module's docstring."""
    if small:
        batches, rounds, tokens = (1, 2), 1, min(tokens, 40)
    found: dict[str, Any] = {
        "engine": path.name,
        "draft_tokens": draft_tokens,
        "rounds": rounds,
        "small": small,
        "read_bandwidth_gbs": read_bandwidth(threads or 2),
        "drafters": {},
    }
    console = Console(width=130)
    for drafter in drafters:
        with enginewright.load(
            path,
            threads=threads,
            weights="copy",
            max_sequences=max(batches),
            prefix_cache=False,
            speculate=drafter,
            draft_tokens=int(draft_tokens) if draft_tokens.isdigit() else draft_tokens,
        ) as engine:
            found["threads"] = threads or getattr(engine.executor, "threads", None)
            found["isa"] = getattr(engine.executor, "isa", "")
            rows = measure(engine, work or WORK, batches, rounds, tokens)
        name = Path(drafter).name
        found["drafters"][name] = rows
        console.print(report(name, rows))
        console.print()
    console.print(
        f"{found['engine']}, {found['threads']} threads, {found['isa']}, draft tokens {draft_tokens}, "
        f"{rounds} rounds, read bandwidth {found['read_bandwidth_gbs']:.1f} GB/s"
    )
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    if plot is not None:
        draw(plot, found)
    if not all(row["same"] for rows in found["drafters"].values() for row in rows):
        raise SystemExit("an answer was not the same with speculation and without")


if __name__ == "__main__":
    main()
