"""The calls of the CUDA runtime that the executor makes, each checked and named, and memory that knows how to be given back.

`cuda.bindings.runtime` (package cuda-python) returns (error, values…) from every call. A failure becomes a DeviceError with the
call's name and the runtime's own words; running out of memory becomes a MemoryError.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.recipes.errors import EnginewrightError

__all__ = ["Cuda", "DeviceError", "DeviceMemory", "Graph", "PinnedMemory", "Stream"]

Bytes = npt.NDArray[np.uint8]


class DeviceError(EnginewrightError):
    """A call to the device or its library failed."""


class Cuda:
    """The runtime. `module`: `cuda.bindings.runtime` unless a test gives another."""

    def __init__(self, module: Any = None) -> None:
        self.runtime = module if module is not None else importlib.import_module("cuda.bindings.runtime")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `name`; returns its value, a tuple of several, or None."""
        error, *values = getattr(self.runtime, name)(*arguments)
        if int(error):
            what, words = self._text("cudaGetErrorName", error), self._text("cudaGetErrorString", error)
            if int(error) == int(self.runtime.cudaError_t.cudaErrorMemoryAllocation):
                raise MemoryError(f"the device has too little memory: {name}{arguments}: {what} ({words})")
            raise DeviceError(f"the CUDA runtime refused {name}", found=f"{what}: {words}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def _text(self, name: str, error: Any) -> str:
        _, text = getattr(self.runtime, name)(error)
        return text.decode() if isinstance(text, bytes) else str(text)


class DeviceMemory:
    """`size` bytes on the device at `address`, aligned to 256 bytes. Closing it again does nothing."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda = cuda
        self.size = size
        self.address = int(cuda.call("cudaMalloc", size))

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self._cuda.call("cudaFree", address)


class PinnedMemory:
    """`size` bytes of page-locked memory of the host; `bytes` [size] is a view of it, empty once it is closed."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda = cuda
        self.size = size
        self.address = int(cuda.call("cudaMallocHost", size))
        block = (ctypes.c_uint8 * size).from_address(self.address)
        self.bytes: Bytes = np.ctypeslib.as_array(block)

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self.bytes = np.empty(0, np.uint8)
            self._cuda.call("cudaFreeHost", address)


class Stream:
    """One stream, apart from the default one. All copies are asynchronous and in order."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        kinds = cuda.runtime.cudaMemcpyKind
        self._to_device = kinds.cudaMemcpyHostToDevice
        self._to_host = kinds.cudaMemcpyDeviceToHost
        self._on_device = kinds.cudaMemcpyDeviceToDevice
        self._open = True
        self.handle = cuda.call("cudaStreamCreateWithFlags", cuda.runtime.cudaStreamNonBlocking)

    def to_device(self, address: int, source: PinnedMemory, size: int) -> None:
        """Copy the first `size` bytes of pinned memory to the device."""
        self._cuda.call("cudaMemcpyAsync", address, source.address, size, self._to_device, self.handle)

    def to_host(self, target: PinnedMemory, address: int, size: int) -> None:
        """Copy `size` bytes of the device into pinned memory; they are there after `synchronise`."""
        self._cuda.call("cudaMemcpyAsync", target.address, address, size, self._to_host, self.handle)

    def on_device(self, target: int, source: int, size: int) -> None:
        self._cuda.call("cudaMemcpyAsync", target, source, size, self._on_device, self.handle)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set `size` bytes of the device to `byte`."""
        self._cuda.call("cudaMemsetAsync", address, byte, size, self.handle)

    def synchronise(self) -> None:
        """Wait for everything in the stream."""
        self._cuda.call("cudaStreamSynchronize", self.handle)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._cuda.call("cudaStreamDestroy", self.handle)


class Graph:
    """What `launches` puts into the stream, recorded; nothing of it runs while it is recorded.

    The stream leaves capture mode whatever happens. Only this thread's calls are watched (thread-local mode), so that other
    threads may allocate meanwhile.
    """

    def __init__(self, cuda: Cuda, stream: Stream, launches: Callable[[], None]) -> None:
        self._cuda, self._stream, self._open = cuda, stream, False
        mode = cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        cuda.call("cudaStreamBeginCapture", stream.handle, mode)
        try:
            launches()
        except BaseException:
            error, graph = cuda.runtime.cudaStreamEndCapture(stream.handle)
            if not int(error) and graph is not None and int(graph):
                cuda.call("cudaGraphDestroy", graph)
            raise
        graph = cuda.call("cudaStreamEndCapture", stream.handle)
        try:
            self._executable = cuda.call("cudaGraphInstantiate", graph, 0)
        finally:
            cuda.call("cudaGraphDestroy", graph)
        self._open = True

    def launch(self) -> None:
        """Run it in the stream."""
        self._cuda.call("cudaGraphLaunch", self._executable, self._stream.handle)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._cuda.call("cudaGraphExecDestroy", self._executable)
