"""The figures of a played workload: how long first and further tokens took, how much was served, how much of it in time.

- TTFT, time to first token: from the moment a request was due until its first token.
- ITL, inter-token latency: the gaps between a request's tokens, all gaps of all requests together.
- TPOT, time per output token: (last token − first token) / (tokens − 1), one a request.
- Goodput: requests a second whose TTFT and TPOT are both within the objective (Zhong et al. 2024, DistServe, §2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .traffic import Run, Served

__all__ = ["figures", "gaps", "per_request", "ttft"]


def ttft(served: Served) -> float | None:
    """Seconds to the first token; None when none came."""
    return served.times[0] - served.arrival.at if served.times else None


def gaps(served: Served) -> list[float]:
    """Seconds between tokens (over HTTP: between pieces of text)."""
    return np.diff(served.times).tolist() if len(served.times) > 1 else []


def tpot(served: Served) -> float | None:
    """Mean seconds a token after the first; None for fewer than two tokens."""
    if served.new_tokens < 2 or not served.times:
        return None
    return (served.times[-1] - served.times[0]) / (served.new_tokens - 1)


def figures(run: Run, slo_ttft: float, slo_itl: float) -> dict[str, Any]:
    """Plain values, times in milliseconds; objectives in milliseconds. Failed requests count for nothing but `failed`."""
    good = [served for served in run.served if served.error is None]
    end = max((served.finished for served in good), default=0.0)
    rates = _rates(run, good, end)
    in_time = sum(_in_time(served, slo_ttft / 1e3, slo_itl / 1e3) for served in good)
    return {
        "requests": len(run.served),
        "failed": len(run.served) - len(good),
        "seconds": end,
        **rates,
        "ttft_ms": _spread([value for served in good if (value := ttft(served)) is not None]),
        "itl_ms": _spread([gap for served in good for gap in gaps(served)]),
        "tpot_ms": _spread([value for served in good if (value := tpot(served)) is not None]),
        "latency_ms": _spread([served.finished - served.arrival.at for served in good]),
        "goodput": {
            "slo_ttft_ms": slo_ttft,
            "slo_itl_ms": slo_itl,
            "requests_per_second": in_time / end if end else 0.0,
            "share": in_time / len(run.served) if run.served else 0.0,
        },
        **_steps(run),
    }


def _rates(run: Run, good: Sequence[Served], end: float) -> dict[str, Any]:
    prompt, new = sum(served.prompt_tokens for served in good), sum(served.new_tokens for served in good)
    return {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "requests_per_second": len(good) / end if end else 0.0,
        "new_tokens_per_second": new / end if end else 0.0,
        "tokens_per_second": (prompt + new) / end if end else 0.0,
    }


def _in_time(served: Served, slo_ttft: float, slo_itl: float) -> bool:
    first, each = ttft(served), tpot(served)
    return first is not None and first <= slo_ttft and (each is None or each <= slo_itl)


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    milliseconds = 1e3 * np.asarray(seconds)
    p50, p95, p99 = np.percentile(milliseconds, (50, 95, 99)).tolist()
    return {
        "mean": float(milliseconds.mean()),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": float(milliseconds.max()),
    }


def _steps(run: Run) -> dict[str, Any]:
    if not run.samples:
        return dict(run.facts)
    busy = sum(sample.seconds for sample in run.samples)
    return {
        "steps": len(run.samples),
        "step_ms": _spread([sample.seconds for sample in run.samples]),
        "sequences_per_step": sum(sample.sequences for sample in run.samples) / len(run.samples),
        "busy": busy / run.seconds if run.seconds else 0.0,
        **run.facts,
    }


def per_request(run: Run) -> list[dict[str, Any]]:
    """One row a request, in order of arrival: what a table of one's own needs."""
    rows = []
    for served in run.served:
        first, each, own = ttft(served), tpot(served), gaps(served)
        rows.append(
            {
                "at_s": served.arrival.at,
                "prompt_tokens": served.prompt_tokens,
                "new_tokens": served.new_tokens,
                "ttft_ms": None if first is None else 1e3 * first,
                "tpot_ms": None if each is None else 1e3 * each,
                "longest_gap_ms": 1e3 * max(own) if own else None,
                "latency_ms": 1e3 * (served.finished - served.arrival.at),
                "error": served.error,
            }
        )
    return rows
