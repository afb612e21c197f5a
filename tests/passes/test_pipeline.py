"""The whole pipeline without quantisation, on a random model of every family.

What must hold: one paged attention a layer, every rotation, norm, activation and gated product fused, nothing
left over but the generic ops listed here, and the same logits, whole and in chunks, through pages.
"""

from collections import Counter

import pytest
import torch

from enginewright.passes import dialect
from enginewright.passes.capture import capture
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import run_pipeline, steps
from enginewright.passes.program import Stage
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import ARCHITECTURES, VOCAB, folder
from tests.passes.paged import Pools

#: name -> (layers, ropes, norms with or without a sum, gated products, other activations, expert blocks)
EXPECTED = {
    "llama": (2, 4, 5, 2, 0, 0),
    "mistral": (2, 4, 5, 2, 0, 0),
    "qwen2": (2, 4, 5, 2, 0, 0),
    "qwen3": (2, 4, 9, 2, 0, 0),
    "gemma2": (2, 4, 9, 2, 1, 0),
    "gemma3_text": (3, 6, 19, 3, 0, 0),
    "gpt2": (2, 0, 5, 0, 2, 0),
    "opt": (2, 0, 5, 0, 2, 0),
    "opt-postnorm": (2, 0, 4, 0, 2, 0),
    "phi": (2, 4, 7, 0, 2, 0),
    "phi3": (2, 4, 5, 2, 0, 0),
    "gpt_neox": (2, 4, 5, 0, 2, 0),
    "gpt_neox-sequential": (2, 4, 5, 0, 2, 0),
    "gptj": (2, 4, 3, 0, 2, 0),
    "stablelm": (2, 4, 17, 2, 0, 0),
    "stablelm-parallel": (2, 4, 3, 2, 0, 0),
    "olmo2": (2, 4, 9, 2, 0, 0),
    "cohere2": (4, 4, 5, 4, 0, 0),
    "granite": (2, 4, 5, 2, 0, 0),
    "smollm3": (4, 6, 9, 4, 0, 0),
    "starcoder2": (2, 4, 5, 0, 2, 0),
    "exaone4": (4, 6, 17, 4, 0, 0),
    "mixtral": (2, 4, 5, 0, 0, 2),
    "qwen3_moe": (2, 4, 9, 1, 0, 1),
    "gpt_oss": (2, 4, 5, 0, 0, 2),
    "deepseek_v3": (3, 6, 13, 3, 2, 2),
    "bloom": (2, 0, 6, 0, 2, 0),
    "bloom-postnorm": (2, 0, 6, 0, 2, 0),
    "mpt": (2, 0, 5, 0, 2, 0),
    "falcon": (2, 0, 5, 0, 2, 0),
    "falcon-multiquery": (2, 4, 3, 0, 2, 0),
    "falcon-grouped": (2, 4, 5, 0, 2, 0),
}

#: ATen ops that every graph may keep, and what a family keeps besides.
GENERIC = {"getitem", "slice", "reshape"}
KEPT = {
    "gemma2": {"div", "mul"},  # the cap of the logits
    "opt": {"mul"},  # the query's scale
    "opt-postnorm": {"mul", "add"},  # … and the sum of the two embeddings
    "phi": {"add"},  # parallel blocks add twice
    "gpt_neox": {"add"},
    "gptj": {"add"},
    "stablelm": {"cat"},  # a norm of its own for every head
    "stablelm-parallel": {"add"},
    "olmo2": {"add"},  # norms come before the sums
    "exaone4": {"add"},
    "cohere2": {"add", "mul"},
    "granite": {"mul", "div"},  # its multipliers
    "mixtral": {"softmax", "topk", "sum", "div"},
    "qwen3_moe": {"softmax", "topk", "sum", "div"},
    "gpt_oss": {"softmax", "topk"},
    "deepseek_v3": {"cat", "expand", "add", "topk", "sum", "full_like", "scatter", "to", "bitwise_not",
                    "masked_fill", "gather", "div", "mul"},
    "bloom-postnorm": {"add"},  # the residual is the norm
    "mpt": {"clamp"},  # clip_qkv
    "falcon-multiquery": {"add"},
    "falcon-grouped": {"add"},
}  # fmt: skip


def counts(program):
    names = (
        dialect.name_of(node.target) or getattr(node.target, "__name__", "").partition(".")[0]
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    return Counter(names)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family(arch):
    before = capture(folder(arch))
    Normalise().run(before)
    program = before.clone()
    records = run_pipeline(program, load_recipe("fp32"))
    assert program.stage == Stage.FINAL
    assert [record.name for record in records] == [step.rewrite.name for step in steps(load_recipe("fp32"))]

    found = counts(program)
    norms = sum(found[name] for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"))
    fused = tuple(found[name] for name in ("gated_activation", "activation", "moe"))
    assert (found["paged_attention"], found["rope"], norms, *fused) == EXPECTED[arch]
    assert sum(len(group.layers) for group in program.facts.kv_groups) == program.facts.num_layers
    left = found.keys() - dialect.OPS.keys() - GENERIC
    assert left <= KEPT.get(arch, set())

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB, (23,), generator=generator).tolist()
    want = before.run(tokens)
    limit = 1e-5 * want.abs().max()
    for chunks in ([23], [9, 1, 13]):
        pools, start = Pools(program, page_size=16), 0
        for size in chunks:
            got = pools.step(tokens[start : start + size], start)
            assert (got - want[start : start + size]).abs().max() <= limit
            start += size
    last = Pools(program, page_size=16).step(tokens, 0, logit_rows=[22, 4])
    assert (last - want[[22, 4]]).abs().max() <= limit


def test_the_pipeline_is_deterministic():
    dumps = []
    for _ in range(2):
        program = capture(folder("llama"))
        Normalise().run(program)
        run_pipeline(program, load_recipe("fp32"))
        dumps.append(program.dump())
    assert dumps[0] == dumps[1]


@pytest.mark.parametrize("recipe", ["int4", "int8", "bf16"])
def test_quantised_graphs_fuse_alike(recipe):
    program = capture(folder("gemma3_text"))
    Normalise().run(program)
    run_pipeline(program, load_recipe(recipe))
    found = counts(program)
    assert (found["paged_attention"], found["rope"], found["gated_activation"]) == (3, 6, 3)
    assert found["quantised_linear"] == 4 * 3 + 1
    assert found["quantised_embedding"] == 1
    codes = [n.args[1].target for n in program.graph.nodes if "quantised" in str(n.target)]
    assert codes[0] == codes[-1], "the tied table and head name one tensor"
    tokens = list(range(3, 23))
    together = Pools(program, page_size=16).step(tokens, 0)
    assert bool(torch.isfinite(together).all())
