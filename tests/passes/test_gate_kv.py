"""The pass `gate_kv`: what an int8 cache would change, and the layers that keep bf16 for it."""

import json

import pytest
import torch

from enginewright.passes.calibration import Samples
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.paged_attention import round_kv
from enginewright.passes.gate_kv import GateKv
from enginewright.passes.manager import run_steps
from enginewright.passes.matching import argument
from enginewright.passes.pipeline import steps
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import load_recipe
from tests.passes.families import family, some_tokens
from tests.passes.test_quantise import calls
from tests.passes.test_walk import values_of

SAMPLES = [some_tokens(length, seed=length) for length in (19, 30, 30, 13)]
ARCHES = ["llama", "gemma3_text", "gpt_oss", "mpt", "deepseek_v3"]


def recipe(limit, *overrides):
    return load_recipe("fp32", ["kv_cache.format=int8", f"kv_cache.max_error={limit}", *overrides])


def gated(program, limit, samples=SAMPLES):
    formats = {7: "left by another run"}
    result = GateKv(recipe(limit), Samples(samples), formats).run(program)
    return formats, result


def direct(program, samples):
    """layer -> the error of its attention's output, as a share, each sample alone."""
    found = {}
    for node in calls(program, "attention"):
        wrong = right = 0.0
        for tokens in samples:
            values = values_of(program, tokens)
            q, k, v, sinks, alibi = (
                None if part is None else values[part.name]
                for part in (argument(node, n) for n in ("q", "k", "v", "sinks", "alibi"))
            )
            load = [
                part if part is None or isinstance(part, torch.Tensor) else part.load()
                for part in (sinks, alibi)
            ]
            rest = [argument(node, n) for n in ("scale", "window", "softcap")]
            want = OPS["attention"](q, k, v, *load, *rest)
            got = OPS["attention"](q, round_kv(k, "int8"), round_kv(v, "int8"), *load, *rest)
            wrong += float((got - want).square().sum())
            right += float(want.square().sum())
        found[argument(node, "layer")] = (wrong / right) ** 0.5
    return found


@pytest.mark.parametrize("arch", ARCHES)
def test_errors_equal_a_direct_computation(arch):
    program = family(arch)
    formats, result = gated(program, 1.0)
    want = direct(program, SAMPLES)
    assert list(want) == list(range(program.facts.num_layers))
    got = {int(layer): error for layer, error in result.record["kv_errors"].items()}
    assert got == pytest.approx(want, rel=1e-3)
    assert all(0 < error < 0.1 for error in got.values())
    assert formats == {} and result.matches == 0 and result.record["kv_kept_bf16"] == []
    worst = max(want, key=want.get)
    assert f"{want[worst]:.2%}, in layer {worst}" in result.notes[0]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_layers_above_the_limit_keep_bf16(arch, tmp_path):
    """Down to the lowered program: each layer's format in its group."""
    lower = pytest.importorskip("enginewright.backends.cpu.lower").lower
    errors = direct(family(arch), SAMPLES)
    ordered = sorted(errors, key=errors.get)
    limit = (errors[ordered[-1]] + errors[ordered[-2]]) / 2
    program, chosen = family(arch).clone(), recipe(limit)
    rest = [step for step in steps(chosen, Samples(SAMPLES)) if step.stage > program.stage]
    assert "gate_kv" in [step.rewrite.name for step in rest]
    records = {record.name: record for record in run_steps(program, rest)}
    assert records["gate_kv"].record["kv_kept_bf16"] == [ordered[-1]] and records["gate_kv"].matches == 1
    lower(program, chosen, tmp_path)
    groups = json.loads((tmp_path / "program.json").read_text())["kv_groups"]
    stored = {}
    for group, facts in zip(groups, program.facts.kv_groups, strict=True):
        for layer, known in zip(group["layers"], facts.layers, strict=True):
            index = int(known.name.split("layers.")[1].split(".")[0])
            stored[index] = layer.get("format", group["format"])
    assert stored == {layer: "bf16" if layer == ordered[-1] else "int8" for layer in errors}


def test_everything_above_the_limit():
    formats, result = gated(family("llama"), 0)
    assert formats == {0: "bf16", 1: "bf16"} and result.matches == 2


def test_the_graph_stays():
    program = family("llama").clone()
    before = program.dump()
    gated(program, 0.01)
    assert program.dump() == before


def test_upstream_is_quantised():
    """The error is that of the keys and values which the engine will have."""
    chosen = load_recipe("int4", ["linear.weight=int2_g16", "kv_cache.format=int8", "kv_cache.max_error=1"])
    program, plain = family("llama").clone(), family("llama")
    order = [step for step in steps(chosen, Samples(SAMPLES)) if step.rewrite.name in ("quantise", "gate_kv")]
    assert [step.rewrite.name for step in order] == ["quantise", "gate_kv"]
    record = run_steps(program, order)[-1].record["kv_errors"]
    assert {int(k): v for k, v in record.items()} == pytest.approx(direct(program, SAMPLES), rel=1e-3)
    assert record["1"] != pytest.approx(direct(plain, SAMPLES)[1], rel=1e-3)


def test_samples_are_needed():
    with pytest.raises(InputError, match=r"(?s)calibration data.*kv_cache.max_error 0.1"):
        GateKv(recipe(0.1), None, {}).run(family("llama"))
