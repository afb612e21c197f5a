"""The accept-or-resample rule: another way to verify proposed tokens, exact in distribution but not seed by seed.

A token d that the drafter drew from q is accepted with probability min(1, p(d) / q(d)), where p is what the target would
draw from; otherwise the token is drawn from max(p - q, 0), normalised, and the rest of the proposal falls (Leviathan et al.,
"Fast inference from transformers via speculative decoding", 2023, algorithm 1; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023). So tokens follow p, whatever q is. A drafter that does not draw has q(d) = 1.

p and q are the distributions after everything that an option does to a row: penalties, bias, constraint, cuts, temperature.
Against the default rule (keep a proposed token where it equals the one drawn with the noise of its position) this one accepts
more from a drafter that is near the target; but which tokens come depends on what was proposed, hence on batch and load. A
greedy request has one token that can come, and both rules are the same.

The dice here are streams of their own under the request's seed, so that they are independent of what the drafter drew with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .noise import gumbel, random_bits
from .sampler import GREEDY_BELOW, DrawRow, draw_row, probabilities

__all__ = ["Dice", "accept_or_resample", "applies"]

_ACCEPT, _RESAMPLE = 0xA5B85C5E198ED849, 0xD6E8FEB86659FD93


def applies(temperature: float) -> bool:
    """Whether the rule differs from the default one."""
    return temperature > GREEDY_BELOW


class Dice:
    """What one request's tokens are verified with, at any position: its options as `draw_row` has them, its seed."""

    def __init__(self, state: DrawRow) -> None:
        self.state = state

    @classmethod
    def of(cls, options: Any, prompt_length: int, end_ids: list[int], tokens: list[int]) -> Dice:
        """Return those of a request with these tokens so far."""
        state = draw_row(options, prompt_length, end_ids, kind=DrawRow)
        state.extend(tokens, prompt_length)
        return cls(state)

    def verify(
        self,
        row: np.ndarray,
        token: int,
        drafted_from: np.ndarray | None,
        position: int,
        allowed: np.ndarray | None,
    ) -> int:
        """Return the token at `position`, which is `token` where it is accepted; -1 or -2 as `RowDrawer.draw` does.

        `row`, `drafted_from`: the target's logits, and those that the token was drawn from (None: it was not drawn),
        float32 [vocab]. `allowed`: the constraint's mask.
        """
        p = probabilities(row, self.state, position, allowed)
        if isinstance(p, int):
            return p
        q = np.zeros_like(p)
        if drafted_from is not None:
            given = probabilities(drafted_from, self.state, position, allowed)
            q = q if isinstance(given, int) else given
        if not q[token] > 0:
            q = np.zeros_like(p)
            q[token] = 1.0
        return accept_or_resample(p, q, token, self.state.seed, position)


def accept_or_resample(p: np.ndarray, q: np.ndarray, token: int, seed: int, position: int) -> int:
    """Return `token`, which was drawn from `q`, or another, so that what is returned follows `p`; float64 [vocab] both."""
    bits = int(random_bits(seed ^ _ACCEPT, position, 1)[0])
    if ((bits >> 12) + 0.5) * 2.0**-52 * q[token] < p[token]:
        return token
    left = np.maximum(p - q, 0.0)
    ids = np.flatnonzero(left)
    if not len(ids):  # p is q but for rounding
        ids, left = np.flatnonzero(p), p
    noise = gumbel(random_bits(seed ^ _RESAMPLE, position, len(p))[ids])
    return int(ids[(np.log(left[ids]) + noise).argmax()])
