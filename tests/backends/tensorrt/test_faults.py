"""Faults that a lowering could have, planted: the interpreted network shows every one of them.

Each is a small change of the defined network or of what the lowering packs. Without one the rows agree within the bound, as
tests/backends/test_shared.py holds; with one they are ten times beyond it, or not numbers, or the network is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginewright.backends.tensorrt import lower as lowering
from enginewright.backends.tensorrt import lowering as state
from enginewright.backends.tensorrt import weights
from enginewright.backends.tensorrt.interpreter import InterpreterError
from tests.backends import test_shared as shared
from tests.backends.test_shared import Case

trt = pytest.importorskip("tensorrt_rtx")

FP16 = Case("tensorrt-exact", "gemma3_text", bound=1e-5)
INT4 = Case("tensorrt-exact", "llama", "int4", shared._WEIGHT_ONLY, bound=1e-4)


def layers(network: Any, kind: str, class_name: str) -> Iterator[Any]:
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name == kind:
            layer.__class__ = getattr(trt, class_name)
            yield layer


def verdict(case: Case, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], int] | None = None) -> str:
    """Play the mixed batch, with `change` made to the network (it returns how many places it changed): what was wrong with it."""
    define = lowering.define

    def changed(program: Any, network: Any, *more: Any) -> Any:
        lowered = define(program, network, *more)
        assert change is None or change(network) > 0, "the fault found no place"
        return lowered

    monkeypatch.setattr(lowering, "define", changed)
    try:
        shared.play(case, [shared.a_mixed_batch_of_five])
    except InterpreterError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return str(error)
    return "nothing"


def is_seen(found: str) -> bool:
    if "rows miss" not in found:
        return found != "nothing"
    bound, worst = (
        float(part.split()[0].strip(";:")) for part in (found.split("miss ")[1], found.split(": ")[-1])
    )
    return worst > 10 * bound


def test_nothing_is_wrong_without_a_fault(monkeypatch):
    for case in (FP16, INT4):
        assert verdict(case, monkeypatch) == "nothing"


def pages_and_slots_swapped(network: Any) -> int:
    """Gathered pages [S, P, Hk, page, D] become rows slot by slot, not page by page."""
    count = 0
    for layer in layers(network, "SHUFFLE", "IShuffleLayer"):
        if tuple(layer.first_transpose)[:5] == (0, 2, 1, 3, 4) and len(layer.get_input(0).shape) == 5:
            layer.first_transpose = trt.Permutation([0, 2, 3, 1, 4])
            count += 1
    return count


def pairs_for_halves(network: Any) -> int:
    """Rotary embedding of neighbours instead of halves."""
    count = 0
    for layer in layers(network, "ROTARY_EMBEDDING", "IRotaryEmbeddingLayer"):
        layer.interleaved = not layer.interleaved
        count += 1
    return count


def rows_in_order_of_tokens(network: Any) -> int:
    """What is written to pages is not sorted by them: the gather of rows reads row_places instead."""
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    count = 0
    for layer in layers(network, "GATHER", "IGatherLayer"):
        if layer.get_input(1).name.startswith("page_order"):
            layer.set_input(1, inputs["row_places"])
            count += 1
    return count


def values_for_keys(network: Any) -> int:
    """The first two caches change places: keys are written to the pool of values."""
    updates = list(layers(network, "KV_CACHE_UPDATE", "IKVCacheUpdateLayer"))[:2]
    rows = [layer.get_input(1) for layer in updates]
    for layer, other in zip(updates, reversed(rows), strict=True):
        layer.set_input(1, other)
    return len(updates)


def another_group_s_table(network: Any) -> int:
    """A windowed group reads its pages by the other group's table."""
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    count = 0
    for layer in layers(network, "GATHER", "IGatherLayer"):
        if layer.get_input(1).name == "page_table_0":
            layer.set_input(1, inputs["page_table_1"])
            count += 1
    return count


def upper_left_for_a_mask(network: Any) -> int:
    """Attention that counts queries from the first key on."""
    count = 0
    for layer in layers(network, "ATTENTION_INPUT", "IAttentionInputLayer"):
        layer.attention.mask = None
        layer.attention.causal_kind = trt.CausalMaskKind.UPPER_LEFT
        count += 1
    return count


def hidden_slots_not_cleared(network: Any) -> int:
    """Keys and values past the context are multiplied as they lie in the pool."""
    count = 0
    for layer in layers(network, "SELECT", "ISelectLayer"):
        if len(layer.get_input(1).shape) == 4 and layer.get_input(1).dtype == trt.DataType.HALF:
            layer.set_input(2, layer.get_input(1))
            count += 1
    return count


NETWORK_FAULTS = [
    pairs_for_halves,
    pages_and_slots_swapped,
    rows_in_order_of_tokens,
    values_for_keys,
    another_group_s_table,
    upper_left_for_a_mask,
    hidden_slots_not_cleared,
]


@pytest.mark.parametrize("fault", NETWORK_FAULTS)
def test_a_fault_of_the_network_is_seen(fault, monkeypatch):
    found = verdict(FP16, monkeypatch, fault)
    assert is_seen(found), found


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_that_is_off_by_one_is_seen(by, monkeypatch):
    lowering._load_rules()
    rule = state.RULES["ew::paged_attention"]

    def wrong(low: Any, node: Any, a: dict[str, Any]) -> Any:
        return rule(low, node, {**a, "window": a["window"] + by if a["window"] else 0})

    monkeypatch.setitem(state.RULES, "ew::paged_attention", wrong)
    found = verdict(FP16, monkeypatch)
    assert is_seen(found), found


def test_nibbles_in_the_other_order_are_seen(monkeypatch):
    pack = weights.pack_int4

    def wrong(codes: Any) -> Any:
        packed = pack(codes)
        return np.ascontiguousarray(packed >> 4 | packed << 4)

    monkeypatch.setattr(weights, "pack_int4", wrong)
    found = verdict(INT4, monkeypatch)
    assert is_seen(found), found


def test_a_correction_that_is_left_out_is_seen(monkeypatch):
    split = weights.split

    @functools.wraps(split)
    def wrong(*args: Any) -> Any:
        matrix = split(*args)
        matrix.shift = None
        return matrix

    for module in (weights, *(m for m in _users() if hasattr(m, "split"))):
        monkeypatch.setattr(module, "split", wrong)
    found = verdict(INT4, monkeypatch)
    assert is_seen(found), found


def _users() -> list[Any]:
    from enginewright.backends.tensorrt import lower_dialect, lower_moe

    return [lower_dialect, lower_moe]
