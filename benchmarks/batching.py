"""The well-known figures of serving, measured on one's own engine.

    python benchmarks/batching.py --model models/smollm2-135m [--part cache …] [--rounds 3] [--json FILE] [--plot FILE.png]

| part | what is compared | known from |
|---|---|---|
| cache | one more token with the KV cache, and without, as the sequence grows | any text on decoding |
| batching | static and continuous batching, output lengths log-uniform | Yu et al. 2022 (Orca) |
| memory | cache slots reserved by longest possible, rounded or known length, or by page | Kwon et al. 2023, fig. 2 |
| formats | int8 and bf16 weights: decode by batch, prefill, size | any text on memory-bound decoding |

Engines are built from --model where --engines has none. Each comparison alternates, so that a slow minute of the machine hits all
sides; figures are medians of the rounds. --small is a try with little work, whose times mean nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import enginewright
from benchmarks.batching_plot import draw
from enginewright.runtime.bench import bench, read_bandwidth
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.traffic import play_in_process
from enginewright.runtime.workload import Arrival, Lengths

PARTS = ("cache", "batching", "memory", "formats")
POLICIES = {
    "static": "static",
    "static-drop": "static, finished rows dropped",
    "throughput": "continuous",
}
LONGEST = 1024  # tokens of a sequence, for which "longest possible" is reserved
_TIMED = 8  # tokens that decoding is timed on


def requests(
    engine: Engine, count: int, new: Lengths, prompt_tokens: int = 32, seed: int = 0
) -> list[Arrival]:
    """`count` requests that are all there at once."""
    chance = np.random.default_rng(seed)
    lengths = [new.draw(chance) for _ in range(count)]
    prompts = chance.integers(engine.vocab_size, size=(count, prompt_tokens)).tolist()
    return [Arrival(0.0, tuple(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]


def median(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every figure."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


# ------------------------------------------------------------------------------------------------ KV cache


def cache_growth(engine: Engine, lengths: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Milliseconds of one more token after `length`: with the cache, and without it. `engine` keeps no prefixes."""
    rows = []
    for length in lengths:
        taken = [
            {"with_ms": _next_token(engine, length), "without_ms": _whole(engine, length)}
            for _ in range(rounds)
        ]
        row = median(taken)
        rows.append({"length": length, **row, "ratio": row["without_ms"] / row["with_ms"]})
    return rows


def _next_token(engine: Engine, length: int) -> float:
    request = _request(engine, length, _TIMED + 1)
    engine.loop.submit(request)
    while not request.output:
        engine.loop.step()
    started = time.perf_counter()
    while not engine.loop.idle:
        engine.loop.step()
    return 1e3 * (time.perf_counter() - started) / _TIMED


def _whole(engine: Engine, length: int) -> float:
    """The sequence from its beginning: what each token costs when no keys and values are kept."""
    request = _request(engine, length + 1, 1)
    started = time.perf_counter()
    engine.loop.submit(request)
    while not engine.loop.idle:
        engine.loop.step()
    return 1e3 * (time.perf_counter() - started)


def _request(engine: Engine, length: int, new: int) -> Request:
    ids = np.random.default_rng(length).integers(engine.vocab_size, size=length).tolist()
    return Request(ids, SamplingOptions(max_tokens=new, ignore_eos=True))


def report_cache(rows: Sequence[dict[str, float]]) -> Table:
    table = _table("one more token, ms", "after", "with KV cache", "computed again", "ratio")
    for row in rows:
        table.add_row(
            f"{row['length']:,} tokens",
            f"{row['with_ms']:.2f}",
            f"{row['without_ms']:.1f}",
            f"{row['ratio']:.1f}×",
        )
    return table


# ------------------------------------------------------------------------------------------------ batching


def compare_batching(
    load: Callable[..., Engine], count: int, batch: int, new: Lengths, rounds: int
) -> dict[str, dict[str, float]]:
    """Each policy's figures for the same requests. `rows_per_token`: rows computed for a token that was asked for."""
    taken: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for _ in range(rounds):
        for policy in POLICIES:
            with load(max_sequences=batch, policy=policy, prefix_cache=False) as engine:
                engine.generate(
                    [[1] * 8], max_tokens=2, ignore_eos=True
                )  # first touches of weights and cache
                arrivals = requests(engine, count, new)
                run = play_in_process(engine, arrivals)
            wanted = sum(arrival.max_tokens for arrival in arrivals)
            assert wanted == sum(served.new_tokens for served in run.served), (
                "a request was not answered whole"
            )
            taken[policy].append(
                {
                    "seconds": run.seconds,
                    "tokens_per_second": wanted / run.seconds,
                    "steps": len(run.samples),
                    "rows_per_token": run.facts["tokens_computed"] / wanted,
                    "sequences_per_step": sum(sample.sequences for sample in run.samples) / len(run.samples),
                }
            )
    figures = {policy: median(rounds) for policy, rounds in taken.items()}
    for entry in figures.values():
        entry["ratio"] = entry["tokens_per_second"] / figures["static"]["tokens_per_second"]
    return figures


def report_batching(figures: dict[str, dict[str, float]], title: str) -> Table:
    table = _table(title, "batching", "tokens/s", "ratio", "steps", "live rows a step", "rows a token")
    for policy, entry in figures.items():
        table.add_row(
            POLICIES[policy],
            f"{entry['tokens_per_second']:,.0f}",
            f"{entry['ratio']:.2f}×",
            f"{entry['steps']:,.0f}",
            f"{entry['sequences_per_step']:.1f}",
            f"{entry['rows_per_token']:.2f}",
        )
    return table


# -------------------------------------------------------------------------------------------------- memory


def reserved(request: Request, how: str) -> int:
    """Token slots that a running request would hold; by page, the engine's own count is taken instead."""
    if how == "longest":
        return LONGEST
    return 1 << (request.limit - 1).bit_length() if how == "power of two" else request.limit


def compare_memory(
    load: Callable[..., Engine], arrivals_of: Callable[[Engine], list[Arrival]]
) -> dict[str, Any]:
    """Shares of reserved slots that hold a token, over a whole run: as the engine reserves (by page), and as others would."""
    ways = ("longest", "power of two", "own length")
    totals = dict.fromkeys((*ways, "by page", "filled"), 0)
    with load(policy="throughput", prefix_cache=False) as engine:
        for arrival in arrivals_of(engine):
            engine.loop.submit(
                Request(list(arrival.prompt), SamplingOptions(max_tokens=arrival.max_tokens, ignore_eos=True))
            )
        while not engine.loop.idle:
            engine.loop.step()
            seen = engine.loop.statistics()
            totals["filled"] += seen.used_slots
            totals["by page"] += seen.reserved_slots
            for request in engine.loop.scheduler.running:
                for way in ways:
                    totals[way] += reserved(request, way)
    filled = totals.pop("filled")
    return {way: {"filled": filled / slots} for way, slots in totals.items()}


def fill_memory(
    load: Callable[..., Engine], arrivals_of: Callable[[Engine], list[Arrival]], slots: int, rounds: int
) -> dict[str, dict[str, float]]:
    """The same `slots` of cache, given out by the longest possible sequence or by page: requests at once, and tokens/s."""
    ways = {"longest": {"max_sequences": max(1, slots // LONGEST)}, "by page": {"max_sequences": 64}}
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, options in ways.items():
            with load(policy="throughput", cache_tokens=slots, prefix_cache=False, **options) as engine:
                engine.generate([[1] * 8], max_tokens=2, ignore_eos=True)
                run = play_in_process(engine, arrivals_of(engine))
            tokens = sum(served.new_tokens for served in run.served)
            taken[way].append(
                {
                    "tokens_per_second": tokens / run.seconds,
                    "sequences": sum(sample.sequences for sample in run.samples) / len(run.samples),
                    "preemptions": run.facts["preemptions"],
                }
            )
    return {way: median(rounds) for way, rounds in taken.items()}


def report_memory(memory: dict[str, Any], slots: int) -> Table:
    titles = ("reserved", "hold a token", "at once, on average", "tokens/s", "preemptions")
    table = _table(f"cache slots; {slots:,} of them in the last columns", *titles)
    for way, entry in memory.items():
        row = [f"{entry['filled']:.1%}"]
        if "sequences" in entry:
            row += [
                f"{entry['sequences']:.1f}",
                f"{entry['tokens_per_second']:,.0f}",
                f"{entry['preemptions']:.0f}",
            ]
        table.add_row(f"longest possible, {LONGEST:,}" if way == "longest" else way, *row)
    return table


# ------------------------------------------------------------------------------------------------- formats


def compare_formats(
    paths: dict[str, Path], batches: Sequence[int], prompt: int, new: int, rounds: int, threads: int | None
) -> dict[str, dict[str, float]]:
    """Tokens a second of decoding at each batch and of prefill, and megabytes of weights."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            found = bench(
                path,
                batches=batches,
                prompt_tokens=prompt,
                new_tokens=new,
                repeat=1,
                threads=threads,
                weights="copy",
            )
            taken[name].append(
                {
                    **{
                        f"decode, batch {entry['batch']}": entry["tokens_per_second"]
                        for entry in found["decode"]
                    },
                    f"prefill of {prompt}": found["prefill"][0]["tokens_per_second"],
                    "weights, MB": (path / "weights.bin").stat().st_size / 1e6,
                }
            )
    return {name: median(rounds) for name, rounds in taken.items()}


def report_formats(figures: dict[str, dict[str, float]]) -> Table:
    table = _table("tokens/s by format of the weights", "", *figures, "int8 / bf16")
    for key in next(iter(figures.values())):
        cells = [figures[name][key] for name in figures]
        table.add_row(
            key, *(f"{cell:,.0f}" for cell in cells), f"{figures['int8'][key] / figures['bf16'][key]:.2f}×"
        )
    return table


# --------------------------------------------------------------------------------------------------- the whole


def _table(title: str, *headers: str) -> Table:
    table = Table(*headers, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def engine_of(model: Path, recipe: str, folder: Path) -> Path:
    """The engine of `model` by `recipe` in `folder`, built if it is not there."""
    path = folder / f"{model.name}-{recipe}"
    if not (path / "engine.json").exists():
        print(f"building {path}", file=sys.stderr)
        enginewright.optimize(model, recipe, path)
    return path


@click.command()
@click.option(
    "--model", required=True, type=click.Path(path_type=Path, exists=True), help="A Hugging Face folder."
)
@click.option("--engines", "folder", default="engines", type=click.Path(path_type=Path), show_default=True)
@click.option(
    "--recipe", default="int4", show_default=True, help="Of the engine that all parts but formats measure."
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Several times for several.  [default: all]",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--small", is_flag=True, help="Little work: to see that it runs.")
@click.option("--json", "out", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path))
def main(
    model: Path,
    folder: Path,
    recipe: str,
    parts: tuple[str, ...],
    rounds: int,
    threads: int | None,
    small: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure the well-known figures; see the module's docstring."""
    path = engine_of(model, recipe, folder)
    count, batch, new, slots = (8, 4, Lengths(4, 16), 2048) if small else (64, 16, Lengths(16, 512), 8192)

    def load(**options: Any) -> Engine:
        return enginewright.load(path, threads=threads, weights="copy", **options)

    def arrivals_of(engine: Engine) -> list[Arrival]:
        return requests(engine, count, new, prompt_tokens=16 if small else 256)

    with load() as engine:
        facts = {
            "engine": path.name,
            "rounds": rounds,
            "small": small,
            "isa": getattr(engine.executor, "isa", ""),
            "threads": threads or getattr(engine.executor, "threads", None),
        }
    found: dict[str, Any] = {**facts, "read_bandwidth_gbs": read_bandwidth(threads or 2)}
    tables = []
    chosen = parts or PARTS
    if "cache" in chosen:
        print("cache", file=sys.stderr)
        lengths = [16, 64] if small else [16, 64, 128, 256, 512, 1024, 2048]
        with load(prefix_cache=False) as engine:
            found["cache"] = cache_growth(engine, lengths, rounds)
        tables.append(report_cache(found["cache"]))
    if "batching" in chosen:
        print("batching", file=sys.stderr)
        found["batching"] = compare_batching(load, count, batch, new, rounds)
        title = f"{count} requests, batch {batch}, output lengths log-uniform {new.low} to {new.high}"
        tables.append(report_batching(found["batching"], title))
    if "memory" in chosen:
        print("memory", file=sys.stderr)
        found["memory"] = compare_memory(load, arrivals_of)
        for way, entry in fill_memory(load, arrivals_of, slots, rounds).items():
            found["memory"][way] |= entry
        tables.append(report_memory(found["memory"], slots))
    if "formats" in chosen:
        print("formats", file=sys.stderr)
        paths = {name: engine_of(model, name, folder) for name in ("bf16", "int8")}
        batches, prompt, tokens = ((1, 2), 16, 4) if small else ((1, 4, 16, 32), 512, 64)
        found["formats"] = compare_formats(paths, batches, prompt, tokens, rounds, threads)
        tables.append(report_formats(found["formats"]))
    console = Console(width=120)
    for table in tables:
        console.print(table)
        console.print()
    console.print(
        f"{facts['engine']}, {facts['threads']} threads, {facts['isa']}, read bandwidth {found['read_bandwidth_gbs']:.1f} GB/s"
    )
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    if plot is not None:
        draw(plot, found)


if __name__ == "__main__":
    main()
