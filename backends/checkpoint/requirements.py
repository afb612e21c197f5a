"""What a folder cannot say, refused by name before anything is calibrated or rounded.

The check is a pass that changes nothing: it runs on the fused graph, where every matrix still has the recipe's wish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx, nn

from enginewright.backends.checkpoint.schemes import MIXED_ZERO_POINTS, objection
from enginewright.passes.dialect import OPS
from enginewright.passes.kept import held, widest
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call
from enginewright.passes.meta_model import build_on_meta
from enginewright.passes.program import Program
from enginewright.passes.quantise_rtn import roles
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
        found = roles(program)
        names = {node: _name(node) for node in found}
        assigned = self.recipe.assign({names[node]: role for node, role in found.items()})
        kinds: dict[tuple[str, str], str] = {}
        for node, name in names.items():
            wished = assigned[name]
            form = _format(program, node, wished.weight)
            if form is not None:
                _require(program, node, name, modules.get(name), form)
                kinds[(form, wished.activation if form == "int8" else "")] = name
        self._require_one_scheme(kinds)
        return PassResult(0)

    def _require_one_scheme(self, kinds: Mapping[tuple[str, str], str]) -> None:
        lone = [name for (form, _), name in kinds.items() if parse_weight(form).kind == "zero"]
        wishes = (self.recipe.linear, self.recipe.embedding, self.recipe.head, *self.recipe.overrides)
        kept = any(
            wish.weight == "keep" for wish in wishes
        )  # whether those are centred shows when they are read
        if lone and len(kinds) > 1 and not self.recipe.quantise.symmetric and not kept:
            raise _refused(
                f"the matrix {lone[0]}",
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


def _format(program: Program, node: fx.Node, wanted: str) -> str | None:
    """The format that a matrix will have, None where it stays plain."""
    if wanted == "keep":
        kinds = [kind for matrix in _matrices(node) if (kind := held(program.weight_of(matrix))) is not None]
        wanted = widest(kinds).format if kinds else "f32"
    return wanted if parse_weight(wanted).has_scales else None


def _name(node: fx.Node) -> str:
    """The module of a matrix; what a fold has made anew is named after its matrix."""
    stem = str(next(iter(_matrices(node))).target).rpartition(".")[0]
    return str(node.meta.get("module") or stem)


def _matrices(node: fx.Node) -> Iterable[fx.Node]:
    names = ("gate_up", "down") if is_call(node, OPS["moe"]) else ("weight",)
    return [argument(node, name) for name in names]


def _require(program: Program, node: fx.Node, name: str, module: Any, form: str) -> None:
    if is_call(node, OPS["moe"]):
        raise _refused(
            f"the experts {name}",
            f"they are one tensor of transformers' model, and {form} names modules",
            "keep experts in bf16 with an override",
        )
    if is_call(node, OPS["embedding"]):
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
    if reason is None and any(getattr(leaf, "input_order", None) is not None for leaf in weight.leaves()):
        reason = "its groups lie across the inputs (desc_act), which compressed-tensors no longer has"
    if reason is not None:
        raise _refused(f"the matrix {name}", reason, "choose another format for it with an override")
