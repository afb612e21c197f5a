"""Finding the map before a draft's last norm: the engine's own states on the calibration's text, then passes/distil.py.

The states come from the compiled model itself: its program with them as output, lowered into a temporary folder. The last
sequences are kept apart, and on them the map is judged; what was found is worth an entry in the manifest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Backend, Executor, StepInput
from enginewright.passes.calibration import Samples
from enginewright.passes.cut_draft import DraftHead
from enginewright.passes.distil import agreement, fit, logits_of_states, states_program, tune
from enginewright.passes.program import Program
from enginewright.recipes.recipe import Recipe

__all__ = ["distil_head"]

TOKENS = 24576  # of the calibration's text
STEPS = 120  # of the tuning
APART = 16  # one sequence of so many is kept apart
CHUNK = 256  # tokens a step

Report = Callable[[str], None]


def distil_head(
    program: Program, recipe: Recipe, samples: Samples, backend: Backend, report: Report
) -> tuple[DraftHead, dict[str, Any]]:
    """The draft head for the final `program`, and what the manifest says of it.

    Raises LoweringError where the model's head reads more than the last layer's sum.
    """
    layers = recipe.draft.layers
    assert layers is not None
    logits_of = logits_of_states(program, layers)
    sequences = samples.cut(TOKENS)
    apart = max(len(sequences) // APART, 1) if len(sequences) > 1 else 0
    report("computing the layers' states")
    probe, width = states_program(program, layers)
    states = _states(probe, width, recipe, sequences, backend)
    learned = torch.cat(states[: len(states) - apart])
    judged = torch.cat(states[len(states) - apart :])
    early, late = learned.chunk(2, dim=1)
    early_judged, late_judged = judged.chunk(2, dim=1)
    shared = agreement(None, early_judged, late_judged, logits_of)
    first = fit(early, late)
    heads = [first, tune(first, early, late, logits_of, STEPS, recipe.calibration.seed, report)]
    measured = [agreement(head, early_judged, late_judged, logits_of) for head in heads]
    best = 1 if measured[1].kl <= measured[0].kl else 0
    record = {
        "tokens": len(learned),
        "judged_tokens": len(judged),
        "steps": STEPS if best else 0,
        "top1": {"shared": round(shared.top1, 4), "distilled": round(measured[best].top1, 4)},
        "kl": {"shared": round(shared.kl, 4), "distilled": round(measured[best].kl, 4)},
    }
    return heads[best], record


def _states(
    probe: Program, width: int, recipe: Recipe, sequences: Sequence[Sequence[int]], backend: Backend
) -> list[torch.Tensor]:
    """The two states of each token of each sequence: float32 [T, 2 D]."""
    with tempfile.TemporaryDirectory(prefix="enginewright-distillation-") as folder:
        files = backend.lower(probe, recipe, Path(folder))
        manifest = {
            "backend": backend.name,
            "target": backend.target,
            "files": {name: {} for name in files},
        }
        executor = backend.load(Artifact(Path(folder), manifest), max_tokens=CHUNK)
        try:
            longest = max(len(sequence) for sequence in sequences)
            pages = -(-longest // recipe.kv_cache.page_size)
            executor.create_pool([pages] * len(executor.kv_groups))
            return [_run(executor, sequence, pages, width) for sequence in sequences]
        finally:
            executor.close()


def _run(executor: Executor, sequence: Sequence[int], pages: int, width: int) -> torch.Tensor:
    """The states of one sequence, which has the pools to itself."""
    tables = np.tile(np.arange(pages, dtype=np.int32), (len(executor.kv_groups), 1, 1))
    found = []
    for start in range(0, len(sequence), CHUNK):
        tokens = np.array(sequence[start : start + CHUNK], np.int32)
        count = len(tokens)
        rows = np.arange(count, dtype=np.int32)
        step = StepInput(
            tokens=tokens,
            positions=rows + np.int32(start),
            seq_starts=np.array([0, count], np.int32),
            context_lens=np.array([start + count], np.int32),
            page_tables=tables,
            logit_rows=rows,
        )
        found.append(torch.from_numpy(executor.step(step)[:, :width].copy()))
    return torch.cat(found)
