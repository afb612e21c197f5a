"""The loop and the scheduler under random traffic: each request's tokens are those it has alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.recipes.errors import RequestError
from enginewright.runtime.loop import EngineLoop, LoopLimits
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, alone, drain, make_loop, options, prompts, run

arrivals = st.lists(st.tuples(prompts, options, st.integers(0, 12)), min_size=1, max_size=9)


@given(
    arrivals,
    st.integers(8, 24),
    st.integers(3, 24),
    st.sampled_from([1, 3, 7, 64]),
    st.integers(1, 6),
    st.integers(0, 30),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_request_gets_the_same_tokens_in_any_company(
    traffic, full_pages, window_pages, chunk, sequences, abort_at
):
    """Random prompts, arrivals, chunk sizes and tiny pools; one request is aborted somewhere."""
    pages = (full_pages, window_pages)
    loop = make_loop(pages, chunk_size=chunk, token_budget=max(sequences, 9), max_sequences=sequences)
    pending = sorted(
        ((start, Request(prompt, option)) for prompt, option, start in traffic), key=lambda item: item[0]
    )
    submitted: list[Request] = []
    step = 0
    while pending or not loop.idle:
        while pending and pending[0][0] <= step:
            submitted.append(pending.pop(0)[1])
            loop.submit(submitted[-1])
        loop.step()
        loop.scheduler.check_invariants()
        if step == abort_at and submitted:
            loop.finish(submitted[len(submitted) // 2])
            loop.scheduler.check_invariants()
        step += 1
        assert step < 5000, "the loop does not come to rest"
    assert loop.pool.idle, "pages leak"
    for request in submitted:
        lonely = alone(request.tokens[: request.prompt_length], request.options, pages)
        if request.finish_reason == "abort":
            assert lonely.output[: len(request.output)] == request.output
        else:
            assert (request.output, request.logprobs) == (lonely.output, lonely.logprobs)
            assert request.finish_reason == lonely.finish_reason


def test_preemption_repeats_nothing_and_changes_nothing():
    loop = make_loop((20, 40), max_context=64)
    requests = run(
        loop,
        [
            Request([i, 1, 2], SamplingOptions(max_tokens=60, temperature=0.8, seed=i, ignore_eos=True))
            for i in range(6)
        ],
    )
    assert sum(request.preemptions for request in requests) >= 6
    for request in requests:
        lonely = alone(request.tokens[:3], request.options)
        assert len(request.output) == 60
        assert (request.output, request.logprobs) == (lonely.output, lonely.logprobs)


@pytest.mark.parametrize("chunk", [None, 1, 16, 17])
@pytest.mark.parametrize("max_tokens", [0, 1, 5, None])
def test_prompts_about_the_context_limit(chunk, max_tokens):
    groups = [GroupSpec(0, 16)]
    loop = make_loop((32,), groups, FakeExecutor(groups), max_context=128, chunk_size=chunk)
    wanted = SamplingOptions(max_tokens=max_tokens, ignore_eos=True)
    for length in (126, 127):
        (request,) = run(loop, [Request([5] * length, wanted)])
        room = 128 - length
        assert len(request.output) == (room if max_tokens is None else min(room, max_tokens))
        assert request.finish_reason == "length"
    for length in (128, 129):
        with pytest.raises(RequestError, match="too long"):
            loop.submit(Request([5] * length, wanted))
    assert loop.idle and loop.pool.idle


def test_what_can_never_fit_is_refused_and_what_outgrows_the_pool_ends():
    groups = [GroupSpec(0, 16)]
    loop = make_loop((8,), groups, FakeExecutor(groups), max_context=512)
    with pytest.raises(RequestError, match="never fit"):
        loop.submit(Request([1] * 130))
    growing = Request([2] * 100, SamplingOptions(max_tokens=200, ignore_eos=True))
    ordinary = [Request([3 + i] * 20, SamplingOptions(max_tokens=10, ignore_eos=True)) for i in range(5)]
    run(loop, [growing, *ordinary])
    assert growing.finish_reason == "length" and len(growing.output) == 129 - 100
    assert all(len(request.output) == 10 for request in ordinary)


def test_a_nan_row_ends_its_request_alone():
    loop = make_loop(executor=FakeExecutor(GROUPS, poison_token=30))
    bad = Request([1, 2, 30], SamplingOptions(max_tokens=5))
    hot = Request([1, 30], SamplingOptions(max_tokens=5, temperature=1.0))
    good = Request([4, 5, 6], SamplingOptions(max_tokens=5, ignore_eos=True))
    run(loop, [bad, good, hot])
    for request in (bad, hot):
        assert request.finish_reason == "error" and request.output == []
        assert "NaN" in str(request.error)
    assert good.output == alone([4, 5, 6], good.options).output


def test_a_step_that_raises_ends_the_request_at_fault_alone():
    loop = make_loop(executor=FakeExecutor(GROUPS, crash_token=29))
    bad = Request([1, 29], SamplingOptions(max_tokens=5))
    good = [
        Request([4, i, 6], SamplingOptions(max_tokens=5, ignore_eos=True, seed=i, temperature=0.5))
        for i in range(4)
    ]
    run(loop, [good[0], bad, *good[1:]])
    assert bad.finish_reason == "error" and "told to crash" in str(bad.error)
    for request in good:
        if 29 not in request.output:
            assert request.output == alone(request.tokens[:3], request.options).output


def test_end_of_sequence_and_stop_ids():
    base = alone([7, 8], SamplingOptions(max_tokens=40, ignore_eos=True)).output
    stopped = alone([7, 8], SamplingOptions(max_tokens=40, ignore_eos=True, stop_token_ids=(base[4],)))
    assert stopped.finish_reason == "stop" and stopped.output == base[: base.index(base[4]) + 1]
    executor = FakeExecutor(GROUPS)
    loop = EngineLoop(executor, GROUPS, (64, 64), LoopLimits(64, 8), [base[3], base[6]])
    (ended,) = run(loop, [Request([7, 8], SamplingOptions(max_tokens=40))])
    first = min(base.index(base[3]), base.index(base[6]))
    assert ended.finish_reason == "stop" and ended.output == base[: first + 1]


def test_logits_of_given_tokens_are_the_same_in_any_chunks():
    tokens = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [9] * 64, [3]]
    whole = None
    for chunk in (None, 1, 5, 64):
        requests = [Request(ids, keep_logits=True, chunk_size=chunk) for ids in tokens]
        run(make_loop((40, 40), row_budget=20), requests)
        rows = [[row.tobytes() for block in request.logit_rows for row in block] for request in requests]
        assert [len(r) for r in rows] == [12, 64, 1]
        whole = whole or rows
        assert rows == whole


def test_a_step_keeps_its_budget_and_decodes_do_not_wait_for_prefill():
    executor = FakeExecutor(GROUPS)
    loop = make_loop(executor=executor, token_budget=16, max_sequences=4)
    short = Request([1, 2], SamplingOptions(max_tokens=20, ignore_eos=True))
    loop.submit(short)
    loop.step()
    loop.submit(Request([3] * 40, SamplingOptions(max_tokens=1)))
    for expected in range(2, 5):
        loop.step()
        assert len(short.output) == expected
    assert executor.steps == [(2, 1), (16, 2), (16, 2), (11, 2)]


@pytest.mark.parametrize("ids", [[-1], [32], [2**31], [2**64], ["12"], ["x"], [1.5], [True], [], [None]])
def test_token_ids_out_of_range_are_refused(ids):
    loop = make_loop()
    neighbour = Request([1, 2], SamplingOptions(max_tokens=4, ignore_eos=True))
    loop.submit(neighbour)
    with pytest.raises(RequestError, match="prompt"):
        loop.submit(Request(ids))
    if ids:
        with pytest.raises(RequestError, match="stop_token_ids"):
            loop.submit(Request([1], SamplingOptions(stop_token_ids=tuple(ids))))
    drain(loop)
    assert neighbour.output == alone([1, 2], neighbour.options).output
    run(loop, [Request([31, 0], SamplingOptions(max_tokens=1))])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True),
        ("seed", -1), ("seed", 2**64), ("seed", "7"), ("ignore_eos", "yes"), ("stop_token_ids", "12"),
        ("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop", [3]),
    ],
)  # fmt: skip
def test_options_are_checked_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingOptions(**{name: value})


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_prompt_logprobs_have_one_entry_a_token_whatever_the_chunks(chunk, max_tokens):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [9] * 40, [3]]
    options = SamplingOptions(max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
    loop = make_loop((14, 14), row_budget=20)  # too small for all three at once: some are preempted
    requests = run(loop, [Request(ids, options, chunk_size=chunk) for ids in prompts])
    for request, prompt in zip(requests, prompts, strict=True):
        whole = run(make_loop(), [Request(prompt, keep_logits=True)])[0].logit_rows
        rows = [row.astype(float) for block in whole for row in block]
        assert request.finish_reason == "length" and len(request.output) == max_tokens
        assert len(request.prompt_logprobs) == len(prompt) and request.prompt_logprobs[0] is None
        for entry, token, row in zip(request.prompt_logprobs[1:], prompt[1:], rows[:-1], strict=True):
            expected = row - math.log(sum(math.e**value for value in row))
            logprob, top = entry
            assert logprob == pytest.approx(expected[token], abs=1e-5)
            best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:2]
            assert top == [(i, pytest.approx(expected[i], abs=1e-5)) for i in best]
    plain = run(make_loop(), [Request(prompts[0], SamplingOptions(max_tokens=max_tokens, ignore_eos=True))])[
        0
    ]
    assert requests[0].output == plain.output and requests[0].logprobs == plain.logprobs
