"""Rounding with calibration: what each matrix saw, what its result is, and what is said where something falls back."""

import contextlib
import dataclasses
import re
import resource
import tempfile

import numpy as np
import pytest
import torch

from enginewright.passes import calibrated
from enginewright.passes.calibration import Samples
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import simulate_activation
from enginewright.passes.fuse_siblings import FuseSiblings
from enginewright.passes.gptq import GptqOptions, invert, round_gptq
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Stage
from enginewright.passes.quant_formats import QuantTensor, dequantise, quantise_rtn
from enginewright.passes.quantise import Quantise
from enginewright.passes.smooth import Smooth
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import save
from tests.passes.families import family, fused, some_tokens
from tests.passes.graphs import Build
from tests.passes.test_quantise import calls, expert_model, formats, mlp
from tests.passes.test_walk import values_of

SAMPLES = [some_tokens(length, seed=length) for length in (40, 33, 47, 40)]
SMALL = [[5, 3, 11, 0, 7, 7, 2], [1, 2], [12, 4, 9, 8]]
EXACT = ("embedding.weight=f32", "head.weight=f32")  # what stands before the first linear is then exact


def rounded(program, recipe, *overrides, samples=SMALL, memory=None):
    """A copy with matrices in the recipe's formats, by calibration on the samples; and the pass's result."""
    recipe = load_recipe(recipe, list(overrides))
    if memory is not None:
        recipe = dataclasses.replace(
            recipe, calibration=dataclasses.replace(recipe.calibration, memory=memory)
        )
    made = program.clone()
    result = Quantise(recipe, Samples(samples)).run(made)
    made.stage = Stage.QUANTISED
    remove_dead_code(made)
    made.recompile()
    return made, result


def matrix_of(program, node):
    """(the stored matrix, its format's name) of a quantised linear or of the first matrices of experts."""
    name = "codes" if is_call(node, OPS["quantised_linear"]) else "gate_up_codes"
    if is_call(node, OPS["quantised_moe"]):
        parts = node.args[3:6]
    else:
        parts = [argument(node, part) for part in (name, "scales", "offsets")]
    loaded = [None if part is None else program.weight_of(part).load() for part in parts]
    return QuantTensor(parse_weight(argument(node, "weight_format")), *loaded)


def inputs_of(program, node, samples=SMALL):
    """The node's x for all samples, each alone, [tokens, K]."""
    x = argument(node, "x").name
    return torch.cat([values_of(program, tokens)[x] for tokens in samples]).flatten(1)


def weight_named(program, name):
    return program.weights[name].load().float()


# What is measured.


def test_each_matrix_sees_the_quantised_part_before_it():
    program = mlp(tied=False)
    made, _ = rounded(program, "int4", "quantise.method=gptq", *EXACT)
    _up, down = calls(made, "quantised_linear")
    x = inputs_of(made, down)
    assert not torch.allclose(x, inputs_of(program, calls(program, "linear")[1]), atol=1e-3)
    gram, options = x.T @ x, GptqOptions(range="minmax")
    form = parse_weight("int4_g64")
    weight = weight_named(program, "down_proj.weight")
    want = round_gptq(weight, gram, invert(gram, len(x), options), form, options)
    assert (matrix_of(made, down).codes != want.codes).float().mean() < 0.01
    exact = inputs_of(program, calls(program, "linear")[1])
    gram = exact.T @ exact
    other = round_gptq(weight, gram, invert(gram, len(x), options), form, options)
    assert (matrix_of(made, down).codes != other.codes).float().mean() > 0.05


def test_linears_of_one_input_share_what_is_measured(monkeypatch):
    count = []
    whole = calibrated.Inputs.of
    monkeypatch.setattr(calibrated.Inputs, "of", lambda *a: count.append(1) or whole(*a))
    monkeypatch.setattr(calibrated, "invert", lambda *a: count.append("inverse") or invert(*a))
    _, result = rounded(family("llama"), "int4-gptq", samples=SAMPLES)
    assert result.record["rounded"] == 14
    assert count.count(1) == count.count("inverse") == 2 * 4  # qkv, o, gate and up, down


@pytest.mark.parametrize("recipe", ["int4-gptq", "int3-gptq", "llm-int8"])
def test_two_runs_are_bitwise_equal_with_values_on_disk_too(recipe):
    first, one = rounded(family("llama"), recipe, samples=SAMPLES)
    second, two = rounded(family("llama"), recipe, samples=SAMPLES, memory=2e-6)
    assert one.record == two.record
    assert any("waited on disk" in note for note in two.notes) and not any("disk" in n for n in one.notes)
    for a, b in zip(calls(first, "quantised_linear"), calls(second, "quantised_linear"), strict=True):
        assert torch.equal(matrix_of(first, a).codes, matrix_of(second, b).codes)
        scales = matrix_of(first, a).scales, matrix_of(second, b).scales
        assert scales == (None, None) or torch.equal(*scales)


@contextlib.contextmanager
def a_full_disk(most):
    """No file may grow beyond `most` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("memory", [None, 2e-6], ids=["results", "activations"])
def test_a_disk_without_room_for_temporary_files_is_told(memory, tmp_path, monkeypatch):
    program = family("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with a_full_disk(1000), pytest.raises(InputError, match="MiB free") as raised:
        rounded(program, "int4-gptq", samples=SAMPLES, memory=memory)
    assert str(tmp_path) in str(raised.value) and "TMPDIR" in str(raised.value)


@pytest.mark.parametrize("options", [["quantise.method=gptq"], ["quantise.range=output"]])
def test_recorded_errors_are_those_of_the_outputs(options):
    program = mlp(tied=False)
    made, result = rounded(
        program, "int3-gptq", "quantise.method=rtn", "quantise.range=mse", *options, *EXACT
    )
    nearest, _ = rounded(program, "int4", "linear.weight=int3_g64", *EXACT)
    for node, plain in zip(calls(made, "quantised_linear"), calls(nearest, "quantised_linear"), strict=True):
        name = node.meta["module"]
        x, weight = inputs_of(made, node), weight_named(program, f"{name}.weight")

        def error(stored, x=x, weight=weight):
            return float((x @ (dequantise(stored) - weight).T).norm() / (x @ weight.T).norm())

        found = error(matrix_of(made, node))
        assert result.record["relative_errors"][name] == pytest.approx(found, rel=1e-3)
        assert found < error(matrix_of(nearest, plain))


def test_recipes_that_only_smooth_or_gate_do_not_walk(monkeypatch):
    monkeypatch.setattr(calibrated.Inputs, "of", lambda *a: pytest.fail("measured for nothing"))
    _, result = rounded(family("llama"), "int8-smoothquant", samples=SAMPLES)
    assert result.record["rounded"] == 0


# Shapes (a group that does not divide the inputs; matrices stored the other way round).


def numpy_values(stored):
    """float32 [N, K] of codes, scales and offsets, one group at a time."""
    codes, scales = stored.codes.numpy().astype(np.float32), stored.scales.numpy()
    group, k = stored.format.group or codes.shape[1], codes.shape[1]
    out = np.zeros(codes.shape, np.float32)
    for g, start in enumerate(range(0, k, group)):
        part = slice(start, min(start + group, k))
        out[:, part] = codes[:, part] * scales[:, g, None]
        if stored.offsets is not None:
            out[:, part] += stored.offsets.numpy()[:, g, None]
    return out


def numpy_nearest(weight, bits, group):
    """(codes, scales, offsets) of rounding to nearest with a float16 scale and offset a group."""
    tables, codes = [], np.zeros(weight.shape, np.float32)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group]
        offset = part.min(1).astype(np.float16).astype(np.float32)
        scale = ((part.max(1) - offset) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
        tables.append((scale, offset))
        codes[:, start : start + group] = np.clip(
            np.rint((part - offset[:, None]) / scale[:, None]), 0, 2**bits - 1
        )
    scales, offsets = (np.stack(table, 1) for table in zip(*tables, strict=True))
    return codes, scales, offsets


def wide_mlp(hidden, ffn):
    build = Build(Stage.FUSED)
    norm = build.call("rms_norm", build.hidden(hidden), build.weight("norm.weight", hidden), 1e-5)
    up = build.linear(norm, ffn, "up_proj")
    down = build.linear(build.call("activation", up, "silu"), hidden, "down_proj")
    head = build.linear(down, 13, "lm_head")
    for node, module in ((up, "up_proj"), (down, "down_proj"), (head, "lm_head")):
        node.meta["module"] = module
    build.program.graph.output_node().args = (head,)
    return build.program


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("hidden, ffn", [(72, 200), (576, 72)])
def test_the_last_group_of_a_matrix_may_be_short(hidden, ffn, method):
    """Groups of 128 over 72, 200 and 576 inputs."""
    program = wide_mlp(hidden, ffn)
    options = ["linear.weight=int4_g128", *EXACT]
    if method == "awq":
        recipe = load_recipe("int4", [*options, "smooth.method=awq"])
        assert Smooth(recipe, Samples(SMALL)).run(program).matches > 0
    made, _ = rounded(program, "int4", *options, *(["quantise.method=gptq"] if method == "gptq" else []))
    for node in calls(made, "quantised_linear"):
        stored = matrix_of(made, node)
        weight = weight_named(program, f"{node.meta['module']}.weight").numpy()
        codes, scales, offsets = numpy_nearest(weight, 4, 128)
        assert scales.shape[1] == -(-weight.shape[1] // 128)
        np.testing.assert_array_equal(stored.scales.numpy(), scales)
        np.testing.assert_array_equal(stored.offsets.numpy(), offsets)
        if method != "gptq":
            np.testing.assert_array_equal(stored.codes.numpy(), codes)
        np.testing.assert_allclose(dequantise(stored).numpy(), numpy_values(stored), rtol=1e-6, atol=1e-7)
        step = np.repeat(scales, 128, 1)[:, : weight.shape[1]]
        moved = np.abs(numpy_values(stored) - weight) / step
        assert moved.max() <= (0.51 if method != "gptq" else 15)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return fused(save("gpt2", tmp_path_factory.mktemp("gpt2") / "gpt2", n_embd=96, n_inner=200))


@pytest.mark.parametrize("recipe", ["int8", "int4", "int4-gptq", "int4-awq"])
def test_matrices_that_are_stored_transposed(gpt2, recipe):
    """GPT-2's Conv1D, 96 and 200 wide: groups run along the inputs, and the notes count every linear."""
    program = gpt2.clone()
    if recipe == "int4-awq":
        Smooth(load_recipe(recipe), Samples(SAMPLES)).run(program)
    made, result = rounded(program, recipe, samples=SAMPLES)
    name = load_recipe(recipe).linear.weight
    assert f"linears: 8 of 8 {name}" in result.notes
    linears = [node for node in calls(made, "quantised_linear") if argument(node, "weight_format") == name]
    shapes = [tuple(argument(node, "codes").meta["val"].shape) for node in linears if "head" not in str(node)]
    assert shapes[:4] == [(288, 96), (96, 96), (200, 96), (96, 200)]
    groups = parse_weight(name)
    for node, shape in zip(linears[:8], shapes[:8], strict=True):
        assert tuple(argument(node, "scales").meta["val"].shape) == (shape[0], groups.groups(shape[1]))
        stored = matrix_of(made, node)
        weight = program.weights[re.sub(r"\.(int\d\w*)\.codes$", "", str(argument(node, "codes").target))]
        assert (dequantise(stored) - weight.load()).norm() < (
            0.01 if recipe == "int8" else 0.2
        ) * weight.load().norm()
    tokens = some_tokens()
    want = gpt2.run(tokens)
    assert (made.run(tokens) - want).norm() < (0.05 if recipe == "int8" else 0.35) * want.norm()


@pytest.mark.parametrize(
    "overrides, embedding, head",
    [
        ([], "int8", "int8"),
        (["embedding.weight=f32"], None, "int8"),
        (["head.weight=f32"], "int8", None),
        (["embedding.weight=f32", "head.weight=f32"], None, None),
    ],
)
def test_calibration_leaves_a_tied_table_to_its_own_formats(overrides, embedding, head):
    """Only the asked side changes; linears are rounded by calibration all the same."""
    program = mlp(tied=True)
    made, result = rounded(program, "int4-gptq", *overrides)
    found = formats(made)
    assert (found.get("embed_tokens", (None,))[0], found.get("lm_head", (None,))[0]) == (embedding, head)
    assert list(result.record["relative_errors"]) == ["up_proj", "down_proj"]
    tables = [name for name in made.weights if name.startswith("embed_tokens.weight")]
    stored = {name for name in tables if name.endswith((".codes", "tokens.weight"))}
    assert len(stored) == len({embedding, head})
    nearest = quantise_rtn(weight_named(program, "embed_tokens.weight"), "int8")
    for name in stored - {"embed_tokens.weight"}:
        assert torch.equal(made.weights[name].load(), nearest.codes)


# What falls back.


def scaled_mlp(scale):
    build = Build()
    table = torch.randn(13, 40, generator=build.generator) * scale
    x = build.call("embedding", build.tokens, build.weight("embed.weight", value=table))
    up = build.linear(x, 24, "up_proj")
    up.meta["module"] = "up_proj"
    build.program.graph.output_node().args = (build.linear(up, 13, "lm_head"),)
    return build.program


@pytest.mark.parametrize("options", [["quantise.method=gptq"], ["quantise.range=output"]])
@pytest.mark.parametrize("scale, why", [(1e25, "not finite"), (0.0, "all zero, or not finite")])
def test_a_matrix_without_a_usable_gram_matrix_is_rounded_to_nearest_by_name(scale, why, options):
    if scale == 0 and "range" in options[0]:
        why = None  # every grid is as good: the widest stays
    program = scaled_mlp(scale)
    made, result = rounded(program, "int4", *options, *EXACT)
    got = matrix_of(made, calls(made, "quantised_linear")[0])
    search = "mse" if why and "range" in options[0] else "minmax"
    want = quantise_rtn(weight_named(program, "up_proj.weight"), "int4_g64", search)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    if why is None:
        assert result.record["fallbacks"] == {}
    else:
        assert why in result.record["fallbacks"]["up_proj"]
        assert any("up_proj is rounded to nearest: " in note and why in note for note in result.notes)
    if scale:
        assert "up_proj" not in result.record["relative_errors"], "an error that is not known is not recorded"


@pytest.mark.parametrize("samples", [[[5, 90, 17, 33]], [some_tokens(9)] * 12], ids=["four", "identical"])
@pytest.mark.parametrize("recipe", ["int4-gptq", "int3-gptq"])
def test_little_calibration_is_never_worse_than_none(recipe, samples):
    """On what was seen; and the result is finite."""
    program = family("llama")
    made, result = rounded(program, recipe, samples=samples)
    nearest, _ = rounded(
        program, "int4", f"linear.weight={load_recipe(recipe).linear.weight}", samples=samples
    )
    assert result.record["fallbacks"] == {}
    assert all(bool(torch.isfinite(made.run(tokens)).all()) for tokens in samples)
    for node, plain in zip(calls(made, "quantised_linear"), calls(nearest, "quantised_linear"), strict=True):
        name = node.meta["module"]
        if name not in result.record["relative_errors"]:
            continue
        x, weight = inputs_of(made, node, samples[:1]), weight_named(program, f"{name}.weight")
        got, other = (
            (x @ (dequantise(s) - weight).T).norm()
            for s in (matrix_of(made, node), matrix_of(nearest, plain))
        )
        assert got <= other


def test_without_samples_the_keys_that_want_them_are_named():
    with pytest.raises(InputError, match=r"(?s)calibration data.*quantise.method, quantise.range"):
        Quantise(load_recipe("int4-gptq")).run(mlp())


def test_weights_that_are_not_finite_are_named():
    program = scaled_mlp(1.0)
    program.weights["up_proj.weight"].value[3, 5] = float("nan")
    with pytest.raises(InputError, match=r"(?s)up_proj.*not finite.*override"):
        rounded(program, "int4-gptq", *EXACT)


# Outliers and static scales.


def outlier_model(width=64):
    """Two linears that read one input with a few large features, the others at most 2, and one that reads another."""
    build = Build()
    table = torch.randn(13, width, generator=build.generator)
    table *= 2 / table.abs().amax(0)
    for column, size in ((3, 40.0), (17, 9.0), (40, 25.0), (41, 8.0), (63, 7.0)):
        table[:, column] *= size / 2
    x = build.call("embedding", build.tokens, build.weight("embed.weight", value=table))
    parts = [build.linear(x, 24, name, bias=True) for name in ("gate_proj", "up_proj")]
    product = build.call(torch.ops.aten.mul.Tensor, build.call("activation", parts[0], "silu"), parts[1])
    down = build.linear(product, 13, "down_proj")
    head = build.linear(down, 13, "lm_head")
    for node, module in zip(
        [*parts, down, head], ("gate_proj", "up_proj", "down_proj", "lm_head"), strict=True
    ):
        node.meta["module"] = module
    build.program.graph.output_node().args = (head,)
    return build.program


ALL = [list(range(13))]  # every row of the table: the largest magnitudes are those above


@pytest.mark.parametrize(
    "options, columns",
    [
        ([], [3, 17, 40, 41]),  # of 64 features one in sixteen may stay apart: the four largest
        (["outliers.most=0.5"], [3, 17, 40, 41, 63]),
        (["outliers.threshold=4.25"], [3, 17, 40]),
        (["outliers.threshold=15", "outliers.most=0.5"], [3]),
        (["outliers.threshold=25"], []),
        (["outliers.most=0.02"], [3]),
        (["outliers.most=0.01"], []),
    ],
)
def test_columns_by_threshold_and_share(options, columns):
    made, result = rounded(outlier_model(), "llm-int8", *options, *EXACT, samples=ALL)
    gate, up, _down = calls(made, "quantised_linear")
    found = [argument(node, "outlier_columns") for node in (gate, up)]
    if columns:
        assert found[0] is found[1]
        loaded = made.weight_of(found[0]).load()
        assert loaded.dtype == torch.int32 and loaded.tolist() == columns
    else:
        assert found == [None, None]
    assert result.record.get("outlier_columns", 0) >= len(columns)


def direct(x, weight, bias, columns, scale=None):
    """LLM.int8() written out: float64 products of bf16 outliers and of int8 codes, one scale a token and a channel."""
    rest, matrix = x.clone(), weight.clone()
    rest[:, columns] = 0
    matrix[:, columns] = 0
    row_scale = matrix.abs().amax(1, keepdim=True) / 127
    codes = (matrix / row_scale).round()
    token_scale = rest.abs().amax(1, keepdim=True) / 127 if scale is None else torch.full((len(x), 1), scale)
    token_codes = (rest / token_scale).round().clamp(-127, 127)
    inner = (token_codes.double() @ codes.double().T) * token_scale * row_scale.T
    outer = x[:, columns].bfloat16().double() @ weight[:, columns].bfloat16().double().T
    return (inner + outer + bias).float()


@pytest.mark.parametrize("activation", ["int8", "int8_static"])
def test_the_decomposition_equals_a_direct_computation(activation):
    """A static scale is that of the features which are left: the outliers would make it useless."""
    program = outlier_model()
    made, _ = rounded(program, "llm-int8", f"linear.activation={activation}", *EXACT, samples=ALL)
    columns = [3, 17, 40, 41]
    x = inputs_of(program, calls(program, "linear")[0], ALL)
    rest = x.clone()
    rest[:, columns] = 0
    scale = float(rest.abs().max()) / 127 if activation == "int8_static" else None
    for node in calls(made, "quantised_linear")[:2]:
        name = node.meta["module"]
        weight, bias = (weight_named(program, f"{name}.{part}") for part in ("weight", "bias"))
        assert argument(node, "activation_scale") == pytest.approx(scale or 0.0)
        got = torch.cat([values_of(made, tokens)[node.name] for tokens in ALL])
        want = direct(x, weight, bias, columns, scale)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        codes = matrix_of(made, node).codes
        assert not codes[:, columns].any() and codes.abs().amax() == 127
        kept = made.weight_of(argument(node, "outlier_weight")).load()
        assert torch.equal(kept, weight[:, columns].bfloat16())


def test_outliers_help():
    program = outlier_model()
    want = program.run(ALL[0])

    def error(*options):
        made, _ = rounded(program, "llm-int8", *EXACT, *options, samples=ALL)
        return float((made.run(ALL[0]) - want).norm() / want.norm())

    assert error() < 0.4 * error("outliers.threshold=null")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("search", ["minmax", "mse", "output"])
def test_what_is_left_of_a_matrix_is_rounded_as_the_recipe_says(method, search):
    program = outlier_model()
    # Large weights that hardly matter: a smaller range is better.
    program.weights["embed.weight"].value[:, 5] *= 1e-3
    program.weights["gate_proj.weight"].value[:, 5] *= 4
    made, _ = rounded(
        program, "llm-int8", f"quantise.method={method}", f"quantise.range={search}", *EXACT, samples=ALL
    )
    node = calls(made, "quantised_linear")[0]
    columns = made.weight_of(argument(node, "outlier_columns")).load().long()
    weight = weight_named(program, "gate_proj.weight").index_fill(1, columns, 0.0)
    stored = matrix_of(made, node)
    assert not stored.codes[:, columns].any()
    plain = quantise_rtn(weight, "int8")
    if method == "gptq" or search == "output":
        x = inputs_of(program, calls(program, "linear")[0], ALL).index_fill(1, columns, 0.0)
        got, nearest = ((x @ (dequantise(s) - weight).T).norm() for s in (stored, plain))
        assert got < nearest
    else:
        assert torch.equal(stored.codes, quantise_rtn(weight, "int8", search).codes)


def test_siblings_with_outliers_are_still_joined():
    made, _ = rounded(family("llama"), "llm-int8", "outliers.threshold=1.2", samples=SAMPLES)
    before, tokens = made.clone(), some_tokens()
    assert all(argument(node, "outlier_columns") is not None for node in calls(made, "quantised_linear")[:3])
    assert FuseSiblings().run(made).matches == 4  # q, k, v and gate, up of two layers
    remove_dead_code(made)
    made.recompile()
    assert len(calls(made, "quantised_linear")) == len(calls(before, "quantised_linear")) - 6
    torch.testing.assert_close(made.run(tokens), before.run(tokens), rtol=1e-4, atol=1e-4)


def test_only_matrices_that_the_kernel_adds_columns_to_have_outliers():
    """An override to another format, and experts; the notes say so of experts."""
    made, _ = rounded(
        outlier_model(), "llm-int8", 'overrides=[{match: "up_proj", weight: int4_g32}]', *EXACT, samples=ALL
    )
    gate, up, _ = calls(made, "quantised_linear")
    assert argument(gate, "outlier_columns") is not None
    assert argument(up, "outlier_columns") is None and argument(up, "weight_format") == "int4_g32"
    _, result = rounded(family("mixtral"), "llm-int8", samples=SAMPLES)
    assert any("experts of 2 layers keep no columns apart" in note for note in result.notes)


def test_static_scales_are_the_largest_magnitude_in_the_engine():
    """Of inputs behind a quantised part; what lies beyond is clamped."""
    program = mlp(tied=False)
    made, _ = rounded(program, "int8", "linear.activation=int8_static", *EXACT)
    for node in calls(made, "quantised_linear"):
        x = inputs_of(made, node)
        assert argument(node, "activation_scale") == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)
    y = calls(made, "quantised_linear")[0]
    scale, weight = argument(y, "activation_scale"), dequantise(matrix_of(made, y))
    x = inputs_of(made, y) * 3
    want = ((x / scale).round().clamp(-127, 127) * scale) @ weight.T + weight_named(program, "up_proj.bias")
    args = [made.weight_of(a).load() if getattr(a, "op", "") == "get_attr" else a for a in y.args[1:]]
    torch.testing.assert_close(OPS["quantised_linear"](x, *args), want)
    assert torch.equal(simulate_activation(x, "int8_static", scale).abs().max(), torch.tensor(127 * scale))


@pytest.mark.parametrize("scale, found", [(0.0, "zero"), (float("inf"), "not finite")])
def test_a_static_scale_needs_inputs(scale, found):
    program = scaled_mlp(1.0)
    program.weights["embed.weight"].value.fill_(scale)
    with pytest.raises(InputError, match=rf"(?s)up_proj.*static activation scale.*{found}"):
        rounded(program, "int8", "linear.activation=int8_static", *EXACT)


@pytest.mark.parametrize("module, role", [("lm_head", "head"), ("gate", "router")])
def test_a_static_scale_is_for_linears_only(module, role):
    program = expert_model()
    for node in program.graph.nodes:
        if is_call(node, OPS["linear"]):
            node.meta["module"] = str(argument(node, "weight").target).removesuffix(".weight")
    override = f"overrides=[{{match: {module}, weight: int8, activation: int8_static}}]"
    with pytest.raises(InputError, match=rf"(?s){module} takes no static.*int8_static for the {role}"):
        rounded(program, "int8", override)


def test_experts_take_no_static_scale_and_the_notes_say_so():
    made, result = rounded(family("mixtral"), "int8", "linear.activation=int8_static", samples=SAMPLES)
    assert [argument(n, "activation_format") for n in calls(made, "quantised_moe")] == ["int8_g32"] * 2
    linears = [n for n in calls(made, "quantised_linear") if n.meta["module"].startswith("model.layers")]
    assert {argument(n, "activation_format") for n in linears} == {"int8_static"}
    assert any("2 × experts take no static activation scale: int8_g32 instead" in n for n in result.notes)


# Experts.


def routed(program, samples):
    """The tokens' inputs of each expert, from the model itself."""
    (node,) = calls(program, "moe")
    x = torch.cat([values_of(program, tokens)[argument(node, "x").name] for tokens in samples])
    chosen = torch.cat([values_of(program, tokens)[argument(node, "topk_index").name] for tokens in samples])
    return [x[(chosen == expert).any(1)] for expert in range(4)]


def test_each_expert_is_rounded_for_the_tokens_that_it_gets():
    """One with few tokens is rounded to nearest, and counted."""
    program = expert_model()
    samples = [[token for token in range(13) for _ in range(5)]]
    tokens = routed(program, samples)
    few = {i: len(x) for i, x in enumerate(tokens) if len(x) < calibrated.LEAST_EXPERT_TOKENS}
    assert 0 < len(few) < 4
    made, result = rounded(program, "int3-gptq", *EXACT, samples=samples)
    (node,) = calls(made, "quantised_moe")
    found = result.record["experts_with_few_tokens"]
    assert {int(name.rpartition(".")[2]): count for name, count in found.items()} == few
    assert any(f"{len(few)} experts saw fewer than 32" in note for note in result.notes)
    stored, source = matrix_of(made, node), weight_named(program, "experts.gate_up_proj")
    for expert, x in enumerate(tokens):
        weight = source[expert]
        got = dequantise(
            QuantTensor(
                stored.format, *(part[expert] for part in (stored.codes, stored.scales, stored.offsets))
            )
        )
        nearest = dequantise(quantise_rtn(weight, "int3_g64", "mse"))
        if expert in few:
            assert torch.equal(got, nearest)
        else:
            assert (x @ (got - weight).T).norm() < 0.95 * (x @ (nearest - weight).T).norm()


def test_experts_of_a_model():
    made, result = rounded(family("mixtral"), "int4-gptq", samples=SAMPLES)
    assert result.record["rounded"] == 2 * 4 + 2
    nearest, _ = rounded(family("mixtral"), "int4", samples=SAMPLES)
    want = [family("mixtral").run(tokens) for tokens in SAMPLES]

    def error(program):
        return sum(float((program.run(t) - w).square().sum()) for t, w in zip(SAMPLES, want, strict=True))

    assert error(made) < error(nearest)
