"""`engine verify`: an engine on disk, held against its files' hashes, its source model, an earlier engine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginewright import __version__
from enginewright.backends import writer_of
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.backends.golden import GOLDEN, read_golden
from enginewright.backends.golden_check import check_golden
from enginewright.progress import Progress
from enginewright.recipes.errors import ArtifactError, InputError
from enginewright.recipes.recipe import Recipe
from enginewright.recipes.schema import parse
from enginewright.runtime.engine import load

from .baseline import compare_with_baseline, read_baseline
from .checks import Check, EngineReport, checks_of, verdict_of_build
from .compare import judge_logits, verify
from .figures import Figures

if TYPE_CHECKING:
    from enginewright.passes.program import Program

__all__ = ["verify_engine"]

_SAME = ("architecture", "parameters", "vocab_size", "num_layers")
"""What the engine's manifest and the captured model must agree on."""

_OF_MODEL: dict[str, Any] = {
    **dict.fromkeys(("parameters", "vocab_size", "num_layers", "hidden_size", "max_context"), int),
    "source": str,
    "architecture": (str, type(None)),
}
"""What is read of a manifest's `model`, and its types."""

_OF_PERPLEXITY = 1e-3  # what another machine's sums may change of it


def verify_engine(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    adapter: str | os.PathLike[str] | None = None,
    level: str = "quick",
    baseline: str | os.PathLike[str] | None = None,
    bisect: bool = False,
    calibration: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> EngineReport:
    """Verify the engine in the folder `path`; see the module. Nothing is written.

    `against` is the model that it was built from (as for `optimize`, with the `adapter`), `level` "quick" or "full", `baseline` a
    file (`baseline.py`). Nothing is raised for what fails a check (`EngineReport.raise_if_failed`). Raises InputError and its kin
    for what cannot be used: no engine, another model, no baseline.

    `bisect` runs the engine's passes again, and names the first pass or op that leaves the model (`EngineReport.bisection`);
    `calibration` is the file of text that the recipe was calibrated on.
    """
    if level not in ("quick", "full"):
        raise InputError("there is no such level", found=repr(level), expected="quick or full")
    needing = {"adapter": adapter, "baseline": baseline, "bisect": bisect or None}
    alone = [name for name, value in needing.items() if value is not None]
    if against is None and alone:
        raise InputError(
            f"--{alone[0]} means nothing here",
            found="no --against",
            action="name the model with --against",
        )
    if calibration is not None and not bisect:
        raise InputError(
            "--calibration means nothing here", found="no --bisect", action="add --bisect, or leave it out"
        )
    if against is not None:
        _require_torch()
    earlier = None if baseline is None else read_baseline(Path(baseline))
    progress = progress or Progress()
    started = time.perf_counter()
    with progress.stage("files") as record:
        try:
            artifact = open_engine(path, check=True)
            _require_whole(artifact)
        except ArtifactError as error:
            return _damaged(path, level, error)
        record.detail = f"{len(artifact.manifest['files'])} files are what was built"
    report = EngineReport(str(artifact.path), artifact.manifest, level, artifact.build)
    report.checks.append(Check("files", "every file is what was built", True, record.detail))
    report.checks.append(verdict_of_build(artifact.manifest))
    if GOLDEN in artifact:
        with progress.stage("goldens") as record:
            report.checks.append(_goldens(artifact, threads))
            record.detail = report.checks[-1].found
    if against is not None:
        with progress.stage("verify") as record:
            report.verification = _against(artifact, against, adapter, level, threads, progress)
            record.detail = f"mean KL {report.verification['mean_kl']:.3g}"
        if (reason := _cannot_run(artifact)) is not None:
            told = f"{reason}; figures, stages and limits are those of its build, and of its Program"
            report.checks.append(Check("figures", "the engine's own answers", None, told))
        if (same := _source(artifact.manifest, report.verification)) is not None:
            report.checks.append(same)
        report.checks += checks_of(report.verification)
    if earlier is not None:
        report.checks += compare_with_baseline(report, earlier)
    if bisect and against is not None:
        from .rebuilding import bisect_engine

        with progress.stage("bisect") as record:
            report.bisection = bisect_engine(
                artifact, against, adapter=adapter, calibration=calibration, report=progress.update
            )
            record.detail = report.bisection.kind or "nothing left its limit"
    report.seconds = time.perf_counter() - started
    return report


def _require_whole(artifact: Artifact) -> None:
    """Raise ArtifactError for a manifest without what verifying reads: its hash says only that nobody changed it since."""
    manifest, missing = artifact.manifest, []
    model, groups, recorded = (manifest.get(key) for key in ("model", "kv_groups", "verification"))
    if not isinstance(model, Mapping) or not all(
        isinstance(model.get(name), kind) and not isinstance(model.get(name), bool)
        for name, kind in _OF_MODEL.items()
    ):
        missing.append("model")
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and type(group.get("window")) is int for group in groups
    ):
        missing.append("kv_groups")
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("verdict"), str):
        missing.append("verification")
    try:
        parse(Recipe, manifest.get("recipe"), "")
    except InputError:
        missing.append("recipe")
    if missing:
        raise ArtifactError(
            f"the manifest of the engine at {artifact.path} lacks what it must say",
            found=f"no usable {', '.join(missing)}",
            action="build it again with `optimize`",
        )


def _source(manifest: Mapping[str, Any], verification: Mapping[str, Any]) -> Check | None:
    """Whether the source model answers as it did when the engine was built; None where other samples were asked for.

    Another model with the same shapes, a fine-tune of it say, passes for the source of a coarse engine by its figures alone.
    """
    recorded = manifest["verification"]
    before, now = (some.get("reference_perplexity") for some in (recorded, verification))
    same_samples = all(recorded.get(key) == verification[key] for key in ("samples", "tokens"))
    if not same_samples or not isinstance(before, (int, float)):
        return None
    within = now is not None and abs(now - before) <= _OF_PERPLEXITY * before
    found = "not finite" if now is None else f"perplexity {now:.6g}"
    return Check("figures", "the model that it was built from", within, found, f"perplexity {before:.6g}")


def _require_torch() -> None:
    """Raise InputError unless a model can be captured here."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as missing:
        raise InputError(
            f"--against needs the package {missing.name or 'torch'!r}: the model answers in torch",
            action="pip install 'torch>=2.9' 'transformers>=5' gguf sentencepiece protobuf, or leave --against out",
        ) from missing


def _damaged(path: str | os.PathLike[str], level: str, error: ArtifactError) -> EngineReport:
    manifest: dict[str, Any] = {}
    report = EngineReport(os.fspath(path), manifest, level)
    report.checks.append(Check("files", "every file is what was built", False, str(error)))
    return report


def _cannot_run(artifact: Artifact) -> str | None:
    """Why this machine cannot run an engine that serves; None where it can."""
    backend = writer_of(artifact.manifest)
    return backend.runs_here(artifact.manifest) if backend.serves else None


def _goldens(artifact: Artifact, threads: int | None) -> Check:
    """The recorded answers, asked for again through the runtime."""
    words = "recorded answers"
    backend = writer_of(artifact.manifest)
    reason = _cannot_run(artifact)
    if reason is not None:
        return Check("goldens", words, None, reason)
    golden = read_golden(artifact.file(GOLDEN))
    most = max((len(sample.tokens) for sample in golden.samples), default=1)
    held = 8 * (most + 64)
    with load(artifact, threads=threads, cache_tokens=held, max_sequences=8, prefix_cache=False) as engine:
        isa = getattr(engine.executor, "isa", None)
        identity = {"isa": str(isa), "version": __version__} if backend.exact else None
        found = check_golden(golden, engine.logits, engine.vocab_size, identity)
    bits = "the same bits; " if found.same_bits else ""
    told = "; ".join(found.failures) or f"{bits}{found}"
    expected = (
        "the same bits"
        if found.same_bits is not None
        else f"within {golden.tolerance:g} of the largest logit"
    )
    return Check("goldens", words, found.passed, told, expected)


def _against(
    artifact: Artifact,
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None,
    level: str,
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    from enginewright.passes.capture import capture
    from enginewright.passes.source import open_source

    manifest = artifact.manifest
    progress.update("capturing the model")
    judge = capture(open_source(model, adapter), max_context=manifest["recipe"]["max_context"])
    _require_same(manifest["model"], asdict(judge.facts), os.fspath(model))
    limits = {key: value for key, value in manifest["recipe"]["verify"].items() if value is not None}
    backend = writer_of(manifest)
    if _cannot_run(artifact) is not None:
        return _of_its_build(artifact, judge)
    if not backend.serves:
        with backend.answers(artifact) as answers:
            found = verify(
                answers, judge, limits, demand_invariance=backend.exact, level=level, report=progress.update
            )
            return found.to_dict()
    held = max((group["window"] for group in manifest["kv_groups"]), default=0) + (
        4096 if level == "quick" else 12288
    )
    with load(artifact, threads=threads, cache_tokens=held, max_sequences=8) as engine:
        found = verify(
            engine, judge, limits, demand_invariance=backend.exact, level=level, report=progress.update
        )
        return found.to_dict()


def _of_its_build(artifact: Artifact, judge: Program) -> dict[str, Any]:
    """The figures of the build of an engine that cannot run here, which are its Program's; of the judge the perplexity is taken
    again, on the samples of the goldens, so that another model is noticed."""
    recorded = dict(artifact.manifest["verification"])
    if GOLDEN not in artifact:
        return recorded
    figures = Figures()
    for sample in read_golden(artifact.file(GOLDEN)).samples:
        logits = judge_logits(judge, list(sample.tokens))
        figures.add(sample.tokens, logits, logits)
    return recorded | {"reference_perplexity": figures.reference_perplexity}


def _require_same(built: Mapping[str, Any], found: Mapping[str, Any], model: str) -> None:
    for name in _SAME:
        if built.get(name) != found[name]:
            raise InputError(
                f"the engine was not built from {model}",
                found=f"{name} {found[name]}",
                expected=f"{name} {built.get(name)}, as in the engine's manifest",
                action="name the model that the engine was built from",
            )
