"""What a recipe asks for, held against what a backend can hold, before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from enginewright.recipes.errors import InputError
from enginewright.recipes.values import KEEP

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.recipes.recipe import Recipe

__all__ = ["adapt", "refusals"]


def adapt(recipe: Recipe, backend: Backend) -> Recipe:
    """The recipe as this backend builds it: what it left to the backend is filled in.

    Raises InputError at the first format that the backend's capabilities do not have, with the recipe's key.
    """
    adapted, refused = refusals(recipe, backend)
    for error in refused:
        raise error
    return adapted


def refusals(recipe: Recipe, backend: Backend) -> tuple[Recipe, list[InputError]]:
    """The recipe with what it left to the backend filled in, and one error for each format that the backend does not have."""
    able = backend.capabilities
    refused: list[InputError] = []

    def require(key: str, found: str | int, allowed: str) -> bool:
        if allowed not in able or found in able[allowed]:
            return True
        refused.append(
            InputError(
                f"the {backend.name} backend does not hold {found}",
                found=f"{key}: {found}",
                expected="one of " + ", ".join(map(str, able[allowed])),
                action=f"set {key} to one of them, choose another recipe, or build with another --backend",
            )
        )
        return False

    if recipe.compute != "auto":
        require("compute", recipe.compute, "compute")
    elif "compute" in able:
        recipe = replace(recipe, compute=able["compute"][0])
    wider = able.get("wider_kv_formats", {}).get(recipe.kv_cache.format)
    if wider is not None:
        recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, format=wider))
    require("kv_cache.format", recipe.kv_cache.format, "kv_formats")
    require("kv_cache.page_size", recipe.kv_cache.page_size, "page_sizes")
    require(
        "embedding.weight", recipe.embedding.weight, "weight_formats"
    ) if recipe.embedding.weight != KEEP else None
    matrices = {
        **{role: getattr(recipe, role) for role in ("linear", "head", "router")},
        **{f"overrides.{index}": override for index, override in enumerate(recipe.overrides)},
    }
    for key, matrix in matrices.items():
        if matrix.weight == KEEP:
            continue
        if not require(f"{key}.weight", matrix.weight, "weight_formats"):
            continue
        activation = recipe.activation_of(matrix.weight, matrix.activation)
        allowed = able.get("activation_formats", {}).get(matrix.weight)
        if allowed is not None and activation not in allowed:
            refused.append(
                InputError(
                    f"the {backend.name} backend multiplies no {activation} activations with {matrix.weight} weights",
                    found=f"{key}.activation: {activation}",
                    expected="one of " + ", ".join(allowed),
                    action=f"set {key}.activation=auto",
                )
            )
    for candidate in recipe.mixed.candidates if recipe.mixed.wanted else ():
        require("mixed.candidates", candidate, "weight_formats")
    return recipe, refused
