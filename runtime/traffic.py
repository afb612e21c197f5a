"""Plays a workload against an engine in this process, or against a server over HTTP, and notes when each token came.

A request counts from the moment it is due, not from when it was taken up: what waits for a slow step waits on the clock too.
Everything is asked for greedily and to its full length, so a workload is the same work whatever the model says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from enginewright.recipes.errors import RequestError

from .engine import Engine
from .http_client import HttpError, Target, get_json, post_events
from .request import Request, SamplingOptions
from .statistics import LoopStatistics, speculation_between
from .workload import Arrival

__all__ = ["Run", "Sample", "Served", "play_in_process", "play_over_http"]

PATIENCE = 600.0  # seconds that a request over HTTP may take

Told = Callable[[int], None]


@dataclass
class Served:
    """What became of one arrival. `times[i]` is when the i-th token came (over HTTP: the i-th piece), seconds from the start."""

    arrival: Arrival
    prompt_tokens: int = 0
    new_tokens: int = 0
    times: list[float] = field(default_factory=list)
    finished: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Sample:
    """One step: when it ended, its length (s), tokens and sequences computed, requests waiting after it, and the cache's token
    slots after it: `reserved` by requests, and `used` of them."""

    at: float
    seconds: float
    tokens: int
    sequences: int
    waiting: int
    reserved: int
    used: int


@dataclass
class Run:
    """A played workload; `samples` are the steps, which only a run in this process knows."""

    served: list[Served]
    seconds: float
    samples: list[Sample] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------- in-process


def play_in_process(engine: Engine, arrivals: Sequence[Arrival], told: Told = lambda finished: None) -> Run:
    """Step the engine's loop through `arrivals`, which are in order of time. `told` hears how many requests have ended.

    Texts are turned into ids before the clock starts. A request that the engine refuses, or that fails, keeps its error.
    """
    prompts = [_ids(engine, arrival.prompt) for arrival in arrivals]
    loop = engine.loop
    clock = time.perf_counter
    served = {}
    samples: list[Sample] = []
    before = loop.statistics()
    due = ended = 0
    started = clock()
    while due < len(arrivals) or not loop.idle:
        now = clock() - started
        while due < len(arrivals) and arrivals[due].at <= now:
            request, record = _submit(engine, arrivals[due], prompts[due])
            served[request] = record
            if record.error is not None:
                record.finished, ended = now, ended + 1
            due += 1
        if loop.idle:
            if due < len(arrivals):
                time.sleep(max(0.0, arrivals[due].at - now))
            continue
        began = clock()
        report = loop.step()
        now = clock() - started
        seen = loop.statistics()
        samples.append(
            Sample(
                now,
                now + started - began,
                report.tokens,
                report.sequences,
                seen.waiting,
                seen.reserved_slots,
                seen.used_slots,
            )
        )
        for request in report.changed:
            record = served[request]
            new = request.generated
            record.times.extend([now] * (new - record.new_tokens))
            record.new_tokens = new
            if request.finished and not record.finished:
                record.finished = now
                record.error = str(request.error) if request.error is not None else None
                ended += 1
                told(ended)
    return Run(list(served.values()), clock() - started, samples, _facts(before, loop.statistics(), samples))


def _facts(before: LoopStatistics, after: LoopStatistics, samples: Sequence[Sample]) -> dict[str, Any]:
    """What the loop counted between two looks. `waste`: the share of reserved cache slots that no token was in."""
    asked = after.prefix_queried_tokens - before.prefix_queried_tokens
    reserved = sum(sample.reserved for sample in samples)
    return {
        "tokens_computed": after.tokens_computed - before.tokens_computed,
        "preemptions": after.preemptions - before.preemptions,
        "prefix_hit_rate": (after.prefix_hit_tokens - before.prefix_hit_tokens) / asked if asked else None,
        "waste": 1 - sum(sample.used for sample in samples) / reserved if reserved else None,
        **speculation_between(before, after),
    }


def _ids(engine: Engine, prompt: tuple[int, ...] | str) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if engine.tokenizer is None:
        raise RequestError("the engine has no tokenizer", action="use a workload without texts")
    return engine.tokenizer.encode(prompt)


def _submit(engine: Engine, arrival: Arrival, ids: list[int]) -> tuple[Request, Served]:
    request = Request(
        ids, SamplingOptions(max_tokens=arrival.max_tokens, ignore_eos=True), priority=arrival.priority
    )
    record = Served(arrival, prompt_tokens=len(ids))
    try:
        engine.loop.submit(request)
    except RequestError as error:
        record.error = str(error)
    return request, record


# ----------------------------------------------------------------------------------------------------- HTTP


def play_over_http(
    url: str, arrivals: Sequence[Arrival], key: str | None = None, told: Told = lambda finished: None
) -> Run:
    """Ask the server at `url` (its /v1/completions, streamed) for `arrivals`; HttpError when it is not there."""
    return asyncio.run(_play(Target.parse(url, key), arrivals, told))


async def _play(target: Target, arrivals: Sequence[Arrival], told: Told) -> Run:
    models = await asyncio.wait_for(get_json(target, "/v1/models"), 30)
    try:
        model = models["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise HttpError(
            "the server names no model", found=str(models)[:200], expected="an OpenAI server"
        ) from error
    started = time.perf_counter()
    ended = 0

    async def one(arrival: Arrival) -> Served:
        nonlocal ended
        record = Served(arrival, len(arrival.prompt) if not isinstance(arrival.prompt, str) else 0)
        await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - started)))
        try:
            await asyncio.wait_for(_ask(target, model, record, started), PATIENCE)
        except (HttpError, OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
            record.error = str(error) or type(error).__name__
        record.finished = time.perf_counter() - started
        ended += 1
        told(ended)
        return record

    served = await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return Run(list(served), time.perf_counter() - started, facts={"model": model})


async def _ask(target: Target, model: str, record: Served, started: float) -> None:
    arrival = record.arrival
    body: dict[str, Any] = {
        "model": model,
        "prompt": arrival.prompt if isinstance(arrival.prompt, str) else list(arrival.prompt),
        "max_tokens": arrival.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arrival.priority:
        body["priority"] = arrival.priority
    usage = None
    async with aclosing(post_events(target, "/v1/completions", body)) as events:
        async for data in events:
            now = time.perf_counter() - started
            event = json.loads(data)
            if event.get("error"):
                raise HttpError("the server ended the stream", found=str(event["error"])[:300])
            choices = event.get("choices") or [{}]
            if choices[0].get("text"):
                record.times.append(now)
            usage = event.get("usage") or usage
    if usage is None:
        record.new_tokens = len(record.times)
    else:
        record.new_tokens, record.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
