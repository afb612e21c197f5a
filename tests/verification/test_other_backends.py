"""Stage "backend" on ONNX Runtime and in the interpreted TensorRT network: each kind of op from exact inputs; faults named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from torch import Tensor, fx

from enginewright.backends.requirements import adapt
from enginewright.passes.capture import capture
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.matching import argument
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import Recipe, load_recipe
from enginewright.verification.bisection import bisect
from enginewright.verification.pieces import Compared, Pieces, one_of_each_kind
from enginewright.verification.running import run_watched
from tests.passes.architectures import folder

NEEDS = {"onnx": "onnxruntime", "tensorrt": "tensorrt_rtx"}
INTEGERS = ["linear.weight=int8", "linear.activation=int8"]
TOKENS = [(i * 37 + 5) % 128 for i in range(80)]


def backend(name: str) -> Any:
    pytest.importorskip(NEEDS[name])
    return import_module(f"enginewright.backends.{name}").BACKEND


def final(arch: str, recipe: str, overrides: list[str], target: Any) -> tuple[Recipe, Program, Program]:
    """The recipe as the backend builds it, the captured model and the final Program."""
    asked = adapt(load_recipe(recipe, overrides), target)
    judge = capture(folder(arch))
    program = judge.clone()
    run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True), *steps(asked)])
    return asked, judge, program


def manifest(name: str, target: Any, program: Program) -> dict[str, Any]:
    return {
        "backend": name,
        "target": target.target,
        "model": {"vocab_size": program.facts.vocab_size},
        "kv_groups": [],
    }


def compared(arch: str, recipe: str, overrides: list[str], name: str) -> list[Compared]:
    target = backend(name)
    asked, _, program = final(arch, recipe, overrides, target)
    kinds = one_of_each_kind(program)
    wanted = {node for unit in kinds for node in unit.inputs}
    values: dict[fx.Node, Tensor] = {}

    def after(node: fx.Node, value: Any) -> None:
        if node in wanted:
            values[node] = value.clone()

    run_watched(program, [TOKENS], [list(range(len(TOKENS)))], after=after)
    pieces = Pieces(program, target, asked, manifest(name, target, program))
    return [pieces.compare(unit, values, TOKENS) for unit in kinds]


CASES = [
    ("tensorrt", "llama", "fp16", []),
    ("tensorrt", "gemma2", "int4-rtn", ["compute=bf16", "kv_cache.format=bf16"]),
    ("tensorrt", "qwen3", "int4-rtn", INTEGERS),
    ("tensorrt", "deepseek_v3", "int4-rtn", []),  # masks between experts hold infinities
    ("onnx", "gpt2", "fp32", []),
    ("onnx", "gemma2", "int4-rtn", []),
    ("onnx", "qwen3_moe", "int4-rtn", INTEGERS),
]


@pytest.mark.parametrize(("name", "arch", "recipe", "overrides"), CASES)
def test_every_kind_of_op_computes_what_the_program_does(
    name: str, arch: str, recipe: str, overrides: list[str]
) -> None:
    found = compared(arch, recipe, overrides, name)
    assert len(found) > 8 and all(one.passed for one in found), [one for one in found if not one.passed]
    integers = [
        one.median
        for one in found
        if one.unit.op == "ew::quantised_linear" and argument(one.unit.node, "activation_format") == "int8"
    ]
    assert bool(integers) == (overrides == INTEGERS)
    assert max(integers, default=0.0) < 2e-6  # their sums are exact, whatever lies between products


@pytest.mark.parametrize("name", ["onnx", "tensorrt"])
def test_a_fault_of_a_lowering_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = backend(name)
    asked, judge, program = final("llama", "int4-rtn", INTEGERS, target)
    history = [("capture", judge), ("all passes", program)]
    told = manifest(name, target, program)
    assert bisect(history, target, asked, told, TOKENS).kind == ""
    rules = import_module(f"enginewright.backends.{name}.lowering").RULES
    rule = rules["ew::gated_activation"]

    def another_activation(low: Any, node: fx.Node, given: dict[str, Any]) -> Any:
        return rule(low, node, {**given, "activation": "gelu"})

    monkeypatch.setitem(rules, "ew::gated_activation", another_activation)
    found = bisect(history, target, asked, told, TOKENS)
    assert found.kind == "op" and "ew::gated_activation, model.layers.0.mlp" in found.where, found.text()
