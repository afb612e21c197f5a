"""XᵀX by half and in batches, and the factors of its products."""

import pytest
import torch

from enginewright.passes.gram import gram_of
from enginewright.passes.products import bfloat16_factors


@pytest.mark.parametrize("width", [1, 7, 256, 300, 515])
def test_batches_add_up_to_the_whole(width):
    """An entry is within what bf16 factors cost of the float64 one, the matrix symmetric, and positive semidefinite."""
    x = torch.randn(400, width, generator=torch.Generator().manual_seed(width))
    x[:, 0] *= 1000
    found = gram_of(iter(x.split([3, 0, 297, 100])))
    want = x.double().T @ x.double()
    size = want.diagonal().sqrt()
    assert found.dtype == torch.float32 and torch.equal(found, found.T)
    assert ((found - want).abs() / torch.outer(size, size)).max() <= 2.0**-8
    assert torch.linalg.eigvalsh((found / torch.outer(size, size)).double()).min() > -1e-4


def test_without_batches_there_is_none():
    assert gram_of(iter([])) is None


def test_the_setting_is_put_back():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with pytest.raises(KeyError), bfloat16_factors():
        assert settings.fp32_precision == "bf16"
        raise KeyError
    assert settings.fp32_precision == before
