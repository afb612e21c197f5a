"""The pass `smooth`: the model stays as it is, what a point's block is, and that the search finds what it looks for."""

import functools

import pytest
import torch

from enginewright.passes import smooth
from enginewright.passes.calibration import Samples
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import simulate_activation
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Stage
from enginewright.passes.quant_formats import dequantise, grouped, quantise_rtn
from enginewright.passes.ranges import choose_grid
from enginewright.passes.smooth import Smooth, block_of
from enginewright.passes.smoothing import check_equal, find_points
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import InputError, LoweringError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import ARCHITECTURES, save
from tests.passes.families import family, fused, some_tokens
from tests.passes.graphs import Build, aten
from tests.passes.test_smoothing import chosen_experts
from tests.passes.test_walk import values_of

SAMPLES = [some_tokens(length, seed=length) for length in (21, 30, 13)]
AWQ = ("int4-awq", "smooth.grid=4")
SMOOTHQUANT = ("int8-smoothquant", "smooth.grid=4")


def smoothed(program, recipe, *overrides, samples=SAMPLES):
    changed = program.clone()
    result = Smooth(load_recipe(recipe, list(overrides)), Samples(samples)).run(changed)
    return changed, result


@pytest.mark.parametrize("method", [AWQ, SMOOTHQUANT], ids=["awq", "smoothquant"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_keeps_its_logits_and_its_experts(arch, method):
    """The scales that a search finds, with nothing rounded, on tokens that it has not seen."""
    before, tokens = family(arch), some_tokens(40, seed=3)
    after, result = smoothed(before, *method, samples=SAMPLES[:2])
    record = result.record
    assert result.matches == record["scaled"]
    assert record["scaled"] + len(record["left_at_default"]) == len(find_points(before)[0])
    assert record["scaled"] > 0 or arch == "bloom-postnorm"  # whose norms are residuals
    assert (after.weights.keys() - before.weights.keys()) == set()
    changed = [name for name in before.weights if after.weights[name] is not before.weights[name]]
    assert bool(changed) == (record["scaled"] > 0)
    assert check_equal(before, after, tokens) <= 1e-4
    assert all(map(torch.equal, chosen_experts(before, tokens), chosen_experts(after, tokens)))


def test_a_fold_that_misses_a_reader_is_caught(monkeypatch):
    """The check is the pass's own: here one matrix is not compensated."""
    whole = smooth.apply

    def careless(program, point, scales):
        name = str(argument(point.consumers[-1], "weight").target)
        before = program.weights[name]
        whole(program, point, scales)
        program.weights[name] = before

    monkeypatch.setattr(smooth, "apply", careless)
    with pytest.raises(LoweringError, match=r"(?s)`smooth` changed the model.*at most 1e-04"):
        smoothed(family("llama"), *AWQ)


# Blocks.


def block(arch, consumer):
    """(modules of the matrices in the block, modules of its outputs) of the first point with that consumer."""
    program = family(arch)
    point = next(
        p for p in find_points(program)[0] if any(consumer in str(n.all_input_nodes) for n in p.consumers)
    )
    nodes = block_of(point)

    def named(node):
        weights = [n for n in node.all_input_nodes if n.op == "get_attr" and "weight" in str(n.target)]
        weights += [n for n in node.all_input_nodes if n.op == "get_attr" and "proj" in str(n.target)]
        return str(weights[0].target).partition(".weight")[0] if weights else node.target.__name__

    ends = [named(node) for node in nodes if any(user not in nodes for user in node.users)]
    matrices = [named(n) for n in nodes if "linear" in n.name or "moe" in n.name]
    shorten = functools.partial(map, lambda name: name.removeprefix("model.").removeprefix("layers.0."))
    assert nodes == sorted(nodes)
    return list(shorten(matrices)), list(shorten(ends))


@pytest.mark.parametrize(
    "arch, consumer, matrices, ends",
    [
        ("llama", "q_proj", "q_proj k_proj v_proj o_proj", "self_attn.o_proj"),
        ("llama", "o_proj", "o_proj", "self_attn.o_proj"),
        ("llama", "gate_proj", "gate_proj up_proj down_proj", "mlp.down_proj"),
        ("llama", "down_proj", "down_proj", "mlp.down_proj"),
        ("llama", "lm_head", "lm_head", "lm_head"),
        # norms after attention and after the MLP belong to the block: the residual comes behind them
        ("gemma3_text", "q_proj", "q_proj k_proj v_proj o_proj", "post_attention_layernorm"),
        ("gemma3_text", "gate_proj", "gate_proj up_proj down_proj", "post_feedforward_layernorm"),
        # parallel attention and MLP: two norms, two blocks; one norm, one block up to the sum of both
        ("gpt_neox", "query_key_value", "query_key_value dense", "gpt_neox.layers.0.attention.dense"),
        ("gpt_neox", "dense_h_to_4h", "dense_h_to_4h dense_4h_to_h", "gpt_neox.layers.0.mlp.dense_4h_to_h"),
        ("cohere2", "q_proj", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", None),
        # a router and its experts; routing stays inside
        ("mixtral", "experts", "gate experts", "moe"),
        ("mixtral", "q_proj", "q_proj k_proj v_proj o_proj", "self_attn.o_proj"),
        # the head is never part of another's block
        ("opt", "project_out", "project_out", "decoder.project_out"),
        ("gpt2", "c_attn", "c_attn c_proj", "transformer.h.0.attn.c_proj"),
    ],
)
def test_what_a_block_is(arch, consumer, matrices, ends):
    found, outputs = block(arch, consumer)
    assert sorted(name.rpartition(".")[2] for name in found) == sorted(
        name.replace("experts", "gate_up_proj") for name in matrices.split()
    )
    if ends is None:
        assert sorted(name.rpartition(".")[2] for name in outputs) == ["down_proj", "o_proj"]
    else:
        assert outputs == [ends] or (ends == "moe" and len(outputs) == 1 and "experts" in outputs[0])


def test_the_head_stays_outside_also_where_logits_are_scaled():
    build = Build(Stage.FUSED)
    norm = build.call("rms_norm", build.hidden(8), build.weight("norm.weight", 8), 1e-5)
    up = build.linear(norm, 8, "up")
    head = build.linear(build.call("activation", up, "silu"), 13, "head")
    program = build.finish(build.call(aten.mul.Tensor, head, 0.5))
    point = find_points(program)[0][0]
    assert [node.target.__name__ for node in block_of(point)] == ["linear.default", "activation.default"]
    assert point.consumers == (up,)


def test_two_outputs_of_one_block_in_the_last_layer(tmp_path):
    """Cohere adds attention and MLP to the residual one after the other: nothing after the block wants the attention."""
    program = fused(
        save(
            "cohere2",
            tmp_path / "c",
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
            tie_word_embeddings=True,
        )
    )
    _, result = smoothed(program, *AWQ)
    assert result.matches > 0


def test_a_block_at_the_end_of_a_deep_graph():
    build = Build(Stage.FUSED)
    x = build.hidden(4)
    for _ in range(1200):
        x = build.call("activation", x, "silu")
    norm = build.call("rms_norm", x, build.weight("norm.weight", 4), 1e-5)
    up = build.linear(norm, 4, "up")
    program = build.finish(build.call("activation", up, "silu"))
    (point,), _ = find_points(program)
    assert [node.target.__name__ for node in block_of(point)][:2] == ["linear.default", "activation.default"]


# The search.


def with_weights(program, changes):
    changed = program.clone()
    for name, value in changes.items():
        changed.weights[name] = ConstantTensor(name, value)
    return changed


@pytest.mark.parametrize("search", ["minmax", "output"])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "mixtral"])
def test_awqs_scales_lower_the_error_of_every_block(arch, search):
    """The consumers rounded as the recipe rounds them (experts to nearest), the block's output against the exact one."""
    before = family(arch)
    options = ("linear.weight=int3_g32", f"quantise.range={search}", "smooth.grid=8")
    after, result = smoothed(before, "int4-awq", *options)
    assert result.matches > 4
    for point in find_points(before)[0]:
        if point.name in result.record["left_at_default"]:
            continue
        nodes = block_of(point)
        ends = [node.name for node in nodes if any(user not in nodes for user in node.users)]
        matrices = {}
        for node in point.consumers:
            name = str(argument(node, "weight" if is_call(node, OPS["linear"]) else "gate_up").target)
            if not name.endswith(".gate.weight"):  # the router stays in f32
                matrices[name] = "int8" if name == "lm_head.weight" else "int3_g32"

        experts = any(is_call(node, OPS["moe"]) for node in point.consumers)
        x = argument(point.consumers[0], "x").name

        def error(program, ends=ends, matrices=matrices, x=x, experts=experts):
            inputs = torch.cat([values_of(program, tokens)[x].flatten(1) for tokens in SAMPLES])
            rounded = {}
            for name, form in matrices.items():
                weight = program.weights[name].load()
                rounded[name] = dequantise(quantise_rtn(weight, form))
                if search == "output" and not experts:
                    grid = choose_grid(weight, parse_weight(form), search, gram=inputs.T @ inputs)
                    groups, _ = grouped(weight, grid.format)
                    rounded[name] = grid.values(grid.codes(groups)).flatten(-2)[:, : weight.shape[1]]
            other, total = with_weights(program, rounded), 0.0
            for tokens in SAMPLES:
                want, got = values_of(before, tokens), values_of(other, tokens)
                total += sum(float((got[end] - want[end]).square().sum()) for end in ends)
            return total

        assert error(after) < error(before) * 1.0001, point.name


def test_smoothquants_scales_lower_the_error_with_rounded_activations():
    before = family("llama")
    after, result = smoothed(before, "int8-smoothquant")
    layer = "model.layers.0."
    assert not any(f"{layer}post_attention" in name for name in result.record["left_at_default"])

    def mlp(program, rounds):
        total = []
        for tokens in SAMPLES:
            gate = next(
                n
                for n in program.graph.nodes
                if f"{layer}mlp.gate_proj.weight" in str([i.target for i in n.all_input_nodes])
            )
            x = values_of(program, tokens)[argument(gate, "x").name]
            part = {
                name: (
                    program.weights[f"{layer}mlp.{name}_proj.weight"].load(),
                    program.weights[f"{layer}mlp.{name}_proj.bias"].load(),
                )
                for name in ("gate", "up", "down")
            }
            if rounds:
                x = simulate_activation(x, "int8")
                part |= {
                    n: (dequantise(quantise_rtn(part[n][0], "int8")), part[n][1]) for n in ("gate", "up")
                }
            gate, up = (x @ part[n][0].T + part[n][1] for n in ("gate", "up"))
            down = program.weights[f"{layer}mlp.down_proj.weight"].load()
            total.append((torch.nn.functional.silu(gate) * up) @ down.T)
        return torch.cat(total)

    torch.testing.assert_close(mlp(after, False), mlp(before, False), rtol=1e-3, atol=1e-3)
    errors = [(mlp(program, True) - mlp(before, False)).norm() for program in (after, before)]
    assert errors[0] < errors[1]


def one_linear(weight, table):
    build = Build(Stage.FUSED)
    x = build.call("embedding", build.tokens, build.weight("embed.weight", value=table))
    norm = build.call("rms_norm", x, build.weight("norm.weight", table.shape[1]), 1e-5)
    up = build.call("linear", norm, build.weight("up.weight", value=weight), None)
    up.meta["module"] = "up"
    head = build.linear(build.call("activation", up, "silu"), 13, "lm_head")
    build.program.graph.output_node().args = (head,)
    return build.program


def test_a_point_that_no_candidate_improves_stays_as_it_is():
    """Weights that lie on the grid already cannot be rounded better."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(0, 16, (24, 32), generator=generator).float()
    exact[:, 0], exact[:, 1] = 0, 15
    program = one_linear(exact, torch.randn(13, 32, generator=generator))
    after, result = smoothed(program, "int4-awq", "head.weight=bf16", samples=[[1, 2, 3]])
    assert result.record["scaled"] == 0 and len(result.record["left_at_default"]) == 1
    assert "up" in result.record["left_at_default"][0]
    assert any("1 of 1 points keep scale 1: no candidate was better" in note for note in result.notes)
    assert after.weights["up.weight"] is program.weights["up.weight"]


def test_a_given_exponent_is_the_formula():
    """SmoothQuant, eq. 4: max|x|^α / max|w|^(1 - α), up to a factor that all channels share."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(13, 32, generator=generator)
    table[:, 5] *= 30
    program = one_linear(torch.randn(24, 32, generator=generator), table)
    tokens = list(range(13))
    after, result = smoothed(
        program, "int8-smoothquant", "smooth.alpha=0.75", "head.weight=bf16", samples=[tokens]
    )
    assert result.matches == 1
    (point,), _ = find_points(program)
    x = values_of(program, tokens)[point.activation.name]
    weight = program.weights["up.weight"].load()
    want = x.abs().amax(0) ** 0.75 / weight.abs().amax(0) ** 0.25
    found = after.weights["up.weight"].load() / weight
    torch.testing.assert_close(
        found / want[None], (found / want[None])[:1, :1].expand(24, 32), rtol=1e-4, atol=0
    )


def test_only_points_whose_matrices_are_rounded_are_searched():
    _, result = smoothed(
        family("llama"), *AWQ, "head.weight=f32", 'overrides=[{match: "model.layers.0.*", weight: bf16}]'
    )
    record = result.record
    assert record["scaled"] + len(record["left_at_default"]) == 4
    assert not any("layers.0" in name or "lm_head" in name for name in record["left_at_default"])


@pytest.mark.parametrize("tokens", [1, 25, 6000])
def test_the_search_looks_at_as_many_tokens_as_it_may(tokens, monkeypatch):
    seen = []
    whole = smooth.Walk

    def walk(*args, **options):
        seen.append(whole(*args, **options))
        return seen[-1]

    monkeypatch.setattr(smooth, "Walk", walk)
    samples = [some_tokens(20, seed=i) for i in range(250)]
    monkeypatch.setattr(smooth._Search, "run", lambda self: None)
    smoothed(family("llama"), *AWQ, f"smooth.tokens={tokens}", samples=samples)
    assert sum(seen[0].batches[0].lengths) == {1: 20, 25: 20, 6000: 5000}[tokens]


def test_samples_are_needed():
    with pytest.raises(InputError, match=r"(?s)calibration data.*smooth.method awq"):
        Smooth(load_recipe("int4-awq"), None).run(family("llama").clone())
