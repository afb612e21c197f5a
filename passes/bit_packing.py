"""Small codes packed densely into 32-bit words, as GPTQ, AWQ and compressed-tensors store them.

Code i of a row occupies bits [i · bits, (i + 1) · bits) of the row's words read as one little-endian stream, so a code of
3 bits may lie across two words (AutoGPTQ's qlinear_cuda_old.py writes the same by hand). Rows end on a whole word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["pack_words", "unpack_words", "words"]

Codes = npt.NDArray[np.uint8]


def words(count: int, bits: int) -> int:
    """Words that a row of `count` codes takes."""
    return -(-count * bits // 32)


def unpack_words(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """packed [R, W] int32 -> codes [R, count] uint8."""
    stream = np.ascontiguousarray(packed.numpy()).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return torch.from_numpy(stream[:, :count].copy())
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (stream[:, :, None] >> shifts) & np.uint8(2**bits - 1)
        return torch.from_numpy(codes.reshape(len(stream), -1)[:, :count].copy())
    ones = np.unpackbits(stream, axis=1, count=count * bits, bitorder="little")
    codes = np.packbits(ones.reshape(len(stream), count, bits), axis=2, bitorder="little")
    return torch.from_numpy(codes[:, :, 0].copy())


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [R, K] uint8 below 2^bits -> packed [R, words(K, bits)] int32; unused bits of the last word are 0."""
    rows, count = codes.shape
    ones = np.unpackbits(codes.numpy()[:, :, None], axis=2, count=bits, bitorder="little")
    stream = np.packbits(ones.reshape(rows, count * bits), axis=1, bitorder="little")
    padded = np.zeros((rows, 4 * words(count, bits)), np.uint8)
    padded[:, : stream.shape[1]] = stream
    return torch.from_numpy(padded.view("<i4").astype(np.int32, copy=False))
