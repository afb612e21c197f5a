"""The one file of external data: where each weight lies, and writing them one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from enginewright.backends.base import LowerProgress
from enginewright.backends.onnx.graph import StoredWeight
from enginewright.recipes.errors import LoweringError

__all__ = ["offsets_of", "write_weights"]

_LARGE = 1 << 20
_PAGE = 4096  # a large tensor begins a page, so that a runtime may map it
_LINE = 64


def offsets_of(weights: Iterable[StoredWeight]) -> dict[str, int]:
    """Byte offset of each weight, in their order."""
    offsets, at = {}, 0
    for weight in weights:
        step = _PAGE if weight.size >= _LARGE else _LINE
        offsets[weight.name] = at = -(-at // step) * step
        at += weight.size
    return offsets


def write_weights(path: Path, weights: Iterable[StoredWeight], progress: LowerProgress | None = None) -> None:
    """Write every weight at its offset; at most one is in memory at a time."""
    weights = list(weights)
    offsets = offsets_of(weights)
    total, done = sum(weight.size for weight in weights), 0
    with path.open("wb") as file:
        for weight in weights:
            if progress is not None:
                progress(weight.name, done, total)
            file.write(b"\0" * (offsets[weight.name] - file.tell()))
            values = np.ascontiguousarray(weight.load())
            if values.nbytes != weight.size:
                raise LoweringError(
                    f"weight {weight.name} changed its size",
                    found=f"{values.nbytes:,} bytes",
                    expected=f"{weight.size:,}",
                )
            values.reshape(-1).view(np.uint8).tofile(file)
            done += weight.size
        if not weights:
            file.write(b"\0")  # an empty file cannot be mapped
    if progress is not None:
        progress("", total, total)
