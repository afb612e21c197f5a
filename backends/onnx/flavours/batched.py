"""What both flavours share: a batch of padded rows instead of packed tokens, and one cache a layer.

| input, int64 | shape | meaning |
|---|---|---|
| input_ids, position_ids | [batch, sequence] | the new tokens, and where they stand; what pads a row may stand anywhere |
| attention_mask | [batch, total] | 1 for every token of a row, cached or new; 0 for padding |
| past_key_values.N.key, .value (f32) | [batch, Hk, past, D] | layer N's cache |

Outputs: logits [batch, sequence, vocab] f32 of every position, and present.N.key, .value. A Program knows tokens, not rows. So
the batch is laid end to end, padding and all, and only attention takes it apart again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from enginewright.backends.onnx.graph import FLOAT, INT64, Size, Value
from enginewright.backends.onnx.lowering import TOKENS, Lowering, arguments, op_name
from enginewright.recipes.errors import LoweringError

__all__ = ["BATCH", "SEQUENCE", "TOTAL", "BatchedForm"]

BATCH, SEQUENCE, TOTAL = "batch", "sequence", "total"


class BatchedForm(ABC):
    """A `CacheForm` (lowering.py) whose inputs are rows of a batch. A flavour says how attention reads the cache."""

    def __init__(self) -> None:
        self.ids = self.mask = Value("", ())
        self.past: dict[str, Value] = {}
        self._present: dict[str, Value] = {}
        self._layers: dict[tuple[int, int], int] = {}

    # Inputs and outputs.

    def inputs(self, low: Lowering) -> Mapping[str, Value]:
        g = low.graph
        self.ids = g.input("input_ids", [BATCH, SEQUENCE])
        self.mask = g.input("attention_mask", [BATCH, TOTAL])
        where = g.input("position_ids", [BATCH, SEQUENCE])
        for node in low.program.graph.nodes:
            if op_name(node) == "ew::paged_attention":
                a = arguments(node)
                self._layers[a["group"], a["layer"]] = layer = len(self._layers)
                for kind, argument in (("key", a["k"]), ("value", a["v"])):
                    heads, width = (int(size) for size in argument.meta["val"].shape[1:])
                    name = f"past_key_values.{layer}.{kind}"
                    self.past[name] = g.input(name, self.cache_shape(kind, heads, width), FLOAT)
        if sorted(self._layers.values()) != list(range(len(self._layers))):
            raise LoweringError("two attention nodes share a cache", expected="one cache a layer")
        return {"tokens": g.reshape(self.ids, (TOKENS,)), "positions": g.reshape(where, (TOKENS,))}

    def cache_shape(self, kind: str, heads: int, width: int) -> list[Size]:
        """The shape that a layer's cache of keys or values is declared with."""
        return [BATCH, heads, "past", width]

    def outputs(self, low: Lowering, logits: Value) -> None:
        low.graph.output(self.rows(low, logits), "logits")
        for name, value in self._present.items():
            low.graph.output(value, name)

    # Attention.

    def attention(self, low: Lowering, node: fx.Node, a: dict[str, Any]) -> Value:
        if a["kv_format"] != "f32":
            raise low.fail(f"a cache of {a['kv_format']} keys and values", "kv_cache.format f32")
        q, k, v = (low.value(a[name]) for name in ("q", "k", "v"))
        heads, value_dim = q.shape[1], v.shape[2]
        assert isinstance(heads, int) and isinstance(value_dim, int)
        layer = self._layers[a["group"], a["layer"]]
        out, key, value = self.attend(low, a, layer, [self.rows(low, flat(low, x)) for x in (q, k, v)])
        self._present[f"present.{layer}.key"] = key
        self._present[f"present.{layer}.value"] = value
        return low.graph.reshape(out, (q.shape[0], heads, value_dim))

    @abstractmethod
    def attend(
        self, low: Lowering, a: dict[str, Any], layer: int, qkv: Sequence[Value]
    ) -> tuple[Value, Value, Value]:
        """Attention of queries, keys and values, each [batch, sequence, heads · D]; returns the result, of as many rows in the
        same order, and the layer's keys and values as they are cached from now on."""

    # Shapes.

    def sizes(self, low: Lowering, *tail: int) -> Value:
        """Int64: [batch, sequence, …tail], for a Reshape."""
        g = low.graph

        def make() -> Value:
            count = g.once("batch and sequence", lambda: g.op("Shape", [self.ids], (2,), INT64))
            return g.op("Concat", [count, g.ints(*tail)], (2 + len(tail),), axis=0)

        return g.once(("sizes", tail), make)

    def rows(self, low: Lowering, x: Value, *split: int) -> Value:
        """[tokens, W] -> [batch, sequence, W], or with the last axis split."""
        width = x.shape[-1]
        assert isinstance(width, int)
        tail = split or (width,)
        return low.graph.op("Reshape", [x, self.sizes(low, *tail)], (BATCH, SEQUENCE, *tail))


def flat(low: Lowering, x: Value) -> Value:
    """[T, H, D] -> [T, H · D]."""
    rows, heads, width = x.shape
    assert isinstance(heads, int) and isinstance(width, int)
    return low.graph.reshape(x, (rows, heads * width))
