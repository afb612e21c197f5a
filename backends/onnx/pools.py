"""The caches of all layers: memory of ours that the model's inputs and outputs are bound to, so that nothing is copied.

A cache is [slots + 1, bytes of a slot]: the last slot is zero and is never written. On the CPU the memory is a numpy array. On a
device it is a tensor of ONNX Runtime's, and copying a page there (prefixes that share a part of one) takes the cache to the host
and back: right, and rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from enginewright.backends.base import StepError

__all__ = ["CacheSpec", "DeviceMemory", "HostMemory", "Pools"]

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_ELEMENT_TYPES = {"f32": 1, "f16": 10, "bf16": 16}  # numbers of onnx.TensorProto.DataType

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CacheSpec:
    """One layer's keys or values: the input's name, its KV group, values a slot, their format."""

    name: str
    group: int
    width: int
    format: str

    @property
    def slot_bytes(self) -> int:
        return self.width * _BYTES[self.format]


class Memory(Protocol):
    """One cache's bytes [slots, bytes of a slot], all zero at first."""

    @property
    def address(self) -> int: ...
    def read(self) -> Bytes: ...
    def write(self, values: Bytes) -> None: ...


class HostMemory:
    """A numpy array; `read` is the memory itself."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._array = np.zeros((slots, slot_bytes), np.uint8)

    @property
    def address(self) -> int:
        return self._array.ctypes.data

    def read(self) -> Bytes:
        return self._array

    def write(self, values: Bytes) -> None:
        """Nothing to do: what was read is the memory."""


class DeviceMemory:
    """A tensor of ONNX Runtime's; `read` is a copy."""

    def __init__(self, slots: int, slot_bytes: int, device: str) -> None:
        empty = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((slots, slot_bytes), np.uint8), device, 0)
        self._value: Any = empty

    @property
    def address(self) -> int:
        return int(self._value.data_ptr())

    def read(self) -> Bytes:
        values: Bytes = np.array(self._value.numpy())
        return values

    def write(self, values: Bytes) -> None:
        self._value.update_inplace(values)


class Pools:
    """The caches of `specs`; `page_sizes` are the groups'. `device` is ONNX Runtime's name of where they live."""

    def __init__(self, specs: Sequence[CacheSpec], page_sizes: Sequence[int], device: str = "cpu") -> None:
        self.specs = specs
        self.page_sizes = page_sizes
        self.device = device
        self.pages: list[int] = []
        self.memory: dict[str, Memory] = {}

    def create(self, pages: Sequence[int]) -> None:
        """Make caches of so many pages a group; drops earlier ones first. Raises MemoryError with what it needs."""
        self.drop()
        memory: dict[str, Memory] = {}
        try:
            for spec in self.specs:
                slots = pages[spec.group] * self.page_sizes[spec.group] + 1
                memory[spec.name] = self._made(slots, spec.slot_bytes)
        except MemoryError:
            memory.clear()
            sizes = ", ".join(map(str, self.page_sizes))
            raise MemoryError(
                f"the key/value cache takes {self.bytes_of(pages):,} bytes, in pages of {sizes} tokens: give it less "
                "(cache_tokens, cache_bytes, --kv-memory), or build with a smaller max_context or kv_cache.page_size"
            ) from None
        self.memory, self.pages = memory, list(pages)

    def _made(self, slots: int, slot_bytes: int) -> Memory:
        return (
            HostMemory(slots, slot_bytes)
            if self.device == "cpu"
            else DeviceMemory(slots, slot_bytes, self.device)
        )

    def drop(self) -> None:
        self.memory, self.pages = {}, []

    def bytes_of(self, pages: Sequence[int]) -> int:
        return sum(
            spec.slot_bytes * (pages[spec.group] * self.page_sizes[spec.group] + 1) for spec in self.specs
        )

    def zero_slot(self, group: int) -> int:
        return self.pages[group] * self.page_sizes[group]

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if not 0 <= group < len(self.pages):
            raise StepError("no such pool", found=f"group {group}", expected=f"0 to {len(self.pages) - 1}")
        if len(sources) != len(destinations):
            raise StepError(
                "pages to copy", found=f"{len(sources)} to {len(destinations)}", expected="as many"
            )
        for page in (*sources, *destinations):
            if not 0 <= page < self.pages[group]:
                raise StepError(
                    "a page to copy", found=page, expected=f"a page of the pool of {self.pages[group]}"
                )
        size = self.page_sizes[group]
        for spec in self.specs:
            if spec.group == group:
                held = self.memory[spec.name].read()
                for source, destination in zip(sources, destinations, strict=True):
                    copied = held[source * size : (source + 1) * size]
                    held[destination * size : (destination + 1) * size] = copied
                self.memory[spec.name].write(held)

    def fill(self, value: float) -> None:
        """Set every number but the zero slots' (tests fill caches with NaN to see that nothing unwritten is read)."""
        single = np.array([value], np.float32)
        for spec in self.specs:
            held = self.memory[spec.name].read()
            if spec.format == "f16":
                held[:-1].view(np.float16)[:] = single.astype(np.float16)
            elif spec.format == "bf16":
                held[:-1].view(np.uint16)[:] = (single.view(np.uint32) >> 16).astype(np.uint16)
            else:
                held[:-1].view(np.float32)[:] = single
            self.memory[spec.name].write(held)

    def addresses(self) -> dict[str, int]:
        """Where each cache lies."""
        return {name: memory.address for name, memory in self.memory.items()}

    def bind(self, binding: Any) -> None:
        """Bind every cache as the input of its name and as the output `…_out`: one memory."""
        for spec in self.specs:
            slots = self.pages[spec.group] * self.page_sizes[spec.group] + 1
            address = self.memory[spec.name].address
            where = (self.device, 0, _ELEMENT_TYPES[spec.format], (slots, spec.width), address)
            binding.bind_input(spec.name, *where)
            binding.bind_output(f"{spec.name}_out", *where)
