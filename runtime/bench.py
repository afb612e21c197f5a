"""`engine bench`: how fast an engine prefills and decodes, beside how fast the machine reads memory.

Decoding one token reads every weight once, so at batch 1 the machine's read bandwidth over the engine's size
is the ceiling; the two are measured in the same run because both swing with whatever else the machine does.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.recipes.errors import InputError

from .engine import Engine, load
from .request import Request, SamplingOptions
from .statistics import speculation_between

__all__ = ["bench", "read_bandwidth"]

_DECODE_PROMPT = 32  # tokens of context before the decoding that is timed
_PINGS = 20


def bench(
    path: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (1, 4, 16, 32),
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    repeat: int = 3,
    threads: int | None = None,
    weights: str = "mmap",
    provider: str | None = None,
    speculate: str | os.PathLike[str] | None = None,
    draft_tokens: int | str = "auto",
    draft_rule: str = "same",
) -> dict[str, Any]:
    """Return the figures of the engine at `path` as plain values; rates are medians of `repeat` runs.

    Keys: engine, threads, isa, load_seconds, peak_memory_bytes, kv_bytes_per_token (of all layers, as the pools hold it),
    read_bandwidth_gbs, ping_ms (a prompt of one token to its first new token), prefill [{tokens, tokens_per_second}],
    decode [{batch, tokens_per_second, step_ms}], which with `speculate` also have what `speculation_between` tells.
    """
    options: dict[str, Any] = {
        "provider": provider,
        "speculate": speculate,
        "draft_tokens": draft_tokens,
        "draft_rule": draft_rule,
    }
    started = time.perf_counter()
    with load(path, threads, weights, max_sequences=max(batches), prefix_cache=False, **options) as engine:
        load_seconds = time.perf_counter() - started
        longest = engine.max_context - 1
        for name, needed in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens + _DECODE_PROMPT)):
            if needed > longest:
                raise InputError(
                    f"{name} does not fit in the engine's context",
                    found=f"{needed} tokens",
                    expected=f"at most {longest}",
                )
        _prefill(engine, prompt_tokens)  # warm up: first touches of weights and cache
        decode = []
        for batch in batches:
            before = engine.loop.statistics()
            runs = [_decode(engine, batch, new_tokens) for _ in range(repeat)]
            decode.append(
                {
                    "batch": batch,
                    "tokens_per_second": batch * new_tokens / statistics.median(run[0] for run in runs),
                    "step_ms": statistics.median(run[1] for run in runs) * 1e3,
                    **speculation_between(before, engine.loop.statistics()),
                }
            )
        prefill_seconds = statistics.median(_prefill(engine, prompt_tokens) for _ in range(repeat))
        ping = statistics.median(_prefill(engine, 1) for _ in range(_PINGS))
        peak = _peak_memory()  # before the bandwidth's own buffers
        bandwidth = read_bandwidth(_threads(engine, threads), rounds=10)
        return {
            "engine": Path(path).name,
            "threads": _threads(engine, threads),
            "isa": getattr(engine.executor, "isa", engine.artifact.manifest["target"]),
            "load_seconds": load_seconds,
            "peak_memory_bytes": peak,
            "kv_bytes_per_token": sum(g.page_bytes // g.page_size for g in engine.executor.kv_groups),
            "read_bandwidth_gbs": bandwidth,
            "ping_ms": ping * 1e3,
            "prefill": [{"tokens": prompt_tokens, "tokens_per_second": prompt_tokens / prefill_seconds}],
            "decode": decode,
        }


def _prefill(engine: Engine, tokens: int) -> float:
    """Seconds from a prompt of so many tokens to its first new token."""
    request = _request(engine, tokens, 1, salt=0)
    started = time.perf_counter()
    engine.loop.submit(request)
    while not engine.loop.idle:
        engine.loop.step()
    _raise_error([request])
    return time.perf_counter() - started


def _decode(engine: Engine, batch: int, new_tokens: int) -> tuple[float, float]:
    """Seconds in which every sequence of the batch gets `new_tokens`, and seconds of a step."""
    context = min(_DECODE_PROMPT, engine.max_context - new_tokens - 1)
    requests = [_request(engine, context, new_tokens + 1, salt=i) for i in range(batch)]
    for request in requests:
        engine.loop.submit(request)
    while not all(request.output for request in requests):  # prefill; early ones may already decode
        engine.loop.step()
    done = sum(len(request.output) for request in requests)
    started, steps = time.perf_counter(), 0
    while not engine.loop.idle:
        engine.loop.step()
        steps += 1
    seconds = time.perf_counter() - started
    _raise_error(requests)
    timed = sum(len(request.output) for request in requests) - done
    return seconds * batch * new_tokens / max(timed, 1), seconds / max(steps, 1)


def _request(engine: Engine, tokens: int, new_tokens: int, salt: int) -> Request:
    ids = [(7919 * i + 31 * salt + 11) % engine.vocab_size for i in range(tokens)]
    return Request(ids, SamplingOptions(max_tokens=new_tokens, ignore_eos=True))


def _raise_error(requests: list[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _threads(engine: Engine, threads: int | None) -> int:
    return int(getattr(engine.executor, "threads", None) or threads or len(os.sched_getaffinity(0)))


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_bandwidth(threads: int, megabytes: int = 192, rounds: int = 5) -> float:
    """Return GB/s at which `threads` threads together read memory: each its own `megabytes`, the best of `rounds`."""
    data = [np.ones(megabytes << 18, np.int32) for _ in range(threads)]
    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=block.max) for block in data]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, threads * megabytes * 2**20 / (time.perf_counter() - started) / 1e9)
    return best
