"""Verification: the engine's logits, taken through the serving path, against the source model's.

The judge is the captured Program before any pass has touched it, run in fp32 with weights streamed from the checkpoint,
so that a model that does not fit in memory twice is still judged. The engine answers through the runtime: paged cache,
chunked prefill, several sequences a step. Both see the same tokens (teacher forcing); figures.py says what is measured.

greedy.py asks the judge about what the engine says by itself.

A backend that is `exact` must moreover give the same bits however requests are scheduled: logits of every sample alone and in
small chunks are those of all samples together, and schedules.py serves requests in every way that there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from enginewright.runtime.engine import Engine

from .figures import Array, Figures, Verification
from .greedy import GreedyFigures, compare_greedy
from .samples import sample_tokens, text_tokens
from .schedules import compare_schedules, executor_alone

if TYPE_CHECKING:
    from enginewright.backends.base import Answers
    from enginewright.passes.program import Program

    from .stages import Stages

__all__ = ["verify"]

Report = Callable[[str], None]
Witness = Callable[[list[int], Array, Array], None]
"""Called as witness(tokens, the judge's logits, the engine's logits) with each sample."""

_SERVED_TOKENS = 320  # of the text, from which requests are made


def verify(
    engine: Engine | Answers,
    judge: Program,
    limits: dict[str, float],
    *,
    demand_invariance: bool,
    level: str = "quick",
    greedy_answers: bool = True,
    stages: Stages | None = None,
    report: Report = lambda line: None,
    witness: Witness | None = None,
) -> Verification:
    """Run `engine` and `judge` on the same samples and compare.

    `limits` holds any of `max_logit_error` (relative to the largest reference logit), `max_kl`, `min_top1`,
    `max_perplexity_ratio`. `level`: "quick", or "full" with longer samples. `greedy_answers`: whether the engine continues
    prompts as well, token by token (greedy.py). `stages`, where what lies
    between model and engine is at hand, judges it as well. Nothing is raised for a figure out of bounds: see
    `Verification.raise_if_failed`. An `Engine`'s own loop cannot be used afterwards.
    """
    windows = [group["window"] for group in engine.artifact.manifest["kv_groups"]]
    window = max(windows, default=0)
    encode = engine.tokenizer.encode if engine.tokenizer is not None else None
    samples = sample_tokens(encode, engine.vocab_size, engine.max_context, window, level)
    figures = Figures()
    if stages is not None:
        stages.begin(samples)
    invariant = True if demand_invariance else None
    served = list(engine.logits(samples))[::-1]
    for index, tokens in enumerate(samples):
        report(f"sample {index + 1} of {len(samples)}, {len(tokens)} tokens")
        logits = served.pop()  # a long sample's are hundreds of megabytes over a large vocabulary
        if demand_invariance:
            alone = engine.logits([tokens], chunk_size=7 if len(tokens) < 64 else 61)[0]
            invariant = bool(invariant) and np.array_equal(alone.view(np.int32), logits.view(np.int32))
            del alone
        with np.errstate(invalid="ignore"):  # logits that are not finite are counted, not warned of
            reference = judge_logits(judge, tokens)
            figures.add(tokens, reference, logits)
        if witness is not None:
            witness(tokens, reference, logits)
        if stages is not None:
            stages.add(reference, logits)
        del logits, reference
    schedules: list[dict[str, Any]] = []
    greedy: GreedyFigures | None = None
    if isinstance(engine, Engine) and all(figures.finite.values()) and engine.max_context > 4:
        stream = text_tokens(encode, engine.vocab_size, _SERVED_TOKENS)
        if greedy_answers:
            report("greedy answers")
            bound = limits.get("max_logit_error")
            greedy = compare_greedy(engine, lambda tokens: judge_logits(judge, tokens), stream, bound)
        if demand_invariance:
            report("the executor by itself")
            schedules = [executor_alone(engine, tokens), *compare_schedules(engine, stream, report)]
            invariant = bool(invariant) and all(way["same"] for way in schedules)
    return figures.verdict(
        len(samples),
        limits,
        invariant=invariant,
        greedy=greedy,
        schedules=schedules,
        windows=windows,
        crosses_window=max(map(len, samples)) > window if window else None,
        stages=[] if stages is None else stages.checks(report),
        matrices=None if stages is None else stages.relative_errors,
    )


def judge_logits(judge: Program, tokens: list[int]) -> Array:
    """Logits [T, vocab] float32 of one whole sequence, by a Program before it was paged."""
    import torch

    with torch.inference_mode():
        logits = judge.run(
            torch.tensor(tokens, dtype=torch.int32), torch.arange(len(tokens), dtype=torch.int32)
        )
    found: Array = logits.float().numpy()
    return found
