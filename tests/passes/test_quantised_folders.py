"""Folders of other tools' quantised models: values equal transformers on dequantised weights, integers arrive unchanged,
and a configuration that does not fit the tensors is an error by name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from enginewright.passes.capture import capture
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.matching import argument, is_call
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import load_recipe
from tests.passes import quantised as make
from tests.passes.architectures import VOCAB

PROMPT = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(1))
Writer = Callable[[Path], make.Written]

CASES: dict[str, tuple[Writer, str]] = {
    "awq": (make.write_awq, "int4_g32_zp"),
    "awq-qwen2": (lambda path: make.write_awq(path, "qwen2", group=16), "int4_g16_zp"),
    "awq-channel": (lambda path: make.write_awq(path, "gemma3_text", group=0), "int4_zp"),
    "gptq": (make.write_gptq, "int4_g32_zp"),
    "gptq-short-group": (lambda path: make.write_gptq(path, group=64), "int4_g64_zp"),
    "gptq-2": (lambda path: make.write_gptq(path, "qwen2", bits=2, group=16), "int2_g16_zp"),
    "gptq-3": (lambda path: make.write_gptq(path, bits=3), "int3_g32_zp"),
    "gptq-8-channel": (lambda path: make.write_gptq(path, bits=8, group=0), "uint8_zp"),
    "gptq-v2": (lambda path: make.write_gptq(path, version=2), "int4_g32_zp"),
    "gptq-v2-3": (lambda path: make.write_gptq(path, "gemma3_text", bits=3, version=2), "int3_g32_zp"),
    "gptq-borrows": (lambda path: make.write_gptq(path, borrows=True), "int4_g32_zp"),
    "gptq-order": (lambda path: make.write_gptq(path, desc_act=True), "int4_g32_zp"),
    "gptq-order-short": (lambda path: make.write_gptq(path, group=64, desc_act=True), "int4_g64_zp"),
    "gptq-conv1d": (lambda path: make.write_gptq(path, "gpt2"), "int4_g32_zp"),
    "gptq-conv1d-order": (lambda path: make.write_gptq(path, "gpt2", desc_act=True), "int4_g32_zp"),
    "gptq-fused": (lambda path: make.write_gptq(path, "phi3"), "int4_g32_zp"),
    "bitsandbytes": (make.write_bitsandbytes, "int8"),
    "bitsandbytes-conv1d": (lambda path: make.write_bitsandbytes(path, "gpt2"), "int8"),
    "packed": (make.write_packed, "int4_g32_zp"),
    "packed-asymmetric": (lambda path: make.write_packed(path, "qwen2", symmetric=False), "int4_g32_zp"),
    "packed-channel": (lambda path: make.write_packed(path, "gemma3_text", group=0), "int4_zp"),
    "packed-8": (lambda path: make.write_packed(path, bits=8), "int8_g32"),
    "packed-8-asymmetric": (lambda path: make.write_packed(path, bits=8, symmetric=False), "uint8_g32_zp"),
    "packed-3": (lambda path: make.write_packed(path, bits=3), "int3_g32_zp"),
    "packed-order": (lambda path: make.write_packed(path, g_idx=True), "int4_g32_zp"),
    "packed-bf16": (lambda path: make.write_packed(path, scale_dtype=torch.bfloat16), "int4_g32_zp"),
    "w8a8": (make.write_w8a8, "int8"),
    "w8a8-tensor": (lambda path: make.write_w8a8(path, "qwen2", "tensor"), "int8"),
    "w8a8-static": (lambda path: make.write_w8a8(path, "gemma3_text", static=True), "int8"),
    "packed-odd": (
        lambda path: make.write_packed(path, group=0, hidden_size=44, intermediate_size=90),
        "int4_zp",
    ),
    "w8a8-odd": (lambda path: make.write_w8a8(path, hidden_size=44, intermediate_size=90), "int8"),
    "awq-odd": (lambda path: make.write_awq(path, group=0, hidden_size=40, intermediate_size=72), "int4_zp"),
    "fp8": (lambda path: make.write_w8a8(path, fp8=True), "fp8"),
    "fp8-tensor": (lambda path: make.write_w8a8(path, "qwen2", "tensor", fp8=True), "fp8"),
}
ACTIVATIONS = {"w8a8": "int8", "w8a8-tensor": "int8", "w8a8-static": "int8_static"}


def quantised(path: Path, recipe: str = "keep") -> Program:
    """The program at stage QUANTISED, before matrices are joined."""
    return rounded(capture(path), recipe)


def rounded(program: Program, recipe: str = "keep") -> Program:
    order = steps(load_recipe(recipe))
    last = next(i for i, step in enumerate(order) if step.rewrite.name == "quantise")
    records = run_steps(program, [Step(Normalise(), Stage.NORMALISED), *order[: last + 1]])
    program.notes += [note for record in records for note in record.notes]
    return program


def linears(program: Program) -> dict[str, torch.fx.Node]:
    nodes = [node for node in program.graph.nodes if is_call(node, OPS["quantised_linear"])]
    return {node.meta["module"]: node for node in nodes}


@pytest.mark.parametrize("case", CASES)
def test_values_equal_transformers_and_integers_arrive_unchanged(tmp_path, case):
    write, form = CASES[case]
    written = write(tmp_path)
    program = capture(written.path)
    with torch.no_grad():
        wanted = written.model(PROMPT[None]).logits[0]
    torch.testing.assert_close(program.run(PROMPT), wanted, rtol=0, atol=2e-5)
    nodes = linears(rounded(program))
    for name, matrix in written.matrices.items():
        node = nodes[name]
        assert argument(node, "weight_format") == form
        codes, scales, offsets = (
            None if part is None else program.weight_of(part).load()
            for part in (argument(node, "codes"), argument(node, "scales"), argument(node, "offsets"))
        )
        shift = 128 if case == "packed-8" else 0
        wanted = matrix.codes - shift
        order = matrix.order if matrix.order is not None else np.arange(wanted.shape[1])
        np.testing.assert_array_equal(codes.float().numpy(), wanted[:, order])
        np.testing.assert_array_equal(scales.numpy(), matrix.scales.astype(np.float32))
        if offsets is None:
            assert matrix.zeros is None or shift
        else:
            np.testing.assert_array_equal(offsets.numpy(), matrix.zeros)
        if case in ACTIVATIONS:
            assert argument(node, "activation_format") == ACTIVATIONS[case]
    if case == "w8a8-static":
        assert {argument(nodes[name], "activation_scale") for name in written.matrices} == {make.INPUT_SCALE}


@pytest.mark.parametrize(
    "case", ["gptq-order", "gptq-conv1d-order", "packed-order", "awq-qwen2", "w8a8-static"]
)
def test_the_quantised_program_computes_the_same(tmp_path, case):
    """The whole pipeline, activations aside: they are left in float32."""
    written = CASES[case][0](tmp_path)
    program = quantised(written.path)
    for node in linears(program).values():
        schema = [item.name for item in node.target._schema.arguments]
        node.args = tuple(
            "f32" if name == "activation_format" else value
            for name, value in zip(schema, node.args, strict=False)
        )
    with torch.no_grad():
        wanted = written.model(PROMPT[None]).logits[0]
    torch.testing.assert_close(program.run(PROMPT), wanted, rtol=0, atol=1e-4)


def test_linears_of_one_order_share_one_reordered_input(tmp_path):
    program = quantised(CASES["gptq-order"][0](tmp_path).path)
    picked = [n for n in program.graph.nodes if is_call(n, torch.ops.aten.index_select.default)]
    layers = 2
    assert len(picked) == layers * 4  # q, k and v one; o, gate and up (alike here), down


def test_another_recipe_rounds_again_and_says_so(tmp_path):
    written = make.write_gptq(tmp_path)
    program = quantised(written.path, "int8")
    assert any("GPTQ int4_g32_zp rounded again to int8" in note for note in program.notes)
    (node, *_) = linears(program).values()
    assert argument(node, "weight_format") == "int8"


def test_what_was_left_plain_is_kept_in_its_nearest_format(tmp_path):
    program = quantised(make.write_gptq(tmp_path, dtype=torch.float16).path)
    assert any("F16 rounded again to bf16" in note for note in program.notes)
    assert argument(linears(program)["lm_head"], "weight_format") == "bf16"
    again = quantised(make.write_gptq(tmp_path / "f32").path)
    assert "lm_head" not in linears(again)  # float32 stays as it is


def test_scales_that_float16_cannot_hold(tmp_path):
    written = make.write_packed(tmp_path, scale_dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj"
    written.tensors[f"{name}.weight_scale"] *= 1 + 1e-5
    program = quantised(written.save())
    assert any("its scales rounded to float16" in note for note in program.notes)
    written.tensors[f"{name}.weight_scale"] *= 1e-9
    program = quantised(written.save())
    assert any("rounded again to int4_g32_zp" in note for note in program.notes)


def test_experts_follow_transformers_conversion(tmp_path):
    changes = {"moe_intermediate_size": 32, "mlp_only_layers": []}
    model = make.ARCHITECTURES["qwen3_moe"](**make.SIZES, **changes)
    directory = tmp_path / "plain"
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    assert any(".experts.3." in key for key in stored), "this checkpoint no longer stores experts one by one"
    settings = make._compressed(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        None,
        ("lm_head", "re:.*mlp.gate$"),
    )
    made = {}
    for seed, key in enumerate(key for key in list(stored) if key.endswith("_proj.weight")):
        n, k = stored.pop(key).shape
        matrix = make.random_matrix(n, k, 4, 32, seed, zero_points=False)
        matrix.zeros = np.full(matrix.scales.shape, 8)
        name = key.removesuffix(".weight")
        made[name] = matrix
        stored[f"{name}.weight_packed"] = torch.from_numpy(make._stream_words(matrix.codes, 4))
        stored[f"{name}.weight_scale"] = torch.from_numpy(matrix.scales)
        stored[f"{name}.weight_shape"] = torch.tensor([n, k])
    config = make.json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
    make.Written(directory, model, made, stored, config).save()
    program = quantised(directory)
    node = next(n for n in program.graph.nodes if is_call(n, OPS["quantised_moe"]))
    layer = node.meta["module"].partition(".mlp")[0]
    assert argument(node, "weight_format") == "int4_g32_zp"
    codes = program.weight_of(argument(node, "down_codes")).load()
    for expert in range(8):
        np.testing.assert_array_equal(codes[expert], made[f"{layer}.mlp.experts.{expert}.down_proj"].codes)


# Configuration against tensors.


def refused(written: make.Written, *words: str) -> None:
    with pytest.raises(InputError) as error:
        capture(written.save())
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("arch", ["gemma3_text", "qwen2"])
def test_an_ignored_name_that_no_longer_matches(tmp_path, arch):
    skipped = ("lm_head", "model.layers.1.mlp.up_proj")
    written = make.write_packed(tmp_path, arch, ignore=skipped, skip=skipped)
    assert capture(written.path).notes
    ignore = written.config["quantization_config"]["ignore"]
    for entry in (
        "model.language_model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.gate_up_proj",
        "re:.*layers.1.mlp.upproj",
    ):
        ignore[1] = entry
        refused(
            written,
            "disagree about model.layers.1.mlp.up_proj",
            "plain values",
            "weight_packed",
            "config.json",
        )
    ignore[1] = "re:.*layers.1.mlp.up"
    capture(written.save())
    ignore.pop()
    refused(written, "disagree about model.layers.1.mlp.up_proj")


def test_an_ignored_name_that_is_packed(tmp_path):
    written = make.write_packed(tmp_path)
    written.config["quantization_config"]["ignore"].append("re:.*down_proj")
    refused(written, "disagree about model.layers.0.mlp.down_proj", "weight_packed", "leaves this module out")


def test_an_unknown_ignored_name_is_noted(tmp_path):
    written = make.write_packed(tmp_path)
    written.config["quantization_config"]["ignore"].append("model.vision_tower.fc1")
    notes = capture(written.save()).notes
    assert any("ignore name no module" in note and "vision_tower.fc1" in note for note in notes)
    assert any("14 matrices are stored as pack-quantized int4_g32_zp" in note for note in notes)


@pytest.mark.parametrize("write", [make.write_awq, make.write_gptq, make.write_bitsandbytes])
def test_a_module_that_is_neither_packed_nor_plain(tmp_path, write):
    written = write(tmp_path)
    for key in [
        key for key in written.tensors if key.startswith("model.layers.1.mlp.up_proj.") and "bias" not in key
    ]:
        del written.tensors[key]
    refused(written, "lacks 1 tensors", "model.layers.1.mlp.up_proj.weight", "[160, 64]")


@pytest.mark.parametrize(
    "write", [make.write_awq, make.write_gptq, make.write_bitsandbytes, make.write_packed]
)
def test_a_plain_matrix_where_its_twin_is_packed(tmp_path, write):
    written = write(tmp_path)
    name = "model.layers.1.mlp.up_proj"
    for key in [key for key in written.tensors if key.startswith(name) and "bias" not in key]:
        del written.tensors[key]
    written.tensors[f"{name}.weight"] = torch.zeros(160, 64)
    refused(written, name, "plain values")


@pytest.mark.parametrize(
    "write, part",
    [(make.write_awq, "qzeros"), (make.write_gptq, "scales"), (make.write_packed, "weight_scale")],
)
def test_a_part_that_is_missing(tmp_path, write, part):
    written = write(tmp_path)
    del written.tensors[f"model.layers.0.mlp.up_proj.{part}"]
    refused(written, "not all there: model.layers.0.mlp.up_proj", "copy or download")


def test_packed_names_that_the_model_does_not_have(tmp_path):
    written = make.write_gptq(tmp_path)
    for key in list(written.tensors):
        if ".gate_proj." in key or ".up_proj." in key:
            written.tensors[key.replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gone.")] = (
                written.tensors.pop(key)
            )
    refused(written, "lacks 8 tensors", "mlp.gate_proj.weight", "gate_up_proj.qweight")


def test_shapes_and_types_are_checked_by_name(tmp_path):
    written = make.write_gptq(tmp_path)
    name = "model.layers.0.mlp.up_proj"
    whole = written.tensors[f"{name}.scales"]
    written.tensors[f"{name}.scales"] = whole[:1].contiguous()
    refused(written, f"matrix {name} contradicts", "scales [1, 160]", "scales [2, 160]", "groups of 32")
    written.tensors[f"{name}.scales"] = whole.to(torch.int32)
    refused(written, "scales [2, 160] int32", "float16")
    written.tensors[f"{name}.scales"] = whole
    written.config["quantization_config"]["bits"] = 8
    refused(written, "contradicts its configuration", "8 bits")
    written.config["quantization_config"]["bits"] = 4
    written.config["quantization_config"]["group_size"] = 64
    refused(written, "groups of 64")


def test_renamed_prefixes_are_followed(tmp_path):
    """As for any folder: a checkpoint of the base model has no `model.`; the configuration may use either name."""
    written = make.write_packed(
        tmp_path, ignore=("lm_head", "layers.0.mlp.up_proj"), skip=("lm_head", "0.mlp.up_proj")
    )
    with torch.no_grad():
        wanted = written.model(PROMPT[None]).logits[0]
    written.tensors = {key.removeprefix("model."): value for key, value in written.tensors.items()}
    torch.testing.assert_close(capture(written.save()).run(PROMPT), wanted, rtol=0, atol=2e-5)
    written.config["quantization_config"]["ignore"][1] = "model.layers.0.mlp.up_proj"
    torch.testing.assert_close(capture(written.save()).run(PROMPT), wanted, rtol=0, atol=2e-5)


def test_dynamic_rules_of_gptq(tmp_path):
    written = make.write_gptq(tmp_path, bits=4)
    other = make.write_gptq(tmp_path / "eight", bits=8)
    settings = written.config["quantization_config"]
    name = "model.layers.1.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales"):
        written.tensors[f"{name}.{part}"] = other.tensors[f"{name}.{part}"]
    settings["dynamic"] = {r"+:.*layers\.1\.mlp\.down_proj": {"bits": 8}, r"-:.*nowhere": {}}
    program = quantised(written.save())
    assert argument(linears(program)[name], "weight_format") == "uint8_g32_zp"
    assert any("dynamic name no module" in note and "nowhere" in note for note in program.notes)
    settings["dynamic"] = {r"-:.*layers\.1\.mlp\.down_proj": {}}
    refused(written, f"disagree about {name}", "leaves this module out")
    settings["dynamic"] = {".*": {"format": "marlin"}}
    refused(written, "layout of their own", "marlin")


@pytest.mark.parametrize(
    "write, change, words",
    [
        (make.write_awq, {"version": "gemv"}, ("gemv", "gemm")),
        (make.write_awq, {"bits": 8}, ("8 bits",)),
        (make.write_awq, {"group_size": 48}, ("group_size 48",)),
        (make.write_gptq, {"checkpoint_format": "marlin"}, ("marlin",)),
        (make.write_gptq, {"bits": 5}, ("5 bits",)),
        (make.write_gptq, {"quant_method": "hqq"}, ("hqq", "awq, gptq")),
        (make.write_packed, {"format": "nvfp4-pack-quantized"}, ("nvfp4",)),
        (make.write_packed, {"format": "marlin-24"}, ("marlin-24",)),
        (make.write_packed, {"kv_cache_scheme": {"num_bits": 8}}, ("kv_cache_scheme",)),
        (make.write_packed, {"transform_config": {"config_groups": {"u": {}}}}, ("transform_config",)),
        (make.write_packed, {"sparsity_config": {"format": "sparse-bitmask"}}, ("sparse-bitmask",)),
        (make.write_packed, {"quantization_status": "frozen"}, ("frozen",)),
        (make.write_bitsandbytes, {"load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}, ("nf4",)),
    ],
)
def test_layouts_that_are_not_read(tmp_path, write, change, words):
    written = write(tmp_path)
    written.config["quantization_config"] |= change
    refused(written, str(tmp_path), "to do", *words)


def group_0(change):
    """A change of compressed-tensors' one config group."""

    def changed(settings):
        for key, value in change.items():
            group = settings["config_groups"]["group_0"]
            group[key] = group[key] | value if isinstance(value, dict) else value

    return changed


MALFORMED = [
    (make.write_awq, {"modules_to_not_convert": 5}, "modules_to_not_convert 5"),
    (make.write_awq, {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head'"),
    (make.write_gptq, {"bits": [4]}, "bits [4]"),
    (make.write_gptq, {"dynamic": ["a"]}, "dynamic ['a']"),
    (make.write_gptq, {"dynamic": {".*up_proj": "x"}}, "dynamic .*up_proj 'x'"),
    (make.write_gptq, {"dynamic": {".*up_proj": {"bits": "8"}}}, "bits '8'"),
    (make.write_gptq, {"dynamic": {"-:*up_proj": {}}}, "'*up_proj'"),
    (make.write_gptq, {"modules_in_block_to_quantize": 5}, "modules_in_block_to_quantize 5"),
    (make.write_packed, {"ignore": "lm_head"}, "ignore 'lm_head'"),
    (make.write_packed, {"ignore": ["re:*lm_head"]}, "'*lm_head'"),
    (make.write_packed, {"sparsity_config": "dense"}, "sparsity_config 'dense'"),
    (make.write_packed, group_0({"targets": "Linear"}), "targets 'Linear'"),
    (make.write_packed, group_0({"targets": ["re:("]}), "'('"),
    (make.write_packed, group_0({"input_activations": "int8"}), "input_activations 'int8'"),
    (make.write_packed, group_0({"weights": {"num_bits": [4]}}), "num_bits [4]"),
    (make.write_bitsandbytes, {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules 'lm_head'"),
    (make.write_bitsandbytes, {"llm_int8_threshold": "six"}, "llm_int8_threshold 'six'"),
]


@pytest.mark.parametrize("write, change, word", MALFORMED)
def test_settings_of_another_type_are_named(tmp_path, write, change, word):
    written = write(tmp_path)
    settings = written.config["quantization_config"]
    change(settings) if callable(change) else settings.update(change)
    refused(written, str(tmp_path), "to do", word)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "write, part, change",
    [
        (make.write_awq, "qweight", lambda t: t.reshape(-1)[0]),
        (make.write_awq, "scales", lambda t: t.reshape(-1)),
        (make.write_gptq, "qweight", lambda t: t.reshape(-1)[0]),
        (make.write_gptq, "qzeros", lambda t: t[None]),
        (make.write_gptq, "g_idx", lambda t: torch.full_like(t, 2**31 - 1)),
        (make.write_packed, "weight_packed", lambda t: t.reshape(-1)[0]),
        (make.write_packed, "weight_shape", lambda t: t.float() * float("nan")),
        (make.write_w8a8, "weight", lambda t: t.reshape(-1)),
        (make.write_bitsandbytes, "weight", lambda t: t.reshape(-1)),
        (make.write_bitsandbytes, "weight_format", lambda t: torch.ones(3, dtype=torch.uint8)),
    ],
)
def test_parts_that_are_no_matrix_are_named(tmp_path, write, part, change):
    written = write(tmp_path)
    written.tensors[f"{UP}.{part}"] = change(written.tensors[f"{UP}.{part}"]).contiguous()
    refused(written, UP, part)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "write, part",
    [
        (make.write_awq, "scales"),
        (make.write_gptq, "scales"),
        (make.write_packed, "weight_scale"),
        (make.write_w8a8, "weight_scale"),
        (make.write_bitsandbytes, "SCB"),
    ],
)
def test_scales_that_are_not_finite_are_named(tmp_path, write, part, value):
    written = write(tmp_path)
    written.tensors[f"{UP}.{part}"].view(-1)[3] = value
    program = quantised(written.save())
    with pytest.raises(InputError, match=rf"(?s){UP}.*scales that are not finite.*1 of"):
        program.weight_of(argument(linears(program)[UP], "scales")).load()


def test_zero_points_that_tools_read_differently(tmp_path):
    written = make.write_gptq(tmp_path)
    written.tensors["model.layers.0.mlp.up_proj.qzeros"][:] = -1
    refused(written, "model.layers.0.mlp.up_proj", "zero points", "gptq_v2")


def test_groups_that_no_format_has(tmp_path):
    written = make.write_gptq(tmp_path)
    written.tensors["model.layers.0.mlp.up_proj.g_idx"][:] = 0
    refused(written, "model.layers.0.mlp.up_proj", "g_idx", "groups of 32")


def test_scales_beside_an_activation_are_not_dropped(tmp_path):
    written = make.write_awq(tmp_path)
    written.tensors["model.layers.0.mlp.act.scales"] = torch.ones(160)
    refused(written, "mlp.act.scales")


def test_the_settings_file_that_autogptq_wrote(tmp_path):
    written = make.write_gptq(tmp_path)
    settings = written.config.pop("quantization_config")
    settings.pop("quant_method")
    (written.path / "quantize_config.json").write_text(make.json.dumps(settings))
    with torch.no_grad():
        wanted = written.model(PROMPT[None]).logits[0]
    torch.testing.assert_close(capture(written.save()).run(PROMPT), wanted, rtol=0, atol=2e-5)


def test_both_packed_and_plain(tmp_path):
    written = make.write_gptq(tmp_path)
    written.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(160, 64)
    refused(written, "holds model.layers.0.mlp.up_proj twice")


def test_the_writers_are_not_trivial(tmp_path):
    written = make.write_gptq(tmp_path, bits=3)
    kinds = [module for module in written.model.modules() if isinstance(module, nn.Linear)]
    assert len(written.matrices) == len(kinds) - 1 == 14
