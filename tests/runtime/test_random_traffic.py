"""Random requests, cancellations, injected errors, tiny pools: nothing crashes or leaks, survivors answer as they do alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from enginewright.runtime import speculation
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.policies import POLICIES
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.speculation import Speculator
from tests.runtime.drafters import Oracle
from tests.runtime.traffic import (
    alone,
    check_invariants,
    check_step,
    check_survivor,
    make_loop,
    options,
    prompts,
    related_prompts,
)


@dataclass(frozen=True)
class Arrival:
    start: int
    prompt: list[int]
    options: SamplingOptions
    priority: int
    cancelled: int | None  # steps after its start
    scored: bool


@dataclass(frozen=True)
class Trace:
    arrivals: list[Arrival]
    pages: tuple[int, int]
    limits: dict[str, Any]
    faults: random.Random
    fault_rate: float
    speculation: dict[str, Any] | None = None


traces = st.builds(
    Trace,
    arrivals=st.lists(
        st.builds(
            Arrival,
            start=st.integers(0, 20),
            prompt=st.one_of(prompts, related_prompts, related_prompts),
            options=options,
            priority=st.sampled_from([0, 0, 0, -1, 2]),
            cancelled=st.one_of(st.none(), st.none(), st.integers(0, 12)),
            scored=st.sampled_from([False, False, False, True]),
        ),
        min_size=1,
        max_size=12,
    ),
    pages=st.tuples(st.integers(8, 24), st.integers(4, 24)),
    limits=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(sorted(POLICIES)),
            "prefix_cache": st.sampled_from([True, True, True, False]),
            "chunk_size": st.sampled_from([1, 3, 7, None]),
            "max_sequences": st.integers(1, 6),
            "token_budget": st.integers(6, 20),
        }
    ),
    faults=st.builds(random.Random, st.integers(0, 2**32)),
    fault_rate=st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    speculation=st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {
                "tokens": st.sampled_from([None, 1, 2, 4, 8]),
                "errors": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
                "free": st.booleans(),
            }
        ),
    ),
)


def failing(call: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """`call`, which raises now and then."""

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if trace.faults.random() < trace.fault_rate:
            raise RuntimeError("injected")
        return call(*args, **kwargs)

    return sometimes


def inject(loop: EngineLoop, trace: Trace) -> None:
    """Let executor, allocator and sampler fail at random."""
    loop.executor.step = failing(loop.executor.step, trace)  # type: ignore[method-assign]
    loop.executor.copy_pages = failing(loop.executor.copy_pages, trace)  # type: ignore[method-assign]
    loop.pool._take = failing(loop.pool._take, trace)  # type: ignore[method-assign]
    loop._drawer.draw = failing(loop._drawer.draw, trace)  # type: ignore[method-assign]
    if loop.speculator is not None:
        drafter = loop.speculator.drafter
        drafter.propose = failing(drafter.propose, trace)  # type: ignore[method-assign]


def speculate(loop: EngineLoop, wanted: dict[str, Any]) -> None:
    """Let requests have what they will say proposed to them, with errors."""
    answers: dict[Request, list[int]] = {}

    def truth(request: Request) -> list[int]:
        if request not in answers:
            answers[request] = alone(request.tokens[: request.prompt_length], request.options).output
        return answers[request]

    drafter = Oracle(truth, 32, wanted["errors"], free=wanted["free"])
    loop.speculator = Speculator(drafter, wanted["tokens"])


def play(
    trace: Trace, prepare: Callable[[EngineLoop], None] = lambda loop: None
) -> tuple[EngineLoop, list[Request]]:
    loop = make_loop(trace.pages, **trace.limits)
    if trace.speculation is not None:
        speculate(loop, trace.speculation)
    prepare(loop)
    inject(loop, trace)
    requests: list[Request] = []
    ahead = sorted(trace.arrivals, key=lambda arrival: arrival.start)
    cancels: list[tuple[int, Request]] = []
    step = 0
    while ahead or not loop.idle:
        while ahead and ahead[0].start <= step:
            arrival = ahead.pop(0)
            wanted = arrival.options
            if arrival.scored:
                wanted = SamplingOptions(max_tokens=wanted.max_tokens, prompt_logprobs=1, ignore_eos=True)
            request = Request(list(arrival.prompt), wanted)
            request.priority = arrival.priority
            requests.append(request)
            loop.submit(request)
            if arrival.cancelled is not None:
                cancels.append((step + arrival.cancelled, request))
        check_step(loop)
        for at, request in cancels:
            if at == step:
                loop.finish(request)
                check_invariants(loop)
        step += 1
        assert step < 5000, "the loop does not come to rest"
    return loop, requests


def check(trace: Trace, prepare: Callable[[EngineLoop], None] = lambda loop: None) -> EngineLoop:
    loop, requests = play(trace, prepare)
    assert loop.pool.idle, "pages leak"
    statistics = loop.statistics()
    assert statistics.reserved_slots == statistics.used_slots == 0
    assert sum(statistics.finished.values()) == len(requests)
    assert sum(page.used for page in statistics.pages) == 0
    assert statistics.tokens_generated == sum(len(request.output) for request in requests)
    if not trace.fault_rate:
        assert statistics.steps == len(loop.executor.steps), "a step had to be repeated"  # type: ignore[attr-defined]
    for request in requests:
        assert request.finished and request.slot == -1
        assert (request.finish_reason == "error") == (request.error is not None)
        if request.error is not None:
            assert "injected" in str(request.error)
        check_survivor(request, trace.pages)
    return loop


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of injected errors: records of them would keep every loop alive."""
    monkeypatch.setattr(speculation._log, "disabled", True)


_plain = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def in_parts(part: int, *values: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], None]:
    """Run a test on 500 examples, which another part does not have: hypothesis keeps what it has drawn, 100 KB of each."""

    def run(test: Callable[..., Any]) -> None:
        @seed(part)
        @given(st.tuples(*values))
        @settings(_plain, max_examples=500)
        def some(drawn: tuple[Any, ...]) -> None:
            test(*drawn)

        some()

    return run


@given(traces)
@settings(_plain, max_examples=200)
def test_survivors_of_anything_say_what_they_say_alone(trace: Trace) -> None:
    check(trace)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_survivors_of_anything_many_times(part: int) -> None:
    in_parts(part, traces)(check)


@given(st.lists(st.tuples(related_prompts, st.integers(0, 3)), min_size=2, max_size=8), st.integers(10, 40))
@settings(_plain, max_examples=50)
def test_the_same_traffic_is_planned_the_same_way(
    traffic: Sequence[tuple[list[int], int]], pages: int
) -> None:
    seen = []
    for _ in range(2):
        loop = make_loop((pages, pages), chunk_size=5, max_sequences=4)
        for prompt, priority in traffic:
            request = Request(list(prompt), SamplingOptions(max_tokens=10, ignore_eos=True))
            request.priority = priority
            loop.submit(request)
        reports = []
        while not loop.idle:
            report = check_step(loop)
            reports.append((report.tokens, report.sequences, [request.number for request in report.changed]))
        seen.append((reports, loop.executor.steps, loop.statistics()))  # type: ignore[attr-defined]
    assert seen[0] == seen[1]
