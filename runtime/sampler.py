"""Choosing tokens from rows of logits: the rules, and numpy's way of following them.

A token is a pure function of its row, the request's options, its position and the request's earlier tokens. In order:

1. **Penalties**, on tokens of the prompt or generated: a logit is divided by `repetition_penalty` where positive, else
   multiplied (Keskar et al., "CTRL", 2019). A generated token also loses `frequency_penalty` for each time it was
   generated, and `presence_penalty` once (the OpenAI API's formula). Computed in float64, rounded to float32.
2. **Bias**, added in float64 and rounded; ids that a constraint forbids, and end tokens before `min_tokens` (unless
   nothing else is left), become -inf. What was finite stays finite.
3. **Greedy**, at temperatures up to 1e-5: the largest, the lowest id on ties. Everything below is for higher temperatures T.
4. **Cuts**, each on what the one before left, in transformers' order. The *weight* of a logit x in a row whose largest is m is

       round(2**30 * 2**s) with s = (x - m) * float32(log2(e) / T), and 0 where s < -31

   a whole number from float32 operations in a fixed order (`_weigh`). Whole numbers add up the same in any order, so every
   implementation cuts at the same token. "In order" breaks ties by the lowest id.
   - `top_k`: the k largest, in order of logit.
   - `top_p`: in order of logit, every token before which less than p of the weight stands (Holtzman et al., 2020).
   - `min_p`: x - m >= T * log(min_p), in float64 (Nguyen et al., 2024).
   - `typical_p`: of the tokens with weight, in order of the distance |d - D|, every one before which less than p of the weight
     stands, where d = -s and D is the weighted mean of d in steps of 2**-14: how far the token's information is
     from the entropy (Meister et al., "Locally typical sampling", 2022). The distance is rounded to float32.
   At least one token always stays; -inf never does.
5. **The draw**: argmax of (x - m) / T + gumbel(seed, position, id) in float64, lowest id on ties, which draws from
   the softmax of what is left (the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", 2014). The
   noise depends on three integers (`noise.py`), never on neighbours, chunks, or having been preempted.

Log-probabilities are of the raw row: logit - log(sum(exp(row))). A row with NaN or +inf, or with nothing above -inf, gives -1.

The cpu backend's native module does the same in one or two passes over the row (`backends/cpu/native/draw.cpp`); where it
cannot be loaded, `DrawRow` and `RowDrawer` below stand in. Both draw the same tokens; log-probabilities agree within rounding.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .noise import gumbel, random_bits
from .request import SamplingOptions, TopLogprobs

_native: Any
try:
    _native = importlib.import_module("enginewright.backends.cpu._native")
except ImportError:  # another backend on a machine that the native module does not run on
    _native = None

__all__ = ["GREEDY_BELOW", "DrawRow", "RowDrawer", "draw_row", "probabilities", "row_drawer"]

GREEDY_BELOW = 1e-5  # softmax(logits / T) has collapsed on the largest logit
HOTTEST = 2.0**100  # higher temperatures mean this one: all that is not -inf is equally likely

_LARGEST = float(np.finfo(np.float32).max)
_POWER = (0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253)
_POWER_OF_2 = [np.float32(c) for c in (*_POWER, 0.6931470036506653, 1.0)]  # 2**f for |f| <= 1/2
_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: leaves the whole part of a sum in the low bits

Results = tuple[list[int], list[float], list[TopLogprobs | None]]


def row_drawer(threads: int = 1) -> Any:
    """Return a RowDrawer, native where it can be."""
    return _native.RowDrawer(threads) if _native is not None else RowDrawer()


def draw_row(
    options: SamplingOptions, prompt_length: int = 0, end_ids: Sequence[int] = (), kind: Any = None
) -> Any:
    """Return the DrawRow of a request: its options, in the terms of one row.

    `end_ids`: the tokens that end it, which `min_tokens` holds back. `kind`: native where it can be, unless given.
    """
    kind = kind or (_native.DrawRow if _native is not None else DrawRow)
    pairs = options.bias_pairs
    return kind(
        temperature=min(options.temperature, HOTTEST),
        top_k=min(options.top_k, 2**62),
        top_p=options.top_p,
        min_gap=math.log(options.min_p) if options.min_p > 0 else 1.0,
        typical_p=options.typical_p,
        seed=options.seed,
        frequency=options.frequency_penalty,
        presence=options.presence_penalty,
        repetition=options.repetition_penalty,
        bias_ids=[token for token, _ in pairs],
        bias=[value for _, value in pairs],
        end_ids=list(end_ids) if options.min_tokens else [],
        min_position=min(prompt_length + options.min_tokens, 2**62),
        best=-1 if options.logprobs is None else options.logprobs,
    )


class DrawRow:
    """One request's sampling options, and the tokens that penalties concern. `min_gap` is log(min_p), positive where off."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_gap: float,
        typical_p: float,
        seed: int,
        frequency: float,
        presence: float,
        repetition: float,
        bias_ids: list[int],
        bias: list[float],
        end_ids: list[int],
        min_position: int,
        best: int,
    ) -> None:
        self.temperature, self.seed = temperature, seed
        self.top_k, self.top_p, self.min_gap, self.typical_p = top_k, top_p, min_gap, typical_p
        self.frequency, self.presence, self.repetition = frequency, presence, repetition
        self.bias_ids, self.bias = np.array(bias_ids, np.int64), np.array(bias, np.float64)
        self.end_ids, self.min_position = end_ids, min_position
        self.best = best
        self.seen = 0
        self.times: dict[int, int] = {}  # how often each token of the prompt or output was generated

    def extend(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Remember the next tokens; the first `prompt_tokens` of all were not generated."""
        for token in tokens:
            self.times[token] = self.times.get(token, 0) + (self.seen >= prompt_tokens)
            self.seen += 1

    def adjust(self, row: np.ndarray, position: int, allowed: np.ndarray | None) -> np.ndarray:
        """Return the row, float32 [vocab], after penalties, bias, end tokens held back, and the constraint."""
        row = row.copy()
        if self.times and (self.frequency or self.presence or self.repetition != 1.0):
            ids = np.fromiter(self.times, np.int64, len(self.times))
            times = np.fromiter(self.times.values(), np.float64, len(self.times))
            x = row[ids].astype(np.float64)
            x = np.where(x > 0, x / self.repetition, x * self.repetition)
            x = np.where(times > 0, x - self.frequency * times - self.presence, x)
            row[ids] = _rounded(x, row[ids])
        if len(self.bias_ids):
            row[self.bias_ids] = _rounded(row[self.bias_ids] + self.bias, row[self.bias_ids])
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(row)]
            row[bits == 0] = -np.inf
        if self.end_ids and position < self.min_position:
            held = row.copy()
            held[self.end_ids] = -np.inf
            row = held if held.max() > -np.inf else row
        return row


def _rounded(x: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.where(before == -np.inf, before, np.clip(x, -_LARGEST, _LARGEST).astype(np.float32))


class RowDrawer:
    """Draws tokens from rows of logits, in numpy."""

    def draw(
        self,
        logits: np.ndarray,
        rows: Sequence[int],
        states: Sequence[DrawRow],
        positions: Sequence[int],
        masks: np.ndarray | None = None,
        mask_rows: Sequence[int] = (),
    ) -> Results:
        """Draw a token from each of `rows` of `logits`, float32 [R, vocab].

        `positions[i]` is where the new token will stand. Row i may hold the ids whose bits are set in
        `masks[mask_rows[i]]`, uint32 [words] (all of them where that is -1). Returns (ids, log-probabilities, the best
        (id, log-probability) or None) of each. An id of -1: NaN, +inf, or nothing above -inf; -2: nothing may be drawn.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        best: list[TopLogprobs | None] = []
        for i, (r, state, position) in enumerate(zip(rows, states, positions, strict=True)):
            row = logits[r]
            top, rest = _logsumexp(row)
            token = -1
            if math.isfinite(top):
                masked = len(mask_rows) and mask_rows[i] >= 0 and masks is not None
                row = state.adjust(
                    row, position, masks[mask_rows[i]] if masked and masks is not None else None
                )
                token = _draw_token(row, state, position) if row.max() > -np.inf else -2
            tokens.append(token)
            logprobs.append(float(logits[r, token]) - top - rest if token >= 0 else math.nan)
            best.append(_best(logits[r], top, rest, state.best) if state.best >= 0 else None)
        return tokens, logprobs, best

    def score(
        self, logits: np.ndarray, rows: Sequence[int], tokens: Sequence[int], best: int
    ) -> list[tuple[float, TopLogprobs]]:
        """Return, for each of `rows`, the log-probability of the token given and the `best` largest."""
        scored = []
        for r, token in zip(rows, tokens, strict=True):
            top, rest = _logsumexp(logits[r])
            logprob = float(logits[r, token]) - top - rest if math.isfinite(top) else math.nan
            scored.append((logprob, _best(logits[r], top, rest, best)))
        return scored


def _logsumexp(row: np.ndarray) -> tuple[float, float]:
    """Return the largest, and log(sum(exp(row - largest))); NaN, twice, where no token can be drawn from the row."""
    top = row.max()
    if not np.isfinite(top):
        return math.nan, math.nan
    with np.errstate(over="ignore"):
        return float(top), math.log(np.exp(row - top, dtype=np.float32).sum(dtype=np.float64))


def _best(row: np.ndarray, top: float, rest: float, count: int) -> TopLogprobs:
    if not count or not math.isfinite(top):
        return []
    order = np.argsort(-row, kind="stable")[:count].tolist()
    return [(i, float(row[i]) - top - rest) for i in order if row[i] > -np.inf]


# ----------------------------------------------------------------------------------------------------- cuts


def _weigh(x: np.ndarray, largest: np.float32, scale: np.float32) -> np.ndarray:
    """Return int64: the weights of the logits `x`, float32."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = (x - largest) * scale
        shifted = s + _MAGIC
        fraction = s - (shifted - _MAGIC)
        power = np.full_like(s, _POWER_OF_2[0])
        for coefficient in _POWER_OF_2[1:]:
            power = power * fraction + coefficient
        two_to = ((shifted.view(np.int32) << 23) + np.int32((127 + 30) << 23)).view(np.float32)
        weights = np.rint(power * two_to)
    return np.where(s < np.float32(-31.0), np.float32(0.0), weights).astype(np.int64)


def _keep_weight(keys: np.ndarray, weights: np.ndarray, share: float) -> np.ndarray:
    """Return the places, ascending, of the items before which, by key, less than `share` of the weight stands."""
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    target = max(share * float(weights.sum()), 1.0)
    return np.sort(order[before.astype(np.float64) < target])


def _cut(row: np.ndarray, state: DrawRow) -> np.ndarray:
    """Return the ids that may be drawn, ascending."""
    largest = row.max()
    scale = np.float32(1.4426950408889634 / state.temperature)
    ids = np.flatnonzero(row > -np.inf)
    if 0 < state.top_k < len(ids):
        ids = np.sort(ids[np.argsort(-row[ids], kind="stable")[: state.top_k]])
    if state.top_p < 1.0:
        ids = ids[_keep_weight(-row[ids], _weigh(row[ids], largest, scale), state.top_p)]
    if state.min_gap <= 0.0:
        ids = ids[row[ids].astype(np.float64) - float(largest) >= state.temperature * state.min_gap]
    if state.typical_p < 1.0:
        weights = _weigh(row[ids], largest, scale)
        ids, weights = ids[weights > 0], weights[weights > 0]
        depths = (largest - row[ids]) * scale
        mean = float((weights * np.rint(depths * np.float32(16384)).astype(np.int64)).sum())
        mean = mean / float(weights.sum()) / 16384
        distances = np.abs(depths.astype(np.float64) - mean).astype(np.float32)
        ids = ids[_keep_weight(distances, weights, state.typical_p)]
    return ids


def probabilities(
    row: np.ndarray, state: DrawRow, position: int, allowed: np.ndarray | None = None
) -> np.ndarray | int:
    """Return what a token at `position` is drawn from, float64 [vocab], for temperatures above greedy; an error as -1 or -2."""
    if not math.isfinite(_logsumexp(row)[0]):
        return -1
    row = state.adjust(row, position, allowed)
    largest = row.max()
    if not largest > -np.inf:
        return -2
    ids = _cut(row, state)
    weights = np.exp((row[ids].astype(np.float64) - largest) / state.temperature)
    found = np.zeros(len(row))
    found[ids] = weights / weights.sum()
    return found


def _draw_token(row: np.ndarray, state: DrawRow, position: int) -> int:
    if state.temperature <= GREEDY_BELOW:
        return int(row.argmax())
    ids = _cut(row, state)
    scores = row[ids].astype(np.float64)
    scores -= row.max()  # at most 0, so that dividing by a small temperature cannot overflow to +inf
    scores /= state.temperature
    scores += gumbel(random_bits(state.seed, position, len(row))[ids])
    return int(ids[scores.argmax()])
