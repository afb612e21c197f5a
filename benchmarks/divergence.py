"""What one set of logits says of the same tokens as another: divergences, losses, and how sure a difference is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["bootstrap", "divergence", "log_softmax", "losses"]

_ROWS = 64  # compared at a time: bounds the float64 temporaries


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || logits) of each position, nats: logits [T, vocab] -> [T]."""
    found = []
    for start in range(0, len(reference), _ROWS):
        p, q = (log_softmax(x[start : start + _ROWS]) for x in (reference, logits))
        found.append((np.exp(p) * (p - q)).sum(-1))
    return np.concatenate(found)


def losses(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """-log p of each token after the first, nats: logits [T, vocab] of tokens [T] -> [T - 1]."""
    targets = np.asarray(tokens[1:], dtype=np.int64)
    found = [np.zeros(0)]
    for start in range(0, len(targets), _ROWS):
        wanted = targets[start : start + _ROWS]
        q = log_softmax(logits[start : start + len(wanted)])
        found.append(-q[np.arange(len(wanted)), wanted])
    return np.concatenate(found)


def bootstrap(
    a: np.ndarray, b: np.ndarray, block: int, resamples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """Whether the mean of b differs from that of a, both measured on the same tokens: [T] each.

    Blocks of neighbouring tokens are drawn with replacement, since neighbours depend on each other. Returns the mean of
    b - a, its 95% interval (`low`, `high`), and the share of resamples in which b's mean is smaller.
    """
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    count = len(difference) // block
    if count == 0:
        raise ValueError(f"{len(difference)} tokens make no block of {block}")
    means = difference[: count * block].reshape(count, block).mean(-1)
    chance = np.random.default_rng(seed)
    drawn = np.stack([means[chance.integers(0, count, count)].mean() for _ in range(resamples)])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "difference": float(means.mean()),
        "low": float(low),
        "high": float(high),
        "b_is_smaller": float((drawn < 0).mean()),
        "blocks": float(count),
    }
