"""`optimize`: from a model to a verified engine.

    source → capture → passes → lower → run through the runtime and verify → publish

Everything is written to a temporary folder; the engine appears under its name only when the verdict is in. The judge of
verification is the captured Program, kept from before the first pass.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from enginewright.backends import aim, flavoured, get_backend
from enginewright.backends.artifact import Artifact, ArtifactWriter, open_engine
from enginewright.backends.base import Backend
from enginewright.backends.requirements import adapt
from enginewright.build_cache import BuildCache, build_key, build_through_cache, build_twice
from enginewright.build_records import build_log, manifest_of
from enginewright.calibration import check_calibration, from_file, from_model
from enginewright.distillation import distil_head
from enginewright.html_report import first_layer
from enginewright.passes.assignment import assign
from enginewright.passes.calibration import Samples
from enginewright.passes.capture import capture
from enginewright.passes.cost import Cost, Ledger
from enginewright.passes.cut_draft import check_layers, cut_draft
from enginewright.passes.manager import Pass, Step, run_steps
from enginewright.passes.mixed import choosable
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.smooth import Smooth
from enginewright.passes.source import ModelSource, open_source
from enginewright.progress import Progress, StageRecord
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import Recipe, load_recipe
from enginewright.report import TOKENS, check_report, write_report
from enginewright.runtime.engine import Engine, load
from enginewright.verification import text_tokens
from enginewright.verification.bisection import Bisection
from enginewright.verification.bisection import bisect as find_culprit
from enginewright.verification.stages import Stages
from enginewright.verification.unpublished import verify_unpublished

_ONE_AT_A_TIME = threading.Lock()  # torch.export patches the whole process while it traces


@dataclass(frozen=True)
class BuildReport:
    """What `optimize` did. `path` is the engine, `passes` one entry a pass (name, matches, seconds, notes).

    `layers`, where a report was asked for: what rounding cost each unit, in the model's order (fields of passes/cost.py's Cost).
    """

    path: Path
    manifest: dict[str, Any]
    passes: list[dict[str, Any]]
    seconds: float
    layers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verification(self) -> dict[str, Any]:
        """The figures and the verdict, as the manifest has them."""
        return self.manifest["verification"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {**asdict(self), "path": str(self.path)}

    def engine(self, **options: Any) -> Engine:
        """Load the engine (options of `enginewright.load`)."""
        return load(self.path, **options)


def optimize(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] = "int4",
    out: str | os.PathLike[str] | None = None,
    *,
    backend: str = "cpu",
    target: str | Iterable[str] | None = None,
    overrides: Iterable[str] = (),
    calibration: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    dump: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    force: bool = False,
    allow_unverified: bool = False,
    bisect: bool = False,
    cache: str | os.PathLike[str] | None = None,
    check_reproducible: bool = False,
    progress: Progress | None = None,
    ledger: Ledger | None = None,
) -> BuildReport:
    """Build the engine of `model` by `recipe` into the folder `out`.

    `model` is a Hugging Face folder, a `.gguf` file, or a hub name (needs a network). `target` names the machines that a backend
    builds for, where it builds for several kinds: GPU architectures, as `sm80,sm89`. `overrides` are `key=value` changes of
    recipe fields; `calibration` is the recipe's `calibration.source`: a file of text, or `self`; `adapter` is the folder of a
    LoRA adapter, which is merged into the model. `dump` is a folder that receives the graph after every pass; `report` one
    that receives layers.csv and layers.png: what rounding cost each unit. `force` replaces an engine at `out`. `ledger` is
    told what every matrix is stored as. `cache` is a folder of engines that were built before (`build_cache.py`): one that has
    the same inputs is copied, and not built. `check_reproducible` builds twice and publishes only what came out the same.

    Raises InputError and its kin for what cannot be used, and VerificationError when the engine's answers leave the recipe's
    limits (then nothing is published, unless `allow_unverified`).

    `bisect` keeps the Program after every pass, and where verification fails it names the pass or op that is at fault: in the
    error's text, and as its attribute `bisection`.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    resolved = load_recipe(str(recipe), list(overrides))
    if calibration is not None:
        given = replace(resolved.calibration, source=os.fspath(calibration))
        resolved = replace(resolved, calibration=given)
    check_calibration(resolved)
    aimed = flavoured(aim(get_backend(backend), target), resolved)
    resolved = adapt(resolved, aimed)
    if resolved.draft.layers is not None and not aimed.drafts:
        raise InputError(
            f"the {aimed.name} backend writes no drafts",
            found=f"draft.layers={resolved.draft.layers}",
            expected="draft.layers null or 0",
            action="leave draft.layers out, or build with --backend cpu",
        )
    out = Path(out) if out is not None else Path("engines") / _default_name(model, adapter, resolved, aimed)
    if dump is not None:
        try:
            Path(dump).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                "the graphs cannot be written",
                found=f"{dump}: {error.strerror}",
                expected="a folder, or a new name",
            ) from error
    if report is not None:
        check_report(Path(report), resolved)
        ledger = ledger or Ledger()
    order = _Order(model, adapter, resolved, aimed, dump, report, allow_unverified, bisect, progress, ledger)

    def build(to: Path, replacing: bool) -> Artifact:
        return _build(order, to, replacing)[0]

    if check_reproducible and cache is not None:
        raise InputError(
            "--check-reproducible and --cache do not go together",
            found="an engine from the cache is not built again",
            action="leave one of them out",
        )
    layers: list[dict[str, Any]] = []
    if check_reproducible:
        built = build_twice(build, out, force, progress)
    elif cache is not None:
        built = _through_cache(Path(cache), order, build, out, force)
    else:
        built, layers = _build(order, out, force)
    passes = list(built.build.get("passes", []))
    return BuildReport(built.path, built.manifest, passes, time.perf_counter() - started, layers)


@dataclass(frozen=True)
class _Order:
    """What is to be built, of what, and how: `optimize`'s arguments, checked."""

    model: str | os.PathLike[str]
    adapter: str | os.PathLike[str] | None
    recipe: Recipe
    target: Backend
    dump: str | os.PathLike[str] | None
    report: str | os.PathLike[str] | None
    allow_unverified: bool
    bisect: bool
    progress: Progress
    ledger: Ledger | None


def _through_cache(
    folder: Path, order: _Order, build: Callable[[Path, bool], Artifact], out: Path, force: bool
) -> Artifact:
    """The engine from the cache, or built and kept there."""
    for name in ("dump", "report", "bisect"):
        if getattr(order, name):
            raise InputError(
                f"--cache and --{name} do not go together",
                found="an engine from the cache is not built again, so there is nothing to show",
                action="leave one of them out",
            )
    source, calibration = order.recipe.calibration.source, None
    if order.recipe.calibrates and source != "self":
        calibration = Path(source).expanduser()
    with order.progress.stage("key") as record:
        key = build_key(
            Path(open_source(order.model).path),
            None if order.adapter is None else Path(order.adapter).expanduser(),
            order.recipe.resolved(),
            calibration,
            order.target.name,
            order.target.target,
        )
        record.detail = key[:16]
    return build_through_cache(BuildCache(folder), key, build, out, force, order.progress)


def _build(order: _Order, out: Path, force: bool) -> tuple[Artifact, list[dict[str, Any]]]:
    """From the opened model to the published engine; with what rounding cost each unit, where that was asked for."""
    model, adapter, resolved, target = order.model, order.adapter, order.recipe, order.target
    dump, report, progress, ledger = order.dump, order.report, order.progress, order.ledger
    with _ONE_AT_A_TIME, ArtifactWriter(out, force=force) as writer:
        with progress.stage("open") as record:
            source = open_source(model, adapter)
            gate = target.gate(resolved, source)
            record.detail = source.name + (
                f" with {source.adapter.name}" if source.adapter is not None else ""
            )
        samples = _samples_of_file(source, resolved, progress)
        with progress.stage("capture") as record:
            program = capture(source, max_context=resolved.max_context)
            record.detail = (
                f"{program.facts.architecture}, {program.facts.parameters / 1e6:,.1f} M parameters"
            )
        if resolved.draft.layers is not None:
            check_layers(resolved.draft.layers, program.facts.num_layers)
        judge = program.clone()
        if resolved.calibrates:
            _require_possible(program, resolved, gate)
        samples = samples or _samples_of_model(source, program, resolved, progress)
        wanted = steps(
            resolved, samples, progress.update, until=Stage[target.stage], gate=gate, ledger=ledger
        )
        history = [("capture", judge)] if order.bisect else None
        passes, records = _run_passes(program, wanted, progress, dump, history)
        draft, head_record = _draft(program, resolved, samples, target, progress)
        with progress.stage("lower") as record:
            files = target.lower(
                program,
                resolved,
                writer.path,
                lambda name, done, total: progress.update(
                    f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB {name}"
                ),
                source,
                draft,
            )
            record.detail = f"{sum((writer.path / file).stat().st_size for file in files) / 1e6:,.1f} MB"
        source.write_tokenizer(writer.path)
        manifest = manifest_of(program, source, resolved, target)
        if samples is not None:
            manifest["calibration"] = {**samples.provenance(), **records, **head_record}
        build = build_log(passes, program.notes)
        build["graphs"] = {"captured": first_layer(judge), "final": first_layer(program)}
        with progress.stage("verify") as record:
            stages = Stages(program, target, resolved, manifest)
            verification = verify_unpublished(writer, manifest, build, judge, stages, progress)
            record.detail = f"KL {verification.mean_kl:.3g}, top-1 {verification.top1_agreement:.1%}"
        manifest["verification"] = verification.to_dict()
        layers: list[dict[str, Any]] = []
        if report is not None and ledger is not None:
            with progress.stage("report") as record:
                costs = _costs(ledger, source, program, samples, progress)
                layers = [cost.to_dict() for cost in costs]
                mixed = records.get("quantise", {}).get("mixed", [])
                title = f"{source.name}, {resolved.name}: what rounding cost each unit"
                write_report(Path(report), layers, mixed, title)
                record.detail = f"{len(layers)} units, {Path(report) / 'layers.csv'}"
        culprit = None
        if verification.failures and history is not None:
            culprit = _bisect(history, stages, writer.path, progress)
        if not order.allow_unverified:
            verification.raise_if_failed(culprit)
        build["seconds"] = {record.name: round(record.seconds, 3) for record in progress.records}
        path = writer.publish(manifest, build)
    return open_engine(path), layers


def _default_name(
    model: str | os.PathLike[str], adapter: str | os.PathLike[str] | None, recipe: Recipe, backend: Backend
) -> str:
    """MODEL-RECIPE of the cpu; what other backends write says which, so that none is in another's way."""
    merged = f"-{Path(adapter).resolve().name}" if adapter is not None else ""
    kind = "" if backend.name == "cpu" else f"-{backend.name}"
    if recipe.onnx.flavour != "plain":
        kind += f"-{recipe.onnx.flavour}"
    return f"{Path(model).name.removesuffix('.gguf')}{merged}-{recipe.name}{kind}"


def _costs(
    ledger: Ledger, source: ModelSource, program: Program, samples: Samples | None, progress: Progress
) -> list[Cost]:
    """What rounding cost each unit, on the calibration's first tokens, or on the package's text."""
    if samples is not None:
        tokens = samples.cut(TOKENS)
    else:
        encode = None if source.tokenizer is None else source.tokenizer.encode
        length = min(TOKENS, program.facts.max_context)
        tokens = [text_tokens(encode, program.facts.vocab_size, length)]
    return ledger.measure(tokens, progress.update)


def _samples_of_file(source: ModelSource, recipe: Recipe, progress: Progress) -> Samples | None:
    """Calibration data of a file, where the recipe names one. Its faults are found before any long work."""
    if not recipe.calibrates or recipe.calibration.source == "self":
        return None
    with progress.stage("calibrate") as record:
        samples = from_file(source, recipe)
        record.detail = _told(samples, recipe)
    return samples


def _require_possible(program: Program, recipe: Recipe, gate: Pass | None) -> None:
    """Refuse what this model cannot have before calibration's long work: on a copy, as the passes before it leave the graph."""
    fused = program.clone()
    order = [step for step in steps(recipe, gate=gate) if step.stage <= Stage.FUSED]
    run_steps(
        fused,
        [
            Step(Normalise(), Stage.NORMALISED, required=True),
            *(step for step in order if not isinstance(step.rewrite, Smooth)),
        ],
    )
    assigned, _ = assign(fused, recipe)
    if recipe.mixed.wanted:
        choosable(fused, assigned, recipe)


def _samples_of_model(
    source: ModelSource, program: Program, recipe: Recipe, progress: Progress
) -> Samples | None:
    """Calibration data that the model writes, where the recipe asks for any."""
    if not recipe.calibrates:
        return None
    with progress.stage("calibrate") as record:
        samples = from_model(source, program, recipe.calibration, progress.update)
        record.detail = _told(samples, recipe)
    return samples


def _draft(
    program: Program, recipe: Recipe, samples: Samples | None, target: Backend, progress: Progress
) -> tuple[Program | None, dict[str, Any]]:
    """The draft that the recipe asks for, and what the manifest keeps of how its head was found."""
    layers = recipe.draft.layers
    if layers is None:
        return None, {}
    if recipe.draft.head == "shared":
        return cut_draft(program, layers), {}
    assert samples is not None, "a distilled head calibrates"
    with progress.stage("distil") as record:
        head, found = distil_head(program, recipe, samples, target, progress.update)
        top1 = found["top1"]
        record.detail = f"top-1 agreement {top1['distilled']:.1%}, without the map {top1['shared']:.1%}"
    return cut_draft(program, layers, head), {"draft_head": found}


def _told(samples: Samples, recipe: Recipe) -> str:
    return (
        f"{len(samples.sequences)} samples, {samples.tokens:,} tokens from {samples.source} for "
        + ", ".join(recipe.calibrates)
    )


def _run_passes(
    program: Program,
    order: list[Step],
    progress: Progress,
    dump: str | os.PathLike[str] | None,
    history: list[tuple[str, Program]] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the passes; returns their log, and by name what the manifest keeps of each. `history` gets the Program after each."""
    folder = None if dump is None else Path(dump)
    with progress.stage("passes") as record:
        records = run_steps(
            program,
            [Step(Normalise(), Stage.NORMALISED, required=True), *order],
            dump=folder,
            progress=lambda name, index, total: progress.update(
                f"{name} ({index + 1} of {total})" if name else "done"
            ),
            check=None if history is None else lambda after, name: history.append((name, after.clone())),
        )
        record.detail = f"{records[0].nodes_before:,} nodes became {records[-1].nodes_after:,}"
    for entry in records:
        progress.add(StageRecord(entry.name, entry.seconds, entry.matches, "; ".join(entry.notes)), indent=2)
    log = [
        {
            "name": entry.name,
            "matches": entry.matches,
            "seconds": round(entry.seconds, 3),
            "notes": list(entry.notes),
        }
        for entry in records
    ]
    return log, {entry.name: dict(entry.record) for entry in records if entry.record}


def _bisect(
    history: list[tuple[str, Program]], stages: Stages, folder: Path, progress: Progress
) -> Bisection:
    """Name the culprit of a failed verification; what was compared is shown where there is a console."""
    with progress.stage("bisect") as record:
        found = find_culprit(
            history,
            stages.target,
            stages.recipe,
            stages.manifest,
            stages.telling_sample(),
            engine=stages.engine_logits(folder),
            report=progress.update,
        )
        record.detail = found.kind or "nothing left its limit"
    if progress.console is not None:
        progress.console.print(found.text(), highlight=False, markup=False, soft_wrap=True)
    return found
