"""What the outside sees of a running engine: one picture of the loop, taken between two steps."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

from ..async_engine import AsyncEngine
from ..request import Request, Status
from ..statistics import LoopStatistics
from .service import Service

__all__ = ["counts", "live_status"]

_PATIENCE = 1.0  # seconds that an observer waits for the step that runs
_MOST_REQUESTS = 100


async def _between_steps(engine: AsyncEngine, look: Callable[[], Any]) -> Any:
    """Return what `look` sees between two steps; None when the loop does not come to it in time."""
    try:
        return await asyncio.wait_for(engine.call(look), _PATIENCE)
    except asyncio.TimeoutError:
        return None


async def counts(service: Service) -> LoopStatistics | None:
    """Return the loop's statistics; None while there is no engine, or one that hangs."""
    engine = service.loaded
    if engine is None or not engine.alive:
        return None
    seen: LoopStatistics | None = await _between_steps(engine, engine.engine.loop.statistics)
    return seen


async def live_status(service: Service) -> dict[str, Any]:
    """Return what GET /status says. It holds no prompt and no text."""
    settings, engine = service.settings, service.loaded
    status: dict[str, Any] = {
        "engine": settings.engine.resolve().name,
        "model": settings.model_name,
        "phase": service.phase,
        "policy": settings.policy,
        "uptime_s": round(time.monotonic() - service.started, 1),
        "max_sequences": settings.max_sequences,
        "running": 0,
        "waiting": 0,
        "batch_fill": 0.0,
        "token_fill": 0.0,
        "tokens_per_second": 0.0,
        "ttft_ms": None,
        "itl_ms": None,
        "preemptions": 0,
        "prefix_hit_rate": None,
        "speculation": None,
        "kv_groups": [],
        "requests": [],
    }
    if engine is None or not engine.alive:
        return status
    seen = await _between_steps(engine, lambda: _picture(engine))
    figures = engine.figures
    status["tokens_per_second"] = round(figures.tokens_per_second(time.monotonic()), 1)
    status["ttft_ms"] = _milliseconds(figures.first_token.percentiles(50, 95))
    status["itl_ms"] = _milliseconds(figures.next_token.percentiles(50, 95))
    return status | (seen or {})


def _milliseconds(values: list[float] | None) -> dict[str, float] | None:
    return None if values is None else {"p50": round(values[0] * 1e3, 1), "p95": round(values[1] * 1e3, 1)}


def _picture(engine: AsyncEngine) -> dict[str, Any]:
    """What only the loop's thread may read."""
    loop = engine.engine.loop
    seen = loop.statistics()
    now = time.monotonic()
    idle = loop.idle
    return {
        "running": seen.running,
        "waiting": seen.waiting,
        "batch_fill": 0.0 if idle else round(seen.batch_fill, 4),
        "token_fill": 0.0 if idle else round(seen.token_fill, 4),
        "preemptions": seen.preemptions,
        "prefix_hit_rate": None if seen.prefix_hit_rate is None else round(seen.prefix_hit_rate, 4),
        "speculation": _speculation(seen),
        "kv_groups": [
            {
                "page_size": pages.page_size,
                "total": pages.total,
                "used": pages.used,
                "cached": pages.cached,
                "map": base64.b64encode(loop.pool.page_map(g)).decode(),
            }
            for g, pages in enumerate(seen.pages)
        ],
        "requests": [
            _request(id_, request, now - since) for id_, request, since in engine.in_flight(_MOST_REQUESTS)
        ],
    }


def _speculation(seen: LoopStatistics) -> dict[str, Any] | None:
    figures = seen.speculation
    if figures is None:
        return None
    return {
        "drafter": figures.drafter,
        "proposed": figures.drafted,
        "accepted": figures.accepted,
        "acceptance_rate": round(figures.acceptance_rate, 4) if figures.drafted else None,
        "acceptance_by_position": [round(share, 4) for share in figures.acceptance_by_position],
        "tokens_per_step": round(seen.tokens_per_step, 4),
        "saved_s": round(figures.saved_seconds, 3),
        "failures": figures.failures,
    }


def _request(id_: str, request: Request, age: float) -> dict[str, Any]:
    return {
        "id": id_,
        "state": "running" if request.status is Status.RUNNING else "waiting",
        "prompt_tokens": request.prompt_length,
        "computed": request.computed,
        "generated": request.generated,
        "age_s": round(age, 2),
    }
