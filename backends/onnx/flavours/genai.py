"""The genai flavour: attention as com.microsoft's GroupQueryAttention, whose cache is one buffer that grows in place.

onnxruntime-genai pads a batch's prompts on the right. The operator reads from `seqlens_k` how many tokens of a row are real, so
padding is overwritten by the tokens that follow, and no query sees it. A window is what the operator calls
local_window_size: the newest so many keys, the query's own among them. Rotary embedding is done before, from position_ids.
Source: the operator's schema, "docs/ContribOperators.md" of ONNX Runtime 1.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto

from enginewright.backends.onnx.flavours.batched import BATCH, SEQUENCE, BatchedForm
from enginewright.backends.onnx.graph import FLOAT, INT64, MICROSOFT, Size, Value
from enginewright.backends.onnx.lowering import Lowering

__all__ = ["SharedBuffers"]

INT32 = TensorProto.INT32


class SharedBuffers(BatchedForm):
    """A `CacheForm`: past and present are one buffer [batch, Hk, capacity, D], of which a row's first tokens are filled."""

    def attend(
        self, low: Lowering, a: dict[str, Any], layer: int, qkv: Sequence[Value]
    ) -> tuple[Value, Value, Value]:
        g = low.graph
        _, heads, width = low.value(a["q"]).shape
        kv_heads, value_width = low.value(a["v"]).shape[1:]
        assert isinstance(heads, int) and isinstance(width, int) and isinstance(kv_heads, int)
        if a["alibi"] is not None:
            raise low.fail("ALiBi", "what GroupQueryAttention has: window, soft cap, sinks")
        if width != value_width:
            raise low.fail(
                f"keys of {width} features with values of {value_width}",
                "equal widths, as GroupQueryAttention has",
            )
        if width % 8:
            raise low.fail(f"heads of width {width}", "a multiple of 8, as GroupQueryAttention has")
        sinks = None if a["sinks"] is None else low.tensor(low.weight(a["sinks"], "sinks"))
        cache: tuple[Size, ...] = (BATCH, kv_heads, "capacity", width)
        past = [self.past[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value")]
        out, key, value = g.ops(
            "GroupQueryAttention",
            [*qkv, *past, self._last(low), self._total(low), None, None, None, None, sinks],
            [((BATCH, SEQUENCE, heads * width), FLOAT), (cache, FLOAT), (cache, FLOAT)],
            domain=MICROSOFT,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=float(a["scale"]),
            softcap=float(a["softcap"]),
            local_window_size=a["window"] or -1,
            do_rotary=0,
        )
        return out, key, value

    def _last(self, low: Lowering) -> Value:
        """seqlens_k [batch] int32: tokens of each row, less one."""
        g = low.graph

        def make() -> Value:
            count = g.op("ReduceSum", [self.mask, g.ints(1)], (BATCH,), keepdims=0)
            return g.cast(g.op("Sub", [count, g.scalar(1, INT64)]), INT32)

        return g.once("seqlens_k", make)

    def _total(self, low: Lowering) -> Value:
        """total_sequence_length [1] int32: the mask's width."""
        g = low.graph
        return g.once(
            "total_sequence_length",
            lambda: g.cast(g.op("Shape", [self.mask], (1,), INT64, start=1, end=2), INT32),
        )
