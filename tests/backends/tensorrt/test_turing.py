"""sm75: what its GPUs lack is refused by name before the builder is asked, and what is let through builds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.requirements import adapt
from enginewright.backends.tensorrt import BACKEND
from enginewright.backends.tensorrt.api import new_network
from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.build import build_plan
from enginewright.backends.tensorrt.lower import define
from enginewright.backends.tensorrt.turing import refuse_formats, refuse_network
from enginewright.build import optimize
from enginewright.recipes.errors import InputError, LoweringError
from enginewright.recipes.recipe import load_recipe
from tests.backends.tensorrt.programs import final_of
from tests.passes.architectures import folder, save

OLD = ["sm80", "sm75"]
HALF = ("compute=f16", "kv_cache.format=f16", "linear.activation=f16", "head.activation=f16")


@pytest.mark.parametrize(
    ("recipe", "overrides", "told"),
    [
        ("int4", ["kv_cache.format=f16"], "linear.weight int4_g64"),
        ("int3-gptq", ["kv_cache.format=f16"], "linear.weight int3_g64"),
        ("fp16", ["embedding.weight=int4_g64"], "embedding.weight int4_g64"),
        ("int8", ["kv_cache.format=f16", "linear.activation=bf16"], "linear.activation bf16"),
        ("int8", ["kv_cache.format=f16", "linear.activation=int8"], "linear.activation int8"),
        ("int8", ["kv_cache.format=f16", "head.activation=f32"], "head.activation f32"),
        ("int8", [], "kv_cache.format bf16"),
        ("fp16", ["head.weight=f32"], "head.weight f32"),
        ("fp16", ["compute=bf16"], "compute bf16"),
        ("llm-int8", [], "outliers.threshold"),
    ],
)
def test_a_recipe_that_it_cannot_hold_is_refused(recipe: str, overrides: list[str], told: str) -> None:
    asked = adapt(load_recipe(recipe, overrides), BACKEND)
    refuse_formats(asked, ["sm80", "sm89"])
    with pytest.raises(InputError, match="sm75 has no bf16") as caught:
        refuse_formats(asked, OLD)
    assert told in str(caught.value.found)


def test_it_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sm75 has no bf16"):
        optimize(folder("llama"), "int4-gptq", tmp_path / "out", backend="tensorrt", target="sm80,sm75")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arch", "overrides", "told"),
    [
        ("gemma2", (), "paged_attention_default.product: a product in float32"),  # soft caps
        ("mixtral", (), "mlp.gate/linear_default"),  # the router
        ("llama", ("head.weight=bf16",), ": bf16"),
        ("llama", ("linear.weight=int4_g16", "linear.activation=f16"), "4-bit integers"),
    ],
)
def test_a_network_that_it_cannot_compute_is_told_by_layers(
    arch: str, overrides: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    program, _ = final_of(save(arch, tmp_path / arch, head_dim=16), "fp16", *overrides)
    lowered = define(program, new_network()[0])
    refuse_network(lowered, ["sm80"])
    with pytest.raises(LoweringError, match="sm75 cannot compute") as caught:
        refuse_network(lowered, OLD)
    assert told in str(caught.value)


@pytest.mark.parametrize("recipe", [("fp16",), ("int8", *HALF)], ids=lambda recipe: recipe[0])
def test_what_is_let_through_builds(recipe: tuple[str, ...], tmp_path: Path) -> None:
    model = save("llama", tmp_path / "llama", hidden_size=64, head_dim=32, intermediate_size=96)
    refuse_formats(load_recipe(recipe[0], list(recipe[1:])), ["sm75"])
    program, _ = final_of(model, *recipe)
    network, builder = new_network()
    lowered = define(program, network)
    refuse_network(lowered, ["sm75"])
    limits = Limits(sequences=2, tokens=16, context=64, page_size=16, pages=(16,))
    assert build_plan(lowered, builder, ["sm75"], limits, tmp_path / "plan").size
