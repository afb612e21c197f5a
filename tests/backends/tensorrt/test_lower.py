"""Lowering into a network, with nothing built: every architecture, and what is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.tensorrt.api import library, new_network
from enginewright.backends.tensorrt.lower import Lowered, Options, define
from enginewright.backends.tensorrt.lowering import RULES
from enginewright.passes.dialect import OPS
from enginewright.passes.program import Program
from enginewright.recipes.errors import LoweringError
from tests.backends.tensorrt.programs import final
from tests.passes.architectures import ARCHITECTURES


def defined(program: Program, options: Options | None = None) -> Lowered:
    network, _ = new_network()
    return define(program, network, options)


#: The kinds that differ for lowering; the interpreter's tests lower and run every one.
KINDS = ("llama", "gemma2", "gpt2", "opt", "stablelm", "gpt_oss", "deepseek_v3", "bloom", "mpt")


@pytest.mark.parametrize(
    "arch", [arch if arch in KINDS else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_every_architecture_has_a_network_with_the_inputs_and_outputs_of_the_bindings(arch: str) -> None:
    program, _ = final(arch)
    lowered = defined(program)
    network = lowered.network
    found = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    wanted = {
        binding.name: tuple(size if isinstance(size, int) else -1 for size in binding.shape)
        for binding in lowered.inputs
    }
    assert found == wanted
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    assert {output.name for output in outputs} == {binding.name for binding in lowered.outputs}
    logits = next(output for output in outputs if output.name == "logits")
    assert tuple(logits.shape) == (-1, program.facts.vocab_size)
    assert logits.dtype == library().trt.DataType.FLOAT


def test_all_that_cannot_be_lowered_is_told_at_once_with_its_module() -> None:
    program, _ = final("llama", "fp16", "kv_cache.format=f32")
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target is OPS["gated_activation"]:
            node.target = torch.ops.aten.special_i1.default
            node.args = node.args[:1]
    with pytest.raises(LoweringError) as caught:
        defined(program)
    told = str(caught.value)
    assert "cannot lower 4 nodes" in told
    for layer in (0, 1):
        assert f"ew::paged_attention of module 'model.layers.{layer}.self_attn': a cache of f32" in told
    assert told.count("aten::special_i1 of module 'model.layers.") == 2
    assert "kv_cache.format f16 or bf16" in told


def test_every_op_of_the_dialect_that_a_final_program_holds_has_a_rule() -> None:
    assert {f"ew::{name}" for name in OPS} - set(RULES) == {"ew::attention"}


def test_products_of_matrices_are_in_the_weights_type() -> None:
    program, _ = final("llama", "bf16")
    network = defined(program, Options(compute="bf16")).network
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    products = [layer for layer in layers if layer.type == library().trt.LayerType.MATRIX_MULTIPLY]
    linears = [layer for layer in products if "/paged_attention" not in layer.name]
    assert len(linears) == 9
    assert {layer.get_output(0).dtype for layer in linears} == {library().trt.DataType.BF16}
