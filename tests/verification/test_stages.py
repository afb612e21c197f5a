"""Stages: a Program with its rounding taken out is the model, good engines pass, and each check sees what it is for."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import enginewright
from enginewright.backends import get_backend
from enginewright.backends.requirements import adapt
from enginewright.passes.capture import capture
from enginewright.passes.cut_out import cut_out, units
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.matching import is_call
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.quant_formats import quantise_rtn
from enginewright.passes.unrounded import StoredMatrix, unrounded
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.recipe import load_recipe
from enginewright.verification.matrices import BEYOND, rounding_error
from enginewright.verification.pieces import one_of_each_kind
from enginewright.verification.running import run_watched
from enginewright.verification.stages import STRUCTURE
from tests.passes.architectures import ARCHITECTURES, folder

TOKENS = [(i * 37 + 5) % 128 for i in range(40)]


@functools.cache
def captured(arch: str) -> Program:
    return capture(folder(arch))


def final(arch: str, recipe: str, *overrides: str) -> Program:
    program = captured(arch).clone()
    asked = adapt(load_recipe(recipe, list(overrides)), get_backend("cpu"))
    run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True), *steps(asked)])
    return program


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_without_its_rounding_a_program_is_the_model(arch: str) -> None:
    program = final(arch, "int4", "kv_cache.format=int8")
    wanted = captured(arch).run(TOKENS)
    rounded, exact = (run_watched(p, [TOKENS])[0] for p in (program, unrounded(program)))
    top = wanted.abs().max()
    assert (exact - wanted).abs().max() / top <= STRUCTURE / 10
    assert (rounded - wanted).abs().max() / top > 100 * STRUCTURE  # the program itself is left as it was


def test_several_sequences_run_as_each_alone() -> None:
    program = final("gemma2", "fp32")
    sequences = [TOKENS, TOKENS[:1], TOKENS[5:30]]
    together = run_watched(program, sequences, [[3, 39], [0], [24]])
    for logits, tokens, rows in zip(together, sequences, ([3, 39], [0], [24]), strict=True):
        alone = run_watched(program, [tokens])[0][rows]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_units_hold_every_op_and_a_part_gives_what_the_whole_gives(arch: str) -> None:
    program = final(arch, "int4")
    found = units(program)
    heavy = [
        n for n in program.graph.nodes if is_call(n, *(OPS[o] for o in ("paged_attention", "quantised_moe")))
    ]
    assert set(heavy) <= {unit.node for unit in found} and len(one_of_each_kind(program)) < len(found)
    values: dict[torch.fx.Node, torch.Tensor] = {}

    def after(node: torch.fx.Node, value: object) -> None:
        if isinstance(value, torch.Tensor):
            values[node] = value.clone()

    run_watched(program, [TOKENS], after=after)
    for unit in found:
        given = {node: values[node] for node in unit.inputs if node.op != "placeholder"}
        ids = list(range(len(TOKENS))) if given else TOKENS
        result = run_watched(cut_out(program, unit.outputs, given, max(ids) + 1), [ids])[0]
        wanted = torch.cat([values[node].float().flatten(1) for node in unit.outputs], -1)
        torch.testing.assert_close(result[:, : wanted.shape[1]], wanted, rtol=1e-6, atol=1e-6)


def stored(weight: torch.Tensor, form: str, search: str = "minmax") -> StoredMatrix:
    rounded = quantise_rtn(weight, form, search)
    parts = [
        None if part is None else ConstantTensor(name, part)
        for name, part in (("codes", rounded.codes), ("scales", rounded.scales), ("offsets", rounded.offsets))
    ]
    node = next(iter(captured("llama").graph.nodes))
    assert parts[0] is not None
    source = ConstantTensor("weight", weight)
    return StoredMatrix(node, "matrix", form, parts[0], parts[1], parts[2], source, source)


@pytest.mark.parametrize("search", ["minmax", "mse"])
@pytest.mark.parametrize(
    "form",
    ["int8", "int8_g32", "int4_g64", "int4_g32_zp", "int3_g64", "int2_g16", "uint8", "fp8", "bf16", "f16"],
)
def test_rounding_to_nearest_stays_within_half_a_step(form: str, search: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for shift, scale in ((0.0, 1.0), (0.4, 0.01), (0.0, 1e-6), (3.0, 1e-4)):
        weight = shift + scale * torch.randn(24, 200, generator=generator)
        weight[3] = 0.0
        found = rounding_error(stored(weight, form, search))
        assert found.steps <= 0.55 and found.beyond <= BEYOND, (shift, scale)


@pytest.mark.parametrize("form", ["int8_g32", "int4_g64", "int4_g32_zp", "int3_g64"])
def test_two_swapped_scales_of_a_large_matrix_stand_out(form: str) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)) * torch.linspace(1, 2, 256)
    matrix = stored(weight, form)
    assert matrix.scales is not None
    scales = matrix.scales.load()
    last = scales.shape[1] - 1
    scales[211, [0, last]] = scales[211, [last, 0]]
    found = rounding_error(matrix)
    assert found.beyond > BEYOND and found.beyond_row == 211
    assert found.steps > 0.55 and found.row == 211 and found.group in (0, last)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_good_engines_of_every_architecture_pass_every_stage(arch: str, recipe: str, tmp_path: Path) -> None:
    passes_every_stage(arch, recipe, tmp_path)


@pytest.mark.parametrize(("arch", "recipe"), [("gemma3_text", "int4"), ("mixtral", "int8")])
def test_good_engines_pass_every_stage(arch: str, recipe: str, tmp_path: Path) -> None:
    passes_every_stage(arch, recipe, tmp_path)


def passes_every_stage(arch: str, recipe: str, out: Path) -> None:
    """Recipes' limits are for real models; those of the stages hold for any."""
    built = enginewright.optimize(folder(arch), recipe, out / "engine", allow_unverified=True)
    stages = built.verification["stages"]
    assert {stage["stage"] for stage in stages} == {"structure", "backend", "engine"} | (
        {"rounding"} if recipe != "fp32" else set()
    )
    for stage in stages:
        assert stage["passed"] and np.isfinite(stage["value"]), stage
        if stage["stage"] in ("structure", "backend") and stage["limit"] < 1e-3:
            assert stage["value"] <= stage["limit"] / 10, stage  # far from the limit, not just within it
