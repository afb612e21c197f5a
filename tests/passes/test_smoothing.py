"""Smoothing that rounds nothing leaves every model as it is: logits, and the experts that a router picks."""

import math
import operator
from collections import Counter

import pytest
import torch

from enginewright.passes import legality, smoothing
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import run_steps
from enginewright.passes.matching import argument, is_call
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Execution, Stage
from enginewright.passes.smoothing import apply, check_equal, find_points, require_equal
from enginewright.passes.weights import ConstantTensor, ScaledAlong, scaled_along
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.recipe import load_recipe
from tests import models
from tests.passes.architectures import ARCHITECTURES, VOCAB
from tests.passes.families import family, fused, some_tokens
from tests.passes.graphs import TOKENS, Build, aten
from tests.passes.paged import Pools

#: name -> (norms, values through attention, other linears that take a scale, activations that need a multiply of their
#: own, activations that cannot be scaled because the head's matrix is the embedding's).
POINTS = {
    "llama": (5, 2, 2, 0, 0),
    "mistral": (5, 2, 2, 0, 0),
    "qwen2": (4, 2, 2, 0, 1),
    "qwen3": (5, 2, 2, 0, 0),
    "gemma2": (4, 2, 2, 0, 1),
    "gemma3_text": (6, 3, 3, 0, 1),
    "gpt2": (4, 2, 0, 2, 1),  # gelu
    "opt": (5, 2, 3, 1, 0),  # relu; project_out → head, and project_in reads the embedding
    "opt-postnorm": (1, 2, 2, 4, 0),  # a norm's output is the residual, but for the last
    "phi": (3, 2, 0, 2, 0),
    "phi3": (5, 2, 2, 0, 0),
    "gpt_neox": (5, 2, 0, 2, 0),
    "gpt_neox-sequential": (5, 2, 0, 2, 0),
    "gptj": (3, 2, 0, 2, 0),
    "stablelm": (5, 2, 2, 0, 0),
    "stablelm-parallel": (3, 2, 2, 0, 0),
    "olmo2": (1, 2, 2, 4, 0),  # linears read the residual
    "cohere2": (5, 4, 4, 0, 0),
    "granite": (5, 2, 2, 0, 0),
    "smollm3": (9, 4, 4, 0, 0),
    "starcoder2": (5, 2, 0, 2, 0),
    "exaone4": (1, 4, 4, 8, 0),
    "mixtral": (5, 2, 0, 0, 0),
    "qwen3_moe": (5, 2, 1, 0, 0),
    "gpt_oss": (5, 2, 0, 0, 0),
    "deepseek_v3": (13, 3, 3, 0, 0),  # two more norms a layer; the dense layer and the shared experts
    "bloom": (4, 2, 0, 2, 1),
    "bloom-postnorm": (0, 2, 0, 6, 1),
    "mpt": (4, 0, 0, 4, 1),  # values are clipped on their way
    "falcon": (4, 2, 0, 2, 1),
    "falcon-multiquery": (2, 2, 0, 2, 1),
    "falcon-grouped": (4, 2, 0, 2, 1),
}


def random_scales(points, octaves=2.0, seed=0):
    """Log-uniform scales between 2^-octaves and 2^octaves, by the points' names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        point.name: torch.exp2((2 * torch.rand(point.channels, generator=generator) - 1) * octaves)
        for point in points
    }


def smoothed(program, scales=None, explicit=False, octaves=2.0):
    """(a copy with scales at all of its points, the points, the scales)."""
    changed = program.clone()
    points, _ = find_points(changed, explicit=explicit)
    scales = scales or random_scales(points, octaves)
    for point in points:
        apply(changed, point, scales[point.name])
    changed.recompile()
    legality.check(changed)
    return changed, points, scales


def through_attention(point):
    x = point.activation
    while not is_call(x, OPS["attention"], OPS["linear"]) and x.args:
        x = x.args[0]
    return is_call(x, OPS["attention"])


def chosen_experts(program, tokens):
    chosen = []

    class Recording(Execution):
        def call_function(self, target, args, kwargs):
            if target is OPS["moe"]:
                chosen.append(args[1])
            return super().call_function(target, args, kwargs)

    Recording(program).evaluate(
        {"tokens": torch.tensor(tokens, dtype=torch.int32), "positions": torch.arange(len(tokens))}
    )
    return chosen


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_keeps_its_logits(arch, explicit):
    before, tokens = family(arch), some_tokens()
    after, points, _ = smoothed(before, explicit=explicit)
    assert points, "every family has something to scale"
    assert check_equal(before, after, tokens) <= 1e-5
    want, got = chosen_experts(before, tokens), chosen_experts(after, tokens)
    assert len(want) == sum(is_call(node, OPS["moe"]) for node in before.graph.nodes)
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_points_of_every_family(arch):
    program = family(arch)
    points, notes = find_points(program)
    every, left = find_points(program, explicit=True)
    kinds, more = Counter(p.kind for p in points), Counter(p.kind for p in every)
    values = sum(through_attention(p) for p in points)
    assert (kinds["norm"], values, kinds["linear"] - values, more["explicit"], len(left)) == POINTS[arch]
    assert len(notes) == more["explicit"] + len(left)
    assert all("has another use" in note for note in left)

    order = list(program.graph.nodes)
    assert [order.index(p.consumers[0]) for p in every] == sorted(order.index(p.consumers[0]) for p in every)
    assert len({p.name for p in every}) == len(every)
    consumers = [node for p in every for node in p.consumers]
    assert len(set(consumers)) == len(consumers)
    matrices = sum(is_call(node, OPS["linear"], OPS["moe"]) for node in order)
    assert len(consumers) + len(left) == matrices
    for point in every:
        width = point.activation.meta["val"].shape[-1]
        assert (point.channels if point.index is None else len(point.index)) == width
        assert all(argument(node, "x").meta["val"].shape[-1] == width for node in point.consumers)


def test_grouped_query_heads_share_their_scales():
    point = next(p for p in find_points(family("llama"))[0] if through_attention(p))
    heads = torch.arange(24).reshape(2, 12)
    assert (point.channels, point.kind) == (24, "linear")
    assert torch.equal(point.index, heads.repeat_interleave(2, dim=0).flatten())
    assert point.name == "model.layers.0.self_attn.v_proj → o_proj"


def test_a_part_of_a_fused_linear_is_scaled_alone():
    before = family("phi3")
    after, points, scales = smoothed(before)
    point = next(p for p in points if through_attention(p))
    assert point.rows.tolist() == list(range(72, 96))
    qkv = str(argument(point.producer, "weight").target)
    rows = after.weights[qkv].load() / before.weights[qkv].load()
    assert torch.allclose(rows[:72], rows[:1].expand(72, -1), rtol=1e-6)  # the columns' scales alone
    assert torch.allclose(rows[72:] / rows[:1], (1 / scales[point.name])[:, None].expand(-1, 48), rtol=1e-5)


def test_experts_router_and_shared_expert_are_one_point():
    names = [p.name for p in find_points(family("deepseek_v3"))[0]]
    assert (
        "model.layers.1.post_attention_layernorm → gate, experts, shared_experts.gate_proj, shared_experts.up_proj"
        in names
    )


@pytest.mark.parametrize("arch", ["gemma3_text", "phi3", "gpt2", "deepseek_v3", "opt-postnorm"])
def test_scales_compose(arch):
    """Twice, in another order, is once by the product; and no expression grows."""
    before, tokens = family(arch), some_tokens()
    points = find_points(before, explicit=True)[0]
    first, second = random_scales(points, seed=1), random_scales(points, seed=2)
    once, _, _ = smoothed(before, {name: first[name] * second[name] for name in first}, explicit=True)
    twice = before.clone()
    points = find_points(twice, explicit=True)[0]
    for point in points:
        apply(twice, point, first[point.name])
    for point in reversed(points):
        apply(twice, point, second[point.name])
    twice.recompile()
    assert check_equal(before, twice, tokens) <= 1e-5
    assert twice.weights.keys() == once.weights.keys()
    for name, weight in once.weights.items():
        torch.testing.assert_close(twice.weights[name].load(), weight.load(), rtol=1e-5, atol=1e-6)
    for weight in twice.weights.values():
        depth = 0
        while isinstance(weight, ScaledAlong):
            weight, depth = weight.source, depth + 1
        assert depth <= 2


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixtral"])
def test_the_rest_of_the_pipeline_takes_a_smoothed_program(arch):
    before, tokens = family(arch), some_tokens()
    after, _, _ = smoothed(before, explicit=True)
    rest = [step for step in steps(load_recipe("fp32")) if step.stage > Stage.FUSED]
    run_steps(after, rest)
    want = before.run(tokens)
    got = Pools(after, page_size=16).step(tokens, 0)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", "smollm2"])
def test_real_models_with_extreme_scales(model):
    """Scales over six decades: a Gemma norm stores w and multiplies by 1 + w, which must not lose digits."""
    before = fused(getattr(models, model)())
    after, points, scales = smoothed(before, octaves=10)
    assert (
        Counter(p.kind for p in points)
        == {
            "gemma3": {"norm": 36, "linear": 36},
            "smollm2": {"norm": 60, "linear": 60},
        }[model]
    )
    tokens = [5, 300, 1000, 42, 7777, 12, 99, 1234]
    assert require_equal("test", before, after, scales, tokens) <= 1e-4


# One rule at a time, on graphs by hand.


def points_of(program, explicit=False):
    """The points' kinds and their notes; whatever is found must leave the numbers alone."""
    changed, points, _ = smoothed(program, explicit=explicit)
    assert check_equal(program, changed, TOKENS) <= 1e-5
    return [p.kind for p in points], find_points(program, explicit=explicit)[1]


def linear(build, x, width, name, bias=False):
    """A linear of a module of its own."""
    node = build.linear(x, width, name, bias)
    node.meta["module"] = name
    return node


def attention(build, q, k, v):
    return build.call("attention", q, k, v, None, None, 0.5)


def gated(build, up, gate, kind="silu"):
    return build.call(aten.mul.Tensor, build.call("activation", gate, kind), up)


def normed(build, width=6):
    """A residual stream [T, width], and its norm."""
    x = build.hidden(width)
    return x, build.call("rms_norm", x, build.weight("layers.0.norm.weight", width), 1e-5)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("extra", [True, False], ids=["extra", "plain"])
def test_norms(op, weight, extra):
    """With and without a weight; `extra`: a layer norm's bias, a stored weight that stands for 1 + w."""
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    args = [build.weight("n.weight", 6) if weight else None]
    if op.endswith("layer_norm"):
        args += [build.weight("n.bias", 6) if extra else None, 1e-5]
    else:
        args += [1e-5, float(extra)]
    if op.startswith("add"):
        y = build.call(operator.getitem, build.call(op, x, linear(build, x, 6, "o"), *args), 0)
    else:
        y = build.call(op, x, *args)
    q, k = linear(build, y, 4, "q", bias=True), linear(build, build.view(y, 1, 6), 4, "k")
    kinds, notes = points_of(build.finish(q, k))
    assert kinds.count("norm") == 1
    assert len(notes) == op.startswith("add")  # o reads the embedding


def test_a_norm_whose_output_is_also_the_residual_takes_none():
    build = Build(Stage.FUSED)
    _, y = normed(build)
    out = build.call(aten.add.Tensor, y, linear(build, y, 6, "q"))
    kinds, (note,) = points_of(build.finish(out))
    assert kinds == []
    assert "the channels of layers.0.norm also reach aten::add.Tensor" in note
    assert points_of(build.program, explicit=True)[0] == ["explicit"]


def test_a_reader_of_some_of_a_norms_channels_forbids_the_fold():
    build = Build(Stage.FUSED)
    _, y = normed(build)
    half = build.call(aten.slice.Tensor, y, 1, 0, 3)
    kinds, notes = points_of(build.finish(linear(build, y, 6, "q"), linear(build, half, 6, "k")))
    assert kinds == [] and len(notes) == 2
    assert "k reads the channels of layers.0.norm in another arrangement" in notes[0]


def test_the_sum_of_a_fused_norm_is_no_normed_value():
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    both = build.call("add_rms_norm", x, x, build.weight("n.weight", 6), 1e-5)
    normed, total = (build.call(operator.getitem, both, i) for i in (0, 1))
    kinds, (note,) = points_of(build.finish(linear(build, normed, 4, "q"), linear(build, total, 4, "k")))
    assert kinds == ["norm"]
    assert "it comes from ew::add_rms_norm" in note


def test_parallel_residual_is_one_point():
    build = Build(Stage.FUSED)
    x, y = normed(build)
    heads = [build.view(linear(build, y, 4, name), 2, 2) for name in "qkv"]
    attended = linear(build, build.view(attention(build, *heads), 4), 6, "o")
    mlp = linear(build, build.call("activation", linear(build, y, 8, "fc1"), "gelu"), 6, "fc2")
    out = build.call(aten.add.Tensor, build.call(aten.add.Tensor, x, attended), mlp)
    points, notes = find_points(build.finish(out))
    assert [(p.kind, len(p.consumers)) for p in points] == [("norm", 4), ("linear", 1)]
    assert len(notes) == 1 and "it comes from ew::activation gelu" in notes[0]
    assert points_of(build.program)[0] == ["norm", "linear"]


@pytest.mark.parametrize(
    ("kind", "fold"), [("relu", True), ("relu2", False), ("gelu", False), ("silu", False)]
)
def test_only_relu_passes_a_scale(kind, fold):
    build = Build(Stage.FUSED)
    inner = build.call("activation", linear(build, build.hidden(6), 8, "fc1", bias=True), kind)
    kinds, _ = points_of(build.finish(linear(build, inner, 6, "fc2", bias=True)))
    assert kinds == (["linear"] if fold else [])


@pytest.mark.parametrize("split", ["slice", "split", "split_with_sizes", "chunk"])
@pytest.mark.parametrize("first", ["gate", "up"])
@pytest.mark.parametrize("kind", ["silu", "relu"])
def test_up_of_one_gated_linear(split, first, kind):
    """Either order of the halves and of the factors; gate keeps its rows, even where a relu would pass them."""
    build = Build(Stage.FUSED)
    both = linear(build, build.hidden(6), 16, "gate_up", bias=True)
    if split == "slice":
        halves = [build.call(aten.slice.Tensor, both, 1, start, start + 8) for start in (0, 8)]
    else:
        op, size = {
            "split": (aten.split.Tensor, 8),
            "split_with_sizes": (aten.split_with_sizes.default, [8, 8]),
            "chunk": (aten.chunk.default, 2),
        }[split]
        parts = build.call(op, both, size, -1)
        halves = [build.call(operator.getitem, parts, i) for i in (0, 1)]
    gate, up = halves if first == "gate" else halves[::-1]
    act = build.call("activation", gate, kind)
    product = build.call(aten.mul.Tensor, *((act, up) if first == "gate" else (up, act)))
    program = build.finish(linear(build, product, 6, "down"))
    assert points_of(program)[0] == ["linear"]
    start = 8 if first == "gate" else 0
    assert find_points(program)[0][0].rows.tolist() == list(range(start, start + 8))


def test_the_gate_takes_no_scale_where_up_may():
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    gate, up = linear(build, x, 8, "gate"), linear(build, x, 8, "up")
    program = build.finish(linear(build, gated(build, up, gate, "relu"), 6, "down"))
    assert [p.name for p in find_points(program)[0]] == ["up → down"]
    assert points_of(program)[0] == ["linear"]


def test_up_read_twice():
    """By two products that two linears read: two activations. By the logits too: a reader without columns."""
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    up = linear(build, x, 8, "up")
    downs = [linear(build, gated(build, up, linear(build, x, 8, f"gate{i}")), 6, f"down{i}") for i in (0, 1)]
    kinds, notes = points_of(build.finish(*downs))
    assert kinds == []
    assert "the channels of up also reach down1 in another activation" in notes[1]

    build = Build(Stage.FUSED)
    x = build.hidden(6)
    up = linear(build, x, 8, "up")
    kinds, notes = points_of(
        build.finish(linear(build, gated(build, up, linear(build, x, 8, "gate")), 6, "down"), up)
    )
    assert kinds == []
    assert "the channels of up also reach aten::cat" in notes[1]


def test_two_linears_that_read_one_product_are_both_compensated():
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    inner = gated(build, linear(build, x, 8, "up"), linear(build, x, 8, "gate"))
    program = build.finish(linear(build, inner, 6, "c"), linear(build, build.view(inner, 1, 8), 6, "d"))
    assert [p.name for p in find_points(program)[0]] == ["up → c, d"]
    assert points_of(program)[0] == ["linear"]


def test_a_square_takes_none():
    build = Build(Stage.FUSED)
    up = linear(build, build.hidden(6), 8, "up")
    kinds, _ = points_of(build.finish(linear(build, build.call(aten.mul.Tensor, up, up), 6, "down")))
    assert kinds == []


@pytest.mark.parametrize("over", [False, True])
def test_a_quotient_passes_its_numerator_alone(over):
    build = Build(Stage.FUSED)
    up, scale = linear(build, build.hidden(6), 8, "up"), build.weight("scale", 8)
    quotient = build.call(aten.div.Tensor, *((scale, up) if over else (up, scale)))
    kinds, _ = points_of(build.finish(linear(build, quotient, 6, "down")))
    assert kinds == ([] if over else ["linear"])

    build = Build(Stage.FUSED)
    x = build.hidden(6)
    up, other = linear(build, x, 8, "up"), linear(build, x, 8, "other")
    inverse = linear(build, build.call(aten.div.Tensor, other, up), 6, "inverse")
    kinds, notes = points_of(build.finish(linear(build, up, 6, "down"), inverse))
    assert kinds == ["linear"]  # other → inverse
    assert "the channels of up also reach aten::div.Tensor" in next(n for n in notes if n.startswith("down"))


@pytest.mark.parametrize("key", [False, True])
def test_values_read_twice(key):
    """The v of two attentions makes two activations; a v that is also the key is not read as values alone."""
    build = Build(Stage.FUSED)
    x = build.hidden(6)
    q = build.view(linear(build, x, 8, "q"), 4, 2)
    k, v = (build.view(linear(build, x, 4, name), 2, 2) for name in "kv")
    first = linear(build, build.view(attention(build, q, k, v), 8), 6, "o1")
    second = linear(build, build.view(attention(build, q, v if key else k, v), 8), 6, "o2")
    kinds, notes = points_of(build.finish(first, second))
    assert kinds == []
    wanted = "the channels of v also reach " + ("ew::attention" if key else "o2 in another activation")
    assert wanted in next(note for note in notes if note.startswith("o1"))


def test_heads_that_share_one_matrix_have_no_channels_of_their_own():
    build = Build(Stage.FUSED)
    wide = build.view(linear(build, build.hidden(6), 8, "up"), 2, 4)
    kinds, notes = points_of(build.finish(linear(build, wide, 6, "down")))
    assert kinds == []
    assert "a feature is made of several channels of up" in notes[1]


def test_tied_matrices():
    """Two linears with one matrix, at one activation: scaled once. At two activations, or with another use: not at all."""
    build = Build(Stage.FUSED)
    _, y = normed(build)
    matrix = build.weight("tied.weight", 5, 6)
    program = build.finish(build.call("linear", y, matrix), build.call("linear", build.view(y, 1, 6), matrix))
    assert points_of(program)[0] == ["norm"]

    build = Build(Stage.FUSED)
    _, y = normed(build)
    table = build.program.weight_node("embed.weight")
    kinds, notes = points_of(build.finish(build.call("linear", y, table)), explicit=True)
    assert kinds == []
    assert notes == ["layers.0: no scale is folded: embed.weight has another use"]

    build = Build(Stage.FUSED)
    _, y = normed(build)
    matrix = build.weight("up.weight", 6, 6)
    inner = build.call("linear", build.call("linear", y, matrix), matrix)
    assert points_of(build.finish(inner), explicit=True)[0] == []


def test_two_norms_with_one_weight_take_none():
    build = Build(Stage.FUSED)
    _, y = normed(build)
    z = build.call(
        "rms_norm", linear(build, y, 6, "q"), build.program.weight_node("layers.0.norm.weight"), 1e-5
    )
    kinds, notes = points_of(build.finish(linear(build, z, 4, "k")))
    assert kinds == []
    assert all("layers.0.norm.weight has another use" in note for note in notes)


def test_an_expert_block_without_its_router_compensated_is_none():
    """The weights of the choice are made of the normed value itself, without a matrix between."""
    build = Build(Stage.FUSED)
    _, y = normed(build)
    index = build.call(operator.getitem, build.call(aten.topk.default, y, 2, 1), 1)
    weights = build.call(aten.slice.Tensor, y, 1, 0, 2)
    experts = build.weight("e.up", 6, 8, 6), None, build.weight("e.down", 6, 6, 4), None
    kinds, (note,) = points_of(build.finish(build.call("moe", y, index, weights, *experts, "silu")))
    assert kinds == []
    assert "also reach aten::topk" in note


def test_scales_must_fit():
    program = family("llama")
    changed = program.clone()
    point = find_points(changed)[0][0]
    for wrong in (torch.ones(39), torch.zeros(40), torch.full((40,), -1.0), torch.full((40,), math.inf)):
        with pytest.raises(ValueError, match="40 finite scales > 0"):
            apply(changed, point, wrong)
    with pytest.raises(ValueError, match="another program"):
        apply(program, point, torch.ones(40))


def test_a_point_that_changes_the_logits_is_named(monkeypatch):
    before = family("llama")
    scale = smoothing._scale

    def forgetful(program, node, dim, factors, offset=0.0):
        if "layers.1.mlp.up_proj" not in str(node.target) or dim != 0:
            scale(program, node, dim, factors, offset)

    monkeypatch.setattr(smoothing, "_scale", forgetful)
    after, _, scales = smoothed(before)
    with pytest.raises(LoweringError, match="pass `awq` changed the model") as raised:
        require_equal("awq", before, after, scales, some_tokens())
    assert "alone, `model.layers.1.mlp.up_proj → down_proj` by" in str(raised.value)


def test_logits_that_are_no_numbers_are_not_equal():
    before = family("llama")
    after = before.clone()
    after.weights["lm_head.weight"] = ConstantTensor("nan", torch.full((VOCAB, 40), math.nan))
    assert check_equal(before, after, some_tokens()) == math.inf


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_a_scaled_weight_streams_its_rows(dim):
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(3, 4, 5, generator=generator).bfloat16()
    factors = torch.rand(value.shape[dim], generator=generator) + 0.5
    weight = scaled_along(ConstantTensor("w", value), dim, factors, 1.0)
    shape = [1, 1, 1]
    shape[dim] = -1
    want = (value.float() + 1) * factors.reshape(shape)
    assert weight.dtype == torch.float32
    assert torch.equal(weight.load(), want)
    assert torch.equal(weight.load_rows(1, 3), want[1:3])
    back = scaled_along(weight, dim, 1 / factors)
    assert torch.allclose(back.load_rows(0, 2), value.float()[:2] + 1, rtol=1e-6)
    with pytest.raises(ValueError, match="cannot scale axis"):
        scaled_along(weight, dim, torch.ones(1))
