"""What a drafting engine has of requests: when it reads prompts, what it keeps, and who makes room for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginewright.backends.base import KvGroupInfo, StepInput
from enginewright.recipes.errors import InputError
from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.memory import plan_draft_pages
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.drafters import Relative, draft_with, is_empty, speculating
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, check_survivor, make_loop, run

GREEDY = SamplingOptions(max_tokens=40, ignore_eos=True)


def test_a_prompt_is_read_in_chunks_and_nothing_is_proposed_before_its_end():
    loop = make_loop(token_budget=8, max_sequences=8)
    drafter = draft_with(loop, FakeExecutor(GROUPS, max_tokens=8))
    proposed: list[tuple[int, bool]] = []
    propose = drafter.propose

    def watched(wanted):
        made = propose(wanted)
        proposed.extend((len(proposal.tokens), proposal.preparation > 0) for proposal in made)
        return made

    drafter.propose = watched
    (request,) = run(loop, [Request([5] * 30, SamplingOptions(max_tokens=30, ignore_eos=True))])
    check_survivor(request)
    # 30 prompt tokens and those that plain steps give meanwhile: after 8, 16 and 24 tokens, 9 are left.
    assert proposed[:6] == [(0, True)] * 4 + [(4, True), (4, False)]
    assert not any(prepared for _, prepared in proposed[5:])
    assert drafter.executor.steps[:5] == [(8, 1), (8, 1), (8, 1), (8, 1), (3, 1)]


def test_equal_prompts_are_read_once():
    loop, drafter = speculating(prefix_cache=False)  # of the target; its requests begin together
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    options = [SamplingOptions(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    requests = run(loop, [Request(list(prompt), option) for option in options])
    for request in requests:
        check_survivor(request)
    tokens = sum(count for count, _ in drafter.executor.steps)
    assert tokens < 2 * len(prompt) + 4 * 20 + 20
    assert loop.speculator.figures.acceptance_rate == 1.0


def test_who_is_preempted_keeps_what_was_read():
    loop, drafter = speculating(pages=(14, 40), draft_pages=(64, 64), max_sequences=3)
    prompts = [[i, 1, 2, 3, i, i, 7, 8, 9] for i in range(3)]
    requests = run(
        loop, [Request(prompt, SamplingOptions(max_tokens=20, ignore_eos=True)) for prompt in prompts]
    )
    assert loop.scheduler.preemptions
    for request in requests:
        check_survivor(request, pages=(14, 40))
    # Each prompt is read once; after that, at most every proposed and every drawn token is computed.
    tokens = sum(count for count, _ in drafter.executor.steps)
    assert tokens <= 27 + loop.speculator.figures.drafted + 3 * 20
    assert is_empty(drafter)


def test_nothing_is_proposed_beyond_the_context_of_the_draft():
    loop, drafter = speculating(draft_context=20)
    positions: list[int] = []
    step = drafter.executor.step

    def watched(given: StepInput) -> np.ndarray:
        positions.extend(given.positions.tolist())
        return step(given)

    drafter.executor.step = watched
    (request,) = run(loop, [Request([1, 2, 3], GREEDY)])
    check_survivor(request)
    # The first step gives a token, and the others five: at lengths 4, 9 and 14 four are proposed, and at 19 two.
    assert max(positions) == 19 and request.drafted == request.accepted == 14
    (longer,) = run(loop, [Request([4] * 25, GREEDY)])
    check_survivor(longer)
    assert not longer.drafted and is_empty(drafter)


@pytest.mark.parametrize("pages", [(1, 1), (3, 3), (6, 4), (11, 40)])
def test_a_draft_with_few_pages_proposes_less(pages):
    loop, drafter = speculating(draft_pages=pages)
    requests = run(
        loop, [Request([i, i, 1, 2, i], SamplingOptions(max_tokens=25, ignore_eos=True)) for i in range(6)]
    )
    for request in requests:
        check_survivor(request)
    figures = loop.speculator.figures
    assert not figures.failures and is_empty(drafter)
    assert figures.acceptance_rate == (1.0 if pages != (1, 1) else 0.0)
    assert (figures.drafted > 0) == (pages != (1, 1))


def test_one_goes_on_where_there_are_not_pages_for_both():
    """Each takes half of the draft's pages; then one gives way, until the other has come to its end."""
    loop, drafter = speculating(draft_pages=(12, 64))
    requests = run(
        loop, [Request([i, 4, 4], SamplingOptions(max_tokens=45, ignore_eos=True)) for i in range(2)]
    )
    for request in requests:
        check_survivor(request)
    assert (
        min(request.drafted for request in requests) >= 25
    )  # of 44; both stand still at half of the pages otherwise
    assert is_empty(drafter)


@pytest.mark.parametrize(("pages", "slots"), [(6, 2), (64, 1)])
def test_who_is_not_asked_for_makes_room(pages, slots):
    """Two requests, room for one: whoever is asked for takes it, and finds its beginning in the prefix cache later."""
    drafter = EngineDrafter(FakeExecutor(GROUPS), (pages, pages), max_sequences=slots, max_context=64)
    first, second = Request([1] * 13, GREEDY), Request([2] * 13, GREEDY)
    first.limit = second.limit = 64
    for request, other in ((first, second), (second, first), (first, second)):
        for _ in range(2):
            (proposal,) = drafter.propose([(request, 3)])
            drafter.check_invariants()
            assert len(proposal.tokens) == 3
            assert drafter._drafts[request].slot >= 0
            assert other not in drafter._drafts or drafter._drafts[other].slot < 0
            request.tokens += [proposal.tokens[0], 5]
            drafter.settle(request, 1)
            drafter.check_invariants()
    both = drafter.propose([(first, 3), (second, 3)])
    drafter.check_invariants()
    assert sorted(bool(proposal.tokens) for proposal in both) == [False, True]
    drafter.close()
    assert is_empty(drafter) and drafter.executor.closed


def test_who_was_not_asked_for_the_longest_makes_room():
    drafter = EngineDrafter(FakeExecutor(GROUPS), (64, 64), max_sequences=2, max_context=64)
    requests = [Request([i, i, i], GREEDY) for i in range(3)]
    for i in (0, 1, 0, 2):
        requests[i].limit = 64
        (proposal,) = drafter.propose([(requests[i], 2)])
        requests[i].tokens += proposal.tokens
        drafter.settle(requests[i], 2)
        drafter.check_invariants()
    assert [drafter._drafts[request].slot >= 0 for request in requests] == [True, False, True]


def test_a_row_that_came_to_nothing_is_computed_again():
    """A proposal that no step verified: the last token's logits are needed again, though the draft has computed it."""
    drafter = EngineDrafter(FakeExecutor(GROUPS), (64, 64), max_sequences=2, max_context=64)
    request = Request([1, 2, 3, 4, 5], GREEDY)
    request.limit = 64
    made = []
    for _ in range(3):
        made += drafter.propose([(request, 3)])
        drafter.check_invariants()
    assert made[0].tokens == made[1].tokens == made[2].tokens and len(made[0].tokens) == 3
    request.tokens.append(made[0].tokens[0])  # by a step without proposals
    (after,) = drafter.propose([(request, 3)])
    drafter.check_invariants()
    assert after.tokens[:2] == made[0].tokens[1:] and len(after.tokens) == 3


def test_pages_for_a_draft():
    groups = [KvGroupInfo(0, 16, 1000, "bf16", 2), KvGroupInfo(64, 16, 500, "bf16", 2)]
    common: dict[str, Any] = {"max_context": 1024, "max_sequences": 4, "chunk": 64}
    full, windowed = plan_draft_pages(groups, **common, tokens=2000, limit_bytes=None)
    assert full == 125 and 16 <= windowed <= 4 * 9
    most = plan_draft_pages(groups, **common, tokens=10**9, limit_bytes=None)
    assert most[0] == 4 * 1024 // 16
    for limit in (30_000, 90_000):
        pages = plan_draft_pages(groups, **common, tokens=2000, limit_bytes=limit)
        assert limit - 2000 < pages[0] * 1000 + pages[1] * 500 <= limit
    with pytest.raises(InputError, match="draft_cache_bytes"):
        plan_draft_pages(groups, **common, tokens=2000, limit_bytes=1000)


def seconds_of(
    monkeypatch, sizes: list[tuple[int, int]], likeness: float | None
) -> tuple[float, list[Request]]:
    """Seconds that requests of (prompt, answer) tokens take one after another: a row of the draft takes a fifth of the engine's.

    `likeness` None: nothing drafts.
    """
    now = 0.0
    for module in ("draft_engine", "speculation", "loop"):
        monkeypatch.setattr(f"enginewright.runtime.{module}.time.perf_counter", lambda: now)
    groups = [GroupSpec(6, 16)]
    limits = {"max_context": 2048, "token_budget": 256, "prefix_cache": False}
    loop = make_loop((400,), groups, FakeExecutor(groups), **limits)
    executor = Relative(groups, likeness or 0.0, max_tokens=256)
    if likeness is not None:
        draft_with(loop, executor, (400,), None, 2048)

    def timed(step, scale):
        def stepping(given: StepInput) -> np.ndarray:
            nonlocal now
            now += scale * (0.01 + 0.0002 * len(given.tokens))
            return step(given)

        return stepping

    loop.executor.step, executor.step = timed(loop.executor.step, 1.0), timed(executor.step, 0.2)
    requests = []
    for i, (prompt, answer) in enumerate(sizes):
        options = SamplingOptions(max_tokens=answer, ignore_eos=True)
        requests += run(loop, [Request([i, *([7, 8, 9] * prompt)[: prompt - 1]], options)])
    return now, requests


@pytest.mark.parametrize("likeness", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("sizes", [(1000, 2), (1000, 5), (1900, 12), (300, 3)])
def test_a_long_prompt_is_not_read_for_a_short_answer(monkeypatch, sizes, likeness):
    drafted, plain = (seconds_of(monkeypatch, [sizes] * 8, kind)[0] for kind in (likeness, None))
    assert drafted <= plain / 0.97


def test_what_a_draft_has_yet_to_read():
    """All but the last two tokens, which a step leaves to catch up with; and not what the prefix cache holds."""
    drafter = EngineDrafter(FakeExecutor(GROUPS, max_tokens=8), (64, 64), max_sequences=2, max_context=64)
    request, other = Request([1] * 25, GREEDY), Request([1] * 24 + [2] * 9, GREEDY)
    unread = []
    for _ in range(5):
        unread.append(drafter.unread(request))
        (proposal,) = drafter.propose([(request, 3)])
    assert unread == [(23, 3), (15, 2), (7, 1), (0, 0), (0, 0)] and len(proposal.tokens) == 3
    drafter.forget(request)
    assert drafter.unread(other) == (33 - 24 - 2, 1)
    drafter.check_invariants()
    drafter.close()
    assert is_empty(drafter)


def test_a_long_prompt_is_read_for_a_long_answer(monkeypatch):
    """Also among short answers: one that goes on for longer than usual may go on."""
    sizes = [(1000, 4)] * 12 + [(1000, 200)]
    drafted, requests = seconds_of(monkeypatch, sizes, 1.0)
    plain, _ = seconds_of(monkeypatch, sizes, None)
    assert requests[-1].accepted > 100 and not any(request.drafted for request in requests[:-1])
    assert drafted < 0.8 * plain


def test_an_attempt_goes_on_until_the_draft_has_read_all(monkeypatch):
    """Always wrong, it is tried ever more seldom, and reads less in a step than came meanwhile: it is asked until it is there."""
    now = 0.0
    for module in ("draft_engine", "speculation", "loop"):
        monkeypatch.setattr(f"enginewright.runtime.{module}.time.perf_counter", lambda: now)
    loop = make_loop(max_context=1024, pages=(300, 300))
    executor = Relative(GROUPS, 0.0, max_tokens=8)
    drafter = draft_with(loop, executor, pages=(300, 300), tokens=None, max_context=1024)
    step, reading = loop.executor.step, drafter.executor.step

    def timed(given: StepInput) -> np.ndarray:
        nonlocal now
        now += 1.0
        return step(given)

    def timed_reading(given: StepInput) -> np.ndarray:
        nonlocal now
        now += 0.5
        return reading(given)

    loop.executor.step, drafter.executor.step = timed, timed_reading
    loop.speculator.length._seconds = 1e6  # it may lose much
    run(loop, [Request([7] * 5, SamplingOptions(max_tokens=400, ignore_eos=True))])
    figures = loop.speculator.figures
    assert figures.proposals >= 5 and not figures.accepted  # after 16, 32, 64 and 128 steps
    assert len(executor.steps) > 30 and figures.saved_seconds < -0.4 * len(executor.steps)  # reading counts
    assert is_empty(drafter)
