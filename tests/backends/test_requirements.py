"""A recipe's formats are held against a backend's before any work."""

from __future__ import annotations

import pytest

from enginewright.backends import BACKENDS, get_backend
from enginewright.backends.requirements import adapt
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import COMPUTE_FORMATS, KV_FORMATS, WEIGHT_FORMATS
from enginewright.recipes.recipe import list_recipes, load_recipe

ROLES = ("linear.weight", "embedding.weight", "head.weight")


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_format_is_held_or_refused_by_its_key(backend: str) -> None:
    target = get_backend(backend)
    able = target.capabilities
    asked = [(key, form, able.get("weight_formats")) for key in ROLES for form in WEIGHT_FORMATS]
    asked += [("kv_cache.format", form, able.get("kv_formats")) for form in KV_FORMATS]
    asked += [("compute", form, able["compute"]) for form in COMPUTE_FORMATS[1:]]
    kept = able.get("kv_formats", ["f32"])  # whatever is asked about, the rest must be held
    for key, form, held in asked:
        recipe = load_recipe("fp32", [f"kv_cache.format={kept[0]}", f"{key}={form}"])
        if held is None or form in held:
            adapt(recipe, target)
        else:
            with pytest.raises(InputError, match=f"the {backend} backend does not hold {form}") as refused:
                adapt(recipe, target)
            assert key in str(refused.value)


def test_an_activation_without_a_kernel_is_refused() -> None:
    recipe = load_recipe("int4", ["overrides+={match: '*.down_proj', weight: int4_g64, activation: f16}"])
    with pytest.raises(InputError, match=r"no f16 activations with int4_g64 weights") as refused:
        adapt(recipe, get_backend("cpu"))
    assert "overrides.0.activation" in str(refused.value)


@pytest.mark.parametrize("recipe", [name for name in list_recipes() if name != "fp16"])
def test_what_comes_with_the_package_is_left_as_it_is_on_the_cpu(recipe: str) -> None:
    loaded = load_recipe(recipe)
    assert adapt(loaded, get_backend("cpu")) == loaded


def test_compute_decides_what_auto_activations_are() -> None:
    recipe = load_recipe("int4", ["compute=f16", "linear.weight=int8", "head.weight=f32"])
    resolved = recipe.resolved()
    assert resolved["linear"]["activation"] == "f16" and resolved["head"]["activation"] == "f32"
    assert recipe.activation_of("fp8") == "bf16" and recipe.activation_of("int8", "int8") == "int8"
