"""Where groups' grids end: by their own values, by squared error, by the error of their output."""

import itertools

import pytest
import torch

from enginewright.passes import ranges
from enginewright.passes.quant_formats import fit_grid, grouped
from enginewright.passes.ranges import OUTPUT_SHRINKS, choose_grid, group_blocks
from enginewright.recipes.formats import parse_weight
from tests.passes.test_gptq import correlated, matrix

FORMATS = ["int4_g32", "int3_g32_zp", "int2_g16", "int8_g32", "int4", "int8"]


def errors(weight, x, form, grid):
    """Each group's squared output error [N, G], from the inputs themselves."""
    values, valid = grouped(weight, form)
    delta = torch.where(valid, grid.values(grid.codes(values)) - values, 0.0).double()
    padded, _ = grouped(x, form)
    return torch.einsum("tgm,ngm->tng", padded.double(), delta).square().sum(0)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_output_never_loses_to_minmax_in_any_group(name, symmetric):
    weight, x, form = matrix(), correlated(200), parse_weight(name)
    gram = x.T @ x
    plain = errors(weight, x, form, choose_grid(weight, form, "minmax", symmetric=symmetric))
    by_square = errors(weight, x, form, choose_grid(weight, form, "mse", symmetric=symmetric))
    by_output = errors(weight, x, form, choose_grid(weight, form, "output", symmetric=symmetric, gram=gram))
    assert bool((by_output <= plain * (1 + 1e-4)).all())
    assert by_output.sum() < by_square.sum() and by_output.sum() < plain.sum()


@pytest.mark.parametrize("name", ["int4_g32", "int3_g32_zp", "int8_g32"])
def test_output_equals_the_search_over_all_tokens(name):
    """Brute force: every factor's grid, every token's output; K 72, so the last group is short."""
    weight, x, form = matrix(n=3), correlated(50), parse_weight(name)
    got = choose_grid(weight, form, "output", gram=x.T @ x)
    values, valid = grouped(weight, form)
    tried = [fit_grid(values, valid, form, shrink=shrink) for shrink in OUTPUT_SHRINKS]
    costs = torch.stack([errors(weight, x, form, grid) for grid in tried])
    best = costs.argmin(0)
    chosen = errors(weight, x, form, got)
    torch.testing.assert_close(chosen, costs.amin(0), rtol=1e-4, atol=0)
    assert len(best.unique()) >= 2
    for row, group in itertools.product(range(3), range(form.groups(72))):
        close = costs[:, row, group] <= costs[:, row, group].min() * (1 + 1e-4)
        scales = torch.stack([grid.scales[row, group] for grid in tried])[close]
        assert got.scales[row, group] in scales


def test_factors_reach_from_the_whole_span_to_half_of_it():
    assert OUTPUT_SHRINKS[0] == 1 and min(OUTPUT_SHRINKS) == 0.5 and len(OUTPUT_SHRINKS) == 21


def test_rows_in_parts_give_the_same_grid(monkeypatch):
    weight, form = matrix(), parse_weight("int4_g32")
    gram = correlated(200).T @ correlated(200)
    whole = choose_grid(weight, form, "output", gram=gram)
    monkeypatch.setattr(ranges, "_CHUNK_ELEMENTS", 200)
    parts = choose_grid(weight, form, "output", gram=gram)
    assert torch.equal(whole.scales, parts.scales) and torch.equal(whole.offsets, parts.offsets)


def test_blocks_of_a_short_last_group_are_padded_with_zeros():
    x = correlated(20, k=42)
    blocks = group_blocks(x.T @ x, parse_weight("int4_g32"))
    assert blocks.shape == (2, 32, 32)
    torch.testing.assert_close(blocks[1, :10, :10], x[:, 32:].T @ x[:, 32:], rtol=1e-5, atol=1e-3)
    assert not blocks[1, 10:].any() and not blocks[1, :, 10:].any()


def test_output_needs_inputs():
    with pytest.raises(ValueError, match="Gram"):
        choose_grid(matrix(), parse_weight("int4_g32"), "output")
