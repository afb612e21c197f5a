"""Greedy answers: what the engine chooses is asked of the judge, at the same prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginewright
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.recipes.errors import VerificationError
from enginewright.runtime.engine import Completion
from enginewright.verification.greedy import compare_greedy
from tests.passes.architectures import folder

VOCAB = 60


def judge(tokens: list[int]) -> np.ndarray:
    """A source that likes the sum of the last two tokens best, and the next one a little less."""
    logits = np.zeros((len(tokens), VOCAB), np.float32)
    for row in range(len(tokens)):
        best = sum(tokens[max(row - 1, 0) : row + 1]) % VOCAB
        logits[row, best], logits[row, (best + 1) % VOCAB] = 10.0, 9.9
    return logits


class Saying:
    """An engine that says what the source does, but for the `wrong` choices, where it says the token that is `off` further."""

    max_context = 500

    def __init__(self, wrong: int, off: int) -> None:
        self.wrong, self.off = wrong, off

    def generate(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[Any]:
        found, left = [], self.wrong
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(max_tokens):
                right = int(judge(tokens)[-1].argmax())
                tokens.append((right + (self.off if left > 0 else 0)) % VOCAB)
                left -= 1
            made = object.__new__(Completion)
            object.__setattr__(made, "token_ids", tokens[len(prompt) :])
            found.append(made)
        return found


@pytest.mark.parametrize(
    ("wrong", "off", "bound", "agreed", "tied"),
    [(0, 0, None, 96, 0), (5, 1, None, 91, 0), (5, 1, 0.02, 91, 5), (5, 2, 0.02, 91, 0), (5, 1, 1e-4, 91, 0)],
)
def test_tokens_are_counted_as_agreed_tied_or_other(
    wrong: int, off: int, bound: float | None, agreed: int, tied: int
) -> None:
    stream = [(7 * i) % VOCAB for i in range(200)]
    found = compare_greedy(Saying(wrong, off), judge, stream, bound)  # type: ignore[arg-type]
    assert (found.tokens, found.agreed, found.tied) == (96, agreed, tied)
    assert found.agreement == (agreed + tied) / 96


def test_the_manifest_says_it_and_an_engine_that_decodes_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding alone is broken: teacher-forced samples in chunks are what they must be."""
    built = enginewright.optimize(folder("qwen3"), "fp32", tmp_path / "good")
    verification = built.manifest["verification"]
    assert verification["greedy_agreement"] == 1.0 and verification["greedy_tokens"] == 96
    step = CpuExecutor.step

    def worse(self: CpuExecutor, given: Any) -> np.ndarray:
        logits = step(self, given)
        alone = len(given.tokens) == len(given.context_lens) == len(given.logit_rows) > 1
        return np.roll(logits, 1, -1) if alone else logits

    monkeypatch.setattr(CpuExecutor, "step", worse)
    with pytest.raises(VerificationError, match=r"of 96 greedy tokens are not the source's"):
        enginewright.optimize(folder("qwen3"), "fp32", tmp_path / "bad")
