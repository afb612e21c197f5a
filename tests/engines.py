"""Engines of the two real models, built once a test session, and the eager model that they are held against."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch

import enginewright
from enginewright.runtime.engine import Engine
from tests import models

_ROOT = tempfile.TemporaryDirectory(prefix="enginewright-engines-")
MODELS = {"smollm2": models.smollm2, "gemma3": models.gemma3, "smollm2-gguf": models.smollm2_gguf}


@functools.cache
def built(model: str, recipe: str, *overrides: str) -> Path:
    """The verified engine of one of MODELS by a recipe."""
    name = "-".join([model, recipe, *overrides]).replace("/", "_")
    return enginewright.optimize(MODELS[model](), recipe, Path(_ROOT.name) / name, overrides=overrides).path


def load(model: str, recipe: str, *overrides: str, **options: object) -> Engine:
    """A freshly loaded engine; use it in a `with` block."""
    return enginewright.load(built(model, recipe, *overrides), **options)  # type: ignore[arg-type]


@functools.cache
def _eager(model: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        MODELS[model](), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def eager_logits(model: str, tokens: list[int]) -> np.ndarray:
    """float32 [T, vocab] of eager transformers in fp32."""
    with torch.inference_mode():
        return _eager(model)(torch.tensor([tokens])).logits[0].float().numpy()


def text_tokens(engine: Engine, count: int) -> list[int]:
    """The first `count` token ids of the package's sample text, as the engine's tokenizer makes them, repeated to length."""
    from importlib import resources

    text = resources.files("enginewright").joinpath("verification", "text.txt").read_text(encoding="utf-8")
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(text)
    while len(tokens) < count:
        tokens = tokens + tokens
    return tokens[:count]
