"""Normalisation on small models of one idea each: the graph before and after, the numbers, the refusals."""

import operator

import pytest
import torch
from torch import nn

from enginewright.passes import dialect
from enginewright.passes.capture import to_program
from enginewright.passes.legality import check
from enginewright.passes.normalise import Normalise
from enginewright.passes.program import ModelFacts, Program, Stage
from enginewright.passes.weights import Computed, ConstantTensor
from enginewright.recipes.errors import CaptureError

CONTEXT = 20
TOKENS = torch.tensor([3, 1, 4, 1, 5])


class Toy(nn.Module):
    """tokens [1, T] -> embedding [1, T, 6] -> `body` -> [1, T, anything]. Weights are seeded noise."""

    def __init__(self, body=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.proj = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.randn(6))
        self.matrix = nn.Parameter(torch.randn(6, 5))
        self.learned = nn.Embedding(CONTEXT + 2, 6)
        self.body = body

    def forward(self, tokens):
        return self.body(self, self.embed(tokens))


def captured(body) -> tuple[Toy, Program]:
    toy = Toy(body).eval()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = toy

        def forward(self, tokens, positions):
            return self.model(tokens)

    ids = torch.zeros(1, 6, dtype=torch.long)
    dim = torch.export.Dim("T", min=2, max=CONTEXT - 1)
    with torch.no_grad():
        exported = torch.export.export(
            Wrapper(), (ids, ids.clone()), dynamic_shapes=({1: dim}, {1: dim}), strict=False
        )
    weights = {
        name: Computed(name, value.shape, value.dtype, lambda value=value: value)
        for name, value in toy.state_dict().items()
    }
    facts = ModelFacts("toy", 7, CONTEXT, 1, 6)
    return toy, to_program(exported, facts, weights, {})


def normalised(body) -> Program:
    """The normalised program, checked to be legal and equal to the model for several lengths."""
    toy, program = captured(body)
    result = Normalise().run(program)
    assert result.matches > 0 and program.stage == Stage.NORMALISED
    check(program)
    for length in (1, 2, 5):
        with torch.no_grad():
            expected = toy(TOKENS[None, :length])[0]
        torch.testing.assert_close(program.run(TOKENS[:length]).reshape(expected.shape), expected)
    return program


def ops(program: Program) -> list[str]:
    """Names of the graph's calls in order."""
    names = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = dialect.name_of(node.target)
            if name is not None:
                names.append(f"ew.{name}")
            elif node.target is operator.getitem:
                names.append("getitem")
            else:
                names.append(node.target._schema.name.removeprefix("aten::"))
    return names


def arguments_of(program: Program, name: str) -> tuple:
    return next(n.args for n, op in zip(calls(program), ops(program), strict=True) if op == name)


def calls(program: Program) -> list:
    return [n for n in program.graph.nodes if n.op == "call_function"]


# The batch goes and tokens come first.


def test_before_and_after():
    def body(m, x):
        heads = m.proj(m.norm(x).to(torch.float32)).view(1, -1, 2, 4).transpose(1, 2)
        return heads.transpose(1, 2)

    _, before = captured(body)
    names = [n.target._schema.name for n in calls(before)]
    assert "aten::layer_norm" in names and "aten::transpose" in names
    assert [n.target for n in before.graph.nodes if n.op == "placeholder"] == ["tokens", "positions"]
    program = normalised(
        lambda m, x: m.proj(m.norm(x).to(torch.float32)).view(1, -1, 2, 4).transpose(1, 2).transpose(1, 2)
    )
    assert ops(program) == ["ew.embedding", "ew.layer_norm", "ew.linear", "reshape"]
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    assert all(n.meta["val"].dtype == torch.int32 and n.meta["val"].dim() == 1 for n in inputs)
    assert list(calls(program)[-1].meta["val"].shape[1:]) == [2, 4]


def test_heads_before_tokens_need_no_copy():
    def body(m, x):
        heads = x.view(1, -1, 2, 3).transpose(1, 2)
        return (heads * 2).transpose(1, 2).reshape(1, -1, 6)

    assert ops(normalised(body)) == ["ew.embedding", "reshape", "mul", "reshape"]


def test_features_that_change_places_do():
    program = normalised(lambda m, x: x.view(1, -1, 2, 3).transpose(2, 3).reshape(1, -1, 6))
    assert ops(program) == ["ew.embedding", "reshape", "permute", "reshape"]
    assert arguments_of(program, "permute")[1] == [0, 2, 1]


def test_flattening_tokens_and_back():
    assert ops(normalised(lambda m, x: m.proj(x.view(-1, 6)).view(1, -1, 8))) == ["ew.embedding", "ew.linear"]


def test_operands_are_aligned_by_axes():
    def body(m, x):
        heads = x.view(1, -1, 2, 3).transpose(1, 2)  # [1, 2, T, 3]
        each = m.scale[:2].view(1, 2, 1, 1)
        return (heads * each + x.sum(-1)[:, None, :, None]).transpose(1, 2).flatten(2)

    normalised(body)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: torch.cat([x[..., :2], x[..., 4:], -x[..., 2:4]], -1),
        lambda m, x: torch.stack([x[..., ::2], x[..., 1::2]], -1).flatten(-2),
        lambda m, x: torch.cat(x.chunk(3, -1)[::-1], -1),
        lambda m, x: x.split([1, 5], -1)[1],
        lambda m, x: torch.stack(x.view(1, -1, 3, 2).unbind(-1), 2),
        lambda m, x: x[:, :, None].expand(-1, -1, 3, -1).reshape(1, -1, 18),
        lambda m, x: x.repeat_interleave(2, dim=-1),
        lambda m, x: x.repeat(1, 1, 2),
        lambda m, x: x[..., [4, 5, 0]],
        lambda m, x: nn.functional.pad(x, (1, 2)),
        lambda m, x: x.narrow(-1, 2, 3),
        lambda m, x: x.unsqueeze(0).squeeze(0),
        lambda m, x: x.topk(2, dim=-1)[0],
        lambda m, x: x.gather(-1, x.topk(2)[1]),
        lambda m, x: torch.zeros_like(x).scatter(-1, x.topk(2)[1], 1.0),
        lambda m, x: x.softmax(-1).cumsum(-1),
        lambda m, x: (x > 0).to(x.dtype) * x,
        lambda m, x: torch.where(x > 0, x, 0.5).clamp(max=1.0),
        lambda m, x: 1.0 / (2.0 - x.sigmoid()),
        lambda m, x: x * torch.tensor(3.0) + torch.tensor(1.5),
        lambda m, x: torch.view_as_real(torch.view_as_complex(x.view(1, -1, 3, 2))).flatten(2),
    ],
)
def test_layouts_and_arithmetic_inside_a_row(body):
    normalised(body)


# Weights.


def test_products_with_weights_become_linears():
    program = normalised(lambda m, x: x @ m.matrix)
    assert ops(program) == ["ew.embedding", "ew.linear"]
    program = normalised(lambda m, x: torch.addmm(m.scale[:5], x.view(-1, 6), m.matrix).view(1, -1, 5))
    assert ops(program) == ["ew.embedding", "ew.linear"]
    weight = program.weight_of(arguments_of(program, "ew.linear")[1])
    assert weight.shape == (5, 6)


def test_layouts_of_weights_fold():
    def body(m, x):
        swapped = torch.cat([m.matrix[:, 2:], m.matrix[:, :2]], 1).t()
        return nn.functional.linear(x, swapped)

    assert ops(normalised(body)) == ["ew.embedding", "ew.linear"]


def test_arithmetic_on_weights_stays_in_the_graph_but_for_products():
    assert ops(normalised(lambda m, x: x * (1.0 + m.scale))) == ["ew.embedding", "add", "mul"]
    program = normalised(lambda m, x: nn.functional.linear(x, m.matrix.t() * 2))
    assert ops(program) == ["ew.embedding", "ew.linear"]
    assert isinstance(program.weight_of(arguments_of(program, "ew.linear")[1]), Computed)


def test_the_same_view_of_a_weight_is_one_node():
    program = normalised(lambda m, x: (x @ m.matrix) + (-x @ m.matrix))
    assert sum(n.op == "get_attr" for n in program.graph.nodes) == 2


# Positions.


def test_sinusoids_become_a_table():
    def body(m, x):
        where = torch.arange(x.shape[1])
        return x + torch.cos(where[:, None] * 0.5 ** torch.arange(6.0))

    program = normalised(body)
    assert (
        ops(program) == ["ew.embedding", "ew.position_table", "add"] or ops(program)[0] == "ew.position_table"
    )
    table = program.weight_of(arguments_of(program, "ew.position_table")[1]).load()
    expected = torch.cos(torch.arange(float(CONTEXT))[:, None] * 0.5 ** torch.arange(6.0))
    torch.testing.assert_close(table, expected)


def test_equal_tables_are_one():
    def body(m, x):
        first = torch.arange(x.shape[1], dtype=torch.float32).cos()
        second = torch.ones(1, x.shape[1]).cumsum(1).sub(1).cos()
        return x + first[None, :, None] + second[..., None]

    program = normalised(body)
    assert sum(isinstance(w, ConstantTensor) for w in program.weights.values()) == 1


def test_learned_positions_are_an_embedding_with_an_offset():
    def body(m, x):
        mask = torch.ones(1, x.shape[1], dtype=torch.long)
        return x + m.learned(mask.cumsum(1) * mask - 1 + 2)

    program = normalised(body)
    assert ops(program).count("ew.embedding") == 2
    learned = next(n for n in calls(program) if n.args[0].name == "positions")
    assert learned.args[2] == 2


def test_what_is_the_same_at_every_position_is_a_number():
    program = normalised(lambda m, x: x * torch.ones(1, x.shape[1], 1).mul(2.0))
    assert ops(program) == ["ew.embedding", "mul"]
    assert calls(program)[-1].args[1] == 2.0


# Refusals.


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, x: x.cumsum(1), "along the tokens"),
        (lambda m, x: x.mean(1, keepdim=True).expand_as(x), "along the tokens"),
        (lambda m, x: x.softmax(1), "along the tokens"),
        (lambda m, x: x.flip(1), "along the tokens"),
        (lambda m, x: torch.cat([x, x], 1)[:, : x.shape[1]], "mixes tokens|appended to the tokens"),
        (lambda m, x: x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], "tokens"),
        (lambda m, x: (x @ x.transpose(1, 2)) @ x, "tokens meet tokens|across tokens"),
        (lambda m, x: x.roll(1, 1), "not known to stay within one token"),
        (lambda m, x: x + torch.arange(x.shape[1]).max(), "depends on the length"),
        (lambda m, x: x / x.shape[1], "number of tokens"),
        (
            lambda m, x: x + m.learned(torch.arange(x.shape[1]).flip(0)),
            "other than a token|depends on the length",
        ),
        (
            lambda m, x: x + m.learned(torch.arange(x.shape[1]) + 3),
            "more positions than the model has learned",
        ),
    ],
)
def test_what_looks_at_other_tokens_is_refused(body, reason):
    _, program = captured(body)
    with pytest.raises(CaptureError, match=reason):
        Normalise().run(program)
    assert program.stage == Stage.CAPTURED


def test_the_module_is_named():
    class Sum(nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    def body(m, x):
        return m.sum(x)

    toy_body = body
    original = Toy.__init__

    def init(self, body=None):
        original(self, body)
        self.sum = Sum()

    Toy.__init__ = init
    try:
        _, program = captured(toy_body)
    finally:
        Toy.__init__ = original
    with pytest.raises(CaptureError, match="in sum"):
        Normalise().run(program)


# In-place operations of the trace.


def test_writes_into_slices_become_a_join():
    def body(m, x):
        made = torch.empty_like(x)
        made[..., :2] = x[..., 4:]
        made[..., 2:] = x[..., :4]
        return made

    assert ops(normalised(body)) == ["ew.embedding", "slice", "slice", "cat"]


def test_in_place_arithmetic_is_made_functional():
    def body(m, x):
        y = x * 2
        z = y
        y += 1
        z *= 3
        return y

    normalised(body)


def test_a_write_that_another_view_would_see_is_refused():
    def body(m, x):
        y = x * 2
        view = y.view(1, -1, 2, 3)
        y.add_(1)
        return view.flatten(2)

    with pytest.raises(CaptureError, match="written in place"):
        captured(body)
