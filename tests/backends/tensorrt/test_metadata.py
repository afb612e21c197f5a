"""The network's inputs: from a StepInput to its arrays, against a plain loop over rows; the block; the profiles' shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.backends.base import KvGroupInfo, StepInput, StepLimits, check_step
from enginewright.backends.tensorrt import bindings, metadata
from enginewright.passes.program import KvGroup, KvLayer

SIZE = 4


@st.composite
def steps(draw: st.DrawFn, single: bool = False) -> tuple[StepInput, list[KvGroupInfo], list[int]]:
    """A step of up to 5 sequences over 1 or 2 KV groups, its groups and the pages of each pool."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    windows = draw(st.sampled_from([(0,), (0, 5), (3,), (4, 0)]))
    rows = draw(st.lists(st.just(1) if single else st.integers(1, 9), min_size=1, max_size=5))
    cached = [draw(st.integers(0, 14)) for _ in rows]
    lens = np.array([a + b for a, b in zip(rows, cached, strict=True)], np.int32)
    groups = [KvGroupInfo(window, SIZE, 1, "f16", 1) for window in windows]
    width = -(-int(lens.max()) // SIZE) + draw(st.integers(0, 2))
    needed = sum(-(-int(length) // SIZE) for length in lens)
    pages = [needed + draw(st.integers(0, 3)) for _ in groups]
    tables = np.full((len(groups), len(rows), width), -1, np.int32)
    for g, group in enumerate(groups):
        free = rng.permutation(pages[g]).tolist()
        for s, length in enumerate(lens):
            for page in range(-(-int(length) // SIZE)):
                passed = group.window and (page + 1) * SIZE <= cached[s] - group.window + 1
                tables[g, s, page] = -1 if passed and draw(st.booleans()) else free.pop()
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + b) for a, b in zip(cached, rows, strict=True)]).astype(
        np.int32
    )
    count = int(starts[-1])
    wanted = rng.permutation(count)[: draw(st.integers(0, count))].astype(np.int32)
    tokens = rng.integers(0, 100, count).astype(np.int32)
    return StepInput(tokens, positions, starts, lens, tables, wanted), groups, pages


def check(step: StepInput, groups: list[KvGroupInfo], pages: list[int]) -> None:
    check_step(step, StepLimits(64, 64, 100, 64, groups, pages))


@settings(max_examples=150, deadline=None)
@given(steps())
def test_a_step_means_what_a_loop_over_its_rows_says(case):
    step, groups, pages = case
    check(step, groups, pages)
    arrays = metadata.step_arrays(step, groups, pages)
    assert all(array.dtype == np.int32 for array in arrays.values())
    assert list(arrays) == [binding.name for binding in bindings.step_inputs(len(groups))]
    sequences = len(step.context_lens)
    longest = max(np.diff(step.seq_starts))
    assert arrays["query_rows"].shape == (sequences, longest)
    flat = arrays["query_rows"].ravel()
    used = set()
    for s in range(sequences):
        start, end = step.seq_starts[s], step.seq_starts[s + 1]
        for row in range(start, end):
            place = s * longest + longest - (end - row)
            used.add(place)
            assert flat[place] == row and arrays["row_places"][row] == place
            # What a mask made from context_lens takes for the query's position is the row's.
            assert step.context_lens[s] - longest + place % longest == step.positions[row]
    assert all(flat[place] == 0 for place in range(len(flat)) if place not in used)
    wanted = step.logit_rows.tolist() or [0]
    assert arrays["logit_rows"].tolist() == wanted
    for g, (group, count) in enumerate(zip(groups, pages, strict=True)):
        check_group(step, arrays, g, group, count)


def check_group(
    step: StepInput, arrays: dict[str, np.ndarray], g: int, group: KvGroupInfo, count: int
) -> None:
    """Follow the arrays of one group as the network does: every row's key and value must reach its slot, none another."""
    table, order = arrays[f"page_table_{g}"], arrays[f"page_order_{g}"]
    starts, first = arrays[f"page_starts_{g}"], arrays[f"page_first_{g}"]
    assert len(starts) == count + 2 and len(first) == count + 1 and starts[0] == 0
    assert starts[-1] == len(step.tokens) and sorted(order) == list(range(len(step.tokens)))
    written = {}
    for page in range(count + 1):
        for at in range(starts[page], starts[page + 1]):
            slot = first[page] + at - starts[page]
            assert slot < group.page_size
            written[page, slot] = int(order[at])
    expected = {}
    for s, length in enumerate(step.context_lens):
        begin = step.seq_starts[s]
        for row in range(begin, step.seq_starts[s + 1]):
            position = int(step.positions[row])
            page = int(step.page_tables[g, s, position // group.page_size])
            expected[page, position % group.page_size] = row
        for page in range(table.shape[1]):
            low, high = page * group.page_size, (page + 1) * group.page_size
            oldest = max(0, int(step.positions[begin]) - group.window + 1) if group.window else 0
            if low < length and high > oldest:
                assert table[s, page] == step.page_tables[g, s, page]
            else:
                assert table[s, page] == count
    assert written == expected


@settings(max_examples=60, deadline=None)
@given(steps(single=True), st.integers(0, 4), st.integers(0, 2))
def test_a_padded_step_is_the_step_and_sequences_that_touch_the_zero_page_alone(case, more, wider):
    step, groups, pages = case
    count = len(step.tokens)
    width = -(-int(step.context_lens.max()) // SIZE) + wider
    plain = metadata.step_arrays(step, groups, pages)
    padded = metadata.step_arrays(step, groups, pages, metadata.Shape(count + more, width))
    whole = count + more
    assert padded["tokens"].tolist() == step.tokens.tolist() + [0] * more
    assert padded["context_lens"].tolist() == step.context_lens.tolist() + [1] * more
    assert padded["query_rows"].tolist() == [[row] for row in range(whole)]
    assert padded["row_places"].tolist() == list(range(whole)) and len(padded["logit_rows"]) == whole
    assert padded["logit_rows"][: len(step.logit_rows)].tolist() == step.logit_rows.tolist()
    for g, zero in enumerate(pages):
        table = padded[f"page_table_{g}"]
        used = plain[f"page_table_{g}"].shape[1]
        assert table.shape == (whole, width)
        assert np.array_equal(table[:count, :used], plain[f"page_table_{g}"])
        assert (table[count:] == zero).all() and (table[:, used:] == zero).all()
        assert padded[f"page_starts_{g}"][:-1].tolist() == plain[f"page_starts_{g}"][:-1].tolist()
        assert padded[f"page_starts_{g}"][-1] == whole and padded[f"page_first_{g}"][zero] == 0
        assert padded[f"page_first_{g}"].tolist() == plain[f"page_first_{g}"].tolist()
        assert padded[f"page_order_{g}"].tolist() == [
            *plain[f"page_order_{g}"].tolist(),
            *range(count, whole),
        ]


def test_a_step_that_does_not_fit_its_shape_is_refused():
    tables = np.array([[[0, 1, 2]]], np.int32)
    one = np.array([5], np.int32)
    step = StepInput(one, one, np.array([0, 1], np.int32), one + 1, tables, np.array([0], np.int32))
    groups = [KvGroupInfo(0, SIZE, 1, "f16", 1)]
    assert metadata.step_arrays(step, groups, [3], metadata.Shape(1 + SIZE, 2))["tokens"].shape == (5,)
    for shape in (metadata.Shape(2 + SIZE, 2), metadata.Shape(2, 1), metadata.Shape(0, 2)):
        with pytest.raises(ValueError, match="cannot be padded"):
            metadata.step_arrays(step, groups, [3], shape)


@settings(max_examples=40, deadline=None)
@given(steps())
def test_the_block_holds_every_array_at_an_aligned_offset(case):
    step, groups, pages = case
    arrays = metadata.step_arrays(step, groups, pages)
    block, offsets = metadata.pack(arrays, len(groups))
    assert list(offsets) == list(arrays)
    end = 0
    for name, at in offsets.items():
        assert at % metadata.ALIGNMENT == 0 and at >= end
        end = at + arrays[name].size
        assert np.array_equal(block[at:end], arrays[name].ravel())
    assert end <= len(block)
    own = np.full(len(block) + 100, -7, np.int32)
    again, _ = metadata.pack(arrays, len(groups), own)
    assert again.base is own and (own[len(block) :] == -7).all()


GROUPS = [
    KvGroup(0, [KvLayer(2, 8, 6, "a", "f16"), KvLayer(1, 8, 6, "b", "bf16")]),
    KvGroup(16, [KvLayer(2, 4, 4, "c", "f16")]),
]


def test_bindings_name_every_input_and_output_once():
    found = bindings.inputs(GROUPS, 16)
    names = [binding.name for binding in found]
    assert len(set(names)) == len(names) == 6 + 2 * 4 + 2 * 3
    by_name = {binding.name: binding for binding in found}
    assert by_name["key_pool_0_1"] == bindings.Binding("key_pool_0_1", ("N0", 1, 16, 8), "bf16")
    assert by_name["value_pool_0_0"].shape == ("N0", 2, 16, 6)
    results = {binding.name: binding for binding in bindings.outputs(GROUPS, 16, 99)}
    assert results.pop("logits") == bindings.Binding("logits", ("R", 99), "f32")
    pools = {name for name in names if "pool" in name}
    assert {name.removesuffix("_out") for name in results} == pools
    assert all(results[f"{name}_out"].shape == by_name[name].shape for name in pools)


@pytest.mark.parametrize("kind", bindings.PROFILES)
def test_a_profile_orders_its_shapes_and_takes_what_the_limits_allow(kind):
    limits = bindings.Limits(sequences=32, tokens=100, context=1000, page_size=16, pages=(200, 50))
    shapes = bindings.profile(kind, bindings.inputs(GROUPS, 16), limits)
    for low, usual, high in shapes.values():
        assert all(1 <= a <= b <= c for a, b, c in zip(low, usual, high, strict=True))
    assert shapes["page_table_0"][2] == (32, 63)
    assert shapes["page_starts_1"][2] == (51,) and shapes["key_pool_1_0"][2] == (50, 2, 16, 4)
    assert shapes["query_rows"][2] == ((32, 1) if kind == "decode" else (32, 100))
    assert shapes["tokens"][2] == ((32,) if kind == "decode" else (100,))
    with pytest.raises(ValueError, match="unknown profile 'prefill'"):
        bindings.sizes("prefill", limits)
