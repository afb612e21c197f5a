"""The optimum flavour: standard Attention over a cache that grows by concatenation, with any padding that attention_mask says.

transformers' `generate` pads prompts on the left and gives positions that are counted from the mask. Padding keeps its column, so
the distance of two tokens is that of their columns: causality, windows and ALiBi are made from columns. Padded keys are hidden.
A row of the batch that is all padding so far sees nothing; its scores are equal and finite, and nobody reads its result.

Optimum 0.1 makes the first, empty cache with heads and widths that it guesses from the configuration. Since nothing stands in an
empty cache, the inputs are declared with open axes and given the model's own sizes by a Reshape, which copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginewright.backends.onnx.flavours.batched import BATCH, SEQUENCE, TOTAL, BatchedForm
from enginewright.backends.onnx.graph import BOOL, FLOAT, INT64, Size, Value
from enginewright.backends.onnx.lowering import Lowering

__all__ = ["GrowingCaches"]

_HIDDEN = np.float32(-1e38)  # a row that sees nothing stays finite


class GrowingCaches(BatchedForm):
    """A `CacheForm`: present is past with the new keys and values after it."""

    def cache_shape(self, kind: str, heads: int, width: int) -> list[Size]:
        return [BATCH, f"{kind}_heads", "past", f"{kind}_width"]

    def attend(
        self, low: Lowering, a: dict[str, Any], layer: int, qkv: Sequence[Value]
    ) -> tuple[Value, Value, Value]:
        g = low.graph
        sides = [low.value(a[name]).shape[1:] for name in ("q", "k", "v")]
        (heads, _), (kv_heads, _), (_, value_dim) = sides
        assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(value_dim, int)
        query, *new = (self._headed(low, x, *side) for x, side in zip(qkv, sides, strict=True))  # type: ignore[arg-type]
        present = [
            self._grown(low, self.past[f"past_key_values.{layer}.{kind}"], x)
            for kind, x in zip(("key", "value"), new, strict=True)
        ]
        sinks = None if a["sinks"] is None else low.tensor(low.weight(a["sinks"], "sinks"))
        slopes = None if a["alibi"] is None else low.tensor(low.weight(a["alibi"], "slopes"))
        mask, read = self._biases(low, a["window"], slopes), list(present)
        if sinks is not None:
            mask = self._with_sinks(low, mask, sinks)
            read = [self._after_zeros(low, x) for x in present]
        out = g.op(
            "Attention",
            [query, *read, mask],
            (BATCH, heads, SEQUENCE, value_dim),
            scale=float(a["scale"]),
            softcap=float(a["softcap"]),
        )
        out = g.op("Transpose", [out], (BATCH, SEQUENCE, heads, value_dim), perm=[0, 2, 1, 3])
        return out, present[0], present[1]

    # Caches, [batch, heads, tokens, D].

    def _headed(self, low: Lowering, x: Value, heads: int, width: int) -> Value:
        g = low.graph
        split = g.op("Reshape", [x, self.sizes(low, heads, width)], (BATCH, SEQUENCE, heads, width))
        return g.op("Transpose", [split], (BATCH, heads, SEQUENCE, width), perm=[0, 2, 1, 3])

    def _grown(self, low: Lowering, past: Value, new: Value) -> Value:
        g = low.graph
        _, heads, _, width = new.shape
        assert isinstance(heads, int) and isinstance(width, int)

        def sizes() -> Value:
            batch = g.op("Shape", [self.ids], (1,), INT64, start=0, end=1)
            cached = g.op("Sub", [self._extent(low, self.mask), self._extent(low, self.ids)])
            parts = [batch, g.ints(heads), g.op("Unsqueeze", [cached, g.ints(0)], (1,)), g.ints(width)]
            return g.op("Concat", parts, (4,), axis=0)

        wanted = g.once(("past sizes", heads, width), sizes)
        held = g.op("Reshape", [past, wanted], (BATCH, heads, "past", width), allowzero=1)
        return g.op("Concat", [held, new], (BATCH, heads, TOTAL, width), axis=2)

    def _after_zeros(self, low: Lowering, x: Value) -> Value:
        """With a first token of zeros, which a sink's column of the mask belongs to."""
        g = low.graph
        return g.op("Pad", [x, g.ints(0, 0, 1, 0, 0, 0, 0, 0)], (*x.shape[:2], "total and sink", x.shape[3]))

    # Masks, added to the scores [batch, heads or 1, sequence, total].

    def _extent(self, low: Lowering, x: Value) -> Value:
        """The second axis of `input_ids` or of the mask, int64 []."""
        g = low.graph

        def make() -> Value:
            return g.op("Gather", [g.op("Shape", [x], (2,), INT64), g.scalar(1, INT64)], (), axis=0)

        return g.once(("extent", x.name), make)

    def _distances(self, low: Lowering) -> Value:
        """Key's column less query's [1, 1, sequence, total]."""
        g = low.graph

        def make() -> Value:
            total, new, one = self._extent(low, self.mask), self._extent(low, self.ids), g.scalar(1, INT64)
            keys = g.op("Range", [g.scalar(0, INT64), total, one], (TOTAL,), INT64)
            queries = g.op("Range", [g.op("Sub", [total, new]), total, one], (SEQUENCE,), INT64)
            key = g.op("Unsqueeze", [keys, g.ints(0, 1, 2)], (1, 1, 1, TOTAL))
            query = g.op("Unsqueeze", [queries, g.ints(0, 1, 3)], (1, 1, SEQUENCE, 1))
            return g.op("Sub", [key, query], (1, 1, SEQUENCE, TOTAL))

        return g.once("distances", make)

    def _seen(self, low: Lowering, window: int) -> Value:
        """Whether a query sees a key [batch, 1, sequence, total]."""
        g = low.graph

        def make() -> Value:
            away = self._distances(low)
            real = g.op("Unsqueeze", [g.cast(self.mask, BOOL), g.ints(1, 2)], (BATCH, 1, 1, TOTAL))
            seen = g.op("LessOrEqual", [away, g.scalar(0, INT64)], dtype=BOOL)
            if window:
                seen = g.op("And", [seen, g.op("Greater", [away, g.scalar(-window, INT64)], dtype=BOOL)])
            return g.op("And", [seen, real], (BATCH, 1, SEQUENCE, TOTAL))

        return g.once(("seen", window), make)

    def _biases(self, low: Lowering, window: int, slopes: Value | None) -> Value:
        g = low.graph

        def make() -> Value:
            seen = self._seen(low, window)
            if slopes is None:
                return g.op("Where", [seen, g.scalar(0.0), g.scalar(_HIDDEN)], seen.shape, FLOAT)
            shape = (BATCH, slopes.shape[0], SEQUENCE, TOTAL)
            slope = g.op("Reshape", [slopes, g.ints(1, -1, 1, 1)], (1, slopes.shape[0], 1, 1))
            bias = g.mul(slope, g.cast(self._distances(low), FLOAT), (1, *shape[1:]))
            return g.op("Where", [seen, bias, g.scalar(_HIDDEN)], shape, FLOAT)

        return g.once(("biases", window, slopes), make)

    def _with_sinks(self, low: Lowering, mask: Value, sinks: Value) -> Value:
        """A sink is one more logit with no value: the score of the token of zeros, plus the sink."""
        g, heads = low.graph, sinks.shape[0]
        sink = g.op("Reshape", [sinks, g.ints(1, -1, 1, 1)], (1, heads, 1, 1))
        column = g.op("Expand", [sink, self._column(low)], (BATCH, heads, SEQUENCE, 1))
        assert isinstance(heads, int)
        wide = g.op("Expand", [mask, g.ints(1, heads, 1, 1)], (BATCH, heads, *mask.shape[2:]))
        return g.op("Concat", [column, wide], (BATCH, heads, SEQUENCE, "total and sink"), axis=3)

    def _column(self, low: Lowering) -> Value:
        """[batch, 1, sequence, 1], the shape of one column of the mask for all heads."""
        g = low.graph

        def make() -> Value:
            count = g.op("Shape", [self.ids], (1,), INT64, start=0, end=1)
            rows = g.op("Shape", [self.ids], (1,), INT64, start=1, end=2)
            return g.op("Concat", [count, g.ints(1), rows, g.ints(1)], (4,), axis=0)

        return g.once("sink column", make)
