"""A GPU without a GPU: the calls of the CUDA runtime that the executor makes, as documented, with every rule checked.

`FakeDevice().runtime` stands for `cuda.bindings.runtime`. Work put into a stream waits there until the stream is synchronised; so
whoever reads too early reads poison, and whoever changes a buffer that is still on its way is caught when it runs. Memory is
the host's own, at real addresses, and every use of it is held to what is allocated at that time. A broken rule raises
`BrokenRule`, which nothing catches.

From NVIDIA's CUDA Runtime API, "Memory Management", "Stream Management", "Graph Management": what a copy's direction means,
that an asynchronous copy needs page-locked memory, what frees what, that a captured stream runs nothing and may not be waited
for.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

POISON = 0xA5


class BrokenRule(BaseException):
    """The code under test did what the documentation forbids. No `except Exception` hides it."""


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


OK = cudaError_t.cudaSuccess


@dataclass
class Block:
    """An allocation: `memory` uint8 [size] at `address`."""

    address: int
    memory: np.ndarray
    pinned: bool


@dataclass
class FakeStream:
    work: list[Work] = field(default_factory=list)
    captured: list[Work] | None = None  # what is being captured; None where nothing is
    invalid: bool = False


@dataclass
class Work:
    """Something in a stream. `touches`: (address, size) of all memory that it reads or writes."""

    run: Callable[[], None]
    touches: list[tuple[int, int]]
    check: Callable[[], None] = lambda: None  # what must still hold when a graph that has it is launched


class FakeDevice:
    """One GPU of `memory` bytes. `count`, `driver`: what is found. `fail`: names of calls that fail, with their errors."""

    def __init__(self, memory: int = 1 << 28, architecture: tuple[int, int] = (9, 0)) -> None:
        self.total = memory
        self.architecture = architecture
        self.count, self.driver = 1, 13000
        self.fail: dict[str, cudaError_t] = {}
        self.blocks: dict[int, Block] = {}
        self.streams: dict[int, FakeStream] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, tuple[list[Work], int]] = {}
        self.calls: list[str] = []
        self.launches = 0
        self._handles = 100
        self._kept: list[Any] = []
        self.runtime = SimpleNamespace(
            cudaError_t=cudaError_t,
            cudaMemcpyKind=cudaMemcpyKind,
            cudaStreamCaptureMode=cudaStreamCaptureMode,
            cudaStreamNonBlocking=1,
            **{name: self._named(name) for name in dir(self) if name.startswith("cuda")},
        )

    def _named(self, name: str) -> Callable[..., tuple[Any, ...]]:
        method = getattr(self, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fail:
                return (self.fail[name], *([None] if name not in _NO_VALUE else []))
            found = method(*arguments)
            return found if isinstance(found, tuple) else (found,)

        return call

    # ------------------------------------------------------------------------------------------- inspection

    def assert_clean(self) -> None:
        """Everything was given back, and nothing waits."""
        assert not self.blocks, f"{len(self.blocks)} allocations leak"
        assert not self.streams, "a stream leaks"
        assert not self.graphs and not self.executables, "graphs leak"

    def find(self, address: int, size: int, *, pinned: bool | None = None) -> np.ndarray:
        """uint8 [size]: the memory at an address, which must lie in one live allocation (of the given kind)."""
        for block in self.blocks.values():
            start = address - block.address
            if start >= 0 and start + size <= len(block.memory):
                if pinned is not None and block.pinned != pinned:
                    kind = "pinned" if block.pinned else "the device's"
                    raise BrokenRule(f"memory at {address:#x} is {kind}, which this use does not allow")
                return block.memory[start : start + size]
        raise BrokenRule(
            f"{size} bytes at {address:#x} lie in no live allocation (pageable, freed, or too long)"
        )

    def stream(self, handle: Any) -> FakeStream:
        if int(handle) not in self.streams:
            raise BrokenRule(
                f"{handle!r} is no live stream that was created (the default stream is not to be used)"
            )
        return self.streams[int(handle)]

    def put(self, handle: Any, work: Work) -> None:
        """Put work into a stream, or into what it captures."""
        stream = self.stream(handle)
        for address, size in work.touches:
            self.find(address, size)
        (stream.work if stream.captured is None else stream.captured).append(work)

    def capturing(self) -> bool:
        return any(stream.captured is not None for stream in self.streams.values())

    def _new(self) -> int:
        self._handles += 1
        return self._handles

    def _forbid_in_capture(self) -> bool:
        """Whether a capture goes on, which the call breaks: it becomes invalid."""
        for stream in self.streams.values():
            if stream.captured is not None:
                stream.invalid = True
        return self.capturing()

    # ------------------------------------------------------------------------------------------------ device

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, self.driver

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return (OK, self.count) if self.count else (cudaError_t.cudaErrorNoDevice, None)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        major, minor = self.architecture
        return OK, SimpleNamespace(name=b"Imagined GPU", major=major, minor=minor, totalGlobalMem=self.total)

    def cudaGetErrorName(self, error: cudaError_t) -> tuple[Any, ...]:
        return OK, error.name.encode()

    def cudaGetErrorString(self, error: cudaError_t) -> tuple[Any, ...]:
        return OK, error.name.removeprefix("cudaError").lower().encode()

    # ------------------------------------------------------------------------------------------------ memory

    def _allocate(self, size: int, pinned: bool) -> tuple[Any, ...]:
        if self._forbid_in_capture():
            return cudaError_t.cudaErrorStreamCaptureUnsupported, None
        if size <= 0:
            raise BrokenRule(f"an allocation of {size} bytes")
        taken = sum(len(block.memory) for block in self.blocks.values() if not block.pinned)
        if not pinned and taken + size > self.total:
            return cudaError_t.cudaErrorMemoryAllocation, None
        raw = (ctypes.c_uint8 * (size + 256))()
        self._kept.append(raw)  # an address is never given out twice, so a stale one is always found
        start = -ctypes.addressof(raw) % 256
        memory = np.ctypeslib.as_array(raw)[start : start + size]
        memory[:] = POISON
        address = ctypes.addressof(raw) + start
        self.blocks[address] = Block(address, memory, pinned)
        return OK, address

    def _free(self, address: int, pinned: bool) -> cudaError_t:
        if self._forbid_in_capture():
            return cudaError_t.cudaErrorStreamCaptureUnsupported
        block = self.blocks.get(int(address))
        if block is None or block.pinned != pinned:
            raise BrokenRule(f"{address:#x} is freed twice, or by the wrong call, or was never allocated")
        for stream in self.streams.values():
            for work in stream.work:
                if any(
                    a < block.address + len(block.memory) and block.address < a + s for a, s in work.touches
                ):
                    raise BrokenRule("memory is freed that waiting work uses")
        block.memory[:] = POISON
        del self.blocks[int(address)]
        return OK

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        return self._allocate(size, False)

    def cudaMallocHost(self, size: int) -> tuple[Any, ...]:
        return self._allocate(size, True)

    def cudaFree(self, address: int) -> cudaError_t:
        return self._free(address, False)

    def cudaFreeHost(self, address: int) -> cudaError_t:
        return self._free(address, True)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: cudaMemcpyKind, stream: Any
    ) -> cudaError_t:
        names = {
            cudaMemcpyKind.cudaMemcpyHostToDevice: (False, True),
            cudaMemcpyKind.cudaMemcpyDeviceToHost: (True, False),
            cudaMemcpyKind.cudaMemcpyDeviceToDevice: (False, False),
        }
        to_pinned, from_pinned = names[kind]
        into = self.find(target, size, pinned=to_pinned)
        out_of = self.find(source, size, pinned=from_pinned)
        if max(target, source) < min(target, source) + size:
            raise BrokenRule("a copy's source and target overlap")
        before = out_of.copy() if from_pinned else None
        if to_pinned:
            into[:] = POISON  # what is read before the stream was waited for

        def run() -> None:
            if before is not None and not np.array_equal(before, out_of):
                raise BrokenRule("pinned memory was changed while a copy of it was on its way")
            into[:] = out_of

        self.put(stream, Work(run, [(target, size), (source, size)]))
        return OK

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: Any) -> cudaError_t:
        memory = self.find(address, size, pinned=False)
        self.put(stream, Work(lambda: memory.fill(value), [(address, size)]))
        return OK

    # ------------------------------------------------------------------------------------- streams and graphs

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        handle = self._new()
        self.streams[handle] = FakeStream()
        return OK, handle

    def cudaStreamDestroy(self, handle: Any) -> cudaError_t:
        if self.stream(handle).captured is not None:
            raise BrokenRule("a stream is destroyed while it captures")
        self._drain(self.stream(handle))
        del self.streams[int(handle)]
        return OK

    def cudaStreamSynchronize(self, handle: Any) -> cudaError_t:
        stream = self.stream(handle)
        if stream.captured is not None:
            stream.invalid = True
            return cudaError_t.cudaErrorStreamCaptureUnsupported
        self._drain(stream)
        return OK

    def _drain(self, stream: FakeStream) -> None:
        while stream.work:
            work = stream.work.pop(0)
            for address, size in work.touches:
                self.find(address, size)
            work.run()

    def cudaStreamBeginCapture(self, handle: Any, mode: cudaStreamCaptureMode) -> cudaError_t:
        stream = self.stream(handle)
        if stream.captured is not None:
            raise BrokenRule("a stream that captures begins to capture")
        stream.captured, stream.invalid = [], False
        return OK

    def cudaStreamEndCapture(self, handle: Any) -> tuple[Any, ...]:
        stream = self.stream(handle)
        if stream.captured is None:
            raise BrokenRule("a capture is ended that was not begun")
        work, stream.captured = stream.captured, None
        if stream.invalid:
            return cudaError_t.cudaErrorStreamCaptureInvalidated, None
        graph = self._new()
        self.graphs[graph] = work
        return OK, graph

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        executable = self._new()
        self.executables[executable] = (self.graphs[graph], len(self.calls))
        return OK, executable

    def cudaGraphDestroy(self, graph: int) -> cudaError_t:
        if self.graphs.pop(graph, None) is None:
            raise BrokenRule("a graph is destroyed twice")
        return OK

    def cudaGraphLaunch(self, executable: int, stream: Any) -> cudaError_t:
        if executable not in self.executables:
            raise BrokenRule("a graph is launched that was destroyed")
        self.launches += 1
        for work in self.executables[executable][0]:
            work.check()
            self.put(stream, work)
        return OK

    def cudaGraphExecDestroy(self, executable: int) -> cudaError_t:
        if self.executables.pop(executable, None) is None:
            raise BrokenRule("an executable graph is destroyed twice")
        return OK


_NO_VALUE = {
    *(
        "cudaFree",
        "cudaFreeHost",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "cudaStreamDestroy",
        "cudaStreamSynchronize",
    ),
    *("cudaStreamBeginCapture", "cudaGraphDestroy", "cudaGraphLaunch", "cudaGraphExecDestroy"),
}
