"""What sampling costs beside the model: the pass over a step's logits, by option.

    python benchmarks/sampling.py --engine DIR [--sequences 32] [--steps 40] [--rounds 3] [--threads N] [--json FILE]

So many sequences decode together under each set of options in turn. Timed is what stands between the executor's return and the
commit (`Drawer.draw`: the row passes and all of Python around them), as milliseconds and as a share of the step, which is
executor and draw together. Figures are medians over steps; rounds alternate between the sets, so that a slow minute hits all.

A second table has the row passes alone on random rows: 49,152 and 262,144 wide, peaked as a language model's are and flat as no
model's are, by each variant of the kernels that the machine runs, on one thread, and by numpy.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import enginewright
from enginewright.runtime import sampler
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions

_PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": dict.fromkeys(range(50), 1.0),
}
_CUTS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.95}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, 20 best": {"logprobs": 20},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "typical 0.95": {"temperature": 1.0, "typical_p": 0.95},
    "penalties, greedy": _PENALTIES,
    "everything": {**_CUTS, **_PENALTIES, "min_tokens": 1000, "logprobs": 20},
}
CONSTRAINED = "JSON schema"  # its text ends by itself, so only its first steps are timed
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 400} for name in ("title", "text")},
    "required": ["title", "text"],
    "additionalProperties": False,
}


class Timed:
    """Adds up the seconds of a function, call by call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self._call(*args)
        self.seconds.append(time.perf_counter() - started)
        return result


def decode(engine: Engine, fields: dict[str, Any], sequences: int, steps: int) -> dict[str, float]:
    """Medians over `steps` decoding steps of `sequences` requests, milliseconds."""
    constraint = fields.get("constraint")
    grammar = engine.compile(constraint) if constraint is not None else None
    fields = {"max_tokens": steps + 1, "ignore_eos": "min_tokens" not in fields, **fields}
    fields["min_tokens"] = min(fields.get("min_tokens", 0), steps + 1)  # ends are held back, so none comes
    chance = np.random.default_rng(0)
    requests = [
        Request(
            chance.integers(engine.vocab_size, size=64).tolist(),
            SamplingOptions(**fields, seed=seed),
            grammar=grammar,
        )
        for seed in range(sequences)
    ]
    loop = engine.loop
    for request in requests:
        loop.submit(request)
    while not all(request.output for request in requests):
        loop.step()
    drawer, executor = loop._drawer, loop.executor
    draw, step = Timed(drawer.draw), Timed(executor.step)
    drawer.draw, executor.step = draw, step
    try:
        while not loop.idle:
            loop.step()
    finally:
        del drawer.draw, executor.step  # the class's own again
    draws, model = (1e3 * statistics.median(timed.seconds) for timed in (draw, step))
    return {"draw_ms": draws, "model_ms": model, "share": draws / (draws + model)}


def in_engine(engine: Engine, sequences: int, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the rounds, by set of options."""
    sets = {**OPTIONS, CONSTRAINED: {"constraint": Constraint.json_schema(_SCHEMA), "temperature": 0.8}}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in sets}
    for _ in range(rounds):
        for name, fields in sets.items():
            taken[name].append(decode(engine, fields, sequences, steps))
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in taken.items()
    }


def random_rows(width: int, flat: bool, count: int = 32) -> np.ndarray:
    """float32 [count, width]: normal with a deviation of 1/2, or of 3 with 200 tokens that stand out."""
    chance = np.random.default_rng(width)
    rows = chance.standard_normal((count, width), dtype=np.float32) * np.float32(0.5 if flat else 3.0)
    if not flat:
        rows[:, :200] += np.sort(chance.gumbel(size=(count, 200)) * 4)[:, ::-1].astype(np.float32) + 5
    return rows


def rows_alone(width: int, repeats: int = 7) -> dict[str, dict[str, float]]:
    """Milliseconds for 32 rows, by set of options, then by implementation and kind of row; the least of the repeats."""
    native = sampler._native
    kinds = {isa: native.RowDrawer(1, isa) for isa in native.available_isas()} if native is not None else {}
    found: dict[str, dict[str, float]] = {name: {} for name in OPTIONS}
    for flat in (False, True):
        logits = random_rows(width, flat)
        for kind, drawer in [*kinds.items(), ("numpy", sampler.RowDrawer())]:
            for name, fields in OPTIONS.items():
                sampler._native = None if kind == "numpy" else native
                states = [
                    sampler.draw_row(SamplingOptions(**fields, seed=r), 100, [0]) for r in range(len(logits))
                ]
                sampler._native = native
                for state in states:
                    state.extend(np.random.default_rng(1).integers(width, size=300).tolist(), 200)
                times = []
                for repeat in range(1 if kind == "numpy" else repeats):
                    started = time.perf_counter()
                    drawer.draw(logits, range(len(logits)), states, [300 + repeat] * len(logits))
                    times.append(time.perf_counter() - started)
                found[name][f"{kind}, {'flat' if flat else 'peaked'}"] = 1e3 * min(times)
    return found


def report(title: str, rows: dict[str, dict[str, float]], forms: Callable[[str, float], str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("options")
    names = list(next(iter(rows.values())))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for options, figures in rows.items():
        table.add_row(options, *(forms(name, figures[name]) for name in names))
    return table


@click.command()
@click.option(
    "--engine",
    "folder",
    type=click.Path(path_type=Path),
    help="An engine; its vocabulary is the row's width.",
)
@click.option("--sequences", default=32, show_default=True)
@click.option("--steps", default=40, show_default=True, help="Decoding steps of each set and round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", type=int, default=None, help="The engine's; as many as cores unless given.")
@click.option("--width", "widths", type=int, multiple=True, default=(49_152, 262_144), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None)
def main(
    folder: Path | None,
    sequences: int,
    steps: int,
    rounds: int,
    threads: int | None,
    widths: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Measure the sampling pass, in an engine and alone."""
    console = Console(width=160)
    result: dict[str, Any] = {}
    if folder is not None:
        with enginewright.load(
            folder, threads=threads, max_sequences=sequences, prefix_cache=False
        ) as engine:
            result["engine"] = in_engine(engine, sequences, steps, rounds)
        console.print(
            report(
                f"{sequences} sequences decode together",
                result["engine"],
                lambda name, value: f"{value:.1%}" if name == "share" else f"{value:.2f}",
            )
        )
    for width in widths:
        result[f"rows of {width}"] = rows_alone(width)
        console.print(
            report(
                f"32 rows x {width:,} alone, ms", result[f"rows of {width}"], lambda _, value: f"{value:.2f}"
            )
        )
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
