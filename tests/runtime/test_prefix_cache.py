"""The prefix cache: what is found again, what must never be, and that no answer changes."""

from __future__ import annotations

from typing import Any

import pytest

from enginewright.runtime import prefix_cache
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.pages import GroupSpec, PagePool
from enginewright.runtime.request import Request, SamplingOptions, derived_seed
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import check_step, check_survivor, drain, make_loop, run

FULL = [GroupSpec(0, 4)]


def ask(prompt: list[int], tokens: int = 4, **more: Any) -> Request:
    return Request(list(prompt), SamplingOptions(max_tokens=tokens, ignore_eos=True, **more))


def pattern(count: int, salt: int = 0) -> list[int]:
    return [(5 * i + i // 7 + 11 * salt) % 31 for i in range(count)]


def computed(loop: EngineLoop) -> int:
    return loop.statistics().tokens_computed


# ---------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (pattern(24), pattern(24), 23),  # but for the token whose logits are wanted
        (pattern(21), pattern(21), 20),
        (pattern(24), [*pattern(17), 9, 9], 17),  # a page that is shared in part
        (pattern(10), pattern(24), 10),
        (pattern(24), pattern(24, 1), 0),
        ([1], [1], 0),
        (pattern(24), pattern(2), 1),
    ],
)  # fmt: skip
def test_what_was_written_is_not_computed_again(first, second, cached):
    loop = make_loop(groups=FULL, pages=(64,), executor=FakeExecutor(FULL))
    run(loop, [ask(first, 20)])
    before = computed(loop)
    (request,) = run(loop, [ask(second, 1)])
    assert request.cached_tokens == cached
    assert computed(loop) - before == len(second) - cached
    assert loop.statistics().prefix_hit_tokens == cached
    fresh = run(make_loop(groups=FULL, pages=(64,), executor=FakeExecutor(FULL)), [ask(second, 1)])[0]
    assert (request.output, request.logprobs) == (fresh.output, fresh.logprobs)


def test_an_answer_is_found_when_the_conversation_goes_on():
    loop = make_loop()
    (first,) = run(loop, [ask(pattern(9), 12)])
    (second,) = run(loop, [ask([*first.tokens, 3, 4, 5])])
    assert second.cached_tokens == 20  # the last token's keys and values were never computed
    check_survivor(second)


def test_without_a_cache_nothing_is_kept():
    loop = make_loop(prefix_cache=False)
    requests = run(loop, [ask(pattern(20))]) + run(loop, [ask(pattern(20))])
    assert [request.cached_tokens for request in requests] == [0, 0]
    assert all(page.cached == 0 for page in loop.statistics().pages)


def test_a_window_must_still_hold_what_the_next_token_reads():
    """Of a prompt of 40 with a window of 6, the pages about token 40 are kept, and those about token 16 are taken away."""
    loop = make_loop((64, 8), max_sequences=2)
    run(loop, [ask(pattern(40), 1)])
    run(loop, [ask(pattern(16, 2), 1)])  # takes the windowed pages that were given back first
    (request,) = run(loop, [ask([*pattern(16), 1, 1, 1], 1)])
    assert loop.statistics().pages[0].cached > 0
    check_survivor(request, (64, 8))
    (again,) = run(loop, [ask(pattern(40), 1)])
    check_survivor(again, (64, 8))


def test_a_hit_needs_every_group():
    groups = [GroupSpec(0, 4), GroupSpec(8, 4)]
    pool = PagePool(groups, [16, 16], 4, 64, prefix_cache=True)
    tokens = list(range(16))
    slot = pool.open(tokens)
    pool.reserve(slot, 16)
    pool.commit(slot, 16)
    pool.close(slot)
    pool.check_invariants()
    assert pool.find(tokens, [], 16).length == 16
    pool.cache.forget(1, pool.cache.nodes[_digest(pool, tokens, 1)].pages[1])  # windowed page of tokens 4 … 7
    assert pool.find(tokens, [], 16).length == 16  # token 16 reads 9 … 15
    assert pool.find(tokens, [], 11).length == 4 + 0  # token 11 reads 4 … 10, token 4 reads 0 … 3


def _digest(pool: PagePool, tokens: list[int], place: int) -> bytes:
    blocks: list[prefix_cache.Block] = []
    pool.cache.extend(blocks, tokens)
    return blocks[place][0]


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    loop = make_loop((10,), FULL, FakeExecutor(FULL), max_sequences=1)
    for salt in (1, 2):
        run(loop, [ask(pattern(16, salt), 1)])
    run(loop, [ask(pattern(16, 1), 1)])  # 1 is now the younger
    run(loop, [ask(pattern(12, 3), 1)])  # two free pages, and the last of 2
    cached = {salt: loop.pool.find(pattern(16, salt), [], 16).length for salt in (1, 2)}
    assert cached == {1: 16, 2: 12}
    run(loop, [ask(pattern(40, 4), 1)])
    assert loop.pool.find(pattern(16, 1), [], 16).length == 0


# ------------------------------------------------------------------------------------------- what must never be


@pytest.mark.parametrize("bits", [0, 4])
def test_equal_digests_change_no_answer(monkeypatch, bits):
    """Fifty prompts whose blocks share one digest, or sixteen: what is found is compared."""
    strong = prefix_cache.block_digest

    def weak(parent: bytes, content: bytes) -> bytes:
        return bytes([strong(parent, content)[0] & ((1 << bits) - 1)])

    monkeypatch.setattr(prefix_cache, "block_digest", weak)
    loop = make_loop(max_sequences=1)
    repeated = [ask([*pattern(4) * repeats, 1]) for repeats in range(1, 6)]  # one block, after other parents
    for request in run(loop, repeated) + run(loop, [ask([3, *pattern(4) * 3, 1])]):
        assert request.finish_reason == "length"
        check_survivor(request)
    loop = make_loop(max_sequences=4)
    prompts = [pattern(8 + i % 13, i // 2) for i in range(40)]
    prompts += [[2] * offset + pattern(12) for offset in range(5)]  # the same tokens elsewhere
    requests = run(loop, [ask(prompt, 5, temperature=0.8, seed=i) for i, prompt in enumerate(prompts)])
    requests += run(loop, [ask(prompt, 5) for prompt in reversed(prompts)])
    for request in requests:
        assert request.finish_reason == "length"
        check_survivor(request)
    if bits:
        assert loop.statistics().prefix_hit_tokens > 0


def test_a_digest_names_content_parents_and_the_engine():
    def digest(identity: bytes, tokens: list[int]) -> bytes:
        blocks: list[prefix_cache.Block] = []
        prefix_cache.PrefixCache(4, [1], identity).extend(blocks, tokens)
        return blocks[-1][0]

    names = {
        digest(identity, tokens)
        for identity in (b"", b"model a, bf16", b"model a, int8", b"model b, bf16")
        for tokens in ([1, 2, 3, 4], [1, 2, 3, 5], [0, 0, 0, 0, 1, 2, 3, 4], [1, 2, 3, 4] * 2)
    }
    assert len(names) == 16 and all(len(name) == 32 for name in names)


def test_pages_are_found_only_once_they_are_written():
    """A, and B of the same prefix in the same step; A is cancelled after its first chunk, and C wants other things at once."""
    prefix = pattern(120)
    for cancelled_at in range(1, 6):
        loop = make_loop((64, 40), max_context=256, chunk_size=16, token_budget=32)
        a, b, c = ask(prefix, 8), ask([*prefix, 7], 8), ask(pattern(90, 3), 8)
        loop.submit(a)
        loop.submit(b)
        for _ in range(cancelled_at):
            check_step(loop)
        assert not b.computed, "B waits for the pages that A writes"
        loop.finish(a)
        loop.submit(c)
        drain(loop)
        assert b.cached_tokens == 16 * cancelled_at
        for request in (b, c):
            assert request.finish_reason == "length"
            check_survivor(request, (64, 40), 256)


def test_a_step_that_fails_registers_nothing():
    executor = FakeExecutor(FULL)
    loop = make_loop((64,), FULL, executor)
    executor.crash_token = 30
    run(loop, [ask([*pattern(16), 30])])
    assert loop.pool.find(pattern(16), [], 16).length == 0
    assert not loop.pool.cache.nodes


def test_scored_prompts_take_nothing_and_leave_their_pages():
    loop = make_loop()
    rows = Request(pattern(20), keep_logits=True)
    scored = ask(pattern(20), 3, prompt_logprobs=2)
    run(loop, [rows])
    run(loop, [scored])
    assert rows.cached_tokens == scored.cached_tokens == 0
    assert sum(len(block) for block in rows.logit_rows) == len(scored.prompt_logprobs) == 20
    check_survivor(scored)
    (plain,) = run(loop, [ask(pattern(20), 3)])
    assert plain.cached_tokens == 19 and plain.output == scored.output


# ------------------------------------------------------------------------------------------- several answers


@pytest.mark.parametrize("length", [7, 16, 17, 30, 64])
def test_several_answers_share_the_prompt_and_not_its_last_page(length):
    groups = [GroupSpec(0, 16)]
    loop = make_loop((64,), groups, FakeExecutor(groups), max_context=128)
    choices = [ask(pattern(length), 20, temperature=1.0, seed=derived_seed(7, i)) for i in range(4)]
    for choice in choices:
        loop.submit(choice)
    held = []
    while not loop.idle:
        check_step(loop)
        if all(choice.output for choice in choices):
            held.append(loop.statistics().pages[0].used)
    assert len({tuple(choice.output) for choice in choices}) == 4
    if length >= 16:
        assert computed(loop) == length + 3 + 4 * 19  # one prompt, and its last token for each other answer
        assert (
            held[0] == -(-(length + 1) // 16) + 3
        )  # the first is a token ahead; each other one has a page of its own
    for choice in choices:
        fresh = make_loop((64,), groups, FakeExecutor(groups), max_context=128)
        (lonely,) = run(fresh, [Request(pattern(length), choice.options)])
        assert (choice.output, choice.logprobs) == (lonely.output, lonely.logprobs)


def test_more_answers_than_the_pool_can_hold():
    loop = make_loop((20, 20), max_sequences=8)
    choices = run(loop, [ask(pattern(17), 12, temperature=1.0, seed=derived_seed(3, i)) for i in range(60)])
    for choice in choices[::7]:
        check_survivor(choice, (20, 20))
    greedy = run(loop, [ask(pattern(17), 12) for _ in range(4)])
    assert len({tuple(choice.output) for choice in greedy}) == 1


def test_a_copy_that_fails_ends_those_that_wanted_it_alone():
    executor = FakeExecutor(FULL)
    loop = make_loop((64,), FULL, executor)
    run(loop, [ask(pattern(24))])

    def broken(*_: object) -> None:
        raise RuntimeError("no copy today")

    working, executor.copy_pages = executor.copy_pages, broken
    other = ask(pattern(20, 2), 6)
    (request, _) = run(loop, [ask(pattern(24)), other])
    assert request.finish_reason == "error" and "no copy today" in str(request.error)
    assert len(other.output) == 6
    executor.copy_pages = working
    (again,) = run(loop, [ask(pattern(24))])
    assert again.cached_tokens == 23 and again.output
