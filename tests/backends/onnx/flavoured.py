"""Architectures' programs as folders of the other flavours, and the prompts that they are asked."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginewright.backends.onnx.flavours.answers import FlavourModel
from enginewright.backends.onnx.flavours.lower import lower
from enginewright.passes.capture import capture
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import ModelSource, open_source
from tests.backends.onnx.programs import PROMPTS, recipe_of
from tests.backends.stepping import Floats
from tests.passes.architectures import ARCHITECTURES, save

#: Heads of a width that GroupQueryAttention takes; the architectures' own are odd.
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64},
    "gptj": {"n_embd": 64, "rotary_dim": 8},
    "opt-postnorm": {"hidden_size": 64, "word_embed_proj_dim": 64},
    **{
        name: {"hidden_size": 64}
        for name in ("opt", "gpt_neox", "gpt_neox-sequential", "falcon-multiquery", "falcon-grouped")
    },
    **{name: {"hidden_size": 64, "head_dim": 16} for name in ("phi", "stablelm", "stablelm-parallel")},
}


@dataclass(frozen=True)
class Case:
    """A small model: its folder, opened, and what transformers answers to PROMPTS, each alone."""

    source: ModelSource
    program: Program
    expected: dict[str, Floats]
    _kept: tempfile.TemporaryDirectory[str]


def case(arch: str, wide: bool = True, recipe: str = "fp32", *overrides: str) -> Case:
    """An architecture by a recipe, made once; `wide`: with heads of a width that GroupQueryAttention takes."""
    return _case(arch, wide, recipe, overrides)


@functools.cache
def _case(arch: str, wide: bool, recipe: str, overrides: tuple[str, ...]) -> Case:
    changes = WIDE.get(arch, {"head_dim": 16}) if wide else {}
    kept = tempfile.TemporaryDirectory(prefix="enginewright-onnx-")
    source = open_source(save(arch, Path(kept.name), **changes))
    program = capture(source)
    order = [Step(Normalise(), Stage.NORMALISED, required=True), *steps(recipe_of(recipe, *overrides))]
    run_steps(program, order)
    model = ARCHITECTURES[arch](**changes)
    with torch.no_grad():
        logits = {name: model(torch.tensor([prompt])).logits[0].numpy() for name, prompt in PROMPTS.items()}
    return Case(source, program, logits, kept)


def model(found: Case, flavour: str, folder: Path) -> FlavourModel:
    """The case's program, written as a flavour and opened."""
    lower(found.program, flavour, folder, found.source)
    return FlavourModel(folder / "model.onnx", flavour, threads=1)
