"""The pools of keys and values on the device: one block of memory, every layer's pools in it, each with its zero page last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginewright.backends.base import StepError
from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.cuda import Cuda, DeviceMemory, Stream

__all__ = ["BYTES", "Description", "KvGroupLayers", "KvLayerShape", "Pools"]

BYTES = {"f16": 2, "bf16": 2}
_ALIGNMENT = 256  # bytes, of every pool's address


@dataclass(frozen=True)
class KvLayerShape:
    """One layer's keys and values in a pool: see passes.program.KvLayer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    format: str

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of keys and one of values."""
        return page_size * self.kv_heads * (self.key_dim + self.value_dim) * BYTES[self.format]


@dataclass(frozen=True)
class KvGroupLayers:
    """The layers of one KV group, and its window (0: none)."""

    window: int
    layers: tuple[KvLayerShape, ...]


@dataclass(frozen=True)
class Description:
    """What an engine's manifest says of its plans. `context`: positions lie below it."""

    groups: tuple[KvGroupLayers, ...]
    limits: bindings.Limits
    vocab_size: int

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Description:
        """Read it from the manifest of an engine."""
        limits = manifest["tensorrt"]["limits"]
        return Description(
            tuple(
                KvGroupLayers(
                    group["window"],
                    tuple(
                        KvLayerShape(layer["kv_heads"], layer["key_dim"], layer["value_dim"], layer["format"])
                        for layer in group["layers"]
                    ),
                )
                for group in manifest["kv_groups"]
            ),
            bindings.Limits(**{**limits, "pages": tuple(limits["pages"])}),
            manifest["model"]["vocab_size"],
        )


class Pools:
    """So many `pages` of each group, zeros at first.

    `shapes` and `addresses`: of every pool as the network's input, and addresses of the outputs that alias them. `size`:
    bytes of all.
    """

    def __init__(self, cuda: Cuda, stream: Stream, description: Description, pages: Sequence[int]) -> None:
        self.pages = list(pages)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stream = stream
        self._names: list[list[str]] = []
        self._page_bytes: dict[str, int] = {}
        page_size = description.limits.page_size
        starts: dict[str, int] = {}
        self.size = 0
        for g, group in enumerate(description.groups):
            self._names.append([])
            for i, layer in enumerate(group.layers):
                for name, width in zip(
                    bindings.pool_names(g, i), (layer.key_dim, layer.value_dim), strict=True
                ):
                    shape = (self.pages[g] + 1, layer.kv_heads, page_size, width)
                    page = layer.kv_heads * page_size * width * BYTES[layer.format]
                    self.shapes[name], self._page_bytes[name], starts[name] = shape, page, self.size
                    self._names[g].append(name)
                    self.size += -(-shape[0] * page // _ALIGNMENT) * _ALIGNMENT
        self._memory = DeviceMemory(cuda, self.size)
        self._places = {name: self._memory.address + start for name, start in starts.items()}
        self.addresses = {**self._places, **{f"{name}_out": at for name, at in self._places.items()}}
        try:
            stream.fill(self._memory.address, 0, self.size)
            stream.synchronise()
        except BaseException:
            self.close()
            raise

    def copy(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy page sources[i] to destinations[i], in order, in every layer of the group. Raises StepError before any."""
        if not 0 <= group < len(self.pages):
            raise StepError("no such pool", found=f"group {group}", expected=f"0 to {len(self.pages) - 1}")
        if len(sources) != len(destinations):
            raise StepError(
                "pages to copy", found=f"{len(sources)} to {len(destinations)}", expected="as many"
            )
        pairs = [(int(source), int(target)) for source, target in zip(sources, destinations, strict=True)]
        count = self.pages[group]
        for page in (page for pair in pairs for page in pair):
            if not 0 <= page < count:
                raise StepError("no such page to copy", found=page, expected=f"0 to {count - 1}")
        for name in self._names[group]:
            at, size = self._places[name], self._page_bytes[name]
            for source, target in pairs:
                if source != target:
                    self._stream.on_device(at + target * size, at + source * size, size)

    def fill(self, value: float) -> None:
        """Set every number of the runtime's pages to zero or NaN; the zero pages stay."""
        if value == value and value != 0:
            raise ValueError(f"pools are filled with zero or NaN, not {value}")
        byte = 0 if value == 0 else 0xFF  # 0xFFFF is NaN in f16 and in bf16
        for names, count in zip(self._names, self.pages, strict=True):
            for name in names:
                self._stream.fill(self._places[name], byte, count * self._page_bytes[name])
        self._stream.synchronise()

    def close(self) -> None:
        self._memory.close()
