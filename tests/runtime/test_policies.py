"""Whose turn it is: every policy's promises, in steps and tokens, since the scheduler has no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enginewright.recipes.errors import InputError
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.policies import POLICIES
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import check_step, drain, make_loop, run

SHORT_SIGHT = [GroupSpec(16, 16)]  # what the fake executor computes quickly at any length
CONTINUOUS = ["fair", "latency", "throughput"]


def ask(prompt: list[int], tokens: int = 4, priority: int = 0) -> Request:
    request = Request(list(prompt), SamplingOptions(max_tokens=tokens, ignore_eos=True))
    request.priority = priority
    return request


def pattern(count: int, salt: int = 0) -> list[int]:
    return [(5 * i + i // 7 + 11 * salt) % 31 for i in range(count)]


def quick_loop(pages: int = 150, **limits: Any) -> EngineLoop:
    return make_loop((pages,), SHORT_SIGHT, FakeExecutor(SHORT_SIGHT), 8192, **limits)


def steps_until(loop: EngineLoop, request: Request, most: int = 5000) -> int:
    """Step until the request has a token."""
    for step in range(most):
        if request.output:
            return step
        check_step(loop)
    raise AssertionError("it never gets a token")


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_a_long_prompt_beside_streams_takes_no_token_from_them(policy):
    loop = quick_loop(policy=policy, token_budget=512, chunk_size=256, max_sequences=8)
    streams = [ask([i, 1, 2], 200) for i in range(4)]
    for stream in streams:
        loop.submit(stream)
    for _ in range(5):
        loop.step()
    long = ask(pattern(4000), 3)
    loop.submit(long)
    steps = 0
    while not long.output:
        before = [len(stream.output) for stream in streams]
        report = loop.step()
        steps += 1
        assert [len(stream.output) for stream in streams] == [count + 1 for count in before]
        assert report.tokens <= 4 + 256
    chunk = 128 if policy == "latency" else 256
    assert steps == math.ceil(4000 / chunk)
    drain(loop)


def test_latency_serves_short_prompts_first_but_not_for_ever():
    loop = quick_loop(policy="latency", token_budget=100, max_sequences=16)
    long, short = ask(pattern(600), 2), ask(pattern(90, 1), 2)
    loop.submit(long)
    loop.submit(short)
    assert steps_until(loop, short) == 1
    drain(loop)
    long = ask(pattern(600, 2), 2)
    loop.submit(long)
    for i in range(300):  # an endless stream of short ones
        loop.submit(ask(pattern(98, 3 + i), 1))
        loop.step()
        if long.output:
            break
    assert long.output, "a long prompt waits for ever"
    drain(loop)


def test_fair_lets_short_prompts_pass_beside_a_long_one():
    loop = quick_loop(policy="fair", token_budget=100, max_sequences=16)
    long, short = ask(pattern(2000), 2), ask(pattern(90, 1), 2)
    loop.submit(long)
    loop.step()
    loop.submit(short)
    assert steps_until(loop, short) == 2  # half of each step
    assert not long.output and long.computed == 210
    drain(loop)


@pytest.mark.parametrize("count", [6, 20])
def test_fair_bounds_the_wait_behind_those_that_generate_for_long(count):
    """Two places, everyone wants 3,000 tokens: each gets 512, then makes room."""
    loop = quick_loop(policy="fair", max_sequences=2)
    crowd = [ask(pattern(20, i), 3000) for i in range(count)]
    for request in crowd:
        loop.submit(request)
    for place, request in enumerate(crowd):
        steps_until(loop, request)
        assert loop.statistics().steps <= (place // 2 + 1) * (512 + 4)
    assert loop.statistics().preemptions >= count - 2
    for request in crowd:
        loop.finish(request)
    drain(loop)


def test_a_quantum_changes_no_answer():
    loop = quick_loop(80, policy="fair", max_sequences=2)
    requests = run(loop, [ask(pattern(20, i), 1300) for i in range(4)], 20_000)
    assert sum(request.preemptions for request in requests) >= 4
    for request in requests:
        (lonely,) = run(quick_loop(80, prefix_cache=False), [ask(request.tokens[:20], 1300)])
        assert (request.output, request.logprobs) == (lonely.output, lonely.logprobs)


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_an_urgent_request_takes_the_place_of_a_lesser_one(policy):
    loop = quick_loop(policy=policy, max_sequences=2)
    lesser = [ask(pattern(10, i), 100, priority=5) for i in range(4)]
    for request in lesser:
        loop.submit(request)
    for _ in range(3):
        loop.step()
    equal, urgent = ask(pattern(10, 8), 10, priority=5), ask(pattern(10, 9), 10, priority=-1)
    loop.submit(equal)
    loop.submit(urgent)
    assert steps_until(loop, urgent) == 1
    assert not equal.output and sum(request.preemptions for request in lesser) == 1
    assert lesser[1].preemptions == 1, "the last to have entered"
    drain(loop)
    for request in (*lesser, equal, urgent):
        assert len(request.output) == request.options.max_tokens


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_nobody_waits_for_the_prefix_of_one_that_gives_way_to_all(policy):
    def wait_of(urgent: Request, lesser: Request) -> int:
        """Steps until `urgent` has a token, beside an endless stream of prompts that come after it."""
        loop = quick_loop(policy=policy, token_budget=16, max_sequences=8)
        loop.submit(lesser)
        loop.step()
        loop.submit(urgent)
        later: list[Request] = []
        for step in range(1000):
            while sum(not other.finished for other in later) < 6:
                later.append(ask(pattern(40, 2 + len(later)), 1))
                loop.submit(later[-1])
            check_step(loop)
            if urgent.output:
                return step
        raise AssertionError("it never gets a token")

    shared = pattern(200)
    alike = wait_of(ask([*shared, 1]), ask(shared, priority=10))
    assert alike <= wait_of(ask([*shared, 1]), ask(pattern(200, 1), priority=10))


def test_nobody_is_preempted_where_that_makes_too_little_room():
    loop = make_loop((20,), [GroupSpec(0, 4)], FakeExecutor([GroupSpec(0, 4)]), 128, max_sequences=4)
    large, small = ask(pattern(50), 20, priority=-2), ask(pattern(4, 1), 20, priority=3)
    loop.submit(large)
    loop.submit(small)
    loop.step()
    loop.submit(ask(pattern(40, 2), 4, priority=-1))
    for _ in range(5):
        loop.step()
    assert small.preemptions == 0 and len(small.output) == 6
    drain(loop)


def test_ageing_lets_a_wait_outweigh_priority_in_fair_alone():
    for policy, overtaken in (("fair", False), ("throughput", True)):
        loop = quick_loop(policy=policy, max_sequences=1)
        humble = ask(pattern(10), 5, priority=1)
        loop.submit(ask(pattern(10, 1), 300))
        loop.submit(humble)
        for _ in range(290):
            loop.step()
        late = ask(pattern(10, 2), 5)
        loop.submit(late)
        steps_until(loop, late)
        assert bool(humble.output) != overtaken
        drain(loop)


def test_throughput_lets_small_requests_pass_one_that_finds_no_pages():
    passed = {}
    for policy in CONTINUOUS:
        loop = make_loop((30,), [GroupSpec(0, 4)], FakeExecutor([GroupSpec(0, 4)]), 128, policy=policy)
        loop.submit(ask(pattern(80), 30))
        loop.step()
        large, small = ask(pattern(60, 1), 5), ask(pattern(6, 2), 5)
        loop.submit(large)
        loop.submit(small)
        for _ in range(6):
            loop.step()
        passed[policy] = small.finished
        drain(loop)
        assert len(large.output) == 5
    assert passed == {"fair": False, "latency": True, "throughput": True}


def test_who_is_passed_too_often_is_passed_no_more():
    loop = make_loop((30,), [GroupSpec(0, 4)], FakeExecutor([GroupSpec(0, 4)]), 128, policy="throughput")
    large = ask(pattern(100, 1), 5)
    loop.submit(ask(pattern(20), 4))
    loop.step()
    loop.submit(large)
    for i in range(400):  # small ones without end, which always leave too few pages
        loop.submit(ask(pattern(12, i), 4))
        check_step(loop)
        if large.output:
            break
    assert large.output and large.passed <= POLICIES["throughput"].overtaking
    drain(loop)


# ----------------------------------------------------------------------------------------------------- static


@pytest.mark.parametrize(("policy", "rows"), [("static", 4), ("static-drop", 1)])
def test_a_static_batch_runs_until_its_last_row_has_ended(policy, rows):
    loop = quick_loop(policy=policy, max_sequences=4)
    batch = [ask(pattern(5, i), tokens) for i, tokens in enumerate((3, 9, 3, 20))]
    late = ask(pattern(5, 7), 3)
    for request in (*batch, late):
        loop.submit(request)
    for step in range(1, 21):
        check_step(loop)
        statistics = loop.statistics()
        if step in (9, 20):
            # In step 10 to 20 one row is wanted, whatever is computed.
            assert statistics.last_sequences == (4 if policy == "static" else 2 if step == 9 else rows)
        assert not late.output
    assert all(request.finished for request in batch)
    assert steps_until(loop, late) == 1
    drain(loop)
    for request in (*batch, late):
        (lonely,) = run(quick_loop(), [ask(request.tokens[:5], request.options.max_tokens)])
        assert (request.output, request.logprobs) == (lonely.output, lonely.logprobs)


def test_continuous_batching_takes_fewer_steps_than_static():
    """64 requests, batches of 16, lengths log-uniform from 16 to 512."""
    lengths = [round(16 * 32 ** (((37 * i) % 64 + 0.5) / 64)) for i in range(64)]
    steps = {}
    for policy in ("static", "static-drop", "fair", "throughput"):
        loop = quick_loop(policy=policy, max_sequences=16)
        run(loop, [ask(pattern(8, i), length) for i, length in enumerate(lengths)])
        steps[policy] = loop.statistics().steps
    assert steps["static"] == steps["static-drop"]
    assert 2 * steps["throughput"] <= steps["static"] and 2 * steps["fair"] <= steps["static"], steps


def test_padding_gives_its_pages_back_before_anyone_is_preempted():
    loop = make_loop(
        (12,), [GroupSpec(0, 4)], FakeExecutor([GroupSpec(0, 4)]), 64, policy="static", max_sequences=4
    )
    requests = run(loop, [ask(pattern(4, i), tokens) for i, tokens in enumerate((2, 2, 2, 40))])
    assert all(request.preemptions == 0 for request in requests)
    assert len(requests[3].output) == 40


# ----------------------------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_little_of_what_is_reserved_is_wasted(policy):
    """Page 16, lengths about 256 to 900: under 4 % of the reserved slots hold nothing, in the mean over steps."""
    groups = [GroupSpec(0, 16), GroupSpec(512, 16)]
    executor = _Blind(groups)
    loop = make_loop((2000, 1200), groups, executor, 2048, policy=policy, max_sequences=16)
    for i in range(40):
        loop.submit(ask(pattern(150 + 17 * (i % 20), i), 100 + 23 * (i % 19)))
    wasted = reserved = 0
    while not loop.idle:
        loop.step()
        statistics = loop.statistics()
        wasted += statistics.reserved_slots - statistics.used_slots
        reserved += statistics.reserved_slots
    assert 0 < wasted / reserved < 0.04


class _Blind(FakeExecutor):
    """Computes nothing of the past, so that long contexts are quick."""

    def _write(self, token: int, position: int, tables: list[list[int]]) -> int:
        return (token * 31 + position) * 0x9E3779B97F4A7C15 % 2**64


def test_statistics_add_up():
    loop = make_loop((20, 40), max_sequences=6)
    requests = [ask([i, 1, 2], 40) for i in range(6)]
    for request in requests:
        loop.submit(request)
    while not loop.idle:
        loop.step()
        now = loop.statistics()
        assert now.running == len(loop.scheduler.running) and now.waiting == len(loop.scheduler.waiting)
        for g, page in enumerate(now.pages):
            assert page.used + page.cached + page.free == page.total
            states = loop.pool.page_map(g)
            assert (
                len(states) == page.total and states.count(0) == page.free and states.count(1) == page.cached
            )
        assert now.used_slots <= now.reserved_slots
        assert 0 <= now.batch_fill <= 1 and 0 <= now.token_fill <= 1
    assert now.finished == {"length": 6} and now.tokens_generated == 240
    assert now.preemptions == sum(request.preemptions for request in requests) > 0
    assert now.tokens_computed == sum(tokens for tokens, _ in loop.executor.steps)  # type: ignore[attr-defined]
    assert now.steps == len(loop.executor.steps)  # type: ignore[attr-defined]


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="'fair'"):
        make_loop(policy="whoever shouts")
