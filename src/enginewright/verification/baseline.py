"""An engine against an earlier one: has its quality or size become worse by more than is allowed?

A baseline is what `engine verify --json` has written of the earlier engine, committed beside the recipe. It may say itself how
much worse a figure may become, as shares of the earlier value:

    "allowed": {"mean_kl": 0.05, "top1_agreement": 0.02, "perplexity_ratio": 0.02, "bytes": 0.01}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.recipes.errors import InputError

from .checks import Check, EngineReport

__all__ = ["ALLOWED", "compare_with_baseline", "read_baseline"]

ALLOWED = {"mean_kl": 0.05, "p999_kl": 0.10, "top1_agreement": 0.02, "perplexity_ratio": 0.02, "bytes": 0.01}
"""How much worse a figure may become where the baseline does not say."""

_SAME = ("architecture", "parameters")
_HIGHER_IS_BETTER = ("top1_agreement",)
_NOISE = 1e-6  # of a figure: that of an engine whose answers are the source's to the last bits


def read_baseline(path: Path) -> dict[str, Any]:
    """Return the baseline in a file. Raises InputError for one that cannot be read or lacks what is compared."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"the baseline {path} cannot be read",
            found=str(error),
            expected="what `engine verify ENGINE --against MODEL --json FILE` writes",
            action="name that file",
        ) from error
    needed = isinstance(found, dict) and isinstance(found.get("verification"), dict) and "bytes" in found
    if not needed:
        raise InputError(
            f"{path} is no baseline",
            expected="what `engine verify ENGINE --against MODEL --json FILE` writes",
            action="write one with the engine that is to be the baseline",
        )
    figures = {**found["verification"], "bytes": found["bytes"]}
    lacking = [name for name in ALLOWED if not _is_number(figures.get(name))]
    if lacking:
        raise InputError(
            f"the baseline {path} has no {', '.join(lacking)}",
            found=", ".join(repr(figures.get(name)) for name in lacking),
            expected="a number for each of " + ", ".join(ALLOWED),
            action="write the baseline anew: what it does not have cannot become worse",
        )
    allowed = found.get("allowed", {})
    if not isinstance(allowed, dict) or not all(
        name in ALLOWED and _is_number(share) and share >= 0 for name, share in allowed.items()
    ):
        raise InputError(
            f"the baseline {path} allows something that cannot be used",
            found=repr(allowed),
            expected="shares of 0 or more for any of " + ", ".join(ALLOWED),
        )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def compare_with_baseline(report: EngineReport, baseline: Mapping[str, Any]) -> list[Check]:
    """One check a figure. The engine must have been verified against its source, at the baseline's level."""
    if report.verification is None:
        raise InputError(
            "a baseline holds figures against the source model",
            found="no --against",
            action="name the model with --against",
        )
    if baseline.get("level") != report.level:
        raise InputError(
            "the baseline was made at another level",
            found=f"--level {report.level}",
            expected=f"--level {baseline.get('level')}",
        )
    earlier, model = baseline.get("model"), report.to_dict()["model"]
    if isinstance(earlier, dict) and any(earlier.get(name) != model[name] for name in _SAME):
        raise InputError(
            "the baseline is another model's",
            found=", ".join(f"{name} {earlier.get(name)}" for name in ("source", *_SAME)),
            expected=", ".join(f"{name} {model[name]}" for name in _SAME),
            action="name the baseline of this model, or write one with --json",
        )
    allowed = {**ALLOWED, **baseline.get("allowed", {})}
    now = {**report.verification, "bytes": report.to_dict()["bytes"]}
    before = {**baseline["verification"], "bytes": baseline["bytes"]}
    return [_held(name, now.get(name), before.get(name), share) for name, share in allowed.items()]


def _held(name: str, now: Any, before: Any, share: float) -> Check:
    words = f"{name} against the baseline"
    if not _is_number(now):
        return Check("baseline", words, False, "not finite", f"about {before:.6g}")
    if name in _HIGHER_IS_BETTER:
        limit = before - share * before - _NOISE
        return Check("baseline", words, now >= limit, f"{now:.6g}, it was {before:.6g}", f"≥ {limit:.6g}")
    limit = before + share * abs(before) + (0 if name == "bytes" else _NOISE)
    return Check("baseline", words, now <= limit, f"{now:.6g}, it was {before:.6g}", f"≤ {limit:.6g}")
