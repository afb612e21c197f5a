"""What the sampling options mean, in plain float64: the probabilities that a token is drawn with.

Written from the papers' words and transformers' order, without the weights in whole numbers, the noise, or anything else of
`runtime/sampler.py`. A cut that hangs on the last digits is said to be `close`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from enginewright.runtime.request import SamplingOptions

CLOSE = 2e-5  # of the probability: float32 arithmetic may cut on the other side


def adjusted(
    row: np.ndarray,
    options: SamplingOptions,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Return the logits, float64, after penalties, bias, and the end tokens that min_tokens holds back."""
    logits = row.astype(np.float64)
    for token in {*prompt, *generated}:
        logits[token] *= 1 / options.repetition_penalty if logits[token] > 0 else options.repetition_penalty
    for token, count in Counter(generated).items():
        logits[token] -= options.frequency_penalty * count + options.presence_penalty
    for token, bias in options.bias_pairs:
        logits[token] += bias
    if len(generated) < options.min_tokens:
        logits[list(ends)] = -np.inf
    return logits


def probabilities(logits: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, bool]:
    """Return the probability of each token, float64, and whether a cut was close."""
    p = np.exp((logits - logits.max()) / options.temperature)
    p /= p.sum()
    close = False

    def keep(ids: np.ndarray) -> None:
        nonlocal p
        kept = np.zeros_like(p)
        kept[ids] = p[ids]
        p = kept / kept.sum()

    def keep_share(order: np.ndarray, share: float) -> None:
        nonlocal close
        before = np.cumsum(p[order]) - p[order]
        close |= bool((np.abs(before - share) < CLOSE).any())
        keep(order[(before < share) | (np.arange(len(order)) == 0)])

    if options.top_k:
        keep(np.lexsort((np.arange(len(p)), -logits))[: options.top_k])
    if options.top_p < 1:
        order = np.flatnonzero(p > 0)
        keep_share(order[np.argsort(-logits[order], kind="stable")], options.top_p)
    if options.min_p > 0:
        close |= bool((np.abs(p / p.max() - options.min_p) < CLOSE).any() and options.min_p < 1)
        keep(np.flatnonzero(p >= options.min_p * p.max()))
    if options.typical_p < 1:
        ids = np.flatnonzero(p > 2.0**-30)
        entropy = -(p[ids] * np.log(p[ids])).sum()
        surprise = np.abs(-np.log(p[ids]) - entropy)
        order = np.argsort(surprise, kind="stable")
        close |= bool((np.abs(p[ids] - 2.0**-30) < 2.0**-31).any())
        before = np.cumsum(p[ids][order]) - p[ids][order]
        edge = max(int((before < options.typical_p).sum()), 1)  # the first that is cut
        if edge < len(order):
            nearly = surprise[order][edge] - surprise[order][edge - 1] < 2e-4
            close |= bool(nearly and p[ids][order][edge] != p[ids][order][edge - 1])
        keep_share(ids[order], options.typical_p)
    return p, close
