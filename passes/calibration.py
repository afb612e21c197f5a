"""The tokens that calibrated passes look at, and where they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginewright.recipes.errors import InputError

__all__ = ["Samples", "needed"]


@dataclass
class Samples:
    """Token sequences of any lengths (nothing is padded), and what the manifest says of them.

    `source`: `self`, or the file's name. The digest is that of the token ids, so that equal calibrations show as equal.
    """

    sequences: list[list[int]]
    source: str = "self"
    seed: int = 0
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def first(self, tokens: int) -> list[list[int]]:
        """The first sequences, as many as hold at least `tokens` tokens (all, where there are fewer)."""
        taken, count = [], 0
        for sequence in self.sequences:
            if count >= tokens:
                break
            taken.append(sequence)
            count += len(sequence)
        return taken

    def cut(self, tokens: int) -> list[list[int]]:
        """The first sequences, the last one cut, so that they hold `tokens` tokens in all (or as many as there are)."""
        found: list[list[int]] = []
        left = tokens
        for sequence in self.first(tokens):
            found.append(sequence[:left])
            left -= len(found[-1])
        return [sequence for sequence in found if len(sequence) > 1] or [self.sequences[0]]

    def provenance(self) -> dict[str, Any]:
        """Source, sha256 of the token ids, samples, tokens and seed, as plain values."""
        return {
            "source": self.source,
            "sha256": _digest(self.sequences),
            "samples": len(self.sequences),
            "tokens": self.tokens,
            "seed": self.seed,
            **self.detail,
        }


def _digest(sequences: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(np.asarray(sequence, dtype="<i4").tobytes())
    return digest.hexdigest()


def needed(samples: Samples | None, for_what: str) -> Samples:
    """The samples, or InputError where a recipe asks for what cannot be done without."""
    if samples is None:
        raise InputError(
            "the recipe needs calibration data, and none was given",
            found=for_what,
            action="give samples (`optimize` finds them by the recipe's `calibration`)",
        )
    return samples
