"""The Program of every architecture just before quantisation, built once a process, and token sequences for it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginewright.passes.capture import capture
from enginewright.passes.manager import run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import VOCAB, folder

__all__ = ["family", "fused", "some_tokens"]


def fused(model: Any) -> Program:
    """The Program just before quantisation."""
    program = capture(model)
    Normalise().run(program)
    run_steps(program, [step for step in steps(load_recipe("fp32")) if step.stage <= Stage.FUSED])
    return program


@functools.cache
def family(arch: str) -> Program:
    """An architecture's Program; clone it before changing it."""
    return fused(folder(arch))


def some_tokens(count: int = 23, seed: int = 7) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
