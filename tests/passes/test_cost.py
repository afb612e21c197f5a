"""What rounding cost, against the same weights put into the model one unit at a time, and run whole."""

import pytest
import torch

from enginewright.passes.calibration import Samples
from enginewright.passes.capture import capture
from enginewright.passes.cost import Ledger, Stored
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import dequantise
from enginewright.passes.kept import Held, KeptWeight
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.matching import argument, is_call
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Stage
from enginewright.passes.source import open_source
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import VOCAB, folder

GENERATOR = torch.Generator().manual_seed(3)
SEQUENCES = [torch.randint(3, VOCAB, (length,), generator=GENERATOR).tolist() for length in (24, 40)]
CALIBRATION = [torch.randint(3, VOCAB, (32,), generator=GENERATOR).tolist() for _ in range(6)]


def quantised(arch, recipe, *overrides):
    """(source program, quantised program, ledger)"""
    source = capture(open_source(folder(arch)))
    run_steps(source, [Step(Normalise(), Stage.NORMALISED, required=True)])
    made, ledger = source.clone(), Ledger()
    order = steps(
        load_recipe(recipe, list(overrides)), Samples(CALIBRATION), until=Stage.QUANTISED, ledger=ledger
    )
    run_steps(made, order)
    return source, made, ledger


def matrices(made):
    """module -> name of the argument -> the float32 matrix that the rewritten graph multiplies by."""

    def dense(node, prefix):
        codes, scales, offsets = (
            None
            if argument(node, prefix + part) is None
            else made.weight_of(argument(node, prefix + part)).load()
            for part in ("codes", "scales", "offsets")
        )
        return dequantise(codes, scales, offsets, argument(node, "weight_format"))

    found = {}
    for node in made.graph.nodes:
        if is_call(node, OPS["quantised_linear"]):
            weight = dense(node, "")
            if argument(node, "outlier_columns") is not None:
                columns = made.weight_of(argument(node, "outlier_columns")).load().long()
                weight[:, columns] += made.weight_of(argument(node, "outlier_weight")).load().float()
            found[node.meta["module"]] = {"weight": weight}
        elif is_call(node, OPS["quantised_moe"]):
            found[node.meta["module"]] = {part: dense(node, f"{part}_") for part in ("gate_up", "down")}
        elif is_call(node, OPS["quantised_embedding"]):
            found[node.meta["module"]] = {"weight": dense(node, "")}
    return found


def log_probabilities(program):
    return torch.cat([program.run(tokens).log_softmax(-1) for tokens in SEQUENCES])


def modules_of(unit):
    stem, _, last = unit.rpartition(".")
    return [f"{stem}.{part}" if stem else part for part in last.split("+")]


def with_matrices(ledger, dense, modules):
    """The program before quantisation with the matrices of some modules replaced, each for that module alone."""
    program = ledger.program.clone()
    for node in program.graph.nodes:
        if node.meta.get("module") in modules and is_call(node, OPS["linear"], OPS["moe"], OPS["embedding"]):
            for name, value in dense[node.meta["module"]].items():
                target = f"{argument(node, name).target}.test"
                new = program.add_weight(target, ConstantTensor(target, value))
                node.replace_input_with(argument(node, name), new)
    program.recompile()
    return program


CASES = [
    ("qwen2", "int4", "linear.weight=int4_g16"),
    ("llama", "int4-gptq", "linear.weight=int3_g32"),
    ("llama", "int4-awq", "linear.weight=int4_g16_zp"),
    ("llama", "llm-int8", "outliers.threshold=1.2"),
    ("gpt2", "int8", "linear.weight=fp8"),
    ("qwen3_moe", "int4", "linear.weight=int4_g16"),
]


@pytest.mark.parametrize(("arch", "recipe", "overrides"), [(a, r, o) for a, r, *o in CASES])
def test_figures_are_those_of_the_weights_in_the_engine(arch, recipe, overrides):
    _, made, ledger = quantised(arch, recipe, *overrides)
    dense, wanted = matrices(made), log_probabilities(ledger.program)
    costs = ledger.measure(SEQUENCES)
    assert len(costs) >= 9
    for cost in costs:
        found = log_probabilities(with_matrices(ledger, dense, modules_of(cost.unit)))
        kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
        assert cost.kl == pytest.approx(kl, rel=2e-3, abs=2e-7), cost.unit
        assert cost.relative_error > 0 and cost.tokens == 64
    assert max(cost.kl for cost in costs) > 1e-5


def linear_of(program, module):
    return next(
        n for n in program.graph.nodes if n.meta.get("module") == module and is_call(n, OPS["linear"])
    )


def test_relative_error_is_that_of_the_outputs():
    _, made, ledger = quantised("llama", "int4", "linear.weight=int4_g16")
    unit = "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    (cost,) = (cost for cost in ledger.measure(SEQUENCES) if cost.unit == unit)
    dense, looking = matrices(made), ledger.program.clone()
    nodes = {module: linear_of(looking, module) for module in modules_of(unit)}
    looking.graph.output_node().args = (argument(next(iter(nodes.values())), "x"),)
    x = torch.cat([looking.run(tokens) for tokens in SEQUENCES])
    wrong = right = 0.0
    for module, node in nodes.items():
        weight = looking.weight_of(argument(node, "weight")).load().float()
        wrong += float((x @ (dense[module]["weight"] - weight).T).square().sum())
        right += float((x @ weight.T).square().sum())
    assert cost.relative_error == pytest.approx((wrong / right) ** 0.5, rel=1e-4)


def test_smoothed_programs_are_measured_as_they_stood_before_rounding():
    source, _, ledger = quantised("llama", "int4-awq", "linear.weight=int4_g16")
    tokens = SEQUENCES[0]
    plain, smoothed = source.run(tokens), ledger.program.run(tokens)
    assert (plain - smoothed).abs().max() <= 1e-4 * plain.abs().max()
    name = next(n for n in ledger.program.weights if n.endswith("layers.0.mlp.down_proj.weight"))
    assert not torch.equal(ledger.program.weights[name].load(), source.weights[name].load())


def test_a_tied_table_is_counted_once_and_measured_twice():
    _, _, ledger = quantised("qwen2", "int8")
    costs = {cost.unit: cost for cost in ledger.measure(SEQUENCES)}
    table, head = costs["model.embed_tokens"], costs["lm_head"]
    assert table.weights == VOCAB * 48 and head.weights == 0 and head.bytes == 0
    assert head.bits == table.bits == pytest.approx(8 + 32 / 48)
    assert table.kl > 0 and head.kl > 0 and table.kl != head.kl
    assert table.activation == "" and head.activation == "int8_g32"


def test_bits_count_what_is_kept_apart():
    _, _, ledger = quantised("llama", "llm-int8", "outliers.threshold=1.2", "outliers.most=0.1")
    items = [item for item in ledger.stored.values() if item.apart is not None]
    assert items
    for item in items:
        n, k = item.quantised.source.shape
        assert item.bits == pytest.approx(8 * n * k + 32 * n + 16 * n * len(item.columns.load()))


def test_rounded_program_has_the_engine_s_linears_and_nothing_else():
    _, made, ledger = quantised("llama", "int4-gptq", "linear.weight=int4_g16")
    dense = matrices(made)
    linears = [module for module in dense if "embed" not in module and module != "lm_head"]
    expected = with_matrices(ledger, dense, linears).run(SEQUENCES[0])
    assert torch.equal(ledger.rounded_program().run(SEQUENCES[0]), expected)
    assert not torch.equal(ledger.program.run(SEQUENCES[0]), expected)


class Reordered(ConstantTensor):
    """A checkpoint's integers with their inputs in another order."""

    def __init__(self, codes, scales, zeros, order):
        dense = torch.empty(codes.shape)
        dense[:, order] = dequantise(codes, scales, zeros, "int4_g32_zp")
        super().__init__("w", dense)
        self.integers, self.input_order = (codes, scales, zeros), order
        self.held = Held("GPTQ", "int4_g32_zp", kept=True)

    def parts(self):
        return self.integers

    def part_shapes(self):
        return tuple(tuple(part.shape) for part in self.integers)


def test_kept_integers_in_another_order_are_put_back():
    order = torch.randperm(64, generator=GENERATOR)
    codes = torch.randint(0, 16, (8, 64), generator=GENERATOR, dtype=torch.uint8)
    scales = torch.rand(8, 2, generator=GENERATOR).half().float()
    weight = Reordered(codes, scales, torch.full((8, 2), 8.0), order)
    assert torch.equal(Stored(KeptWeight(weight, "int4_g32_zp")).dense(), weight.load())
