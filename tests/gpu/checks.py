"""What is asked of a TensorRT executor on any device: a GPU (test_gpu.py), or an imagined one (tests/backends/tensorrt)."""

from __future__ import annotations

from typing import Any

import numpy as np

from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.backends.tensorrt.cuda import PinnedMemory
from enginewright.backends.tensorrt.executor import TensorRTExecutor
from enginewright.passes.program import Program
from tests.backends.stepping import Stepper

__all__ = ["a_graph_gives_the_plain_run_s_bits", "pages_hold_what_the_reference_s_hold"]


def read_pools(executor: TensorRTExecutor) -> dict[str, np.ndarray]:
    """Every pool as f16 [pages, kv heads, page, dim], the zero page among them."""
    pools, (_, stream) = executor._having_pools(), executor._running()
    found = {}
    for name, shape in pools.shapes.items():
        pinned = PinnedMemory(executor._cuda, int(np.prod(shape)) * 2)
        stream.to_host(pinned, pools.addresses[name], pinned.size)
        stream.synchronise()
        found[name] = pinned.bytes.view(np.float16).reshape(shape).copy()
        pinned.close()
    return found


def a_graph_gives_the_plain_run_s_bits(executor: TensorRTExecutor) -> None:
    """The first step of a shape runs plainly, the same step again by its graph: logits and pools are the same, bit for bit.

    Three sequences are padded to four, then five to eight.
    """
    for names in ("abc", "abcde"):
        stepper = Stepper(executor)
        stepper.feed(**{name: [3 + i, 7, 11 + i] for i, name in enumerate(names)})
        rows = {name: [20 + i] for i, name in enumerate(names)}
        seen = []
        for _ in range(3):
            seen.append((stepper.feed(**rows), read_pools(executor)))
            for name in rows:
                stepper.lengths[name] -= 1
        (captured,) = executor._captured.values()
        assert captured.graph is not None, "the decode step was not captured"
        for logits, pools in seen[1:]:
            for name in rows:
                np.testing.assert_array_equal(logits[name], seen[0][0][name])
            for name, pool in pools.items():  # compared as bits: what was never written is NaN
                pages = pool[:-1].view(np.uint16), seen[0][1][name][:-1].view(np.uint16)
                np.testing.assert_array_equal(*pages)


def pages_hold_what_the_reference_s_hold(executor: TensorRTExecutor, program: Program, bound: float) -> None:
    """Chunks and decodes of two sequences leave in every written slot the keys and values that the reference computes.

    What nothing has written is NaN as before, and the zero page is zeros. `bound`: of a difference, over a pool's largest value.
    """
    held: list[dict[str, Any]] = []
    for serving in (executor, ReferenceExecutor(program)):
        stepper = Stepper(serving)
        stepper.feed(a=list(range(5, 26)), b=[9, 8, 7])
        stepper.feed(a=[4, 2, 6], b=[1])
        stepper.feed(a=[40], b=[41])
        held.append(read_pools(executor) if serving is executor else dict(serving._pools))
    for name, pool in held[0].items():
        wanted = held[1][name].numpy().transpose(0, 2, 1, 3)  # [pages, page, kv heads, dim]
        pages, zero = pool[:-1].astype(np.float32), pool[-1]
        np.testing.assert_array_equal(np.isnan(pages), np.isnan(wanted))
        written = ~np.isnan(wanted)
        assert written.any() and not written.all()
        error = np.abs(pages[written] - wanted[written]).max() / np.abs(wanted[written]).max()
        assert error <= bound, f"{name}: {error}"
        # Padding is written there, one slot a padding sequence (metadata.py): none here, two sequences fill their bucket.
        assert not zero.any()
