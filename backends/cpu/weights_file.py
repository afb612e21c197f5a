"""weights.bin: every weight of the lowered program, packed and written one after another.

Lowering registers weights in the order in which the program uses them and learns their indices; nothing is
loaded before `write`, which streams a few megabytes of rows at a time. A weight registered twice in the same
form is stored once, which is how a tied embedding and head share their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from enginewright.backends.base import LowerProgress
from enginewright.backends.cpu.pack import TILE_ROWS, Array, Layout, Rows, interleave_tiles, pack_tiles
from enginewright.passes.quant_formats import streams_rows
from enginewright.passes.weights import Weight

__all__ = ["Matrix", "WeightsFile", "to_numpy"]

ALIGNMENT = 64
_CHUNK_ELEMENTS = 4 << 20


def to_numpy(tensor: torch.Tensor) -> Array:
    """Floating values as float32, integers and booleans as int32, int8 and uint8 codes as they are."""
    if tensor.dtype in (torch.int8, torch.uint8):
        return tensor.numpy()
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int32).contiguous().numpy()


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K], or a stack [E, N, K], in the format it is stored in.

    `values` holds numbers (f32), bfloat16 (bf16) or codes; `scales` and `offsets` are None where the format has none.
    """

    format: str
    values: Weight
    scales: Weight | None = None
    offsets: Weight | None = None

    @property
    def experts(self) -> int:
        return self.values.shape[0] if len(self.values.shape) == 3 else 0

    @property
    def layout(self) -> Layout:
        return Layout(self.format, *self.values.shape[-2:])

    def read(self) -> Iterator[Callable[[int, int], Rows]]:
        """For each expert (or once), a function that gives rows [start, stop)."""
        for expert in range(self.experts or 1):
            yield self._rows(expert)

    def _rows(self, expert: int) -> Callable[[int, int], Rows]:
        values = self._reader(self.values, expert)
        scales = None if self.scales is None else self._reader(self.scales, expert)
        offsets = None if self.offsets is None else self._reader(self.offsets, expert)

        def rows(start: int, stop: int) -> Rows:
            return Rows(
                values(start, stop),
                None if scales is None else scales(start, stop),
                None if offsets is None else offsets(start, stop),
            )

        return rows

    def _reader(self, part: Weight, expert: int) -> Callable[[int, int], Array]:
        if self.experts:
            whole = part.load_rows(expert, expert + 1)[0]
        elif streams_rows(part) and part is self.values:
            return lambda start, stop: self._numbers(part.load_rows(start, stop))
        else:
            whole = part.load()
        return lambda start, stop: self._numbers(whole[start:stop])

    def _numbers(self, tensor: torch.Tensor) -> Array:
        if self.format == "bf16":
            return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
        return to_numpy(tensor)


@dataclass
class WeightsFile:
    """Collects weights; `entries` is the list that stands in program.json."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    _chunks: list[Callable[[], Iterator[Array]]] = field(default_factory=list)
    _index: dict[Hashable, int] = field(default_factory=dict)
    _held: list[object] = field(default_factory=list)  # keeps the objects whose id is a key alive
    _leaves: list[set[str]] = field(default_factory=list)

    def add_linear(self, matrix: Matrix, gated: bool = False) -> int:
        """Register packed tiles; `gated` interleaves the tiles of the two halves [gate | up] of the rows."""
        layout, key = matrix.layout, ("linear", matrix.format, gated, id(matrix.values), id(matrix.scales))
        half = layout.n // 2
        tiles = 2 * (-(-half // TILE_ROWS)) if gated else layout.tiles
        entry = {"kind": "linear", "format": matrix.format, "n": layout.n, "k": layout.k}
        if gated:
            entry["gated"] = True
        if matrix.experts:
            entry["experts"] = matrix.experts
        size = tiles * layout.tile_bytes * (matrix.experts or 1)

        def chunks() -> Iterator[Array]:
            rows_a_chunk = max(1, _CHUNK_ELEMENTS // layout.k_padded // TILE_ROWS) * TILE_ROWS
            for rows in matrix.read():
                count = half if gated else layout.n
                for start in range(0, count, rows_a_chunk):
                    stop = min(start + rows_a_chunk, count)
                    packed = pack_tiles(matrix.format, rows(start, stop))
                    if gated:
                        up = pack_tiles(matrix.format, rows(half + start, half + stop))
                        packed = interleave_tiles(packed, up)
                    yield packed

        return self._add(key, entry, size, matrix.values, chunks)

    def add_table(self, weight: Weight) -> int:
        """Register a weight [N, ...] as N rows of float32."""
        n, k = weight.shape[0], math.prod(weight.shape[1:])
        entry = {"kind": "table", "format": "f32", "n": n, "k": k}

        def chunks() -> Iterator[Array]:
            yield to_numpy(weight.load().to(torch.float32))

        return self._add(("table", id(weight)), entry, 4 * n * k, weight, chunks)

    def add_vector(self, weight: Weight, form: Callable[[Array], Array] | None = None, size: int = 0) -> int:
        """Register a weight as a flat vector of f32 or i32, or what `form` makes of it: `size` numbers."""
        count = size if form is not None else weight.numel
        entry = {"kind": "vector", "format": "f32" if weight.dtype.is_floating_point else "i32", "n": count}

        def chunks() -> Iterator[Array]:
            values = to_numpy(
                weight.load().to(torch.float32 if weight.dtype.is_floating_point else torch.int32)
            )
            yield values if form is None else form(values)

        key = ("vector", id(weight), getattr(form, "__qualname__", None), size)
        return self._add(key, entry, 4 * count, weight, chunks)

    def _add(
        self,
        key: Hashable,
        entry: dict[str, Any],
        size: int,
        weight: Weight,
        chunks: Callable[[], Iterator[Array]],
    ) -> int:
        if key in self._index:
            return self._index[key]
        last = self.entries[-1] if self.entries else {"offset": 0, "bytes": 0}
        offset = -(-(last["offset"] + last["bytes"]) // ALIGNMENT) * ALIGNMENT
        self._index[key] = len(self.entries)
        self.entries.append({"name": weight.name, **entry, "offset": offset, "bytes": size})
        self._chunks.append(chunks)
        self._held.append(weight)
        self._leaves.append({leaf.name for leaf in weight.leaves()})
        return self._index[key]

    def duplicates(self) -> list[str]:
        """Notes on matrices of the checkpoint that are stored more than once, with the forms."""
        forms: dict[str, list[str]] = {}
        for entry, leaves in zip(self.entries, self._leaves, strict=True):
            if entry["kind"] == "linear":
                for leaf in leaves:
                    forms.setdefault(leaf, []).append(
                        entry["format"] + (" (gated)" if "gated" in entry else "")
                    )
        return [
            f"{leaf} is stored {len(f)} times: as {', '.join(f)}" for leaf, f in forms.items() if len(f) > 1
        ]

    def write(self, path: Path, progress: LowerProgress | None = None) -> None:
        """Write every weight at its offset; the file's size is a multiple of 64 bytes."""
        total = sum(entry["bytes"] for entry in self.entries)
        with path.open("wb") as file:
            written = 0
            for entry, chunks in zip(self.entries, self._chunks, strict=True):
                if progress is not None:
                    progress(entry["name"], written, total)
                file.seek(entry["offset"])
                count = _copy(chunks(), file)
                if count != entry["bytes"]:
                    raise AssertionError(f"{entry['name']}: wrote {count} bytes, planned {entry['bytes']}")
                written += count
            file.truncate(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
        if progress is not None:
            progress("", total, total)


def _copy(chunks: Iterator[Array], file: BinaryIO) -> int:
    count = 0
    for chunk in chunks:
        count += file.write(np.ascontiguousarray(chunk).data)
    return count
