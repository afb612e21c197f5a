"""A second engine as drafter: with the target's own function all is accepted, with any other no token changes; nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginewright.backends.base import StepInput
from enginewright.runtime import speculation
from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.drafters import Relative, draft_with, is_empty, speculating
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.test_random_traffic import Trace, check, failing, in_parts, traces
from tests.runtime.traffic import GROUPS, alone, check_step, check_survivor, make_loop, run

GREEDY = SamplingOptions(max_tokens=40, ignore_eos=True)
WIDE = [GroupSpec(0, 8), GroupSpec(6, 8)]  # the same function in other pages


# ------------------------------------------------------------------------------------------- the same function


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [GROUPS, WIDE], ids=["pages like the target's", "other pages"])
def test_the_same_function_is_always_right(tokens, groups):
    loop = make_loop()
    drafter = draft_with(loop, FakeExecutor(groups), tokens=tokens)
    options = SamplingOptions(max_tokens=1 + 5 * (tokens + 1), ignore_eos=True)
    requests = run(loop, [Request([i, 2, 3], options) for i in range(5)])
    for request in requests:
        check_survivor(request)
    figures = loop.speculator.figures
    assert figures.accepted == figures.drafted == tokens * figures.proposals
    assert len(loop.executor.steps) == 1 + 5 and is_empty(drafter)
    # All requests together: every step of the draft has all five, and there are as many as proposed tokens.
    assert {sequences for _, sequences in drafter.executor.steps} == {5}
    assert len(drafter.executor.steps) == 5 * tokens
    # The prompt with the first token, then what the step before has left, the last proposed token and one more; then one a step.
    computed = sum(count for count, _ in drafter.executor.steps)
    assert computed == 5 * (4 + 4 * 2 + 5 * (tokens - 1))


OPTIONS = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {7: -100.0, 9: 4.0}},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": (3, 8, 11)},
    "temperature": {"temperature": 0.8},
    "cuts": {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 3.0, 2: -3.0},
        "top_p": 0.9,
        "logprobs": 3,
        "prompt_logprobs": 1,
    },
}


@pytest.mark.parametrize("likeness", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_draws_as_the_request_does(name, likeness):
    """With the target's function, options apply at every proposed place or something would be rejected."""
    loop, drafter = speculating(likeness)
    fields = {"max_tokens": 40, "ignore_eos": True, **OPTIONS[name]}
    requests = run(loop, [Request([i, 9, 9, 4], SamplingOptions(**fields, seed=i)) for i in range(4)])
    for request in requests:
        check_survivor(request)
    figures = loop.speculator.figures
    assert figures.drafted and is_empty(drafter)
    if likeness == 1.0:
        assert figures.acceptance_rate == 1.0
    elif likeness == 0.6:
        assert 0.0 < figures.acceptance_rate < 1.0


def leaks_nothing(steps: int) -> None:
    loop, drafter = speculating(prefix_cache=True, pages=(40, 40), draft_pages=(30, 30), max_sequences=6)
    dice, live, taken = random.Random(5), [], 0
    while taken < steps or live:
        while taken < steps and len(live) < 8:
            sampled = dice.random() < 0.5
            options = SamplingOptions(
                max_tokens=dice.randrange(1, 40),
                temperature=0.8 * sampled,
                seed=dice.randrange(2**60),
                frequency_penalty=dice.choice([0.0, 0.0, 1.0]),
                ignore_eos=dice.random() < 0.5,
            )
            live.append(Request([dice.randrange(3) for _ in range(dice.randrange(1, 20))], options))
            loop.submit(live[-1])
        check_step(loop)
        taken += 1
        if dice.random() < 0.02 and live:
            loop.finish(dice.choice(live))
        live = [request for request in live if not request.finished]
    figures = loop.speculator.figures
    assert figures.drafted > 2 * steps and figures.accepted == figures.drafted and not figures.failures
    assert loop.pool.idle and is_empty(drafter)


def test_no_page_leaks():
    leaks_nothing(400)


@pytest.mark.slow
def test_no_page_leaks_in_10_000_steps():
    leaks_nothing(10_000)


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("what", ["step", "copy_pages", "take"])
def test_an_error_in_the_draft_costs_its_proposals(what):
    loop, drafter = speculating(0.8)
    faults = Trace([], (0, 0), {}, random.Random(3), 0.2)
    owner, name = {
        "step": (drafter.executor, "step"),
        "copy_pages": (drafter.executor, "copy_pages"),
        "take": (drafter.own_pool, "_take"),
    }[what]
    setattr(owner, name, failing(getattr(owner, name), faults))
    shared = [7, 1, 2, 3, 4, 5]
    requests = [
        Request([*shared[: 4 + i % 3], i], SamplingOptions(max_tokens=30, ignore_eos=True)) for i in range(20)
    ]
    for request in run(loop, requests):
        assert request.error is None
        check_survivor(request)
    figures = loop.speculator.figures
    assert figures.failures and figures.accepted and is_empty(drafter)


def test_nan_in_the_draft_ends_a_proposal():
    said = alone([1, 2, 3], GREEDY).output
    loop = make_loop()
    drafter = draft_with(loop, FakeExecutor(GROUPS, poison_token=said[5]))
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.output == said and request.accepted == request.drafted > 0
    assert not loop.speculator.figures.failures and is_empty(drafter)


def test_a_step_that_fails_leaves_the_draft_where_the_request_is():
    """The target breaks on a token that the draft alone would say: the step is made without, and drafting goes on."""
    probe, _ = speculating(0.5)
    said: list[int] = []
    step = probe.executor.step

    def watched(given: StepInput) -> np.ndarray:
        said.extend(given.tokens.tolist())
        return step(given)

    probe.executor.step = watched
    (expected,) = run(probe, [Request([1, 2, 3], GREEDY)])
    wrong = next(token for token in said if token not in expected.tokens)
    loop = make_loop(executor=FakeExecutor(GROUPS, crash_token=wrong))
    drafter = draft_with(loop, Relative(GROUPS, 0.5))
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.error is None and request.output == expected.output
    assert request.accepted and is_empty(drafter)


# ------------------------------------------------------------------------------------------------- beside drawing


def test_the_other_rule_accepts_what_both_would_draw_alike():
    """Accept or resample: with equal distributions all is accepted, so the rows that proposals carry are the right ones."""
    loop = make_loop()
    drafter = draft_with(loop, FakeExecutor(GROUPS), resample=True)
    assert drafter.keep_logits
    options = [
        SamplingOptions(
            max_tokens=40, temperature=1.2, top_p=0.8, presence_penalty=0.5 * (i % 2), seed=i, ignore_eos=True
        )
        for i in range(6)
    ]
    run(loop, [Request([i, 2], option) for i, option in enumerate(options)])
    assert loop.speculator.figures.drafted > 100 and loop.speculator.figures.acceptance_rate == 1.0


def test_reading_prompts_is_not_taken_for_the_cost_of_drafting(monkeypatch):
    """The clock: a token takes the draft a second. A long prompt is read once; what a proposed token costs stays a second."""
    now = 0.0
    for module in ("draft_engine", "speculation"):
        monkeypatch.setattr(f"enginewright.runtime.{module}.time.perf_counter", lambda: now)
    loop, drafter = speculating()
    step = drafter.executor.step

    def timed(given: StepInput) -> np.ndarray:
        nonlocal now
        now += len(given.tokens)
        return step(given)

    drafter.executor.step = timed
    run(loop, [Request([7] * 33, SamplingOptions(max_tokens=20, ignore_eos=True))])
    assert loop.speculator.length.drafting.seconds(4) == pytest.approx(5.0, rel=0.3)


# -------------------------------------------------------------------------------------------------- random traffic

drafts = st.fixed_dictionaries(
    {
        "likeness": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "page_size": st.sampled_from([1, 4, 8]),
        "pages": st.tuples(st.integers(1, 40), st.integers(1, 40)),
        "tokens": st.sampled_from([None, 1, 2, 4, 8]),
        "max_context": st.sampled_from([12, 40, 64]),
        "max_tokens": st.sampled_from([8, 20, 64]),
    }
)


def with_draft(trace: Trace, wanted: dict[str, Any]) -> Callable[[EngineLoop], None]:
    def prepare(loop: EngineLoop) -> None:
        size = wanted["page_size"]
        executor = Relative(
            [GroupSpec(0, size), GroupSpec(6, size)], wanted["likeness"], max_tokens=wanted["max_tokens"]
        )
        drafter = draft_with(loop, executor, wanted["pages"], wanted["tokens"], wanted["max_context"])
        executor.step = failing(executor.step, trace)  # type: ignore[method-assign]
        executor.copy_pages = failing(executor.copy_pages, trace)  # type: ignore[method-assign]
        drafter.own_pool._take = failing(drafter.own_pool._take, trace)  # type: ignore[method-assign]

    return prepare


def check_with_draft(trace: Trace, wanted: dict[str, Any]) -> None:
    loop = check(trace, with_draft(trace, wanted))
    drafter, figures = loop.speculator.drafter, loop.speculator.figures
    assert isinstance(drafter, EngineDrafter) and is_empty(drafter)
    if not trace.fault_rate:
        assert not figures.failures
        assert wanted["likeness"] < 1.0 or figures.accepted == figures.drafted


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of injected errors: records of them would keep every loop alive."""
    monkeypatch.setattr(speculation._log, "disabled", True)


_plain = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
plain_traces = traces.filter(lambda trace: trace.speculation is None)


@given(plain_traces, drafts)
@settings(_plain, max_examples=150)
def test_survivors_of_anything_say_what_they_say_alone(trace, wanted):
    check_with_draft(trace, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_survivors_of_anything_many_times(part):
    in_parts(part, plain_traces, drafts)(check_with_draft)
