"""Formats by measured sensitivity: the measure, the choice, and what it may not do."""

import itertools

import numpy as np
import pytest
import torch

from enginewright.passes import mixed
from enginewright.passes.assignment import assign
from enginewright.passes.calibration import Samples
from enginewright.passes.fuse_siblings import FuseSiblings
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.matching import argument
from enginewright.passes.mixed import Choice, Unit, allocate, divergences, units_of
from enginewright.passes.program import Stage
from enginewright.passes.quant_formats import dequantise, quantise_rtn
from enginewright.passes.quantise import Quantise
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import load_recipe
from tests.passes.families import family, some_tokens
from tests.passes.test_quantise import calls, formats
from tests.passes.test_walk import values_of

SAMPLES = [some_tokens(length, seed=length) for length in (19, 30, 13)]
BITS = {"int2_g16": 4.0, "int3_g64": 3.5, "int4_g64": 4.5, "int4_g32": 5.0, "int8": 8.2}


def instance(seed, units=4, candidates=4):
    """Random costs: more bits mostly cost less divergence, not always."""
    random = np.random.default_rng(seed)
    names = list(BITS)[:candidates]
    choices = []
    for i in range(units):
        slope = random.uniform(0.3, 2)
        costs = {
            name: (
                BITS[name],
                float(random.uniform(0.01, 1) * 2 ** (-slope * BITS[name]) * random.uniform(0.5, 2)),
            )
            for name in names
        }
        choices.append(Choice(Unit(f"u{i}", (), ((int(random.integers(1, 9)) * 100, 64),)), costs))
    return choices


def total(choices, names):
    bits = sum(c.costs[name][0] * c.unit.weights for c, name in zip(choices, names, strict=True))
    return bits, sum(c.costs[name][1] for c, name in zip(choices, names, strict=True))


def everything(choices):
    return [total(choices, names) for names in itertools.product(*(c.costs for c in choices))]


@pytest.mark.parametrize("seed", range(30))
def test_a_budget_is_kept_and_spent_well(seed):
    """Against all 5⁴ choices: never above the budget; at most one step of one unit from the best."""
    choices = instance(seed, candidates=5)
    weights = sum(c.unit.weights for c in choices)
    for budget in (3.5, 3.9, 4.4, 5.0, 6.3, 9.0):
        allocate(choices, budget, None)
        bits, nats = total(choices, [c.chosen for c in choices])
        assert bits <= budget * weights * (1 + 1e-9)
        for choice in choices:  # nothing that would still save something fits
            hull = mixed._hull(choice.costs)
            at = [name for *_, name in hull].index(choice.chosen)
            if at + 1 < len(hull):
                more = (hull[at + 1][0] - hull[at][0]) * choice.unit.weights
                assert bits + more > budget * weights
        step = max((8.2 - 3.5) * c.unit.weights for c in choices)
        best = min(n for b, n in everything(choices) if b <= max(bits, budget * weights - step))
        assert nats <= best * (1 + 1e-9) or bits > budget * weights - step
        lower = [n for b, n in everything(choices) if b <= budget * weights - step]
        assert not lower or nats <= min(lower) * (1 + 1e-9)
    allocate(choices, 9.0, None)
    assert total(choices, [c.chosen for c in choices])[1] == pytest.approx(
        min(n for _, n in everything(choices))
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_limit_of_divergence_is_kept_with_few_bits(seed):
    """What is chosen lies on the hull of all choices: with as many bits nothing diverges less."""
    choices = instance(seed, candidates=5)
    nats = sorted(n for _, n in everything(choices))
    for limit in (nats[0] * 1.01, nats[len(nats) // 3], nats[len(nats) // 2], nats[-1]):
        allocate(choices, None, limit)
        bits, found = total(choices, [c.chosen for c in choices])
        assert found <= limit * (1 + 1e-9)
        assert found == pytest.approx(
            min(n for b, n in everything(choices) if b <= bits * (1 + 1e-9)), rel=1e-9
        )


def test_candidates_that_another_beats_are_never_chosen():
    unit = Unit("u", (), ((100, 64),))
    costs = {"int2_g16": (4.0, 0.9), "int3_g64": (3.5, 0.5), "int4_g64": (4.5, 0.45), "int4_g32": (5.0, 0.1)}
    chosen = set()
    for budget in (3.5, 4.0, 4.5, 5.0, 9.0):
        choice = Choice(unit, costs)
        allocate([choice], budget, None)
        chosen.add(choice.chosen)
    assert chosen == {"int3_g64", "int4_g32"}  # int4_g64 lies above the line between its neighbours


def test_what_no_candidate_reaches_is_refused():
    choices = instance(0)
    with pytest.raises(InputError, match=r"(?s)mixed.budget 3.2 bits; the smallest formats take 3.5"):
        allocate(choices, 3.2, None)
    with pytest.raises(InputError, match=r"(?s)mixed.max_kl.*at most 1e-12.*larger formats"):
        allocate(choices, None, 1e-12)


# Units and their measure.


def named(units):
    return [
        unit.name.removeprefix("model.layers.")
        for unit in units
        if not unit.name.startswith("model.layers.1")
    ]


def assigned_units(arch, recipe="auto", *overrides):
    program, options = family(arch), load_recipe(recipe, list(overrides))
    return units_of(
        program,
        assign(program, options)[0],
        lambda m: m.role == "linear" and m.weight == options.linear.weight,
    )


def test_a_unit_is_what_must_share_a_format():
    units = assigned_units("llama")
    assert named(units) == [
        "0.self_attn.q_proj+k_proj+v_proj",
        "0.self_attn.o_proj",
        "0.mlp.gate_proj+up_proj",
        "0.mlp.down_proj",
    ]
    assert [unit.shapes for unit in units[:4]] == [
        ((48, 40), (24, 40), (24, 40)),
        ((40, 48),),
        ((72, 40), (72, 40)),
        ((40, 72),),
    ]
    experts = assigned_units("mixtral")
    assert named(experts)[:2] == named(units)[:2] and len(named(experts)) == 3
    assert experts[2].weights == 8 * (144 * 40 + 40 * 72)
    # attention and MLP read one norm, so nothing but one format would let them share what reads it
    assert named(assigned_units("gptj"))[0].count("+") == 3


def direct(program, unit, name, search="mse"):
    """(error share, mean KL in nats) of the model with the unit's matrices rounded, each sample alone."""
    changed = program.clone()
    wrong = right = 0.0
    for node in unit.nodes:
        weight_name = str(argument(node, "weight").target)
        weight = program.weights[weight_name].load()
        rounded = dequantise(quantise_rtn(weight, name, search))
        changed.weights[weight_name] = ConstantTensor(weight_name, rounded)
        for tokens in SAMPLES:
            x = values_of(program, tokens)[argument(node, "x").name].flatten(1).double()
            wrong += float((x @ (rounded - weight).T.double()).square().sum())
            right += float((x @ weight.T.double()).square().sum())
    kl = []
    for tokens in SAMPLES:
        p, q = (each.run(tokens).double().log_softmax(-1) for each in (program, changed))
        kl.append((p.exp() * (p - q)).sum(-1))
    return wrong / right, float(torch.cat(kl).mean())


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt_neox"])
def test_measures_equal_a_direct_computation(arch):
    program, units = family(arch), assigned_units(arch)
    names = ["int3_g64", "int4_g32", "int8"]
    found = divergences(program, [(unit, names, "int3_g64") for unit in units], SAMPLES)
    assert list(found) == [unit.name for unit in units]
    for unit in (units[0], units[1], units[-1]):
        error, kl = direct(program, unit, "int3_g64")
        measured = found[unit.name]
        assert measured["int3_g64"] == pytest.approx((error, kl), rel=2e-3)
        other = direct(program, unit, "int4_g32")[0]
        assert measured["int4_g32"] == pytest.approx((other, kl * other / error), rel=2e-3)
        assert measured["int3_g64"][1] > measured["int4_g32"][1] > measured["int8"][1] > 0


def test_measuring_changes_nothing():
    program = family("mixtral")
    before, want = program.dump(), program.run(SAMPLES[0])
    divergences(program, [(unit, ["int4_g64"], "int4_g64") for unit in assigned_units("mixtral")], SAMPLES)
    assert program.dump() == before and torch.equal(program.run(SAMPLES[0]), want)


# The pass.


def quantised(arch, *overrides, recipe="auto", samples=SAMPLES):
    made = family(arch).clone()
    result = Quantise(load_recipe(recipe, list(overrides)), Samples(samples)).run(made)
    made.stage = Stage.QUANTISED
    remove_dead_code(made)
    made.recompile()
    return made, result


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("budget", [5.5, 6.3])
def test_a_budget_holds_for_the_bits_that_are_stored(arch, budget):
    """Of experts too, whose second matrix has fewer inputs, and so more scales a weight, than the first."""
    _, result = quantised(arch, "quantise.method=rtn", "quantise.range=mse", f"mixed.budget={budget}")
    assert 4 < result.record["bits_a_weight"] <= budget


@pytest.mark.parametrize("arch", ["llama", "mixtral"])
@pytest.mark.parametrize("options", [["mixed.budget=4.9"], ["mixed.budget=null", "mixed.max_kl=0.05"]])
def test_every_unit_gets_one_format_within_the_limits(arch, options):
    made, result = quantised(arch, "quantise.method=rtn", "quantise.range=mse", *options)
    chosen = {entry["unit"]: entry["chosen"] for entry in result.record["mixed"]}
    assert list(chosen) == [unit.name for unit in assigned_units(arch)]
    assert len(set(chosen.values())) > 1
    for module, (weight, activation) in formats(made).items():
        for unit, name in chosen.items():
            stem, _, leaves = unit.rpartition(".")
            if module.rpartition(".")[0] == stem and module.rpartition(".")[2] in leaves.split("+"):
                assert weight == name
                assert activation == {"int8": "int8_g32"}.get(
                    name, f"int8_g{min(128, parse_weight(name).group)}"
                )
    units = assigned_units(arch)
    bits = sum(unit.weights * unit.bits(chosen[unit.name]) for unit in units)
    nats = sum(entry["candidates"][entry["chosen"]][1] for entry in result.record["mixed"])
    if "mixed.max_kl=0.05" in options:
        assert nats <= 0.05 * (1 + 1e-3)
    else:
        assert bits <= 4.9 * sum(unit.weights for unit in units)
    assert FuseSiblings().run(made).matches == (4 if arch == "llama" else 2)


def test_an_impossible_budget_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(mixed, "divergences", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(InputError, match=r"(?s)smaller than the smallest candidates.*mixed.budget 2 bits"):
        quantised("llama", "mixed.budget=2")


def test_what_an_override_asks_for_stays():
    """The override's format is not chosen again, nor are activations that the recipe names."""
    override = (
        'overrides=[{match: "model.layers.0.mlp.*", weight: int8}, {match: "*.1.self_attn.*", weight: bf16}]'
    )
    made, result = quantised(
        "llama", override, "mixed.candidates=[int3_g64, int4_g32]", "linear.activation=int8"
    )
    found = formats(made)
    assert found["model.layers.0.mlp.down_proj"] == ("int8", "int8_g32")
    assert found["model.layers.1.self_attn.o_proj"] == ("bf16", "bf16")
    units = [entry["unit"] for entry in result.record["mixed"]]
    assert len(units) == 4 and not any("layers.0.mlp" in name or "1.self_attn" in name for name in units)
    assert found["model.layers.1.mlp.down_proj"][1] == "int8"


@pytest.mark.parametrize("weight", ["int4_g64", "int2_g16", "bf16"])
def test_an_override_is_an_answer_whatever_format_it_names(weight):
    """The recipe's own format too, which is what linears have before any is chosen."""
    override = f'overrides=[{{match: "*.0.mlp.down_proj", weight: {weight}}}]'
    made, result = quantised("llama", override, "quantise.method=rtn", "quantise.range=mse", "mixed.budget=8")
    assert load_recipe("auto").linear.weight == "int4_g64"
    assert formats(made)["model.layers.0.mlp.down_proj"][0] == weight
    assert not any("0.mlp.down_proj" in entry["unit"] for entry in result.record["mixed"])


def test_calibrated_rounding_uses_the_chosen_formats():
    made, result = quantised("llama", "mixed.budget=4.9")
    assert result.record["rounded"] == 14 and result.record["fallbacks"] == {}
    assert len({argument(node, "weight_format") for node in calls(made, "quantised_linear")}) > 2


def test_it_is_deterministic():
    first, second = (quantised("llama")[1] for _ in range(2))
    assert first.record == second.record
