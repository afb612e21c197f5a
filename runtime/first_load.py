"""An engine's first load on a device: its goldens are run through the serving path before anything else is.

An engine that was built where its target cannot run has the verdict `structure-only` and a golden.json
(`backends/golden.py`). Here it is asked through an `EngineLoop` of its own: paged cache, chunked prefill, batched decode. If
its answers fit, that is remembered in the user's cache folder, by the engine's hash and the executor's `device` (name,
driver, library), so that later loads do not ask again. If they do not, the engine does not serve; nothing of that is
remembered but a record for reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Executor
from enginewright.backends.golden import GOLDEN, read_golden
from enginewright.backends.golden_check import GoldenReport, check_golden
from enginewright.recipes.errors import ArtifactError, VerificationError

from .facts import longest_context
from .loop import EngineLoop, LoopLimits
from .memory import DEFAULT_CACHE_BYTES, plan_pages
from .pages import GroupSpec
from .request import Request

__all__ = ["STRUCTURE_ONLY", "cache_folder", "held_to_goldens", "require_goldens"]

STRUCTURE_ONLY = "structure-only"  # the verdict of an engine that could not run where it was built
_SEQUENCES = 8  # computed together while goldens are checked

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where outcomes are remembered: $ENGINEWRIGHT_CACHE, or `enginewright` in $XDG_CACHE_HOME or ~/.cache.

    A user without a home, as containers have them, has a place that cannot be written.
    """
    if own := os.environ.get("ENGINEWRIGHT_CACHE"):
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:
        base = os.devnull
    return Path(base) / "enginewright"


def require_goldens(artifact: Artifact, executor: Executor) -> None:
    """Hold a `structure-only` engine to its goldens, unless this device is known to have passed.

    Any other engine was run by its build, and passes. Drops the executor's pools. Raises VerificationError with the figures
    where the answers leave their limits, ArtifactError where the engine has no goldens, or another model's.
    """
    if artifact.manifest.get("verification", {}).get("verdict") != STRUCTURE_ONLY:
        return
    if GOLDEN not in artifact:
        raise ArtifactError(
            f"the engine at {artifact.path} never ran, and holds no golden outputs to be checked with",
            found=f"verdict {STRUCTURE_ONLY!r}, no {GOLDEN}",
            action="build it again with `optimize`",
        )
    device = str(getattr(executor, "device", artifact.manifest["backend"]))
    record = _record(artifact, device)
    if _passed(record):
        return
    _log.info("checking the golden outputs of %s on %s, once", artifact.path, device)
    report = held_to_goldens(artifact, executor)
    _remember(record, artifact, device, report)
    if not report.passed:
        raise VerificationError(
            f"the engine at {artifact.path} does not answer as it must on {device}: "
            + "; ".join(report.failures),
            found=str(report),
            expected="the golden outputs of its build, within their tolerance",
            action="do not serve it; build it again for this device, or report it with the figures (kept in "
            f"{record})",
        )


def held_to_goldens(artifact: Artifact, executor: Executor) -> GoldenReport:
    """Ask the executor for the samples of golden.json through the serving path, and compare. Drops its pools."""
    golden = read_golden(artifact.file(GOLDEN))
    total = sum(len(sample.tokens) for sample in golden.samples)
    most = longest_context(artifact)
    budget = executor.max_tokens
    sequences = min(_SEQUENCES, budget, executor.max_rows, getattr(executor, "max_sequences", _SEQUENCES))
    slack = max((group.page_size for group in executor.kv_groups), default=0) * len(golden.samples)
    pages = plan_pages(
        executor.kv_groups,
        max_context=most,
        max_sequences=sequences,
        chunk=budget,
        tokens=total + slack,
        limit_bytes=DEFAULT_CACHE_BYTES,
        most_pages=getattr(executor, "max_pages", None),
    )
    loop = EngineLoop(
        executor,
        [GroupSpec(group.window, group.page_size) for group in executor.kv_groups],
        pages,
        LoopLimits(most, sequences, budget, None, executor.max_rows, prefix_cache=False),
    )

    def logits(samples: Sequence[Sequence[int]], chunk: int | None) -> list[npt.NDArray[np.float32]]:
        requests = [Request(list(tokens), keep_logits=True, chunk_size=chunk) for tokens in samples]
        for request in requests:
            loop.submit(request)
        while not loop.idle:
            loop.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [np.concatenate(request.logit_rows) for request in requests]

    return check_golden(golden, logits, executor.vocab_size)


def _record(artifact: Artifact, device: str) -> Path:
    key = f"{artifact.manifest['manifest_sha256']}\n{device}".encode()
    return cache_folder() / "first-loads" / f"{hashlib.sha256(key).hexdigest()[:32]}.json"


def _passed(record: Path) -> bool:
    try:
        return json.loads(record.read_bytes())["passed"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remember(record: Path, artifact: Artifact, device: str, report: GoldenReport) -> None:
    """Write the record whole or not at all. A folder that cannot be written costs the next load the same check."""
    outcome = {
        "engine": str(artifact.manifest["manifest_sha256"]),
        "device": device,
        "passed": report.passed,
        **report.to_dict(),
    }
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, suffix=".tmp", delete=False) as file:
            json.dump(outcome, file, indent=1)
        os.replace(file.name, record)
