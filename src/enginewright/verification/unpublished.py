"""`optimize`'s last stage: an engine that is written and not yet published, held against the judge."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from enginewright import __version__
from enginewright.backends.artifact import Artifact, ArtifactWriter
from enginewright.backends.golden import write_golden
from enginewright.runtime.engine import load

from .compare import verify
from .figures import Verification
from .goldens import Kept, tolerance
from .structure import verify_structure

if TYPE_CHECKING:
    from enginewright.passes.program import Program
    from enginewright.progress import Progress

    from .stages import Stages

__all__ = ["verify_unpublished"]


def verify_unpublished(
    writer: ArtifactWriter,
    manifest: dict[str, Any],
    build: dict[str, Any],
    judge: Program,
    stages: Stages,
    progress: Progress,
) -> Verification:
    """Load the unpublished folder, through the runtime where the backend serves, and hold it against the judge.

    Where the engine cannot run here, the final Program is held against it instead, and what was lowered against that.
    """
    names: dict[str, dict[str, Any]] = {
        path.relative_to(writer.path).as_posix(): {} for path in writer.path.rglob("*") if path.is_file()
    }
    unpublished = Artifact(writer.path, {**manifest, "files": names})
    program, recipe, target = stages.final, stages.recipe, stages.target
    limits = {key: value for key, value in asdict(recipe.verify).items() if value is not None}
    options: dict[str, Any] = {
        "demand_invariance": target.exact,
        "stages": stages,
        "report": progress.update,
    }
    if not target.serves:
        with target.answers(unpublished) as answers:
            return verify(answers, judge, limits, **options)
    reason = target.runs_here(manifest)
    if reason is not None:
        build["not_run"] = reason
        return verify_structure(
            unpublished, program, judge, recipe, target, limits, progress.update, stages=stages
        )
    window = max(group["window"] for group in manifest["kv_groups"])
    with load(unpublished, cache_tokens=window + 4096, max_sequences=8) as engine:
        build["isa"] = isa = getattr(engine.executor, "isa", None)  # the figures hold for this kernel variant
        kept = Kept()
        found = verify(engine, judge, limits, witness=kept.add, **options)
        if math.isfinite(kept.largest):
            identity = {"isa": str(isa), "version": __version__} if target.exact else None
            write_golden(kept.golden(tolerance(recipe), limits, identity), writer.path)
        return found
