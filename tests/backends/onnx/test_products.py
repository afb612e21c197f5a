"""Every weight format as ONNX operators, against the Program itself; what is stored once; what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from enginewright.backends.onnx.lower import capabilities, lower  # noqa: E402
from enginewright.backends.onnx.packing import packed, plane_of  # noqa: E402
from enginewright.backends.reference.executor import ReferenceExecutor  # noqa: E402
from enginewright.recipes.errors import LoweringError  # noqa: E402
from tests.backends.onnx.programs import (  # noqa: E402
    PROMPTS,
    load,
    lowered,
    program_of,
    recipe_of,
    worst,
)
from tests.backends.stepping import alone  # noqa: E402

TOLERANCE = 1e-4
FORMATS = {  # of linears, of the table, and of what linears multiply
    "fp8": ("fp8", "f16", "auto"),
    "bf16": ("bf16", "bf16", "auto"),
    "int8": ("int8", "int8", "auto"),
    "int8, a scale a group": ("int8_g32", "int8_g16", "auto"),
    "int8 by int8, a scale a token": ("int8", "uint8_g32", "int8"),
    "uint8": ("uint8_g64", "uint8", "bf16"),
    "uint8, zero points": ("uint8_g32_zp", "int4_g16_zp", "auto"),
    "int4": ("int4_g64", "int4_g32", "auto"),
    "int4, a channel": ("int4", "int4", "auto"),
    "int4, zero points": ("int4_g16_zp", "int3", "f16"),
    "int3 and int2": ("int3_g16", "int2_g32", "auto"),
}


def overrides(linear: str, table: str, activation: str) -> tuple[str, ...]:
    return (
        f"linear.weight={linear}",
        f"linear.activation={activation}",
        f"head.weight={linear}",
        f"head.activation={activation}",
        f"embedding.weight={table}",
    )


#: Of each way to multiply and to look up one: the others are a proof.
EVERYDAY = ("fp8", "int8", "int8 by int8, a scale a token", "uint8, zero points", "int4", "int4, zero points")


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_a_format_gives_what_the_program_gives(name: str) -> None:
    changes = overrides(*FORMATS[name])
    executor = load("llama", "fp32", *changes)
    found = alone(executor, PROMPTS, 64)
    executor.close()
    wanted = alone(ReferenceExecutor(program_of("llama", "fp32", *changes)), PROMPTS, 64)
    if FORMATS[name][0].startswith(("int", "uint")) and FORMATS[name][2] == "auto":
        assert worst(found, wanted) <= TOLERANCE
        return
    # Both round activations to the same grid: what is left is the ties that another order of sums tips.
    for prompt, want in wanted.items():
        error = np.abs(found[prompt] - want) / np.abs(want).max()
        assert np.median(error) <= TOLERANCE and error.max() <= 1e-2


@pytest.mark.parametrize("arch", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_experts_of_four_bits(arch: str) -> None:
    changes = overrides("int4_g32", "int8", "auto")
    executor = load(arch, "fp32", *changes)
    found = alone(executor, PROMPTS, 64)
    executor.close()
    wanted = alone(ReferenceExecutor(program_of(arch, "fp32", *changes)), PROMPTS, 64)
    assert worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("kv_format", ["f16", "bf16"])
def test_a_cache_of_sixteen_bits_is_rounded_as_it_is_written(kv_format: str) -> None:
    """The Program rounds bf16's queries and softmax weights too, which attention in f32 does not."""
    changes = (f"kv_cache.format={kv_format}",)
    executor = load("llama", "fp32", *changes)
    found = alone(executor, PROMPTS, 17)
    assert [group.format for group in executor.kv_groups] == [kv_format]
    assert executor.kv_groups[0].page_bytes * 2 == load("llama").kv_groups[0].page_bytes
    executor.close()
    exact = alone(load("llama"), PROMPTS, 17)
    wanted = alone(ReferenceExecutor(program_of("llama", "fp32", *changes)), PROMPTS, 17)
    assert worst(found, wanted) <= (TOLERANCE if kv_format == "f16" else 2e-2)
    assert worst(found, exact) > 1e-6  # the rounding is there


def test_tied_tables_are_stored_once() -> None:
    for changes in ((), overrides("int8", "int8", "auto"), overrides("int8", "int8", "int8")):
        model = onnx.load(
            Path(lowered("qwen2", "fp32", *changes).name) / "model.onnx", load_external_data=False
        )
        large = [
            tensor
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL and 131 in tensor.dims
        ]
        codes = sum(np.prod(t.dims) for t in large if t.dims[-1] != 1 and len(t.dims) > 1)
        scales = sum(np.prod(t.dims) for t in large) - codes
        assert codes == 131 * 48 if not changes else codes <= 131 * (48 + 2 * 3), changes
        assert scales <= 2 * 131, changes


def test_blocks_are_packed_low_half_first_and_padded_with_zero() -> None:
    codes = (np.arange(20)[None] * 13 % 256).astype(np.uint8)
    high, low = packed(plane_of(codes, "high"), 16), packed(plane_of(codes, "low"), 16)
    assert high.shape == (1, 2, 8) and high[0, 1, 2:].tolist() == [0x88] * 6
    again = np.stack([(high & 15) * 16 + (low & 15), (high >> 4) * 16 + (low >> 4)], -1).reshape(1, -1)
    assert np.array_equal(again[:, :20], codes)


def test_what_a_step_cannot_hold_is_refused_by_name_and_module(tmp_path: Path) -> None:
    program = program_of("llama", "int4", "linear.activation=int8_g64", "kv_cache.format=int8")
    with pytest.raises(LoweringError) as refused:
        lower(program, recipe_of("int4", "kv_cache.format=int8"), tmp_path)
    text = str(refused.value)
    assert "ew::paged_attention: a cache of int8 keys and values" in text and "layers.0.self_attn" in text
    assert "ew::quantised_linear: int4_g64 weights with int8_g64 activations" in text and "mlp" in text
    assert not list(tmp_path.iterdir())


def test_capabilities_name_what_is_lowered() -> None:
    able = capabilities()
    assert "ew::paged_attention" in able["ops"] and "aten::softmax" in able["ops"]
    assert able["compute"] == ["f32"] and able["kv_formats"] == ["f32", "f16", "bf16"]
    assert able["activation_formats"]["int4_g64"] == ["f32", "f16", "bf16"]
