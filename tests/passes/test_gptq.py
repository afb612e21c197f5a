"""GPTQ against the paper's algorithm written out column by column in float64, and what its inputs may be like."""

import dataclasses

import numpy as np
import pytest
import torch

from enginewright.passes.gptq import GptqOptions, NotPositiveError, invert, round_gptq
from enginewright.passes.quant_formats import dequantise, quantise_rtn
from enginewright.passes.ranges import choose_grid
from enginewright.recipes.formats import parse_weight

N, K = 12, 72  # with groups of 32 the last holds 8
FORMATS = ["int4_g32", "int3_g32_zp", "int2_g16", "int4_g64_zp", "int8_g32", "int8", "int4", "uint8_g32"]


def correlated(tokens, k=K, seed=0, spread=1.0):
    """Inputs [tokens, k] whose features have much in common and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k // 3, generator=generator) @ torch.randn(k // 3, k, generator=generator)
    sizes = torch.exp(spread * torch.randn(k, generator=generator))
    return (mixed + 0.3 * torch.randn(tokens, k, generator=generator)) * sizes


def matrix(n=N, k=K, seed=5):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def output_error(x, weight, rounded):
    delta = (dequantise(rounded) - weight).double()
    return float((x.double() @ delta.T).square().sum())


def made(weight, x, name, **options):
    options = GptqOptions(**{"range": "minmax", **options})
    gram = x.T @ x
    return round_gptq(weight, gram, invert(gram, len(x), options), parse_weight(name), options)


def grid_of(values, form, **options):
    """Scale and shift [N] of one group [N, members], as rounding to nearest fits them."""
    fitted = choose_grid(values.float(), dataclasses.replace(form, group=0), "minmax", **options)
    shift = torch.zeros_like(fitted.scales) if fitted.offsets is None else fitted.offsets
    return fitted.scales[:, 0].double().numpy(), shift[:, 0].double().numpy()


def oracle(weight, x, name, order, static, damping=0.01, symmetric=False):
    """Frantar et al. 2023, eqs. 2 and 3, one column at a time, with the inverse of the remaining Hessian made afresh.

    Returns the codes [N, K] and, for each, how far its value lay from a tie (in steps).
    """
    form, k = parse_weight(name), weight.shape[1]
    size = form.group or k
    hessian = x.double().numpy().T @ x.double().numpy()
    mean = np.diag(hessian).mean()
    hessian += np.eye(k) * damping * max(1, k / len(x)) * mean
    columns = list(np.argsort(-np.diag(hessian), kind="stable")) if order == "activation" else list(range(k))
    work = weight.double().numpy().copy()
    tables = {
        g: grid_of(weight[:, g * size : (g + 1) * size], form, symmetric=symmetric)
        for g in range(-(-k // size))
    }
    codes, distance = np.zeros(work.shape), np.ones(work.shape)
    left = list(columns)
    low, high = (-127, 127) if form.symmetric else (0, 2**form.bits - 1)
    for column in columns:
        if not static and column % size == 0:
            now = torch.from_numpy(work[:, column : column + size])
            tables[column // size] = grid_of(now, form, symmetric=symmetric)
        scale, shift = tables[column // size]
        w = work[:, column]
        exact = w / scale + shift if form.kind == "zero" else (w - shift) / scale
        code = np.clip(np.rint(exact), low, high)
        value = (code - shift) * scale if form.kind == "zero" else code * scale + shift
        codes[:, column] = code
        distance[:, column] = np.abs(np.abs(exact - np.floor(exact)) - 0.5)
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        at = left.index(column)
        update = np.outer((w - value) / inverse[at, at], inverse[at])
        work[:, left] -= update
        left.remove(column)
    return codes, distance


@pytest.mark.parametrize("order, static", [("natural", True), ("natural", False), ("activation", True)])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_equal_the_papers_algorithm(name, order, static):
    """But for rows in which a value lay on a tie: from there on both are right and different."""
    weight, x = matrix(), correlated(200)
    got = made(weight, x, name, order=order, static_groups=static, block=20)
    codes, distance = oracle(weight, x, name, order, static)
    clear = distance.min(1) > 1e-4
    assert clear.sum() >= N - 2
    np.testing.assert_array_equal(got.codes.numpy()[clear], codes[clear])
    # and the errors of others were made good: this is not rounding to nearest
    nearest = quantise_rtn(weight, name).codes.numpy()
    assert (codes != nearest).mean() > 0.1


@pytest.mark.parametrize("block", [1, 7, 31, 32, 33, 64, 100, 128])
@pytest.mark.parametrize("order, static", [("natural", True), ("natural", False), ("activation", True)])
def test_blocks_only_change_the_order_of_sums(block, order, static):
    weight, x = matrix(k=150), correlated(400, k=150)
    one = made(weight, x, "int4_g32", order=order, static_groups=static, block=1000)
    other = made(weight, x, "int4_g32", order=order, static_groups=static, block=block)
    rows = (one.codes == other.codes).all(1)
    assert rows.sum() >= N - 1
    torch.testing.assert_close(one.scales[rows], other.scales[rows], rtol=2e-3, atol=0)


@pytest.mark.parametrize("range", ["minmax", "mse", "output"])
@pytest.mark.parametrize("order, static", [("natural", True), ("natural", False), ("activation", True)])
@pytest.mark.parametrize("name", ["int4_g32", "int3_g32_zp", "int2_g16", "int8_g32", "int4"])
def test_the_output_error_is_below_that_of_rounding_to_nearest(name, order, static, range):
    for seed, tokens in enumerate((300, 72, 40)):
        weight, x = matrix(seed=seed), correlated(tokens, seed=seed + 50)
        got = made(weight, x, name, order=order, static_groups=static, range=range)
        nearest = output_error(x, weight, quantise_rtn(weight, name))
        assert 0 < output_error(x, weight, got) < nearest


def test_the_range_reaches_dynamic_groups():
    """`output` weighs by the inputs also where a group's grid is found on the way."""
    weight, x = matrix(), correlated(200)
    grids = {
        search: made(weight, x, "int3_g32", order="natural", static_groups=False, range=search).scales
        for search in ("minmax", "mse", "output")
    }
    gram = x.T @ x
    first = choose_grid(weight[:, :32], parse_weight("int3"), "output", gram=gram[:32, :32]).scales
    assert torch.equal(grids["output"][:, :1], first)
    assert not torch.equal(grids["output"], grids["mse"]) and not torch.equal(grids["mse"], grids["minmax"])


def test_symmetric_ranges_keep_zero_in_the_middle():
    for static in (True, False):
        got = made(
            matrix(), correlated(200), "int4_g32_zp", symmetric=True, order="natural", static_groups=static
        )
        assert bool((got.offsets == 8).all())
        got = made(
            matrix(), correlated(200), "int4_g32", symmetric=True, order="natural", static_groups=static
        )
        torch.testing.assert_close(got.offsets, -8 * got.scales)


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_dead_inputs_are_rounded_to_nearest_and_correct_nothing(order):
    weight, x = matrix(), correlated(200)
    dead = [0, 17, 31, 40]
    x[:, dead] = 0
    weight[:, dead] = -0.2  # within every group's span
    got = made(weight, x, "int4_g32", order=order)
    nearest = quantise_rtn(weight, "int4_g32")
    assert torch.equal(got.scales, nearest.scales)
    assert torch.equal(got.codes[:, dead], nearest.codes[:, dead])
    live = [k for k in range(K) if k not in dead]
    other = weight.clone()
    other[:, dead] = 0.1
    same = made(other, x, "int4_g32", order=order)
    assert torch.equal(same.scales, got.scales)
    assert torch.equal(same.codes[:, live], got.codes[:, live])


@pytest.mark.parametrize("tokens", [1, 4])
def test_few_tokens_correct_little(tokens):
    """H says nothing about most directions; damping grows, the result is finite and no worse on the tokens seen."""
    weight, x = matrix(), correlated(tokens)
    got = made(weight, x, "int4_g32")
    assert bool(torch.isfinite(dequantise(got)).all())
    nearest = quantise_rtn(weight, "int4_g32")
    assert output_error(x, weight, got) <= output_error(x, weight, nearest)
    unseen = correlated(200, seed=99)
    assert output_error(unseen, weight, got) <= 2 * output_error(unseen, weight, nearest)


def test_identical_samples():
    weight, x = matrix(), correlated(4).repeat(50, 1)
    got = made(weight, x, "int4_g32")
    assert output_error(x, weight, got) < 0.5 * output_error(x, weight, quantise_rtn(weight, "int4_g32"))


def test_damping_is_a_share_of_the_mean_diagonal_that_grows_where_tokens_are_few():
    x = correlated(1000)
    gram = (x.T @ x).double()

    def damping(tokens, asked):
        factor = invert(gram.float(), tokens, GptqOptions(order="natural", damping=asked)).factor.double()
        hessian = torch.linalg.inv(factor.T @ factor)
        return float((torch.diagonal(hessian) - torch.diagonal(gram)).mean() / torch.diagonal(gram).mean())

    assert damping(1000, 0.05) == pytest.approx(0.05, rel=0.02)
    assert damping(K // 4, 0.05) == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_inputs_without_a_factor_are_an_error_by_name(value):
    gram = torch.full((8, 8), value)
    with pytest.raises(NotPositiveError, match="all zero, or not finite"):
        invert(gram, 100, GptqOptions())


def test_a_matrix_that_is_not_positive_is_damped_until_it_is_or_refused():
    gram = torch.eye(8)
    gram[0, 1] = gram[1, 0] = 1.05  # an eigenvalue of -0.05: ten times the asked damping makes it positive
    inverse = invert(gram, 100, GptqOptions(order="natural"))
    assert bool(torch.isfinite(inverse.factor).all())
    gram[0, 1] = gram[1, 0] = 5.0
    with pytest.raises(NotPositiveError, match="no positive definite"):
        invert(gram, 100, GptqOptions())
