"""The Program: lazy weights in an executable graph, one node a weight, independent clones, readable text."""

import pytest
import torch
from torch import fx

from enginewright.passes import dialect  # noqa: F401
from enginewright.passes.program import Execution, ModelFacts, Program, Stage
from enginewright.passes.weights import (
    Computed,
    Concatenated,
    ConstantTensor,
    Permuted,
    Reshaped,
    Scaled,
    Sliced,
    Stacked,
    Transposed,
    Weight,
    concatenated,
    permuted,
    reshaped,
    sliced,
    transposed,
)

ew = torch.ops.ew
aten = torch.ops.aten


class Counting(Weight):
    """A weight that counts how often it is loaded and how many copies are alive."""

    def __init__(self, value: torch.Tensor):
        self.name, self.value, self.shape, self.dtype = "counting", value, tuple(value.shape), value.dtype
        self.loads = 0

    def load(self) -> torch.Tensor:
        self.loads += 1
        return self.value.clone()


def tied() -> tuple[Program, Counting]:
    """tokens -> embedding -> the same matrix as a head."""
    program = Program(fx.Graph(), Stage.NORMALISED, {}, ModelFacts("toy", 10, 16, 1, 4))
    for name in ("tokens", "positions"):
        node = program.graph.placeholder(name)
        node.meta = {"val": program.fake([program.tokens], torch.int32), "module": ""}
    tokens = next(iter(program.graph.nodes))
    program.graph.output(None)
    weight = Counting(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    matrix = program.add_weight("model.embed.weight", weight)
    rows = program.call(ew.embedding.default, (tokens, matrix), module="model.embed")
    logits = program.call(ew.linear.default, (rows, matrix), module="lm_head")
    program.graph.output_node().args = (logits,)
    program.recompile()
    return program, weight


def test_running_loads_weights_at_each_use_as_float32():
    program, weight = tied()
    value = weight.value.float()
    assert torch.equal(program.run([1, 2]), value[[1, 2]] @ value.T)
    assert weight.loads == 2
    assert program.run([3]).dtype == torch.float32


def test_one_node_a_weight():
    program, weight = tied()
    assert program.weight_node("model.embed.weight") is program.weight_node("model.embed.weight")
    assert program.add_weight("model.embed.weight", weight).users
    with pytest.raises(ValueError, match="another weight"):
        program.add_weight("model.embed.weight", Counting(weight.value))


def test_values_are_freed_after_their_last_use():
    program, _ = tied()
    alive = []

    class Watching(Execution):
        def run_node(self, n):
            alive.append(sum(isinstance(v, torch.Tensor) for v in self.env.values()))
            return super().run_node(n)

    inputs = torch.tensor([1, 2], dtype=torch.int32)
    Watching(program).evaluate({"tokens": inputs, "positions": inputs})
    assert max(alive) <= 2


def test_missing_inputs_are_named():
    program, _ = tied()
    with pytest.raises(ValueError, match="positions"):
        Execution(program).evaluate({"tokens": torch.tensor([1])})


def test_shapes_are_inferred_with_a_symbol_for_tokens():
    program, _ = tied()
    shape = list(program.graph.output_node().args[0].meta["val"].shape)
    assert shape[1:] == [10] and isinstance(shape[0], torch.SymInt)


def test_a_clone_is_independent():
    program, _ = tied()
    copy = program.clone()
    assert copy.dump() == program.dump()
    last = copy.graph.output_node().args[0]
    copy.graph.output_node().args = (copy.call(aten.neg.default, (last,)),)
    copy.facts.kv_groups.append(None)
    copy.recompile()
    assert torch.equal(copy.run([1]), -program.run([1])) and program.facts.kv_groups == []
    copy.graph.lint()


def test_unnamed_weights_are_dropped():
    program, _ = tied()
    program.weights["left.over"] = ConstantTensor("left.over", torch.zeros(1))
    program.recompile()
    assert list(program.weights) == ["model.embed.weight"]


def test_the_dump_is_readable():
    text = tied()[0].dump()
    assert "ew.embedding(tokens, @model.embed.weight)" in text
    assert "f32[T, 10]" in text and "# lm_head" in text


# Weights.

BASE = torch.arange(24.0).reshape(4, 6)


def leaf(value: torch.Tensor = BASE) -> ConstantTensor:
    return ConstantTensor("w", value)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Transposed(leaf()), BASE.T),
        (Permuted(leaf(BASE.reshape(2, 2, 6)), (1, 2, 0)), BASE.reshape(2, 2, 6).permute(1, 2, 0)),
        (Reshaped(leaf(), (2, 12)), BASE.reshape(2, 12)),
        (Sliced(leaf(), 1, 1, 6, 2), BASE[:, 1:6:2]),
        (Sliced(leaf(), 0, 1, 3), BASE[1:3]),
        (Scaled(leaf(), 0.5), BASE * 0.5),
        (Concatenated([leaf(), leaf(BASE + 1)]), torch.cat([BASE, BASE + 1])),
        (Concatenated([leaf(), leaf(BASE + 1)], 1), torch.cat([BASE, BASE + 1], 1)),
        (Stacked([leaf(), leaf(BASE + 1)]), torch.stack([BASE, BASE + 1])),
        (Computed("c", (4, 6), torch.float32, lambda: BASE), BASE),
    ],
)
def test_expressions(weight, expected):
    assert weight.shape == tuple(expected.shape) and weight.dtype == expected.dtype
    assert torch.equal(weight.load(), expected)
    assert torch.equal(weight.load_rows(1, 2), expected[1:2])
    assert all(isinstance(source, ConstantTensor) for source in weight.leaves()) or not weight.sources


def test_trivial_expressions_fold():
    weight = leaf()
    assert transposed(transposed(weight)) is weight
    assert reshaped(weight, (4, 6)) is weight
    assert permuted(weight, (0, 1)) is weight
    assert sliced(weight, 0, 0, 4) is weight
    assert concatenated([weight]) is weight
    other = leaf(BASE + 1)
    assert sliced(concatenated([weight, other]), 0, 4, 8) is other
    assert isinstance(sliced(concatenated([weight, other]), 0, 3, 5), Sliced)


def test_expressions_that_do_not_fit():
    with pytest.raises(ValueError, match="reshape"):
        Reshaped(leaf(), (5, 5))
    with pytest.raises(ValueError, match="concatenate"):
        Concatenated([leaf(), leaf(BASE.T)])
    with pytest.raises(ValueError, match="stack"):
        Stacked([leaf(), leaf(BASE.T)])
