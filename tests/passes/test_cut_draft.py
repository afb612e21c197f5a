"""A draft of N layers is the model that transformers would be with N layers, on every architecture."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from enginewright.passes.cut_draft import CanDraft, cut_draft
from enginewright.passes.manager import run_steps
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import InputError, LoweringError
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import ARCHITECTURES
from tests.passes.families import family, some_tokens
from tests.passes.graphs import Build, aten, count
from tests.passes.paged import Pools

TOKENS = some_tokens()
LISTS = {  # of a transformers model: where its layers are
    "gpt2": "transformer.h", "gptj": "transformer.h", "bloom": "transformer.h", "falcon": "transformer.h",
    "mpt": "transformer.blocks", "opt": "model.decoder.layers", "gpt_neox": "gpt_neox.layers",
}  # fmt: skip


@functools.cache
def final(arch: str, recipe: str = "fp32") -> Program:
    program = family(arch).clone()
    run_steps(program, [step for step in steps(load_recipe(recipe)) if step.stage > Stage.FUSED])
    return program


def truncated(arch: str, layers: int) -> torch.Tensor:
    """Logits of the transformers model without its later layers."""
    model: Any = ARCHITECTURES[arch]()
    path = LISTS.get(arch.partition("-")[0], "model.layers")
    blocks = model.get_submodule(path)
    if arch == "opt-postnorm":  # the norm before the head is the last layer's own
        blocks[layers - 1].final_layer_norm = blocks[-1].final_layer_norm
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, blocks[:layers])
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        if hasattr(model.config, key):
            setattr(model.config, key, layers)
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), use_cache=False).logits[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_gives_the_logits_of_the_truncated_model(arch: str) -> None:
    program = final(arch)
    nodes = len(program.graph.nodes)
    for layers in range(1, program.facts.num_layers):
        draft = cut_draft(program, layers)
        got = Pools(draft, 16).step(TOKENS, 0)
        want = truncated(arch, layers)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{layers} layers"
        assert count(draft, "paged_attention") == layers == draft.facts.num_layers
        assert draft.facts.kv_groups == program.facts.kv_groups
        full = Pools(program, 16).step(TOKENS, 0)
        assert (full - want).abs().max() > 1e-2 * want.abs().max(), "the whole model gives something else"
        rows = Pools(draft, 16).step(TOKENS, 0, [4, 22, 4])
        torch.testing.assert_close(rows, got[[4, 22, 4]])
    assert len(program.graph.nodes) == nodes and program.facts.num_layers != layers, "the model is as it was"


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
def test_a_draft_writes_the_keys_and_values_of_the_model(arch: str) -> None:
    program = final(arch, "int4")
    draft = cut_draft(program, 1)
    pools = [Pools(one, 16) for one in (program, draft)]
    for one in pools:
        one.step(TOKENS, 0)
    first = {name for name in pools[0].pools if name.endswith("_0_0")}
    assert len(first) == 2
    for name, values in pools[1].pools.items():
        if name in first:
            torch.testing.assert_close(values, pools[0].pools[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert values.isnan().all(), "later layers are left alone"


def test_a_draft_reads_the_weights_of_the_model() -> None:
    program = final("llama", "int4")
    draft = cut_draft(program, 1)
    assert len(draft.weights) < len(program.weights)
    assert all(program.weights[name] is weight for name, weight in draft.weights.items())


@pytest.mark.parametrize("layers", [0, 2, 7, -1])
def test_the_number_of_layers_is_checked(layers: int) -> None:
    with pytest.raises(InputError, match="the model has 2 layers") as caught:
        cut_draft(final("llama"), layers)
    assert "1 to 1" in str(caught.value)
    with pytest.raises(InputError):
        CanDraft(layers).run(family("llama"))


def test_what_can_be_cut_shows_before_anything_is_rounded() -> None:
    program = family("llama").clone()
    before = program.dump()
    assert CanDraft(1).run(program).matches == 1 and program.dump() == before
    names = [step.rewrite.name for step in steps(load_recipe("int4", ["draft.layers=1"]))]
    assert names.index("can_draft") < names.index("quantise")
    assert "can_draft" not in [step.rewrite.name for step in steps(load_recipe("int4", ["draft.layers=0"]))]


def layered(side: bool, width: int = 8) -> Program:
    """Two layers of attention; with `side`, the second also reads the embedding."""
    build = Build()
    embedded = x = build.hidden(8)
    for layer in range(2):
        heads = build.view(x, 2, 4)
        mixed = build.view(build.call("attention", heads, heads, heads, None, None, 0.5, 0, 0.0, layer), 8)
        if side and layer:
            mixed = build.call(aten.mul.Tensor, mixed, embedded)
        x = build.call(aten.add.Tensor, x, build.linear(mixed, 8, f"o{layer}"))
    return build.finish(build.linear(x, 11, "head"))


def test_a_model_whose_layers_read_something_else_too_is_refused() -> None:
    CanDraft(1).run(layered(side=False))
    with pytest.raises(LoweringError, match="after layer 1 no sum stands alone") as caught:
        CanDraft(1).run(layered(side=True))
    assert "draft.layers=0" in str(caught.value)


def test_only_a_final_program_is_cut() -> None:
    with pytest.raises(LoweringError, match="cut from a final program"):
        cut_draft(family("llama"), 1)
