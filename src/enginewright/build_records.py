"""What a build writes down: engine.json's account of the engine, and build.json's of the build."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginewright import __version__
from enginewright.backends.base import Backend
from enginewright.passes.program import Program
from enginewright.passes.source import ModelSource
from enginewright.recipes.recipe import Recipe

__all__ = ["build_log", "manifest_of"]


def manifest_of(program: Program, source: ModelSource, recipe: Recipe, backend: Backend) -> dict[str, Any]:
    """Everything in engine.json but files, hashes and verification. Nothing here may differ between equal builds."""
    facts = asdict(program.facts)
    groups = facts.pop("kv_groups")
    for group in groups:
        page_size = recipe.kv_cache.tokens_a_page(program.facts.max_context)
        group.update(format=recipe.kv_cache.format, page_size=page_size)
    resolved = recipe.resolved()
    resolved["calibration"]["source"] = Path(recipe.calibration.source).name  # no path of this machine
    model = {**facts, "source": source.name}
    if source.adapter is not None:
        model["adapter"] = {"name": source.adapter.name, "sha256": source.adapter.fingerprint}
    return {
        "enginewright_version": __version__,
        "backend": backend.name,
        "target": backend.target,
        "model": model,
        "recipe": resolved,
        "kv_groups": groups,
        "io": {
            "inputs": ["tokens", "positions", "seq_starts", "context_lens", "page_tables", "logit_rows"],
            "outputs": ["logits"],
        },
        **backend.sections(),
    }


def build_log(passes: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """What build.json holds: how this engine came to be, on which machine, with which versions."""
    import torch
    import transformers

    return {
        "passes": passes,
        "notes": list(notes),
        "host": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {
            "enginewright": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
