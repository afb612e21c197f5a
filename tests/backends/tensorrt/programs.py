"""Final Programs of small models, for the tests of lowering, the interpreter and plans."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from enginewright.passes.capture import capture
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import Recipe, load_recipe
from tests.passes.architectures import folder

__all__ = ["captured", "final", "final_of"]


@functools.cache
def captured(model: Path) -> Program:
    """A folder's captured Program. Clone it before passes run."""
    return capture(model)


def final_of(model: Path, recipe: str = "fp16", *overrides: str) -> tuple[Program, Recipe]:
    """The final Program of a folder by a recipe that does not calibrate, and the recipe."""
    resolved = load_recipe(recipe, list(overrides))
    program = captured(model).clone()
    order: list[Any] = [Step(Normalise(), Stage.NORMALISED, required=True), *steps(resolved)]
    run_steps(program, order)
    return program, resolved


def final(arch: str, recipe: str = "fp16", *overrides: str) -> tuple[Program, Recipe]:
    """The final Program of an architecture of tests/passes/architectures.py."""
    return final_of(folder(arch), recipe, *overrides)
