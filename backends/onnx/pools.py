"""The caches of all layers: memory of ours that the model's inputs and outputs are bound to, so that nothing is copied.

A cache is [slots + 1, width]: the last slot is zero and is never written. On the CPU the memory is a numpy array,
elsewhere a tensor of ONNX Runtime's on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import StepError

__all__ = ["CacheSpec", "Pools"]

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_ELEMENT_TYPES = {"f32": 1, "f16": 10, "bf16": 16}  # numbers of onnx.TensorProto.DataType


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


class Pools:
    """The caches of `specs`; `page_sizes` are the groups'. `device` is ONNX Runtime's name of where they live."""

    def __init__(self, specs: Sequence[CacheSpec], page_sizes: Sequence[int], device: str = "cpu") -> None:
        self.specs = specs
        self.page_sizes = page_sizes
        self.device = device
        self.pages: list[int] = []
        self._memory: dict[str, npt.NDArray[np.uint8]] = {}

    def create(self, pages: Sequence[int]) -> None:
        """Make caches of so many pages a group; drops earlier ones first. Raises MemoryError with what it needs."""
        self.drop()
        memory: dict[str, npt.NDArray[np.uint8]] = {}
        try:
            for spec in self.specs:
                slots = pages[spec.group] * self.page_sizes[spec.group] + 1
                memory[spec.name] = np.zeros((slots, spec.slot_bytes), np.uint8)
        except MemoryError:
            total = self.bytes_of(pages)
            memory.clear()
            raise MemoryError(
                f"the key/value cache takes {total:,} bytes, of pages of {', '.join(map(str, self.page_sizes))} tokens: give it "
                "less (cache_tokens, cache_bytes), or build with a smaller max_context or kv_cache.page_size"
            ) from None
        self._memory, self.pages = memory, list(pages)

    def drop(self) -> None:
        self._memory, self.pages = {}, []

    def bytes_of(self, pages: Sequence[int]) -> int:
        return sum(
            spec.slot_bytes * (pages[spec.group] * self.page_sizes[spec.group] + 1) for spec in self.specs
        )

    def zero_slot(self, group: int) -> int:
        return self.pages[group] * self.page_sizes[group]

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
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
                memory = self._memory[spec.name]
                for source, destination in zip(sources, destinations, strict=True):
                    memory[destination * size : (destination + 1) * size] = memory[
                        source * size : (source + 1) * size
                    ]

    def fill(self, value: float) -> None:
        """Set every number but the zero slots' (tests fill caches with NaN to see that nothing unwritten is read)."""
        for spec in self.specs:
            memory = self._memory[spec.name][:-1]
            single = np.array([value], np.float32)
            if spec.format == "f16":
                memory.view(np.float16)[:] = single.astype(np.float16)
            elif spec.format == "bf16":
                memory.view(np.uint16)[:] = (single.view(np.uint32) >> 16).astype(np.uint16)
            else:
                memory.view(np.float32)[:] = single

    def addresses(self) -> dict[str, int]:
        """Where each cache lies."""
        return {name: memory.ctypes.data for name, memory in self._memory.items()}

    def bind(self, binding: Any) -> None:
        """Bind every cache as the input of its name and as the output `…_out`: one memory."""
        for spec in self.specs:
            memory = self._memory[spec.name]
            where = (
                self.device,
                0,
                _ELEMENT_TYPES[spec.format],
                (memory.shape[0], spec.width),
                memory.ctypes.data,
            )
            binding.bind_input(spec.name, *where)
            binding.bind_output(f"{spec.name}_out", *where)
