"""Speculation changes how many tokens a step gives, and never which: with drafters that know everything, something, nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.recipes.errors import RequestError
from enginewright.runtime.draft_length import FIRST_LOSS, Candidate, CostModel, DraftLength
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.ngram import CANDIDATES, LONGEST, SHORTEST, NgramDrafter
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.speculation import Speculator
from tests.runtime.drafters import Oracle
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, alone, check_survivor, make_loop, run

GREEDY = SamplingOptions(max_tokens=40, ignore_eos=True)


def truth(request: Request) -> list[int]:
    return alone(request.tokens[: request.prompt_length], request.options).output


def speculating(
    errors: float = 0.0, tokens: int | None = 4, free: bool = True, **limits: object
) -> tuple[EngineLoop, Oracle]:
    loop = make_loop(**limits)
    drafter = Oracle(truth, 32, errors, free=free)
    loop.speculator = Speculator(drafter, tokens)
    return loop, drafter


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_perfect_drafter_fills_every_step(tokens):
    loop, drafter = speculating(tokens=tokens)
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.output == truth(request)
    assert all(accepted == proposed for proposed, accepted in drafter.accepted)
    steps = len(loop.executor.steps)
    assert steps == 1 + -(-(GREEDY.max_tokens - 1) // (tokens + 1))
    figures = loop.speculator.figures
    assert figures.acceptance_rate == 1.0 and figures.accepted == request.accepted == request.drafted
    assert [drafted == true for drafted, true in figures.by_position] == [True] * tokens
    assert not drafter.known and not loop.speculator.length._own


def test_a_drafter_that_is_always_wrong_costs_rows_and_nothing_else():
    loop, drafter = speculating(tokens=4)
    drafter.truth = lambda request: [(token + 1) % 32 for token in truth(request)]
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.output == truth(request)
    assert loop.speculator.figures.accepted == 0 and len(loop.executor.steps) == GREEDY.max_tokens


def test_requests_say_how_much_may_be_proposed():
    loop, drafter = speculating(tokens=4)
    wanted = [None, 0, 1, 6]
    requests = run(
        loop,
        [
            Request([i, 5], SamplingOptions(max_tokens=30, ignore_eos=True, draft_tokens=most))
            for i, most in enumerate(wanted)
        ],
    )
    assert [request.drafted > 0 for request in requests] == [True, False, True, True]
    assert {proposed for proposed, _ in drafter.accepted} >= {1, 4, 6}
    assert all(request.output == truth(request) for request in requests)
    for bad in (-1, 65, 1.5, True, "4"):
        with pytest.raises(RequestError, match="draft_tokens"):
            SamplingOptions(draft_tokens=bad)


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("kind", ["eos", "stop id", "max_tokens"])
def test_an_end_inside_an_accepted_run_ends_there(place, kind):
    free = alone([4, 5], SamplingOptions(max_tokens=20, ignore_eos=True)).output
    if free[place] in free[:place]:
        pytest.skip("it has been said before")
    options = SamplingOptions(
        max_tokens=place + 1 if kind == "max_tokens" else 20,
        ignore_eos=kind != "eos",
        stop_token_ids=(free[place],) if kind == "stop id" else (),
    )
    loop, drafter = speculating(tokens=8)
    if kind == "eos":
        loop._drawer.eos_token_ids = frozenset([free[place]])
    drafter.truth = lambda request: free
    (request,) = run(loop, [Request([4, 5], options)])
    assert request.output == free[: place + 1] and len(request.logprobs) == place + 1
    assert request.finish_reason == ("length" if kind == "max_tokens" else "stop")


def test_what_was_rejected_cannot_be_found_by_others():
    """Pages of 4, wrong proposals of 8 that cross their edges: whoever shares the prefix says what it says alone."""
    loop, _ = speculating(tokens=8, errors=1.0)
    first = Request(list(range(1, 8)), GREEDY)
    loop.submit(first)
    while not loop.idle:
        loop.step()
        loop.scheduler.check_invariants()
        if len(first.output) in (3, 9, 14) and not first.finished:
            follower = Request(list(first.tokens), SamplingOptions(max_tokens=6, ignore_eos=True))
            loop.submit(follower)
            drain_one(loop, follower)
            assert follower.cached_tokens and follower.output == truth(follower)
    assert first.output == truth(first) and loop.pool.idle


def drain_one(loop: EngineLoop, request: Request) -> None:
    for _ in range(100):
        if request.finished:
            return
        loop.step()
        loop.scheduler.check_invariants()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("free", [True, False])
def test_a_full_pool_ends_a_request_where_it_ends_without(free):
    groups = [GROUPS[0]]
    plain = make_loop((6,), groups, FakeExecutor(groups))
    (expected,) = run(plain, [Request([3] * 9, SamplingOptions(max_tokens=50, ignore_eos=True))])
    loop = make_loop((6,), groups, FakeExecutor(groups))
    loop.speculator = Speculator(Oracle(lambda request: expected.output, 32, free=free), 4)
    (request,) = run(loop, [Request([3] * 9, SamplingOptions(max_tokens=50, ignore_eos=True))])
    assert (request.output, request.finish_reason) == (expected.output, "length")


def test_nobody_is_preempted_for_proposed_tokens():
    options = SamplingOptions(max_tokens=12, ignore_eos=True)
    loop, _ = speculating(tokens=8, errors=1.0, pages=(12, 40))
    bare = make_loop((12, 40))
    for each in (loop, bare):
        run(each, [Request([i, 1, 2], options) for i in range(3)])
    assert loop.scheduler.preemptions == bare.scheduler.preemptions == 0


def test_a_step_that_fails_on_a_proposed_token_is_made_without_it():
    """The executor breaks on a token that the request would never have said."""
    expected = truth(Request([1, 2, 3], GREEDY))
    unsaid = next(token for token in range(4, 32) if token not in expected)
    loop, drafter = speculating(executor=FakeExecutor(GROUPS, crash_token=unsaid))
    drafter.truth = lambda request: [unsaid] * 40
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.error is None and request.output == expected


def test_a_drafter_that_fails_costs_nothing_but_its_proposals(caplog):
    loop, drafter = speculating(free=False)

    def broken(wanted: Sequence[tuple[Request, int]]) -> list:
        raise ZeroDivisionError

    drafter.propose = broken
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.output == truth(request) and loop.speculator.figures.failures > 10
    assert len([record for record in caplog.records if "drafter" in record.message]) == 1


def test_nan_behind_a_wrong_proposal_is_not_seen():
    expected = truth(Request([1, 2, 3], GREEDY))
    unsaid = next(token for token in range(4, 32) if token not in expected)
    loop, drafter = speculating(executor=FakeExecutor(GROUPS, poison_token=unsaid))
    drafter.truth = lambda request: [unsaid] * 40
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    assert request.error is None and request.output == expected and request.drafted


# -------------------------------------------------------------------------------------------------------- ngram


def scan(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """What the index must find, by looking at every place: the latest of those whose past agrees the longest."""
    places = [
        end for end in range(SHORTEST, len(tokens)) if tokens[end - SHORTEST : end] == tokens[-SHORTEST:]
    ]
    best, longest = 0, 0
    for place in reversed(places[-CANDIDATES:]):
        length = SHORTEST
        while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if not longest:
        return 0, []
    period = tokens[best:]
    return longest, [period[i % len(period)] for i in range(most)]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 9),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_the_index_finds_what_a_scan_finds(tokens, cuts, most):
    drafter = NgramDrafter()
    request = Request(tokens[: cuts[0]], GREEDY)
    end = cuts[0]
    for cut in cuts:
        (made,) = drafter.propose([(request, most)])
        length, wanted = scan(request.tokens, most)
        assert made.tokens == wanted
        assert made.kind == length.bit_length() * bool(wanted)
        request.tokens += tokens[end : end + cut]
        end += cut
    drafter.forget(request)
    assert not drafter._indexes


# ---------------------------------------------------------------------------------------------- draft lengths


def rate(length: int, first: float, following: float, a: float, b: float, c: float, d: float) -> float:
    """Tokens a second with proposals of `length`, for one request."""
    gained = sum(first * following**i for i in range(length))
    return (1 + gained) / (a + b * (1 + length) + (c + d * length if length else 0.0))


@given(
    st.floats(0.02, 0.98),
    st.floats(0.02, 0.98),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.3),
    st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_the_length_is_the_best_there_is(first, following, b, d, free):
    """Told exactly what steps cost and how often proposals come true, it loses at most a few percent on the best length."""
    chooser = DraftLength(free, 8)
    request = Request([1])
    for count in (1, 2, 3, 5, 9) * 8:
        chooser.steps.observe(count, 1.0 + b * count)
    for count in (1, 2, 4, 8) * 8:
        chooser.drafting.observe(count, 0.02 + d * count)
    chooser.chances = lambda request, kind=0: (first, following)  # type: ignore[method-assign]
    (length,) = chooser.choose([Candidate(request, 8)], 1, 1)
    costs = (1.0, b, 0.0 if free else 0.02, 0.0 if free else d)
    best = max(rate(k, first, following, *costs) for k in range(9))
    assert rate(length, first, following, *costs) >= 0.97 * best


def test_it_learns_to_leave_it_and_to_take_it_up_again():
    chooser = DraftLength(True, 8)
    request, other = Request([1]), Request([2])
    for count in (1, 2, 5) * 10:
        chooser.steps.observe(count, 1.0 + 0.2 * count)

    def length(of: Request) -> int:
        return chooser.choose([Candidate(of, 8)], 1, 1)[0]

    assert length(request) > 0
    for _ in range(12):
        chooser.observe(request, 0, 0, True)
    assert length(request) == 0
    for _ in range(12):
        chooser.observe(other, 0, 4, False)
    assert length(other) == 8 and length(request) == 0
    for _ in range(12):
        chooser.observe(request, 0, 1, False)  # compared, not computed
    assert length(request) > 0


def test_attempts_that_fail_lose_little():
    """A drafter that costs and is always wrong: what it takes away stays near a hundredth of all time."""
    chooser = DraftLength(False, 8)
    request, total, wasted = Request([1]), 0.0, 0.0
    for _ in range(20_000):
        (length,) = chooser.choose([Candidate(request, 8)], 1, 1)
        step, drafting = 0.002 + 0.0003 * (1 + length), 0.0008 * length
        chooser.steps.observe(1 + length, step)
        if length:
            chooser.drafting.observe(length, drafting)
            chooser.observe(request, 0, 0, True)
            wasted += step + drafting - 0.0023
        chooser.observe_step(1 + length, step + drafting, 1, 1, 0)
        total += step + drafting
    assert wasted < 0.02 * total + 0.1
    assert any(
        chooser.choose([Candidate(request, 8)], 1, 1)[0]
        for _ in range(3000)
        if not chooser.observe_step(1, 0.1, 1, 1, 0)
    ), "it is never tried again"


def test_attempts_that_sometimes_come_true_lose_little_either():
    """Short answers, each a request of its own: a proposal that comes true now and then must not be an excuse for more."""
    chooser = DraftLength(False, 8)
    chance = random.Random(1)
    total = lost = 0.0
    for answer in range(60):
        request, left = Request([answer]), 200
        while left > 0:
            (length,) = chooser.choose([Candidate(request, 8)], 1, 1)
            step, drafting = 0.002 + 0.0001 * (1 + length), 0.001 * length
            chooser.steps.observe(1 + length, step)
            accepted = 0
            if length:
                chooser.drafting.observe(length, drafting)
                while accepted < length and chance.random() < 0.25:
                    accepted += 1
                chooser.observe(request, 0, accepted, accepted < length)
            chooser.observe_step(1 + length, step + drafting, 1, 1, accepted, drafting)
            lost += step + drafting - 0.0021 * (1 + accepted)
            total += step + drafting
            left -= 1 + accepted
        chooser.forget(request)
    assert lost < 0.01 * total + FIRST_LOSS + 0.005, (lost, total)


def test_costs_are_fitted():
    model = CostModel(ratio=0.1)
    assert model.seconds(5) == 0.0 and not model.known
    model.observe(1, 1.1)
    assert model.fit()[1] / model.fit()[0] == pytest.approx(0.1, rel=1e-6)
    for count in (1, 3, 5, 9) * 20:
        model.observe(count, 2.0 + 0.5 * count)
    assert model.fit() == pytest.approx((2.0, 0.5), rel=0.05)
    model.observe(1, 1000.0)
    assert model.seconds(1) < 3.0


@pytest.mark.parametrize("free", [True, False])
def test_many_requests_with_lengths_that_are_measured(free):
    loop, drafter = speculating(errors=0.2, tokens=None, free=free, token_budget=24)
    options = [SamplingOptions(max_tokens=30, temperature=0.8 * (i % 2), seed=i) for i in range(12)]
    requests = [Request([i, 7, 7], option) for i, option in enumerate(options)]
    known = {request: truth(request) for request in requests}
    drafter.truth = known.__getitem__
    for request in run(loop, requests):
        check_survivor(request)
    figures = loop.speculator.figures
    assert figures.drafted == sum(request.drafted for request in requests) >= figures.accepted
    assert figures.accepted == sum(request.accepted for request in requests)
