"""Rounding to nearest against a NumPy oracle written from the definitions, at even and odd shapes."""

import numpy as np
import pytest
import torch

from enginewright.passes.quant_formats import (
    QuantisedWeight,
    QuantTensor,
    code_dtype,
    concatenate,
    dequantise,
    quantise_rtn,
    quantise_weight,
)
from enginewright.passes.weights import ConstantTensor, concatenated, transposed
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import WEIGHT_FORMATS, parse_weight

INTEGER = [name for name in WEIGHT_FORMATS if parse_weight(name).kind != "float"]


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def oracle(weight, name):
    """codes, scales, offsets (or zero points), one group at a time, in NumPy."""
    form = parse_weight(name)
    n, k = weight.shape
    group, top = form.group or k, np.float32(2**form.bits - 1)
    codes = np.zeros((n, k), np.int32)
    scales, offsets = (np.zeros((n, -(-k // group)), np.float32) for _ in range(2))
    for row in range(n):
        for start in range(0, k, group):
            values = weight[row, start : start + group].astype(np.float32)
            at = row, start // group
            if form.kind == "symmetric":
                scale = np.abs(values).max() * np.float32(1 / 127)
                scales[at] = np.float32(np.float16(scale)) if form.half_scales else scale
                codes[row, start : start + group] = np.clip(np.rint(values / scales[at]), -127, 127)
            elif form.kind == "zero":
                low, high = min(values.min(), np.float32(0)), max(values.max(), np.float32(0))
                scales[at] = np.float32(np.float16((high - low) * np.float32(1 / top)))
                offsets[at] = np.clip(np.rint(-low / scales[at]), 0, top)
                codes[row, start : start + group] = np.clip(
                    np.rint(values / scales[at] + offsets[at]), 0, top
                )
            else:
                offsets[at] = np.float32(np.float16(values.min()))
                scales[at] = np.float32(np.float16((values.max() - offsets[at]) / top))
                codes[row, start : start + group] = np.clip(
                    np.rint((values - offsets[at]) / scales[at]), 0, top
                )
    return codes, scales, offsets


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("shape", [(5, 72), (3, 200), (7, 576), (4, 31), (1, 1), (16, 128)])
def test_equals_the_oracle(name, shape):
    weight = matrix(*shape)
    result = quantise_rtn(weight, name)
    codes, scales, offsets = oracle(weight.numpy(), name)
    form = parse_weight(name)
    assert result.codes.dtype == code_dtype(form) and tuple(result.codes.shape) == shape
    slack = (
        2.0**-24 if shape[1] % (form.group or 72) == 1 else 0
    )  # of one value float16 loses the scale itself
    np.testing.assert_allclose(result.scales.numpy(), scales, rtol=2e-7, atol=slack)
    if form.has_offsets:
        np.testing.assert_array_equal(result.offsets.numpy(), offsets)
    else:
        assert result.offsets is None
    if shape[1] > 1 or form.kind != "offset":
        assert np.abs(result.codes.numpy().astype(np.int32) - codes).max() <= (
            form.bits == 8
        )  # a tie, at most
        assert (result.codes.numpy() != codes).mean() <= 1e-3


@pytest.mark.parametrize("name", INTEGER)
def test_values_are_what_the_definition_says(name):
    result = quantise_rtn(matrix(6, 200, seed=5), name)
    form = parse_weight(name)
    group = form.group or 200
    codes, scales = result.codes.numpy().astype(np.float64), result.scales.numpy().astype(np.float64)
    scales = np.repeat(scales, group, -1)[:, :200]
    if form.has_offsets:
        shift = np.repeat(result.offsets.numpy().astype(np.float64), group, -1)[:, :200]
        want = scales * (codes - shift) if form.kind == "zero" else scales * codes + shift
    else:
        want = scales * codes
    np.testing.assert_allclose(dequantise(result).numpy(), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zero", ["", "_zp"])
def test_symmetric_means_a_zero_in_the_middle(bits, zero):
    name = f"{'uint8' if bits == 8 else f'int{bits}'}_g32{zero}"
    result = quantise_rtn(matrix(4, 72), name, symmetric=True)
    middle = 2 ** (bits - 1)
    if zero:
        assert torch.equal(result.offsets, torch.full((4, 3), float(middle)))
    else:
        assert torch.equal(result.offsets, -middle * result.scales)
    back = dequantise(result)
    slack = 2.0 ** (bits - 12)  # what float16 takes from a scale, at the outermost code
    assert (back - matrix(4, 72)).abs().max() <= result.scales.max() * (0.501 + slack)


def test_fp8_is_e4m3_with_a_scale_a_channel():
    weight = matrix(5, 40)
    result = quantise_rtn(weight, "fp8")
    assert result.codes.dtype == torch.float8_e4m3fn and tuple(result.scales.shape) == (5, 1)
    assert (
        dequantise(result) - weight
    ).abs().max() <= weight.abs().max() / 16  # three bits behind the leading one


@pytest.mark.parametrize("name", INTEGER)
def test_error_is_half_a_step_and_dequantise_inverts(name):
    weight = matrix(9, 200, seed=1)
    form = parse_weight(name)
    result = quantise_rtn(weight, name)
    back = dequantise(result)
    group = form.group or 200
    steps = result.scales.repeat_interleave(group, -1)[:, :200]
    slack = 0 if form.symmetric else 2.0**-11 * weight.abs().max()
    slack = slack + steps * 0.5 if form.kind == "zero" else slack  # zero points are whole
    assert bool(((back - weight).abs() <= steps * 0.502 + slack).all())
    again = quantise_rtn(back, name)
    assert torch.allclose(dequantise(again), back, atol=2e-3 * float(weight.abs().max()))


@pytest.mark.parametrize("name", INTEGER)
def test_half_scales_are_exactly_float16(name):
    result = quantise_rtn(matrix(4, 96), name)
    if parse_weight(name).half_scales:
        for part in (result.scales, result.offsets):
            assert part is None or torch.equal(part, part.half().float())


@pytest.mark.parametrize("name", INTEGER)
def test_zero_constant_and_tiny_groups(name):
    weight = torch.zeros(4, 64)
    weight[1] = 0.375
    weight[2] = 1e-6 * torch.linspace(-1, 1, 64)
    weight[3, 5] = 1e-9
    back = dequantise(quantise_rtn(weight, name))
    assert bool((back[0] == 0).all())
    assert torch.allclose(back[1], weight[1], rtol=1e-3)
    tolerance = 1e-8 if name == "int8" else 2.0**-24 * 8
    assert float((back[2:] - weight[2:]).abs().max()) <= tolerance


def test_padding_of_a_short_group_does_not_widen_it():
    weight = torch.full((1, 72), 3.0)
    weight[0, 64:] = torch.linspace(5, 6, 8)
    result = quantise_rtn(weight, "int4_g64")
    assert float(result.offsets[0, 1]) == 5.0
    assert float(result.scales[0, 1]) == pytest.approx(1 / 15, rel=1e-3)


@pytest.mark.parametrize("name", INTEGER)
def test_mse_search_never_errs_more(name):
    weight = matrix(8, 192, seed=2) ** 3
    errors = [
        float((dequantise(quantise_rtn(weight, name, search)) - weight).square().sum())
        for search in ("minmax", "mse")
    ]
    assert errors[1] <= errors[0]
    if name.startswith("int4") and not name.endswith("_zp"):
        assert errors[1] < 0.97 * errors[0]


def test_bf16_is_a_cast():
    weight = matrix(3, 5)
    result = quantise_rtn(weight, "bf16")
    assert result.codes.dtype == torch.bfloat16 and result.scales is None and result.offsets is None
    assert torch.equal(dequantise(result), weight.bfloat16().float())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_rows_stand_alone(name):
    """Quantising a concatenation along the outputs equals concatenating quantised matrices."""
    first, second = matrix(6, 72), matrix(5, 72, seed=3)
    joined = concatenate([quantise_rtn(first, name), quantise_rtn(second, name)])
    whole = quantise_rtn(torch.cat([first, second]), name)
    stack = quantise_rtn(torch.stack([first, first]), name)
    for part in ("codes", "scales", "offsets"):
        a, b, c = getattr(joined, part), getattr(whole, part), getattr(stack, part)
        assert (a is None and b is None) or torch.equal(a, b)
        assert c is None or torch.equal(c[1], a[:6])


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_streaming_gives_the_same(name, monkeypatch):
    monkeypatch.setattr("enginewright.passes.quant_formats._CHUNK_BYTES", 1000)
    parts = [ConstantTensor("a", matrix(6, 72)), ConstantTensor("b", matrix(5, 72, seed=3))]
    joined = concatenated(parts)
    wide = transposed(ConstantTensor("c", matrix(72, 11, seed=4)))
    for weight in (joined, wide):
        streamed, whole = quantise_weight(weight, name), quantise_rtn(weight.load(), name)
        assert torch.equal(streamed.codes, whole.codes)
        assert streamed.scales is None or torch.equal(streamed.scales, whole.scales)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_parts_describe_themselves_before_they_load(name):
    weight = QuantisedWeight(ConstantTensor("layer.weight", matrix(6, 72)), name)
    for part in (weight.codes, weight.scales, weight.offsets):
        if part is not None:
            value = part.load()
            assert (tuple(value.shape), value.dtype) == (part.shape, part.dtype)
            assert [leaf.name for leaf in part.leaves()] == ["layer.weight"]


def test_one_matrix_is_rounded_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        QuantisedWeight,
        "compute",
        lambda self: calls.append(self) or quantise_rtn(self.source.load(), "int8"),
    )
    weight = QuantisedWeight(ConstantTensor("w", matrix(4, 8)), "int8")
    weight.codes.load(), weight.scales.load()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "value, said", [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e7, "too large")]
)
def test_unusable_values_name_the_tensor(value, said):
    weight = matrix(4, 64)
    weight[2, 3] = value
    with pytest.raises(InputError, match=f"(?s)'model.x.weight'.*{said}"):
        quantise_weight(ConstantTensor("model.x.weight", weight), "int4_g64")


def test_parts_must_fit_together():
    codes = torch.zeros(4, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales"):
        QuantTensor(parse_weight("int4_g64"), codes, torch.zeros(4, 1), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="codes"):
        QuantTensor(parse_weight("int8"), codes, torch.zeros(4, 1))
