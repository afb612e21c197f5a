"""Architectures' programs, lowered to ONNX and loaded: what several test files share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch

from enginewright.backends.onnx.executor import OnnxExecutor
from enginewright.backends.onnx.lower import lower
from enginewright.passes.capture import capture
from enginewright.passes.manager import run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import Recipe, load_recipe
from tests.backends.stepping import Floats
from tests.passes.architectures import ARCHITECTURES, folder

PROMPTS = {
    name: torch.randint(3, 130, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in (("short", 3), ("middle", 17), ("long", 64))
}


@functools.cache
def expected(arch: str) -> dict[str, Floats]:
    """Eager transformers' logits, each prompt alone."""
    model = ARCHITECTURES[arch]()
    with torch.no_grad():
        return {name: model(torch.tensor([prompt])).logits[0].numpy() for name, prompt in PROMPTS.items()}


@functools.cache
def _normalised(arch: str) -> Program:
    program = capture(folder(arch))
    if program.stage < Stage.NORMALISED:
        Normalise().run(program)
        program.stage = Stage.NORMALISED
    return program


def recipe_of(name: str, *overrides: str) -> Recipe:
    """A recipe as this backend builds it: what is computed between products is f32."""
    return load_recipe(name, ["compute=f32", *overrides])


@functools.cache
def program_of(arch: str, recipe: str = "fp32", *overrides: str) -> Program:
    """An architecture's final Program."""
    program = _normalised(arch).clone()
    run_steps(program, steps(recipe_of(recipe, *overrides)))
    return program


@functools.cache
def lowered(arch: str, recipe: str = "fp32", *overrides: str) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="enginewright-onnx-")
    lower(program_of(arch, recipe, *overrides), recipe_of(recipe, *overrides), Path(directory.name))
    return directory


def load(arch: str, recipe: str = "fp32", *overrides: str) -> OnnxExecutor:
    model = Path(lowered(arch, recipe, *overrides).name) / "model.onnx"
    return OnnxExecutor(model, threads=1, max_tokens=128)


def worst(found: dict[str, Floats], wanted: dict[str, Floats]) -> float:
    """The largest difference of any prompt, as a share of its largest logit."""
    return max(float(np.abs(found[name] - want).max() / np.abs(want).max()) for name, want in wanted.items())
