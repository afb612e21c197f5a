"""What recipes cost in quality: perplexity, and mean KL divergence to the fp32 source, on texts that calibration never saw.

    python benchmarks/quality.py --write-calibration docs.txt
    python benchmarks/quality.py --model models/smollm2-135m --recipes int8,int4,int4-gptq --calibration docs.txt \
        --compare int4 int4-gptq [--json FILE]

Two rows a recipe:

- `weights`: the linears as they are stored, dequantised in torch; embedding and head in fp32, activations not rounded. This is
  what papers and other tools give.
- `engine`: the engine itself, through the serving path.

The texts (texts.py) are cut into chunks of 512 tokens, 4,096 tokens each; the first token of a chunk is not scored. The reference
is the captured Program in fp32. Every build runs in a process of its own, so that its time and peak memory are its own.
A comparison resamples blocks of 64 tokens (10,000 times) of the two recipes' divergences token by token.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import texts
from benchmarks.divergence import bootstrap, divergence, losses

if TYPE_CHECKING:
    from enginewright.passes.program import Program

RECIPES = "int8,int4,int4-awq,int4-gptq,int4-awq-gptq,int3-gptq,int8-smoothquant,auto"
Chunks = dict[str, list[list[int]]]
Take = Callable[[str, int, np.ndarray], None]


@dataclasses.dataclass
class Figures:
    """Of one recipe and one text: divergences [T] in nats, a position each, and the losses of the tokens that are scored."""

    kl: np.ndarray
    loss: np.ndarray

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.loss.mean()))


@dataclasses.dataclass(frozen=True)
class Work:
    """What a process is told: the model, the chunks of each text, how many tokens stand before a chunk's own, and the folder
    with the reference's logits."""

    model: str
    chunks: Chunks
    before: int
    folder: Path

    def logits_file(self, text: str, index: int) -> Path:
        return self.folder / f"{text.replace(' ', '-')}-{index}.npy"


@dataclasses.dataclass
class Outcome:
    """What was measured of one recipe: `figures` by 'weights' or 'engine' and text."""

    recipe: str
    seconds: float = 0.0
    peak_bytes: int = 0
    engine_bytes: int = 0
    bits_a_weight: float = 0.0
    figures: dict[str, dict[str, Figures]] = dataclasses.field(default_factory=dict)
    failure: str = ""


# Each of these runs in a process of its own.


def reference(work: Work) -> dict[str, np.ndarray]:
    """Write the source model's logits; returns the losses by text."""
    from enginewright.passes.capture import capture
    from enginewright.passes.manager import Step, run_steps
    from enginewright.passes.normalise import Normalise
    from enginewright.passes.program import Stage
    from enginewright.passes.source import open_source

    program = capture(open_source(work.model))
    run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True)])
    found: dict[str, list[np.ndarray]] = {name: [] for name in work.chunks}

    def take(text: str, index: int, logits: np.ndarray) -> None:
        np.save(work.logits_file(text, index), logits)
        found[text].append(losses(logits, work.chunks[text][index])[work.before :])

    _run_torch(program, work.chunks, take)
    return {text: np.concatenate(parts) for text, parts in found.items()}


def measure(work: Work, recipe: str, overrides: Sequence[str], calibration: str | None) -> Outcome:
    """Build the engine of one recipe and measure it."""
    import enginewright
    from enginewright.build import optimize
    from enginewright.passes.cost import Ledger, bits_a_weight
    from enginewright.progress import Progress

    outcome, ledger = Outcome(recipe), Ledger()
    with tempfile.TemporaryDirectory(prefix="enginewright-quality-") as folder:
        started = time.perf_counter()
        built = optimize(
            work.model,
            recipe,
            Path(folder) / "engine",
            overrides=overrides,
            calibration=calibration,
            allow_unverified=True,
            progress=Progress(Console(stderr=True)),
            ledger=ledger,
        )
        outcome.seconds, outcome.peak_bytes = time.perf_counter() - started, _peak_memory()
        outcome.engine_bytes = sum(entry["bytes"] for entry in built.manifest["files"].values())
        linears = [
            item for (node, _), item in ledger.stored.items() if ledger.matrices[node].role == "linear"
        ]
        outcome.bits_a_weight = bits_a_weight(linears)
        scores = _Scores(work)
        _run_torch(ledger.rounded_program(), work.chunks, scores.take)
        outcome.figures["weights"] = scores.figures()
        scores = _Scores(work)
        with enginewright.load(built.path) as engine:
            for text, pieces in work.chunks.items():
                for index, tokens in enumerate(pieces):
                    scores.take(text, index, engine.logits([tokens])[0])
        outcome.figures["engine"] = scores.figures()
    return outcome


def _run_torch(program: Program, chunks: Chunks, take: Take) -> None:
    """Give `take` the float32 logits [T, vocab] of every chunk, from one walk: each weight is loaded once."""
    from enginewright.passes.assignment import roles
    from enginewright.passes.walk import Walk

    (head,) = (node for node, role in roles(program).items() if role == "head")
    order = list(program.graph.nodes)
    (logits,) = program.graph.output_node().all_input_nodes
    tail = [node for node in order[order.index(head) :] if node.op == "call_function"]
    places = [(text, index) for text, pieces in chunks.items() for index in range(len(pieces))]
    walk = Walk(program, [chunks[text][index] for text, index in places], batch_tokens=1)  # a batch a chunk

    def at_head(_node: Any) -> None:
        for batch, (text, index) in enumerate(places):
            values = walk.evaluate_with(tail, batch, {}, wanted=[logits])
            take(text, index, values[logits].float().numpy())

    walk.run({head: at_head})


class _Scores:
    """Compares logits with the reference's, chunk by chunk."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.kl: dict[str, list[np.ndarray]] = {name: [] for name in work.chunks}
        self.loss: dict[str, list[np.ndarray]] = {name: [] for name in work.chunks}

    def take(self, text: str, index: int, logits: np.ndarray) -> None:
        before = self.work.before
        reference = np.load(self.work.logits_file(text, index), mmap_mode="r")
        self.kl[text].append(divergence(reference[before:], logits[before:]))
        self.loss[text].append(losses(logits, self.work.chunks[text][index])[before:])

    def figures(self) -> dict[str, Figures]:
        return {
            text: Figures(np.concatenate(self.kl[text]), np.concatenate(self.loss[text])) for text in self.kl
        }


def _peak_memory() -> int:
    """Bytes of this process at its peak. Linux's ru_maxrss starts from the parent's, /proc does not."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


# The tables.


def quality_table(outcomes: Sequence[Outcome], base: Mapping[str, np.ndarray]) -> str:
    """Markdown: a row for the source and two for each recipe."""
    names = list(base)
    header = ["recipe", "measured", "bits a weight"]
    for name in names:
        header += [f"{name}: KL", "perplexity"]
    header += ["build, s", "peak memory, GB", "engine, MB"]
    rows = [["source, fp32", "", ""]]
    for name in names:
        rows[0] += ["0", f"{math.exp(float(base[name].mean())):.3f}"]
    rows[0] += ["", "", ""]
    for outcome in outcomes:
        if outcome.failure:
            rows.append([outcome.recipe, outcome.failure, *[""] * (len(header) - 2)])
        for kind, figures in outcome.figures.items():
            first = kind == next(iter(outcome.figures))
            row = [outcome.recipe if first else "", kind, f"{outcome.bits_a_weight:.3f}" if first else ""]
            for name in names:
                row += [f"{figures[name].kl.mean():.4f}", f"{figures[name].perplexity:.3f}"]
            row += (
                [
                    f"{outcome.seconds:,.0f}",
                    f"{outcome.peak_bytes / 1e9:.2f}",
                    f"{outcome.engine_bytes / 1e6:,.1f}",
                ]
                if first
                else ["", "", ""]
            )
            rows.append(row)
    return _markdown(header, rows)


def comparison_table(outcomes: Sequence[Outcome], pairs: Sequence[tuple[str, str]], block: int) -> str:
    """Markdown: for each pair, kind and text, and over all texts, how far the second's divergence lies from the first's."""
    by_name = {outcome.recipe: outcome for outcome in outcomes}
    header = ["a → b", "measured", "text", "KL of a", "KL of b", "b - a", "95% interval", "b is smaller in"]
    rows = []
    for a, b in pairs:
        for kind in [kind for kind in by_name[a].figures if kind in by_name[b].figures]:
            first, second = (by_name[name].figures[kind] for name in (a, b))
            series = {text: (first[text].kl, second[text].kl) for text in first}
            if len(series) > 1:
                series["all"] = (
                    np.concatenate([pair[0] for pair in series.values()]),
                    np.concatenate([pair[1] for pair in series.values()]),
                )
            for text, (x, y) in series.items():
                found = bootstrap(x, y, min(block, len(x)))
                rows.append(
                    [
                        f"{a} → {b}",
                        kind,
                        text,
                        f"{x.mean():.4f}",
                        f"{y.mean():.4f}",
                        f"{found['difference']:+.4f}",
                        f"{found['low']:+.4f} … {found['high']:+.4f}",
                        f"{found['b_is_smaller']:.1%}",
                    ]
                )
    return _markdown(header, rows)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_json(outcomes: Sequence[Outcome], base: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> str:
    """Settings, means, and each token's divergence (for comparisons with other runs)."""

    def plain(figures: Figures) -> dict[str, Any]:
        kl = [float(f"{value:.5g}") for value in figures.kl]
        return {"kl": float(figures.kl.mean()), "perplexity": figures.perplexity, "kl_of_tokens": kl}

    recipes = [
        {
            **{name: value for name, value in vars(outcome).items() if name != "figures"},
            "figures": {
                kind: {text: plain(figures) for text, figures in found.items()}
                for kind, found in outcome.figures.items()
            },
        }
        for outcome in outcomes
    ]
    perplexity = {text: math.exp(float(loss.mean())) for text, loss in base.items()}
    return json.dumps({**settings, "reference_perplexity": perplexity, "recipes": recipes}, indent=1)


def cut(model: str, tokens: int) -> tuple[Chunks, int, list[str]]:
    """The chunks of every text that this machine has, how many tokens stand before a chunk's own, and notes."""
    from enginewright.calibration import first_tokens
    from enginewright.passes.source import open_source

    tokenizer = open_source(model).tokenizer
    if tokenizer is None:
        raise click.UsageError(f"{model} has no tokenizer")
    first = first_tokens(tokenizer)
    found, notes = texts.evaluation_texts()
    if not found:
        raise click.UsageError("; ".join(notes))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return (
        {name: texts.chunks(encode, text, tokens, first) for name, text in found.items()},
        len(first),
        notes,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--model", help="The model: what `optimize` takes.")
@click.option("--recipes", default=RECIPES, show_default=True, help="Names or files of recipes, by comma.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a field of every recipe."
)
@click.option("--calibration", metavar="FILE", help="Text for the recipes that calibrate.  [default: self]")
@click.option(
    "--write-calibration",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write Python documentation that is not held back to this file; without --model, stop then.",
)
@click.option("--samples", type=click.IntRange(min=1), help="Calibration samples.  [default: each recipe's]")
@click.option(
    "--tokens",
    type=click.IntRange(min=64),
    default=4096,
    show_default=True,
    help="Tokens of each text that are measured.",
)
@click.option(
    "--compare",
    "pairs",
    nargs=2,
    multiple=True,
    metavar="A B",
    help="A paired bootstrap between two of the recipes; may be given several times.",
)
@click.option(
    "--block",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens that the bootstrap keeps together; 512 is a chunk.",
)
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures.")
def main(
    model: str | None,
    recipes: str,
    overrides: tuple[str, ...],
    calibration: str | None,
    write_calibration: Path | None,
    samples: int | None,
    tokens: int,
    pairs: tuple[tuple[str, str], ...],
    block: int,
    out: Path | None,
) -> None:
    """Measure what recipes cost: perplexity, and KL divergence to the fp32 source, on texts that calibration never saw."""
    from enginewright.recipes.errors import EnginewrightError
    from enginewright.recipes.recipe import load_recipe

    if write_calibration is not None:
        text = texts.calibration_text()
        if text is None:
            raise click.UsageError("the calibration text needs `apt-get install python3-doc`")
        write_calibration.write_text(text, encoding="utf-8")
        click.echo(f"{write_calibration}: {len(text):,} characters", err=True)
        if model is None:
            return
    if model is None:
        raise click.UsageError("--model is needed")
    names = [name.strip() for name in recipes.split(",") if name.strip()]
    unknown = {name for pair in pairs for name in pair} - set(names)
    if unknown:
        raise click.UsageError(f"--compare names what --recipes does not: {', '.join(sorted(unknown))}")
    changes = [*overrides, *([f"calibration.samples={samples}"] if samples else [])]
    try:
        resolved = {name: load_recipe(name, changes) for name in names}
        chunks, before, notes = cut(model, tokens)
    except (EnginewrightError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    for note in notes:
        click.echo(note, err=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="enginewright-quality-") as folder:
        work = Work(model, chunks, before, Path(folder))
        click.echo("the source model in fp32", err=True)
        base = apart(reference, work)
        for number, name in enumerate(names, 1):
            click.echo(f"{name}, {number} of {len(names)}", err=True)
            given = calibration if resolved[name].calibrates else None
            try:
                outcomes.append(apart(measure, work, name, changes, given))
            except EnginewrightError as error:
                outcomes.append(Outcome(name, failure=" ".join(str(error).split())))
    click.echo(quality_table(outcomes, base))
    measured = {outcome.recipe for outcome in outcomes if not outcome.failure}
    if kept := [pair for pair in pairs if set(pair) <= measured]:
        click.echo()
        click.echo(comparison_table(outcomes, kept, block))
    if out:
        settings = {
            "model": model,
            "set": changes,
            "calibration": calibration or "self",
            "tokens": tokens,
            "missing": notes,
        }
        out.write_text(to_json(outcomes, base, settings), encoding="utf-8")


if __name__ == "__main__":
    main()
