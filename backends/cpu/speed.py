"""How many operations a second this machine's products make: the engine's own kernels, one thread, for a tenth of a second."""

from __future__ import annotations

import time

import numpy as np

from enginewright.backends.cpu import _native
from enginewright.backends.cpu.pack import Rows, pack_tiles
from enginewright.recipes.formats import parse_weight

__all__ = ["product_rate"]

_ROWS, _OUTPUTS, _INPUTS = 64, 256, 1024  # rows of a step; a matrix that stays in the caches


def product_rate(weight: str, activation: str, seconds: float = 0.1) -> float:
    """Operations a second of one thread with many rows: a multiplication and an addition are two."""
    kernels, isa = _native.kernels, _native.available_isas()[0]  # type: ignore[attr-defined]
    form = parse_weight(weight)
    rng = np.random.default_rng(0)
    shape = (_OUTPUTS, _INPUTS)
    if weight in ("f32", "bf16"):
        values = rng.normal(size=shape).astype(np.float32)
        rows = Rows(values if weight == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16))
    else:
        codes = rng.integers(0, min(form.levels, 120), shape).astype(np.int8 if form.symmetric else np.uint8)
        table = np.full((_OUTPUTS, form.groups(_INPUTS)), 0.01, np.float32)
        rows = Rows(codes, table if form.has_scales else None, table if form.has_offsets else None)
    packed = kernels.Weight(weight, *shape, pack_tiles(weight, rows).reshape(-1), activation, 0.0, [])
    x = rng.normal(size=(_ROWS, _INPUTS)).astype(np.float32)
    y = np.empty((_ROWS, _OUTPUTS), np.float32)
    prepared = kernels.prepare(isa, packed, x)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        kernels.linear(isa, packed, prepared, y, None, 0, _ROWS, 0, packed.tiles)
        best = min(best, time.perf_counter() - started)
    return 2 * _ROWS * _OUTPUTS * _INPUTS / best
