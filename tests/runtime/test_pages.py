"""The page pool: what it hands out, takes back, and refuses to mix up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.runtime.pages import GroupSpec, PagePool, pages_to_hold


def test_a_window_gives_pages_back_and_full_attention_keeps_them():
    pool = PagePool([GroupSpec(0, 4), GroupSpec(6, 4)], [8, 4], max_sequences=2, max_context=32)
    slot = pool.open()
    for _ in range(20):
        assert pool.fits(slot, 1) == 1
        pool.reserve(slot, 1)
        pool.commit(slot, 1)
        pool.check_invariants()
    assert (pool.held(0, slot), pool.held(1, slot)) == (5, 2)
    # The next token stands at 20 and reads 15 … 20: the page of tokens 12 … 15 is the first still needed.
    assert pool.rows([slot])[1, 0].tolist()[:3] == [-1, -1, -1] and pool.rows([slot])[1, 0, 3] >= 0
    pool.close(slot)
    pool.check_invariants()
    assert pool.idle


def test_the_last_page_is_not_given_twice():
    pool = PagePool([GroupSpec(0, 4)], [3], max_sequences=2, max_context=64)
    first, second = pool.open(), pool.open()
    pool.reserve(first, 5)
    pool.commit(first, 5)
    assert pool.fits(second, 12) == 4
    pool.reserve(second, 4)
    pool.commit(second, 4)
    assert pool.fits(second, 1) == 0 and pool.fits(first, 9) == 3
    pool.close(first)
    assert pool.fits(second, 12) == 8
    pool.check_invariants()


@given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 20), st.integers(1, 200))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_pages_to_hold_is_never_too_few(window, page_size, chunk, length):
    group = GroupSpec(window, page_size)
    most = pages_to_hold(group, length, chunk)
    pool = PagePool([group], [most], max_sequences=1, max_context=length)
    slot = pool.open()
    done = 0
    while done < length:
        count = min(chunk, length - done)
        assert pool.fits(slot, count) == count
        pool.reserve(slot, count)
        pool.commit(slot, count)
        pool.check_invariants()
        done += count
    pool.close(slot)
    assert pool.idle
