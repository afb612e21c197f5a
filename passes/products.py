"""Float32 matrix products with bfloat16 factors: twice as fast on processors that have an instruction for them.

Each factor loses 16 bits of its mantissa (a relative error of at most 2^-9); products and sums stay float32. That is for what is
averaged over thousands of calibration tokens, where it lies far below what rounding to integers costs. Nothing that is
stored, compared or verified is computed so. The setting is the whole process's: what other threads multiply meanwhile has
such factors too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["bfloat16_factors"]


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let torch's float32 products have bfloat16 factors within the block, where the processor gains by it."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
