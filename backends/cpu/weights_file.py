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
from enginewright.backends.planning import StoredWeight
from enginewright.passes.quant_formats import streams_rows
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.formats import default_activation

__all__ = ["Matrix", "WeightsFile", "to_numpy"]

ALIGNMENT = 64
_CHUNK_ELEMENTS = 4 << 20


def to_numpy(tensor: torch.Tensor) -> Array:
    """Floating values as float32, integers and booleans as int32, int8, uint8 and float8 codes as they are."""
    if tensor.dtype in (torch.int8, torch.uint8):
        return tensor.numpy()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy()
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int32).contiguous().numpy()


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K], or a stack [E, N, K], in the format it is stored in.

    `values` holds numbers (f32), bfloat16 (bf16) or codes; `scales` and `offsets` are None where the format has none.
    `activation` says how inputs are rounded, None where nothing is multiplied (a look-up); `activation_scale` is the scale of
    int8_static. `outliers` [N, C] bfloat16 are the columns that an int8 matrix keeps apart, `outlier_columns` their indices.
    """

    format: str
    values: Weight
    scales: Weight | None = None
    offsets: Weight | None = None
    activation: str | None = None
    activation_scale: float = 0.0
    outlier_columns: tuple[int, ...] = ()
    outliers: Weight | None = None

    @property
    def experts(self) -> int:
        return self.values.shape[0] if len(self.values.shape) == 3 else 0

    @property
    def layout(self) -> Layout:
        n, k = self.values.shape[-2:]
        return Layout(self.format, n, k, len(self.outlier_columns))

    @property
    def stored(self) -> Hashable:
        """Equal where two matrices have the same bytes."""
        parts = (self.values, self.scales, self.offsets, self.outliers)
        return (self.format, *(id(part) for part in parts), self.outlier_columns)

    @property
    def rounding(self) -> dict[str, Any] | None:
        """What program.json says of the activation: nothing of a format's default. None for a look-up."""
        if self.activation is None:
            return None
        if self.activation == default_activation(self.format):
            return {}
        scale = {"activation_scale": self.activation_scale} if self.activation == "int8_static" else {}
        return {"activation": self.activation, **scale}

    def read(self) -> Iterator[Callable[[int, int], Rows]]:
        """For each expert (or once), a function that gives rows [start, stop)."""
        for expert in range(self.experts or 1):
            yield self._rows(expert)

    def _rows(self, expert: int) -> Callable[[int, int], Rows]:
        values = self._reader(self.values, expert)
        scales = None if self.scales is None else self._reader(self.scales, expert)
        offsets = None if self.offsets is None else self._reader(self.offsets, expert)
        outliers = None if self.outliers is None else self._reader(self.outliers, expert)

        def rows(start: int, stop: int) -> Rows:
            return Rows(
                values(start, stop),
                None if scales is None else scales(start, stop),
                None if offsets is None else offsets(start, stop),
                None if outliers is None else outliers(start, stop),
            )

        return rows

    def _reader(self, part: Weight, expert: int) -> Callable[[int, int], Array]:
        if self.experts:
            whole = part.load_rows(expert, expert + 1)[0]
        elif streams_rows(part) and part is self.values:
            return lambda start, stop: self._numbers(part, part.load_rows(start, stop))
        else:
            whole = part.load()
        return lambda start, stop: self._numbers(part, whole[start:stop])

    def _numbers(self, part: Weight, tensor: torch.Tensor) -> Array:
        if part is self.outliers or self.format == "bf16":
            return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
        return to_numpy(tensor)


@dataclass
class _Use:
    """An entry of a matrix, and its `Matrix.rounding`."""

    index: int
    rounding: dict[str, Any] | None


@dataclass
class WeightsFile:
    """Collects weights; `entries` is the list that stands in program.json."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    _chunks: list[Callable[[], Iterator[Array]]] = field(default_factory=list)
    _index: dict[Hashable, int] = field(default_factory=dict)
    _held: list[object] = field(default_factory=list)  # keeps the objects whose id is a key alive
    _leaves: list[set[str]] = field(default_factory=list)
    _roundings: dict[Hashable, list[_Use]] = field(default_factory=dict)
    _constants: dict[Hashable, ConstantTensor] = field(default_factory=dict)

    def add_linear(self, matrix: Matrix, gated: bool = False) -> int:
        """Register packed tiles; `gated` interleaves the tiles of the two halves [gate | up] of the rows."""
        layout, half = matrix.layout, matrix.layout.n // 2
        tiles = 2 * (-(-half // TILE_ROWS)) if gated else layout.tiles
        entry = {"kind": "linear", "format": matrix.format, "n": layout.n, "k": layout.k}
        if gated:
            entry["gated"] = True
        if matrix.experts:
            entry["experts"] = matrix.experts
        if matrix.outlier_columns:
            entry["columns"] = list(matrix.outlier_columns)
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

        return self._add_rounded(
            ("linear", gated, matrix.stored), matrix.rounding, entry, size, matrix, chunks
        )

    def _add_rounded(
        self,
        key: Hashable,
        rounding: dict[str, Any] | None,
        entry: dict[str, Any],
        size: int,
        matrix: Matrix,
        chunks: Callable[[], Iterator[Array]],
    ) -> int:
        """Share one entry between look-ups and products that round alike; products that do not get one each."""
        uses = self._roundings.setdefault(key, [])
        for use in uses:
            if rounding is None or use.rounding is None or use.rounding == rounding:
                if use.rounding is None and rounding is not None:
                    use.rounding = rounding
                    self.entries[use.index].update(rounding)
                return use.index
        entry = {**entry, **(rounding or {})}
        index = self._add((key, len(uses)), entry, size, matrix.values, chunks)
        self._held.append(matrix)
        uses.append(_Use(index, rounding))
        return index

    def constant(self, name: str, values: torch.Tensor) -> ConstantTensor:
        """A constant that lowering has made; equal ones are one object, and so stored once."""
        values = values.contiguous()
        key = (values.dtype, values.shape, to_numpy(values).tobytes())
        return self._constants.setdefault(key, ConstantTensor(name, values))

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

    def planned(self) -> list[StoredWeight]:
        """The entries as they will stand in the file, each with what is left free after it."""
        kinds = {"linear": "matrix"}
        return [
            StoredWeight(
                kinds.get(entry["kind"], entry["kind"]),
                entry["format"],
                -(-entry["bytes"] // ALIGNMENT) * ALIGNMENT,
                frozenset(leaves),
            )
            for entry, leaves in zip(self.entries, self._leaves, strict=True)
        ]

    def duplicates(self) -> list[str]:
        """Notes on matrices of the checkpoint that are stored more than once, with the forms."""
        forms: dict[str, list[str]] = {}
        for entry, leaves in zip(self.entries, self._leaves, strict=True):
            if entry["kind"] == "linear":
                for leaf in leaves:
                    forms.setdefault(leaf, []).append(
                        entry["format"]
                        + (f" for {entry['activation']}" if "activation" in entry else "")
                        + (" (gated)" if "gated" in entry else "")
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
