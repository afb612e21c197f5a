"""Random traffic on the fake executor: what the runtime's tests submit, how they drive it, and what must hold after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.loop import EngineLoop, LoopLimits, StepReport
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.fake_executor import FakeExecutor

GROUPS = [GroupSpec(0, 4), GroupSpec(6, 4)]
EOS = 31


def make_loop(
    pages: Sequence[int] = (64, 64),
    groups: Sequence[GroupSpec] = GROUPS,
    executor: FakeExecutor | None = None,
    max_context: int = 64,
    **limits: Any,
) -> EngineLoop:
    executor = executor or FakeExecutor(groups)
    return EngineLoop(
        executor, groups, pages, LoopLimits(max_context, **{"max_sequences": 8, **limits}), [EOS]
    )


def run(loop: EngineLoop, requests: list[Request], most_steps: int = 5000) -> list[Request]:
    """Submit all at once and step until the loop is idle."""
    for request in requests:
        loop.submit(request)
    drain(loop, most_steps)
    return requests


def drain(loop: EngineLoop, most_steps: int = 5000) -> None:
    """Step until the loop is idle, checking every invariant after every step."""
    for _ in range(most_steps):
        if loop.idle:
            break
        check_step(loop)
    assert loop.idle, "the loop does not come to rest"
    assert loop.pool.idle, "pages leak"
    check_invariants(loop)


def check_step(loop: EngineLoop) -> StepReport:
    """Make one step, and check its budget and every invariant after it."""
    report = loop.step()
    assert report.tokens <= loop.limits.token_budget, "a step over its budget"
    check_invariants(loop)
    return report


def check_invariants(loop: EngineLoop) -> None:
    """Raise AssertionError unless the loop's accounts are right, and those of its drafter, where it keeps any."""
    loop.scheduler.check_invariants()
    drafter = loop.speculator.drafter if loop.speculator is not None else None
    if isinstance(drafter, EngineDrafter):
        drafter.check_invariants()


def alone(
    prompt: list[int], options: SamplingOptions, pages: Sequence[int] = (64, 64), max_context: int = 64
) -> Request:
    """The request in a loop of its own, without a prefix cache."""
    loop = make_loop(pages, max_context=max_context, prefix_cache=False)
    return run(loop, [Request(list(prompt), options)])[0]


def check_survivor(request: Request, pages: Sequence[int] = (64, 64), max_context: int = 64) -> None:
    """Raise AssertionError unless the request's answer, or its beginning, is the one that it has alone."""
    lonely = alone(request.tokens[: request.prompt_length], request.options, pages, max_context)
    count = len(request.output)
    assert lonely.output[:count] == request.output
    assert lonely.logprobs[:count] == request.logprobs
    assert lonely.top_logprobs[:count] == request.top_logprobs
    if request.finish_reason not in ("abort", "error"):
        assert (request.finish_reason, count) == (lonely.finish_reason, len(lonely.output))
        assert request.prompt_logprobs == lonely.prompt_logprobs


token_ids = st.integers(0, EOS)
options = st.builds(
    lambda max_tokens, min_tokens, **rest: SamplingOptions(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **rest
    ),
    max_tokens=st.integers(1, 24),
    min_tokens=st.sampled_from([0, 0, 0, 5]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 0, 4]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    typical_p=st.sampled_from([1.0, 1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logit_bias=st.one_of(st.just({}), st.dictionaries(token_ids, st.floats(-5, 5), max_size=3)),
    stop_token_ids=st.one_of(st.just(()), st.tuples(token_ids)),
    logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
)
prompts = st.lists(st.integers(0, EOS), min_size=1, max_size=30)
FAMILIES = [[(7 * i + family) % 31 for i in range(24)] for family in range(3)]
related_prompts = st.builds(
    lambda family, length, tail: (FAMILIES[family][:length] + tail)[:30] or [family],
    st.integers(0, 2),
    st.integers(0, 24),
    st.lists(st.integers(0, 1), max_size=8),
)  # many begin alike, some are equal
