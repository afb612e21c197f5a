"""The pass `quantise`: which matrix gets which format, what is shared, what is refused, and the values that result."""

import operator

import numpy as np
import pytest
import torch

from enginewright.passes import legality
from enginewright.passes.assignment import roles
from enginewright.passes.dialect import OPS, name_of
from enginewright.passes.kept import Held
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.program import Stage
from enginewright.passes.quant_formats import QuantisedWeight, dequantise, quantise_rtn
from enginewright.passes.quantise import Quantise
from enginewright.passes.weights import ConstantTensor, Transposed
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import load_recipe
from tests.passes.graphs import TOKENS, Build, aten

HIDDEN, FFN, VOCAB = 72, 200, 13


def mlp(tied=True, positions=False):
    """embedding -> up (72 to 200, with a bias) -> silu -> down -> head; each linear in its own module."""
    build = Build()
    program = build.program
    x = build.hidden(HIDDEN, "embed_tokens.weight")
    if positions:
        x = build.call(
            aten.add.Tensor,
            x,
            build.call("embedding", build.positions, build.weight("wpe.weight", 32, HIDDEN)),
        )
    up = build.linear(x, FFN, "up_proj", bias=True)
    down = build.linear(build.call("activation", up, "silu"), HIDDEN, "down_proj")
    table = (
        program.weight_node("embed_tokens.weight") if tied else build.weight("lm_head.weight", VOCAB, HIDDEN)
    )
    logits = build.call("linear", down, table)
    for node, module in ((up, "up_proj"), (down, "down_proj"), (logits, "lm_head")):
        node.meta["module"] = module
    next(iter(x.all_input_nodes if positions else [x])).meta["module"] = "embed_tokens"
    program.graph.output_node().args = (logits,)
    return program


def quantised(program, recipe="int4", *overrides):
    before = dict(program.weights)
    made = program.clone()
    made.stage = Stage.QUANTISED
    result = Quantise(load_recipe(recipe, list(overrides))).run(made)
    remove_dead_code(made)
    made.recompile()
    legality.check(made, ["quantise"])
    assert program.weights.keys() == before.keys()
    return made, result


def calls(program, op):
    return [node for node in program.graph.nodes if node.target == OPS[op]]


def formats(program):
    """module -> (weight format, activation format or None) of every quantised node."""
    found = {}
    for node in program.graph.nodes:
        name = name_of(node.target) if node.op == "call_function" else None
        if name == "quantised_linear":
            found[node.meta["module"]] = tuple(node.args[5:7])
        elif name == "quantised_embedding":
            found[node.meta["module"]] = (node.args[4], None)
    return found


def rounded(program, recipe_formats):
    """The model in float64 NumPy with each matrix and its input rounded: an oracle independent of the dialect."""

    def weight(name, form):
        value = program.weights[name].load()
        return (value if form == "f32" else dequantise(quantise_rtn(value, form))).double().numpy()

    def activation(x, form):
        if form == "f32":
            return x
        group = {"int4_g64": 64, "int4_g128": 128}.get(form, 32)
        out = np.zeros_like(x)
        for start in range(0, x.shape[1], group):
            part = x[:, start : start + group].astype(np.float32)
            scale = np.abs(part).max(1, keepdims=True) / np.float32(127)
            scale[scale == 0] = 1
            out[:, start : start + group] = np.rint(part / scale).astype(np.float64) * scale
        return out

    embedding, linear, head = recipe_formats
    x = weight("embed_tokens.weight", embedding)[TOKENS]
    x = (
        activation(x, linear) @ weight("up_proj.weight", linear).T
        + program.weights["up_proj.bias"].load().numpy()
    )
    x = x / (1 + np.exp(-x))
    x = activation(x, linear) @ weight("down_proj.weight", linear).T
    return activation(x, head) @ weight("embed_tokens.weight", head).T


@pytest.mark.parametrize("linear", ["f32", "int8", "int8_g32", "int4_g32", "int4_g64", "int4_g128"])
def test_values_equal_an_oracle_at_odd_widths(linear):
    program = mlp()
    made, result = quantised(program, "int8", f"linear.weight={linear}")
    assert result.matches == (2 if linear == "f32" else 4)
    wanted = rounded(program, ("int8", linear, "int8"))
    np.testing.assert_allclose(made.run(TOKENS).numpy(), wanted, atol=2e-3 * np.abs(wanted).max())


def test_each_role_gets_its_format():
    made, result = quantised(mlp(tied=False), "int4", "head.weight=bf16")
    assert formats(made) == {
        "embed_tokens": ("int8", None),
        "up_proj": ("int4_g64", "int8_g64"),
        "down_proj": ("int4_g64", "int8_g64"),
        "lm_head": ("bf16", "bf16"),
    }
    assert result.notes == ("linears: 2 of 2 int4_g64", "embedding: 1 of 1 int8", "head: 1 of 1 bf16")
    assert not calls(made, "linear") and not calls(made, "embedding")


def test_fp32_changes_nothing():
    program = mlp()
    made, result = quantised(program, "fp32")
    assert result.matches == 0
    assert torch.equal(made.run(TOKENS), program.run(TOKENS))
    assert made.weights.keys() == program.weights.keys()


@pytest.mark.parametrize(
    "overrides, embedding, head, stored",
    [
        ([], "int8", "int8", 1),
        (["head.weight=int4_g32"], "int8", "int4_g32", 2),
        (["embedding.weight=f32"], "f32", "int8", 2),
        (["head.weight=f32"], "int8", "f32", 2),
        (["embedding.weight=f32", "head.weight=f32"], "f32", "f32", 1),
    ],
)
def test_a_tied_table_is_stored_once_only_where_both_uses_agree(overrides, embedding, head, stored):
    """Each side gets exactly its own format, and every stored copy is accounted for."""
    program = mlp()
    made, result = quantised(program, "int8", *overrides)
    found = formats(made)
    assert found.get("embed_tokens", ("f32",))[0] == embedding
    assert found.get("lm_head", ("f32",))[0] == head
    tables = {
        name
        for name, weight in made.weights.items()
        if {leaf.name for leaf in weight.leaves()} == {"embed_tokens.weight"}
    }
    copies = {name for name in tables if name.endswith((".codes", "tokens.weight"))}
    assert len(copies) == stored
    assert any("is stored 2 times" in note for note in result.notes) == (stored == 2)
    if stored == 1 and embedding != "f32":
        (lookup,), logits = calls(made, "quantised_embedding"), calls(made, "quantised_linear")[-1]
        assert lookup.args[1:4] == logits.args[1:4]
    wanted = rounded(program, (embedding, "int8", head))
    np.testing.assert_allclose(made.run(TOKENS).numpy(), wanted, atol=2e-3 * np.abs(wanted).max())


def test_an_untied_head_is_never_tied():
    program = mlp(tied=False)
    made, _ = quantised(program, "int8")
    (lookup,), logits = calls(made, "quantised_embedding"), calls(made, "quantised_linear")[-1]
    assert lookup.args[1] is not logits.args[1]
    assert {leaf.name for leaf in made.weight_of(logits.args[1]).leaves()} == {"lm_head.weight"}


def test_learned_positions_stay_as_they_are():
    made, result = quantised(mlp(positions=True), "int8")
    (table,) = calls(made, "embedding")
    assert table.args[1].target == "wpe.weight"
    assert "embedding: 1 of 1 int8" in result.notes


def test_overrides_by_pattern():
    made, result = quantised(
        mlp(), "int4", 'overrides=[{match: "*_proj", weight: int8}, {match: "up*", weight: f32}]'
    )
    assert formats(made)["down_proj"] == ("int8", "int8_g32")
    assert "up_proj" not in formats(made)
    assert "linears: 1 of 2 f32, 1 of 2 int8" in result.notes
    with pytest.raises(InputError, match=r"(?s)'down_porj'.*down_proj"):
        quantised(mlp(), "int4", 'overrides=[{match: "down_porj", weight: int8}]')


def test_transposed_weights_group_along_their_inputs():
    """GPT-2's Conv1D stores [in, out]: groups run along the inputs of a matrix that is not square."""
    build = Build()
    x = build.hidden(96)
    stored = torch.randn(96, 200, generator=build.generator)
    node = build.program.add_weight("c_fc.weight", Transposed(ConstantTensor("c_fc.weight", stored)))
    up = build.call("linear", x, node)
    down = build.linear(up, 13, "head")
    build.program.graph.output_node().args = (down,)
    made, _ = quantised(build.program, "int4")
    codes = calls(made, "quantised_linear")[0].args[1]
    parts = QuantisedWeight(ConstantTensor("w", stored.T.contiguous()), "int4_g64")
    assert torch.equal(made.weight_of(codes).load(), parts.codes.load())
    assert made.weight_of(codes).shape == (200, 96)


def expert_model(formats_of_experts=None):
    """embedding -> router -> softmax -> top 2 of 4 experts -> head."""
    build = Build()
    x = build.hidden(40)
    scores = build.call(aten._softmax.default, build.linear(x, 4, "gate"), -1, False)
    top = build.call(aten.topk.default, scores, 2)
    weight, index = (build.program.call(operator.getitem, (top, i)) for i in (0, 1))
    gate_up, down = (
        build.weight("experts.gate_up_proj", 4, 48, 40),
        build.weight("experts.down_proj", 4, 40, 24),
    )
    routed = build.call("moe", x, index, weight, gate_up, None, down, None, "silu")
    logits = build.linear(routed, 13, "lm_head")
    build.program.graph.output_node().args = (logits,)
    return build.program


def test_experts_are_quantised_and_the_router_is_not():
    program = expert_model()
    assert sorted(roles(program).values()) == ["embedding", "head", "linear", "router"]
    made, result = quantised(program, "int4")
    (node,) = calls(made, "quantised_moe")
    assert node.args[3].meta["val"].shape == (4, 48, 40) and node.args[4].meta["val"].shape == (4, 48, 1)
    assert [kept.args[1].target for kept in calls(made, "linear")] == ["gate.weight"]
    assert "routers: 1 of 1 f32" in result.notes and "linears: 1 of 1 int4_g64" in result.notes
    error = (made.run(TOKENS) - program.run(TOKENS)).norm() / program.run(TOKENS).norm()
    assert 0 < error < 0.3


class Stored(ConstantTensor):
    """A leaf that holds integers, as a quantised checkpoint's tensors do."""

    def __init__(self, name, codes, scales, offsets, found=None):
        self.codes, self.scales, self.offsets = codes, scales, offsets
        values = codes.float().unflatten(-1, (-1, 32)) * scales[..., None] + offsets[..., None]
        super().__init__(name, values.flatten(-2))
        self.held = found or Held("Q4_1", "int4_g32", kept=True)

    def parts(self):
        return self.codes, self.scales, self.offsets

    def part_shapes(self):
        return tuple(self.codes.shape), tuple(self.scales.shape), tuple(self.offsets.shape)


def held_matrix(name, n, k, found=None):
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales, offsets = (torch.rand(n, k // 32, generator=generator).half().float() for _ in range(2))
    return Stored(name, codes, scales, offsets, found)


def kept_model(found=None):
    build = Build()
    table = build.program.add_weight("embed.weight", held_matrix("embed.weight", 13, 64))
    x = build.call("embedding", build.tokens, table)
    matrix = build.program.add_weight("up.weight", held_matrix("up.weight", 64, 64, found))
    logits = build.call("linear", build.call("linear", x, matrix), table)
    build.program.graph.output_node().args = (logits,)
    return build.program


def test_keep_carries_integers():
    program = kept_model()
    made, result = quantised(program, "keep")
    codes = made.weight_of(calls(made, "quantised_linear")[0].args[1])
    assert torch.equal(codes.load(), program.weights["up.weight"].codes)
    assert "linears: 1 of 1 int4_g32 (integers kept)" in result.notes
    error = (made.run(TOKENS) - program.run(TOKENS)).norm() / program.run(TOKENS).norm()
    assert error < 0.02  # of the activations alone


def test_keep_says_what_it_rounded_again():
    made, result = quantised(kept_model(Held("Q6_K", "int8_g32", kept=False)), "keep")
    assert "Q6_K rounded again to int8_g32" in result.notes
    assert calls(made, "quantised_linear")[0].args[5:7] == ("int8_g32", "int8_g32")
    _, result = quantised(kept_model(Held("Q4_K", "int4_g32", kept=True, exact=False)), "keep")
    assert "Q4_K carried as int4_g32, its scales rounded to float16" in result.notes


def test_keep_needs_something_to_keep():
    with pytest.raises(InputError, match=r"(?s)holds none.*real numbers.*gguf"):
        quantised(mlp(), "keep")


def test_nothing_is_read_before_a_part_is_loaded():
    program = mlp()
    for weight in program.weights.values():
        weight.load = lambda: pytest.fail("read too early")
    quantised(program, "int4")


def test_two_runs_give_the_same_graph():
    first, second = (quantised(mlp(), "int4")[0] for _ in range(2))
    assert first.dump() == second.dump()
