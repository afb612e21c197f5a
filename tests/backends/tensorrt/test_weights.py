"""Matrices in TensorRT's terms: the same values as the Program's, whatever the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginewright.backends.tensorrt.weights import WEIGHT_FORMATS, activations_for, pack_int4, split
from enginewright.passes.quant_formats import dequantise, quantise_rtn
from enginewright.recipes import formats
from enginewright.recipes.formats import parse_weight

INTEGERS = [name for name in WEIGHT_FORMATS if parse_weight(name).kind != "float"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("k", [40, 96, 576])
def test_a_matrix_in_blocks_has_the_same_values(name: str, k: int) -> None:
    weight = torch.randn(6, k, generator=torch.Generator().manual_seed(k)) + 0.3
    stored = quantise_rtn(weight, name)
    assert stored.scales is not None
    matrix = split(stored.codes, stored.scales, stored.offsets, name)
    assert matrix.codes.dtype == np.int8 and matrix.codes.shape == (k + matrix.fill, 6)
    least, most = (-8, 7) if matrix.bits == 4 else (-128, 127)
    assert least <= matrix.codes.min() and matrix.codes.max() <= most
    assert matrix.codes.shape[0] % matrix.scales.shape[0] == 0
    assert matrix.bits == 8 or matrix.block >= 16  # smaller ones have no fused kernel
    scale = np.repeat(matrix.scales, matrix.block, axis=0)
    values = matrix.codes * scale
    if matrix.shift is not None:
        values = values + np.repeat(matrix.shift, matrix.block, axis=0)
    # What fills K up lies outside of the matrix; x has zeros there.
    np.testing.assert_allclose(values[:k].T, dequantise(stored).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in INTEGERS if parse_weight(name).bits < 8])
def test_codes_lie_around_zero(name: str) -> None:
    """What the correction adds, in 16 bits, is no larger than the weights: else it would drown them."""
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(2))
    stored = quantise_rtn(weight, name)
    assert stored.scales is not None
    matrix = split(stored.codes, stored.scales, stored.offsets, name)
    assert matrix.shift is not None and np.median(np.abs(matrix.shift)) < 0.5 * float(weight.abs().max())


def test_a_stack_of_matrices_is_split_like_each_of_them() -> None:
    weight = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
    stored = quantise_rtn(weight, "int4_g16")
    assert stored.scales is not None and stored.offsets is not None
    together = split(stored.codes, stored.scales, stored.offsets, "int4_g16")
    for e in range(3):
        alone = split(stored.codes[e], stored.scales[e], stored.offsets[e], "int4_g16")
        for part in ("codes", "scales", "shift"):
            np.testing.assert_array_equal(getattr(together, part)[e], getattr(alone, part))


def test_a_symmetric_grid_needs_no_correction() -> None:
    stored = quantise_rtn(torch.randn(4, 64), "int4_g32_zp", symmetric=True)
    assert stored.scales is not None
    assert split(stored.codes, stored.scales, stored.offsets, "int4_g32_zp").shift is None


def test_a_groups_scale_is_repeated_where_its_size_does_not_divide_k() -> None:
    stored = quantise_rtn(torch.randn(4, 576), "int4_g128")
    assert stored.scales is not None
    matrix = split(stored.codes, stored.scales, stored.offsets, "int4_g128")
    assert matrix.block == 64 and matrix.fill == 0 and matrix.scales.shape == (9, 4)


def test_int4_codes_lie_two_to_a_byte_the_first_in_the_low_nibble() -> None:
    packed = pack_int4(np.array([[1, -1], [-8, 7]], np.int8))
    assert packed.tolist() == [0xF1, 0x78]


def test_int8_alone_takes_int8_activations() -> None:
    for name in WEIGHT_FORMATS:
        allowed = activations_for(name)
        assert ("int8" in allowed) == (name == "int8")
        assert set(allowed) <= set(formats.activations_for(name))
