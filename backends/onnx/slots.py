"""How a step reaches the model that our runtime serves, and how attention finds its keys: by the numbers of cache slots.

A cache is a row of slots, one a token, [slots, Hk · D]; it is an input, and the output that is bound to the same memory.
The executor says which slot each of the step's rows goes to, and which slots each sequence reads. So the model knows of no
page size: pages of 16 tokens and one page as long as the context are the same to it. A slot that nobody has written, or
that a sequence must not see, is never read; what pads a sequence to its step's longest is the last slot, which is always zero.

| input, int64 | shape | meaning |
|---|---|---|
| tokens, positions | [tokens] | the step's rows, packed |
| logit_rows | [logits] | rows whose logits are wanted |
| query_rows | [sequences, queries] | packed row of each query; a sequence's rows stand at the end, what is before repeats row 0 |
| row_places | [tokens] | sequence · queries + query: where each packed row stands in query_rows |
| context_lens | [sequences] | tokens of each sequence, this step's included |
| write_slots_G | [tokens, 1] | slot of each row's key and value |
| read_slots_G | [sequences, keys of G] | slots of the keys that some query sees, in order; with sinks the zero slot first |
| first_keys_G | [sequences] | position of the first of them |
| key_cache_G_L, value_cache_G_L | [slots of G, Hk · D] | the layer's cache, and as output `…_out` the same memory |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import fx

from enginewright.backends.onnx.graph import BOOL, FLOAT, INT64, Size, Value
from enginewright.backends.onnx.lowering import TOKENS, Lowering, arguments, op_name
from enginewright.passes.program import KvGroup

__all__ = ["CACHE_TYPES", "SlotCaches", "groups_with_sinks"]

SEQUENCES, QUERIES, LOGITS = "sequences", "queries", "logits"

CACHE_TYPES = {"f32": FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
"""Cache format -> type of the cache's tensors. Attention computes in f32."""

_HIDDEN = np.float32(-1e38)  # a row that sees nothing (it pads a sequence) stays finite


def groups_with_sinks(low: Lowering) -> set[int]:
    """KV groups in which some layer has sinks."""
    found = set()
    for node in low.program.graph.nodes:
        if op_name(node) == "ew::paged_attention":
            a = arguments(node)
            if a["sinks"] is not None:
                found.add(int(a["group"]))
    return found


class SlotCaches:
    """The plain flavour's `CacheForm`."""

    def __init__(self) -> None:
        self._in: dict[str, Value] = {}
        self._written: dict[str, Value] = {}
        self._sinks: set[int] = set()

    # Inputs and outputs.

    def inputs(self, low: Lowering) -> Mapping[str, Value]:
        g = low.graph
        self._sinks = groups_with_sinks(low)
        shapes: dict[str, list[Any]] = {
            "tokens": [TOKENS],
            "positions": [TOKENS],
            "logit_rows": [LOGITS],
            "query_rows": [SEQUENCES, QUERIES],
            "row_places": [TOKENS],
            "context_lens": [SEQUENCES],
        }
        groups: list[KvGroup] = low.program.facts.kv_groups
        for index in range(len(groups)):
            shapes[f"write_slots_{index}"] = [TOKENS, 1]
            shapes[f"read_slots_{index}"] = [SEQUENCES, f"keys_{index}"]
            shapes[f"first_keys_{index}"] = [SEQUENCES]
        self._in = {name: g.input(name, shape) for name, shape in shapes.items()}
        for index, group in enumerate(groups):
            for at, layer in enumerate(group.layers):
                if layer.format not in CACHE_TYPES:
                    continue  # its attention refuses it
                for kind, width in (("key", layer.key_dim), ("value", layer.value_dim)):
                    name = f"{kind}_cache_{index}_{at}"
                    shape: list[Size] = [f"slots_{index}", layer.kv_heads * width]
                    self._in[name] = g.input(name, shape, CACHE_TYPES[layer.format])
        return {name: self._in[name] for name in ("tokens", "positions", "logit_rows")}

    def outputs(self, low: Lowering, logits: Value) -> None:
        low.graph.output(logits, "logits")
        unused = {v.name for name, v in self._in.items() if "_cache_" in name and name not in self._written}
        low.graph.inputs = [value for value in low.graph.inputs if value.name not in unused]
        for name, value in self._written.items():
            low.graph.output(value, f"{name}_out")

    # Attention.

    def attention(self, low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
        g = low.graph
        if a["kv_format"] not in CACHE_TYPES:
            raise low.fail(f"a cache of {a['kv_format']} keys and values", " or ".join(CACHE_TYPES))
        q, k, v = (low.value(a[name]) for name in ("q", "k", "v"))
        heads, kv_heads, value_dim = q.shape[1], k.shape[1], v.shape[2]
        assert isinstance(heads, int) and isinstance(value_dim, int)
        keys = self._cached(low, k, "key", a)
        values = self._cached(low, v, "value", a)
        queries = g.gather(_flat(low, q), self._in["query_rows"])
        mask = self._mask(low, a)
        lengths = None if mask is not None else self._lengths(low, a["group"])
        out = g.op(
            "Attention",
            [queries, keys, values, mask, None, None, lengths],
            (SEQUENCES, QUERIES, heads * value_dim),
            q_num_heads=heads,
            kv_num_heads=kv_heads,
            scale=float(a["scale"]),
            softcap=float(a["softcap"]),
            is_causal=int(mask is None),
        )
        rows = g.gather(g.reshape(out, ("places", heads * value_dim)), self._in["row_places"])
        return g.reshape(rows, (q.shape[0], heads, value_dim))

    def _cached(self, low: Lowering, x: Value, kind: str, a: dict[str, Any]) -> Value:
        """Write the step's keys or values to the cache; returns those that each sequence reads, [S, keys, Hk · D] f32."""
        g, group = low.graph, a["group"]
        name = f"{kind}_cache_{group}_{a['layer']}"
        cache = self._in[name]
        new = g.cast(_flat(low, x), cache.dtype)
        self._written[name] = written = g.op("ScatterND", [cache, self._in[f"write_slots_{group}"], new])
        return g.cast(g.gather(written, self._in[f"read_slots_{group}"]), FLOAT)

    def _lengths(self, low: Lowering, group: int) -> Value:
        """[S]: how many of the keys that were read belong to each sequence."""
        ends, starts = self._in["context_lens"], self._in[f"first_keys_{group}"]
        return low.graph.once(("lengths", group), lambda: low.graph.op("Sub", [ends, starts]))

    # Masks.

    def _mask(self, low: Lowering, a: dict[str, Any]) -> Value | None:
        """What is added to the scores [S, 1 or H, Q, keys]; None where lengths and causality say it all."""
        g, group, window = low.graph, a["group"], a["window"]
        slopes = None if a["alibi"] is None else low.tensor(low.weight(a["alibi"], "slopes"))
        sinks = None if a["sinks"] is None else low.tensor(low.weight(a["sinks"], "sinks"))
        if slopes is None and sinks is None and not window and group not in self._sinks:
            return None

        def biases() -> Value:
            away, seen = self._distances(low, group, window)
            if slopes is None:
                return g.op("Where", [seen, g.scalar(0.0), g.scalar(_HIDDEN)], seen.shape, FLOAT)
            slope = g.op("Reshape", [slopes, g.ints(1, -1, 1, 1)], (1, slopes.shape[0], 1, 1))
            shape = (seen.shape[0], slopes.shape[0], *seen.shape[2:])
            bias = g.mul(slope, g.cast(away, FLOAT), shape)
            return g.op("Where", [seen, bias, g.scalar(_HIDDEN)], shape)

        base = g.once(("biases", group, window, slopes), biases)
        return base if sinks is None else self._with_sinks(low, group, window, base, sinks)

    def _distances(self, low: Lowering, group: int, window: int) -> tuple[Value, Value]:
        """Key position minus query position [S, 1, Q, keys], and whether the query sees the key."""
        g = low.graph
        shape = (SEQUENCES, 1, QUERIES, f"keys_{group}")

        def away() -> Value:
            one, zero = g.scalar(1, INT64), g.scalar(0, INT64)
            read = self._in[f"read_slots_{group}"]
            width = g.op("Gather", [g.op("Shape", [read], (2,), INT64), one], (), axis=0)
            depth = g.op("Gather", [g.op("Shape", [self._in["query_rows"]], (2,), INT64), one], (), axis=0)
            columns = g.op("Range", [zero, width, one], (f"keys_{group}",), INT64)
            if group in self._sinks:
                columns = g.op("Sub", [columns, one])
            column = g.op("Unsqueeze", [columns, g.ints(0, 1, 2)], (1, 1, 1, f"keys_{group}"))
            row = g.op(
                "Unsqueeze",
                [g.op("Range", [zero, depth, one], (QUERIES,), INT64), g.ints(0, 1, 3)],
                (1, 1, QUERIES, 1),
            )
            first = g.op(
                "Unsqueeze", [self._in[f"first_keys_{group}"], g.ints(1, 2, 3)], (SEQUENCES, 1, 1, 1)
            )
            end = g.op("Unsqueeze", [self._in["context_lens"], g.ints(1, 2, 3)], (SEQUENCES, 1, 1, 1))
            key = g.add(column, first, (SEQUENCES, 1, 1, f"keys_{group}"))
            query = g.op("Sub", [g.add(row, end, (SEQUENCES, 1, QUERIES, 1)), depth])
            return g.op("Sub", [key, query], shape)

        distance = g.once(("distances", group), away)

        def visible() -> Value:
            seen = g.op("LessOrEqual", [distance, g.scalar(0, INT64)], shape, BOOL)
            if window:
                seen = g.op("And", [seen, g.op("Greater", [distance, g.scalar(-window, INT64)], shape, BOOL)])
            if group in self._sinks:
                seen = g.op("And", [seen, g.op("Not", [self._sink_column(low, group)])], shape)
            return seen

        return distance, g.once(("seen", group, window), visible)

    def _sink_column(self, low: Lowering, group: int) -> Value:
        """[keys] bool: the first column, whose key and value are zero."""
        g = low.graph

        def make() -> Value:
            read = self._in[f"read_slots_{group}"]
            width = g.op("Gather", [g.op("Shape", [read], (2,), INT64), g.scalar(1, INT64)], (), axis=0)
            columns = g.op(
                "Range", [g.scalar(0, INT64), width, g.scalar(1, INT64)], (f"keys_{group}",), INT64
            )
            return g.op("Equal", [columns, g.scalar(0, INT64)], dtype=BOOL)

        return g.once(("sink column", group), make)

    def _with_sinks(self, low: Lowering, group: int, window: int, base: Value, sinks: Value) -> Value:
        """A sink is one more logit with no value: the score of the zero key plus the sink."""
        g = low.graph
        sink = g.op("Reshape", [sinks, g.ints(1, -1, 1, 1)], (1, sinks.shape[0], 1, 1))
        shape = (base.shape[0], sinks.shape[0], *base.shape[2:])
        return g.op("Where", [self._sink_column(low, group), sink, base], shape)


def _flat(low: Lowering, x: Value) -> Value:
    """[T, H, D] -> [T, H · D]."""
    rows, heads, width = x.shape
    assert isinstance(heads, int) and isinstance(width, int)
    return low.graph.reshape(x, (rows, heads * width))
