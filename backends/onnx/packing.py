"""Codes as MatMulNBits stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["packed", "plane_of"]

Array = npt.NDArray[Any]


def plane_of(codes: Array, plane: str) -> Array:
    """4-bit codes of one plane of `codes` [N, K] uint8: all of them ("whole"), or the "high" or "low" half of each byte."""
    if plane == "high":
        return codes >> 4
    return codes & 15 if plane == "low" else codes


def packed(codes: Array, block: int) -> Array:
    """[N, K] codes below 16 -> uint8 [N, ceil(K / block), block / 2]: two a byte, the first in the low half; padded with 8,
    which stands for zero."""
    n, k = codes.shape
    blocks = -(-k // block)
    whole = np.full((n, blocks * block), 8, np.uint8)
    whole[:, :k] = codes
    pairs = whole.reshape(n, blocks, block // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)
