"""Where a program runs: one folder a backend, all behind the contract of base.py."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from enginewright.recipes.errors import InputError, near_matches

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.recipes.recipe import Recipe

__all__ = ["BACKENDS", "aim", "flavoured", "get_backend", "writer_of"]

#: Names and the modules that hold each one's `BACKEND`. A module is imported when its backend is asked for.
BACKENDS = {
    "cpu": "enginewright.backends.cpu",
    "checkpoint": "enginewright.backends.checkpoint",
    "tensorrt": "enginewright.backends.tensorrt",
    "onnx": "enginewright.backends.onnx",
}


def get_backend(name: str) -> Backend:
    """Return the backend called `name`. Raises InputError for an unknown name."""
    if name not in BACKENDS:
        close = near_matches(name, BACKENDS)
        raise InputError(
            "there is no such backend",
            found=repr(name),
            expected=", ".join(BACKENDS),
            action=f"did you mean {close[0]}?" if close else None,
        )
    backend: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return backend


def flavoured(backend: Backend, recipe: Recipe) -> Backend:
    """The backend as it writes what the recipe's `onnx.flavour` asks for. Raises InputError where it writes no flavours."""
    choose = getattr(backend, "flavoured", None)
    if choose is not None:
        chosen: Backend = choose(recipe.onnx.flavour)
        return chosen
    if recipe.onnx.flavour != "plain":
        raise InputError(
            f"the {backend.name} backend writes no ONNX models",
            found=f"onnx.flavour={recipe.onnx.flavour}",
            expected="onnx.flavour plain",
            action="leave onnx.flavour out, or build with --backend onnx",
        )
    return backend


def writer_of(manifest: Mapping[str, Any]) -> Backend:
    """The backend that has written the engine of a manifest, in its flavour."""
    backend = get_backend(manifest["backend"])
    choose = getattr(backend, "flavoured", None)
    if choose is None:
        return backend
    chosen: Backend = choose(manifest["recipe"]["onnx"]["flavour"])
    return chosen


def aim(backend: Backend, target: str | Iterable[str] | None) -> Backend:
    """The backend, building for `target`: names of machines, for a backend that builds for several kinds.

    Raises InputError where the backend builds for one kind alone, or does not know the target.
    """
    aimed = getattr(backend, "aimed", None)
    if aimed is not None:
        chosen: Backend = aimed(target)
        return chosen
    if target is not None:
        raise InputError(
            f"the {backend.name} backend builds for one kind of machine",
            found=f"--target {target}",
            expected=f"no target; it is {backend.target!r}",
            action="leave --target out, or build with --backend tensorrt",
        )
    return backend
