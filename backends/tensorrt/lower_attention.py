"""ew::paged_attention: new keys and values into the pools' pages in place, pages gathered by the tables, attention under a mask.

The pool's pages stand as a batch of KVCacheUpdate, and a step's rows, sorted by the page they go to, as its packed update. The
output of that layer is the pool itself (its alias). Then pages are gathered, [S, kv heads, P·page, D], and slots past a
sequence's context and of the zero page, which may hold anything, become zeros.

**Fused** (one attention layer, which TensorRT computes in one kernel where it has one) with a boolean mask: causal, and the
window where there is one. The masks are made once a KV group. Its causal option together with key_value_lengths is not used:
see bindings.py. **Decomposed** into products and a softmax in float32 where the layer has no form: soft caps, sinks, ALiBi,
and values of another width than keys; the program's notes say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from enginewright.backends.tensorrt.bindings import pool_names
from enginewright.backends.tensorrt.lowering import Lowering, Refused, lowers

__all__ = ["KV_FORMATS"]

KV_FORMATS = ("f16", "bf16")

_HEAD_DIMS = range(16, 257)
"""Features of a head that the fused layer takes, in multiples of 8 (others end the build with an internal error)."""


@lowers("ew::paged_attention")
def paged_attention(low: Lowering, node: fx.Node, a: dict[str, Any]) -> Any:
    kind, group = a["kv_format"], a["group"]
    if kind not in KV_FORMATS:
        raise Refused(f"a cache of {kind}", "kv_cache.format " + " or ".join(KV_FORMATS))
    names = pool_names(group, a["layer"])
    keys, values = (
        _cached(low, name, low.tensor(a[part]), group, kind) for name, part in zip(names, "kv", strict=True)
    )
    query = low.elementwise("PROD", low.wide(a["q"]), low.number(a["scale"], 3))
    heads, width = low.shape(node)
    padded = low.shuffle(low.gather(query, low.inputs["query_rows"]), first=(0, 2, 1, 3))  # [S, H, Q, D]
    why = _unfusable(a, width, query.shape[-1])
    if why is None:
        mixed = _fused(low, low.cast(padded, kind), keys, values, _mask(low, group, a["window"]))
    else:
        low.note(f"attention is decomposed in float32 for its {why}: the fused layer has none")
        mixed = _decomposed(low, padded, keys, values, a)
    packed = low.shuffle(mixed, [-1, heads, width], first=(0, 2, 1, 3))  # [S·Q, H, D]
    return low.gather(packed, low.inputs["row_places"])


def _unfusable(a: dict[str, Any], width: int, key_width: int) -> str | None:
    if a["softcap"]:
        return "soft cap"
    if a["sinks"] is not None:
        return "sinks"
    if a["alibi"] is not None:
        return "ALiBi slopes"
    if width != key_width:
        return "values, which are not as wide as keys"
    if width % 8 or width not in _HEAD_DIMS:
        return f"heads of {width} features"
    return None


def _cached(low: Lowering, name: str, new: Any, group: int, kind: str) -> Any:
    """Write new [T, Hk, D] into the pool `name`; returns what every sequence sees, [S, Hk, P·page, D], zeros past its context."""
    trt, pool = low.trt, low.inputs[name]
    heads, width = new.shape[-2:]
    rows = low.gather(low.cast(new, kind), low.inputs[f"page_order_{group}"])
    layer = low.network.add_kv_cache_update(
        pool, rows, low.inputs[f"page_first_{group}"], trt.KVCacheMode.LINEAR
    )
    low.named(layer, name)
    layer.update_form = trt.AttentionIOForm.PACKED_NHD
    layer.update_lengths = low.inputs[f"page_starts_{group}"]
    written = layer.get_output(0)
    written.name = f"{name}_out"
    low.network.mark_output(written)
    pages = low.gather(written, low.inputs[f"page_table_{group}"])  # [S, P, Hk, page, D]
    seen = low.shuffle(low.shuffle(pages, first=(0, 2, 1, 3, 4)), [0, heads, -1, width])
    valid = low.shuffle(_within(low, group), [0, 1, -1, 1])
    zero = low.cast(low.number(0, 4), kind)
    return low.select(valid, seen, zero)


# Masks, one a KV group.


def _key_positions(low: Lowering, group: int) -> Any:
    """0 … P·page - 1, int32 [1, 1, 1, P·page]."""
    key = ("keys", group)
    if key not in low.shared:
        page = low.options.page_size
        pages = low.shuffle(low.count(low.length(low.inputs[f"page_table_{group}"], 1)), [-1, 1])
        first = low.elementwise("PROD", pages, low.number(page, 2, "int32"))
        slots = low.constant(np.arange(page, dtype=np.int32).reshape(1, page), "slots of a page")
        low.shared[key] = low.shuffle(low.elementwise("SUM", first, slots), [1, 1, 1, -1])
    return low.shared[key]


def _lengths(low: Lowering) -> Any:
    """context_lens as [S, 1, 1, 1]."""
    if "lengths" not in low.shared:
        low.shared["lengths"] = low.shuffle(low.inputs["context_lens"], [-1, 1, 1, 1])
    return low.shared["lengths"]


def _within(low: Lowering, group: int) -> Any:
    """Whether a key lies within its sequence's context and in a page of its own, bool [S, 1, 1, P·page]."""
    key = ("within", group)
    if key not in low.shared:
        reached = low.elementwise("LESS", _key_positions(low, group), _lengths(low))
        low.shared[key] = low.elementwise("AND", reached, _owned(low, group))
    return low.shared[key]


def _owned(low: Lowering, group: int) -> Any:
    """Whether a key's page is another than the zero page, the pool's last, bool [S, 1, 1, P·page]."""
    pages = low.shuffle(low.length(low.inputs[f"page_first_{group}"], 0), [1, 1, 1, 1])
    last = low.elementwise("SUB", pages, low.number(1, 4, "int32"))
    table = low.shuffle(low.inputs[f"page_table_{group}"], [0, -1, 1, 1])  # [S, P, 1, 1]
    slots = low.constant(np.ones((1, 1, 1, low.options.page_size), np.bool_), "slots of a page, all")
    return low.shuffle(low.elementwise("AND", low.elementwise("LESS", table, last), slots), [0, 1, 1, -1])


def _query_positions(low: Lowering) -> Any:
    """context_lens - Q + i, at least 0, int32 [S, 1, Q, 1]: a sequence's rows stand at the end of its places."""
    if "queries" not in low.shared:
        size = low.length(low.inputs["query_rows"], 1)
        place = low.shuffle(low.count(size), [1, 1, -1, 1])
        from_end = low.elementwise("SUB", place, low.shuffle(size, [1, 1, 1, 1]))
        position = low.elementwise("SUM", from_end, _lengths(low))
        low.shared["queries"] = low.elementwise("MAX", position, low.number(0, 4, "int32"))
    return low.shared["queries"]


def _distance(low: Lowering, group: int) -> Any:
    """Key position - query position, int32 [S, 1, Q, P·page]."""
    key = ("distance", group)
    if key not in low.shared:
        low.shared[key] = low.elementwise("SUB", _key_positions(low, group), _query_positions(low))
    return low.shared[key]


def _mask(low: Lowering, group: int, window: int) -> Any:
    """Which keys a query may see, bool [S, 1, Q, P·page]."""
    key = ("mask", group)
    if key not in low.shared:
        distance = _distance(low, group)
        mask = low.elementwise("LESS", distance, low.number(1, 4, "int32"))
        if window:
            near = low.elementwise("GREATER", distance, low.number(-window, 4, "int32"))
            mask = low.elementwise("AND", mask, near)
        low.shared[key] = mask
    return low.shared[key]


# The two forms.


def _fused(low: Lowering, query: Any, keys: Any, values: Any, mask: Any) -> Any:
    trt = low.trt
    attention = low.network.add_attention_v2(
        query, keys, values, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
    )
    low.named(attention, "attention")
    attention.mask = mask
    attention.decomposable = True  # sizes without a fused kernel are computed in several
    return attention.get_output(0)


def _decomposed(low: Lowering, query: Any, keys: Any, values: Any, a: dict[str, Any]) -> Any:
    """query [S, H, Q, Dk] f32 (scaled), keys, values [S, Hk, K, D]  ->  [S, H, Q, Dv] f32; each = H / Hk."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    width, value_width = keys.shape[-1], values.shape[-1]
    # Products of the heads that share keys are one product of their queries, one below the other.
    grouped = low.shuffle(query, [0, kv_heads, -1, width])  # [S, Hk, each·Q, Dk]
    scores = low.matmul(grouped, low.cast(keys, "f32"), transposed=True)
    split = low.shuffle(scores, [0, heads, -1, 0])  # [S, H, Q, K]
    if a["softcap"]:
        cap = a["softcap"]
        bent = low.activation("TANH", low.elementwise("PROD", split, low.number(1 / cap, 4)))
        split = low.elementwise("PROD", bent, low.number(cap, 4))
    if a["alibi"] is not None:
        slopes = low.values(low.weight(a["alibi"], "slopes"), (1, heads, 1, 1))
        split = low.elementwise(
            "SUM", split, low.elementwise("PROD", low.cast(_distance(low, a["group"]), "f32"), slopes)
        )
    split = low.select(_mask(low, a["group"], a["window"]), split, low.number(-1e30, 4))
    most = low.reduce("MAX", split, [3])
    sinks = None
    if a["sinks"] is not None:
        sinks = low.values(low.weight(a["sinks"], "sinks"), (1, heads, 1, 1))
        most = low.elementwise("MAX", most, sinks)
    powers = low.unary("EXP", low.elementwise("SUB", split, most))
    total = low.reduce("SUM", powers, [3])
    if sinks is not None:
        total = low.elementwise("SUM", total, low.unary("EXP", low.elementwise("SUB", sinks, most)))
    shares = low.elementwise("DIV", powers, total)
    joined = low.shuffle(shares, [0, kv_heads, -1, 0])  # [S, Hk, each·Q, K]
    mixed = low.matmul(joined, low.cast(values, "f32"))  # [S, Hk, each·Q, Dv]
    return low.shuffle(mixed, [0, heads, -1, value_width])
