"""What a folder cannot say, refused by name before anything is calibrated or rounded.

The check is a pass that changes nothing: it runs on the fused graph, where every matrix still has the recipe's wish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from enginewright.backends.checkpoint.schemes import MIXED_ZERO_POINTS, objection, scheme_of
from enginewright.passes.assignment import Matrix, assign, kind_of
from enginewright.passes.kept import input_order
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument
from enginewright.passes.meta_model import build_on_meta
from enginewright.passes.program import Program
from enginewright.passes.source import ModelSource
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import Recipe

__all__ = ["Writable", "require_package", "require_recipe"]

_PACKAGE = "compressed-tensors"


class Writable:
    """The pass `check_folder`. Making it checks the recipe and the machine, running it the model's matrices."""

    name = "check_folder"

    def __init__(self, recipe: Recipe, source: ModelSource) -> None:
        self.options: Mapping[str, Any] = {}
        self.recipe, self.source = recipe, source
        require_recipe(recipe)
        require_package()

    def run(self, program: Program) -> PassResult:
        """Raises InputError at the first matrix that the folder cannot hold."""
        modules = dict(build_on_meta(self.source.config).named_modules())
        assigned, _ = assign(program, self.recipe)
        packed = [matrix for matrix in assigned.values() if parse_weight(matrix.weight).has_scales]
        for matrix in packed:
            _require(program, matrix, modules.get(matrix.name))
        self._require_one_scheme(packed)
        return PassResult(0)

    def _require_one_scheme(self, packed: Sequence[Matrix]) -> None:
        kinds = {scheme_of(parse_weight(matrix.weight), matrix.activation) for matrix in packed}
        with_zeros = [matrix for matrix in packed if parse_weight(matrix.weight).kind == "zero"]
        kept = any(matrix.kept for matrix in with_zeros)  # whether those are centred shows when they are read
        if with_zeros and len(kinds) > 1 and not self.recipe.quantise.symmetric and not kept:
            raise _refused(
                f"the matrix {with_zeros[0].name}",
                MIXED_ZERO_POINTS,
                "set quantise.symmetric=true, or keep embedding and head in bf16",
            )


def require_recipe(recipe: Recipe) -> None:
    """Refuse what no model could have written. Raises InputError with the recipe's key."""
    wished = {"linear.weight": recipe.linear.weight, "embedding.weight": recipe.embedding.weight}
    wished |= {"head.weight": recipe.head.weight, "router.weight": recipe.router.weight}
    wished |= {f"overrides.{i}.weight": item.weight for i, item in enumerate(recipe.overrides)}
    if recipe.mixed.wanted:
        wished |= {f"mixed.candidates.{i}": name for i, name in enumerate(recipe.mixed.candidates)}
    for key, name in wished.items():
        reason = None if name == "keep" else objection(parse_weight(name))
        if reason is not None:
            zero_points = (
                f"{name}_zp" if parse_weight(name).kind == "offset" and parse_weight(name).bits != 3 else None
            )
            raise _refused(
                f"recipe key '{key}'",
                reason,
                f"set {key}={zero_points or 'int4_g32_zp'}, or choose another recipe",
            )
    if recipe.outliers.threshold is not None:
        raise _refused(
            "recipe key 'outliers.threshold'",
            "compressed-tensors has no columns in another format",
            "set outliers.threshold=null",
        )
    if recipe.kv_cache.format not in ("f32", "bf16"):
        raise _refused(
            "recipe key 'kv_cache.format'",
            f"{recipe.kv_cache.format} keys and values are this engine's own form",
            "set kv_cache.format=bf16",
        )


def require_package() -> None:
    """transformers reads the folder with this package; without it the folder could not be verified."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"writing a checkpoint needs the package {_PACKAGE}, to verify it with transformers",
            found=str(error),
            action=f"pip install {_PACKAGE}",
        ) from error


def _refused(what: str, reason: str, action: str) -> InputError:
    return InputError(f"{what} cannot be written as a checkpoint", found=reason, action=action)


def _require(program: Program, matrix: Matrix, module: Any) -> None:
    node, name, form = matrix.node, matrix.name, matrix.weight
    if kind_of(node) == "moe":
        raise _refused(
            f"the experts {name}",
            f"they are one tensor of transformers' model, and {form} names modules",
            "keep experts in bf16 with an override",
        )
    if kind_of(node) == "embedding":
        raise _refused(
            f"the table {name} in {form}",
            "transformers reads no embedding that compressed-tensors has packed",
            "set embedding.weight=bf16",
        )
    weight = program.weight_of(argument(node, "weight"))
    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != weight.shape:
        stored = f"a {type(module).__name__}" if module is not None else "no module of its own"
        raise _refused(
            f"the matrix {name} in {form}",
            f"transformers has it as {stored}, and the folder's form knows Linear alone",
            "keep it in bf16 or f32 with an override",
        )
    reason = objection(parse_weight(form), weight.shape[-1])
    if reason is None and matrix.kept and input_order(weight) is not None:
        reason = "its groups lie across the inputs (desc_act), which compressed-tensors no longer has"
    if reason is not None:
        raise _refused(f"the matrix {name}", reason, "choose another format for it with an override")
