"""The TensorRT executor: pools and steps on one GPU, with cuda-python and the library's runtime; no torch.

Every step is one transfer of one pinned block of int32 (metadata.py), one run of the network, one transfer of logits back,
and one wait, all in one stream. A step in which every sequence has one row takes the decode profile: it is padded to a bucket
of sequences and of table width, and from the second time on a CUDA graph of that bucket is launched. Any other step takes the
chunk profile.

Padding writes to the zero page alone, which no sequence reads (bindings.py); so a padded step changes what the plain one
does, and nothing else.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import KvGroupInfo, StepError, StepInput, StepLimits, check_step
from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.cuda import Cuda, DeviceError, DeviceMemory, Graph, PinnedMemory, Stream
from enginewright.backends.tensorrt.metadata import Shape, block_offsets, pack, step_arrays
from enginewright.backends.tensorrt.plan import Context, Plan
from enginewright.backends.tensorrt.pools import Description, KvGroupLayers, Pools

__all__ = ["TensorRTExecutor", "buckets"]

MOST_GRAPHS = 32  # captured at a time; the one used longest ago makes room
_PADDING = 8  # sequences between two buckets at most: what padding may cost a step

_log = logging.getLogger(__name__)


def buckets(most: int, page_size: int) -> list[int]:
    """The numbers of sequences that decode steps are padded to: powers of two, then every eighth, up to `most`.

    A padding sequence takes a slot of the zero page, so there are fewer than `page_size` of them.
    """
    apart = min(_PADDING, page_size)
    found, at = [], 1
    while at < most:
        found.append(at)
        at += min(at, apart)
    return [*found, most]


@dataclass
class _Captured:
    """A decode step of one shape: its context, and the graph once it is recorded (None: cannot be)."""

    context: Context
    graph: Graph | None = None

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
        self.context.close()


class TensorRTExecutor:
    """Runs a plan. See `enginewright.backends.base.Executor` for the methods' contract.

    `max_tokens`, `max_rows`: no more than the plan's profiles hold, whatever is asked for. `max_sequences`: of a step;
    `max_pages`: of each group's pool.
    `device`: the GPU, its driver and the library, in words. `graphs`: whether decode steps are captured.
    """

    def __init__(
        self,
        plan: Path,
        description: Description,
        library: Any,
        cuda: Cuda,
        device: str = "",
        *,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        graphs: bool = True,
    ) -> None:
        limits = description.limits
        self.device = device
        self.vocab_size = description.vocab_size
        self.max_positions = limits.context
        self.max_sequences = limits.sequences
        self.max_pages = [count - 1 for count in limits.pages]  # one is the zero page
        self.max_tokens = min(max_tokens or limits.tokens, limits.tokens)
        self.max_rows = min(max_rows or self.max_tokens, self.max_tokens)
        self.kv_groups: Sequence[KvGroupInfo] = [_info(group, limits) for group in description.groups]
        self._description, self._limits = description, limits
        self._cuda, self._graphs = cuda, graphs
        self._buckets = buckets(bindings.sizes("decode", limits)["S"][2], limits.page_size)
        self._rows = max(self.max_rows, self._buckets[-1])  # that the buffer of logits holds
        self._pools: Pools | None = None
        self._block: _Block | None = None
        self._captured: OrderedDict[Shape, _Captured] = OrderedDict()
        self._chunks: Context | None = None
        self._decodes: Context | None = None
        self._logits: list[Any] = []
        self._plan: Plan | None = None
        self._stream: Stream | None = Stream(cuda)
        try:
            expected_in = bindings.inputs(description.groups, limits.page_size)
            expected_out = bindings.outputs(description.groups, limits.page_size, self.vocab_size)
            self._plan = Plan(
                plan,
                library,
                cuda,
                [binding.name for binding in (*expected_in, *expected_out)],
                {b.name: b.name.removesuffix("_out") for b in expected_out if b.name.endswith("_out")},
            )
            size = self._rows * self.vocab_size * 4
            self._logits.append(DeviceMemory(cuda, size))
            self._logits.append(PinnedMemory(cuda, size))
            self._chunks = self._plan.context("chunk", self._stream, eager=False)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ pools

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        _, stream = self._running()
        pages = [int(count) for count in pages_per_group]
        most = self.max_pages
        if len(pages) != len(most) or not all(1 <= n <= m for n, m in zip(pages, most, strict=True)):
            raise StepError(
                "pools of so many pages cannot be made", found=pages, expected=f"1 to {most} pages"
            )
        stream.synchronise()
        self._drop_pools()
        self._pools = Pools(self._cuda, stream, self._description, pages)
        try:
            self._block = _Block(
                self._cuda, max(self._longest_block(kind, pages) for kind in bindings.PROFILES)
            )
        except BaseException:
            self._drop_pools()
            raise

    def _longest_block(self, kind: str, pages: list[int]) -> int:
        """int32 of the block of the largest step of a profile."""
        sizes = bindings.profile(kind, bindings.step_inputs(len(pages)), self._limits)
        shapes = {name: shape[2] for name, shape in sizes.items()}
        for g, count in enumerate(pages):
            shapes |= {f"page_starts_{g}": (count + 2,), f"page_first_{g}": (count + 1,)}
        return block_offsets(shapes, len(pages))[1]

    def _drop_pools(self) -> None:
        """Give back the pools and all that was captured over them. Nothing runs."""
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()
        pools, block = self._pools, self._block
        self._pools = self._block = None
        for owned in (block, pools):
            if owned is not None:
                owned.close()

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._running()
        self._having_pools().copy(group, sources, destinations)

    def fill_pool(self, value: float) -> None:
        """Set every number of the runtime's pages to zero or NaN: tests see by it that nothing unwritten is read."""
        self._running()
        self._having_pools().fill(value)

    # ------------------------------------------------------------------------------------------------ steps

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        _, stream = self._running()
        pages = self._having_pools().pages
        check_step(
            step,
            StepLimits(
                self.max_tokens, self.max_rows, self.vocab_size, self.max_positions, self.kv_groups, pages
            ),
        )
        if len(step.context_lens) > self.max_sequences:
            raise StepError(
                "malformed step: context_lens",
                found=f"{len(step.context_lens)} sequences",
                expected=f"at most {self.max_sequences}, which the plan was built for",
            )
        shape = self._padded(step)
        arrays = step_arrays(step, self.kv_groups, pages, shape)
        try:
            if shape is not None:
                self._decode(arrays, shape)
            else:
                assert self._chunks is not None
                self._send(arrays, self._chunks)
                self._chunks.run(stream)
            return self._fetch(len(step.logit_rows))
        except BaseException:
            with suppress(DeviceError):  # the next step writes the block that may still be on its way
                stream.synchronise()
            raise

    def _padded(self, step: StepInput) -> Shape | None:
        """The shape of the decode profile that holds the step; None for a step that has chunks."""
        count = len(step.context_lens)
        if len(step.tokens) != count or count > self._buckets[-1] or len(step.logit_rows) > count:
            return None
        needed = -(-int(step.context_lens.max()) // self._limits.page_size)
        width = min(1 << (needed - 1).bit_length(), self._limits.width)
        return Shape(next(bucket for bucket in self._buckets if bucket >= count), width)

    def _decode(self, arrays: Mapping[str, npt.NDArray[np.int32]], shape: Shape) -> None:
        """Run a padded step: by its graph, where there is one; else plainly, and record the graph after it."""
        plan, stream = self._running()
        if not self._graphs:
            if self._decodes is None:
                self._decodes = plan.context("decode", stream, eager=False)
            self._send(arrays, self._decodes)
            self._decodes.run(stream)
            return
        known = self._captured.get(shape)
        if known is None:
            while len(self._captured) >= MOST_GRAPHS:
                self._captured.popitem(last=False)[1].close()
            known = _Captured(plan.context("decode", stream, eager=True))
            try:
                self._send(arrays, known.context)
                known.context.run(stream)
                known.graph = self._record(known.context, stream)
            except BaseException:
                known.close()
                raise
            self._captured[shape] = known
            return
        self._captured.move_to_end(shape)
        self._send(arrays, known.context)
        if known.graph is not None:
            known.graph.launch()
        else:
            known.context.run(stream)

    def _record(self, context: Context, stream: Stream) -> Graph | None:
        """Capture what the context has just run. Where that cannot be, steps of this shape go on without."""
        if not context.capturable(stream):
            _log.info("the plan cannot be captured as a CUDA graph; decode steps run without")
            return None
        try:
            return Graph(self._cuda, stream, lambda: context.run(stream))
        except DeviceError as error:
            _log.warning("no CUDA graph could be captured, decode steps run without: %s", error)
            return None

    def _send(self, arrays: Mapping[str, npt.NDArray[np.int32]], context: Context) -> None:
        """Put the step's block on its way, and give the context shapes and addresses."""
        assert self._block is not None and self._pools is not None and self._stream is not None
        addresses = self._block.send(arrays, len(self._pools.pages), self._stream)
        context.bind(
            {name: array.shape for name, array in arrays.items()} | self._pools.shapes,
            {**addresses, **self._pools.addresses, "logits": self._logits[0].address},
        )

    def _fetch(self, rows: int) -> npt.NDArray[np.float32]:
        """Wait for the step, and return its first rows of logits in memory of their own."""
        (_, stream), (device, pinned) = self._running(), self._logits
        size = rows * self.vocab_size * 4
        if size:
            stream.to_host(pinned, device.address, size)
        stream.synchronise()
        return pinned.bytes[:size].view(np.float32).reshape(rows, self.vocab_size).copy()

    # ------------------------------------------------------------------------------------------------- life

    def memory(self) -> Mapping[str, int]:
        """Bytes on the device: weights (the plan's size, which is about that), pool, arena (between layers), logits and the
        step's block; `pinned` is the host's."""
        block = self._block.size if self._block is not None else 0
        arena = self._plan.memory if self._plan is not None else None
        logits = self._logits[0].size if self._logits else 0
        return {
            "weights": self._plan.bytes if self._plan is not None else 0,
            "pool": self._pools.size if self._pools is not None else 0,
            "arena": arena.size if arena is not None else 0,
            "scratch": logits + block,
            "pinned": logits + block,
        }

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        with suppress(
            DeviceError
        ):  # a device that has failed reports it at every call: give back what can be
            stream.synchronise()
        contexts = [context for context in (self._chunks, self._decodes) if context is not None]
        plan = [self._plan] if self._plan is not None else []
        self._chunks = self._decodes = self._plan = None
        for part in (self._drop_pools, *(owned.close for owned in (*contexts, *plan, *self._logits, stream))):
            with suppress(DeviceError):
                part()
        self._logits = []

    def _running(self) -> tuple[Plan, Stream]:
        if self._plan is None or self._stream is None:
            raise DeviceError("the executor is closed")
        return self._plan, self._stream

    def _having_pools(self) -> Pools:
        if self._pools is None:
            raise StepError("there is no pool", action="call create_pool first")
        return self._pools


class _Block:
    """A step's int32 inputs, pinned on the host and on the device: one transfer carries them all."""

    def __init__(self, cuda: Cuda, length: int) -> None:
        self.size = 4 * length
        self._pinned = PinnedMemory(cuda, self.size)
        try:
            self._device = DeviceMemory(cuda, self.size)
        except BaseException:
            self._pinned.close()
            raise

    def send(
        self, arrays: Mapping[str, npt.NDArray[np.int32]], groups: int, stream: Stream
    ) -> dict[str, int]:
        """Pack the arrays and put them on their way; returns the address of each on the device."""
        block, offsets = pack(arrays, groups, self._pinned.bytes.view(np.int32))
        assert block.ctypes.data == self._pinned.address, "a step is larger than its profile's largest"
        stream.to_device(self._device.address, self._pinned, block.nbytes)
        return {name: self._device.address + 4 * offset for name, offset in offsets.items()}

    def close(self) -> None:
        self._device.close()
        self._pinned.close()


def _info(group: KvGroupLayers, limits: bindings.Limits) -> KvGroupInfo:
    return KvGroupInfo(
        group.window,
        limits.page_size,
        sum(layer.page_bytes(limits.page_size) for layer in group.layers),
        group.layers[0].format,
        len(group.layers),
    )
