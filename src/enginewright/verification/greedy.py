"""Greedy answers: would the source choose the tokens that the engine chooses, when it goes its own way?

Teacher forcing shows an engine nothing but text that somebody else wrote. Here it continues prompts by itself, through the
runtime, and at each of its tokens the judge says what it would have chosen after the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.runtime.engine import Engine

from .figures import Array

__all__ = ["GreedyFigures", "compare_greedy"]

_LENGTHS = (3, 18, 31, 60)  # tokens of the prompts
_TOKENS = 24  # of each answer


@dataclass(frozen=True)
class GreedyFigures:
    """tokens: compared; agreed: chosen by the judge as well; tied: others, which the judge likes as well as its own choice."""

    tokens: int
    agreed: int
    tied: int

    @property
    def agreement(self) -> float:
        """The share that agreed, or was tied."""
        return (self.agreed + self.tied) / max(self.tokens, 1)


def compare_greedy(
    engine: Engine, judge: Callable[[list[int]], Array], stream: Sequence[int], bound: float | None
) -> GreedyFigures:
    """Continue prompts made of `stream`'s tokens; `judge(tokens)` gives logits [T, vocab].

    `bound`: the recipe's on a logit's error, as a share of the largest. A token whose logit is closer than twice that to the
    judge's best is tied; without a bound nothing is.
    """
    prompts, start = [], 0
    for length in _LENGTHS:
        if length < engine.max_context:
            prompts.append(list(stream[start : start + length]))
            start += length
    answers = engine.generate(
        prompts, max_tokens=min(_TOKENS, engine.max_context - max(map(len, prompts))), ignore_eos=True
    )
    tokens = agreed = tied = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        chosen = np.asarray(answer.token_ids)
        logits = judge([*prompt, *answer.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
        gaps = logits.max(-1) - logits[np.arange(len(chosen)), chosen]
        near = 0.0 if bound is None else 2 * bound * float(np.abs(logits).max())
        tokens += len(chosen)
        agreed += int((gaps == 0).sum())
        tied += int(((gaps > 0) & (gaps < near)).sum())
    return GreedyFigures(tokens, agreed, tied)
