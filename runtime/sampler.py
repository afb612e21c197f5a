"""Choosing tokens from rows of logits.

Greedy takes the largest logit, the lowest id on ties. With a temperature T, the token is

    argmax over ids of  logit / T + gumbel(seed, position, id)

which draws from softmax(logits / T) (the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A*
sampling", 2014, section 2). The noise is a pure function of three integers, so what a request draws depends
on its own seed, position and logits only, and never on its neighbours, on chunks, or on being preempted.

The noise is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) read
at counter `id` of the stream `(seed, position)`; its logarithms use additions, multiplications and divisions
alone, which IEEE 754 rounds the same way everywhere, so that any implementation can repeat them bit for bit.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

_native: Any
try:
    _native = importlib.import_module("enginewright.backends.cpu._native")
except ImportError:  # another backend on a machine that the native module does not run on
    _native = None

__all__ = ["GREEDY_BELOW", "Drawn", "argmax_rows", "draw", "gumbel_noise", "logsumexp_rows"]

# Temperatures up to this are greedy: softmax(logits / T) has collapsed on the largest logit.
GREEDY_BELOW = 1e-5

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH = [1.0 / (2 * k + 1) for k in range(11)]  # log(m) = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.172

Drawn = tuple[int, float]  # token id, log-probability; (-1, nan) where the row is not usable


# ---------------------------------------------------------------------------------------------- row passes


def argmax_rows(logits: np.ndarray) -> np.ndarray:
    """Return int64 [R]: the lowest id of each row's largest logit; any number if one is NaN."""
    return _native.argmax_rows(logits) if _native is not None else logits.argmax(axis=-1)


def logsumexp_rows(logits: np.ndarray) -> np.ndarray:
    """Return [R], log(sum(exp(row))); not finite where no token can be drawn from the row."""
    if _native is not None:
        return _native.logsumexp_rows(logits)
    result = np.empty(len(logits), np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        for r, row in enumerate(logits):
            top = row.max()
            result[r] = np.log(np.exp(row - top, dtype=np.float32).sum(dtype=np.float64)) + np.float64(top)
    return result


# --------------------------------------------------------------------------------------------------- noise


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive, normal float64 values, to about 1e-15 relative; the same bits on any machine."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa + mantissa, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, _ATANH[-1])
    for coefficient in reversed(_ATANH[:-1]):
        series *= square
        series += coefficient
    return exponent * _LN2 + (s + s) * series


@lru_cache(maxsize=4)
def _counters(count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        # Modulo 2**64, as all steps below.
        return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def _random_bits(seed: int, position: int, count: int) -> np.ndarray:
    """Return uint64 [count]: the random bits of token ids 0 … count-1."""
    stream = _mix((_mix((seed + _GAMMA) & _MASK) + position * _GAMMA) & _MASK)
    z = _counters(count) + np.uint64(stream)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z


def _gumbel(bits: np.ndarray) -> np.ndarray:
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, in (0, 1)
    return -_log(-_log(uniform))


def gumbel_noise(seed: int, position: int, count: int) -> np.ndarray:
    """Return float64 [count]: Gumbel noise of token ids 0 … count-1 at `position` under `seed`."""
    return _gumbel(_random_bits(seed, position, count))


def _noisy_argmax(row: np.ndarray, top: int, temperature: float, seed: int, position: int) -> int:
    """Return argmax(row / temperature + noise), lowest id on ties; `top` is argmax(row).

    With s = (logit - largest) / T and u the uniform number behind the noise g, g <= -log(1 - u). So an id can
    only beat `top`, whose score is its own noise B, if 1 - u <= exp(s - B). The few ids that pass are scored
    exactly; the test itself is done in float32, on the generous side.
    """
    bits = _random_bits(seed, position, len(row))
    best = float(_gumbel(bits[top : top + 1])[0])
    with np.errstate(over="ignore", under="ignore"):
        reach = row - row[top]
        reach /= np.float32(max(temperature, GREEDY_BELOW))
        np.exp(reach, out=reach)
        reach *= np.float32(1.001 * math.exp(-best) * 2.0**24)
    able = np.flatnonzero((~bits >> np.uint64(40)).astype(np.float32) <= reach)
    scores = row[able].astype(np.float64)
    scores -= row[top]  # at most 0, so that dividing by a small temperature cannot overflow to +inf
    scores /= temperature
    scores += _gumbel(bits[able])
    return int(able[scores.argmax()])


# ------------------------------------------------------------------------------------------------- drawing


def draw(
    logits: np.ndarray, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> list[Drawn]:
    """Draw one token a row of `logits`, float32 [R, vocab].

    `positions[r]` is the position that the new token of row r will have. Returns (id, log-probability) a row,
    the latter under softmax(logits), that is at temperature 1. A row with a NaN, with +inf, or with nothing
    above -inf gives (-1, nan): it cannot be sampled from.
    """
    totals = logsumexp_rows(logits).tolist()
    tokens = argmax_rows(logits).tolist()
    drawn: list[Drawn] = []
    for r, total in enumerate(totals):
        if not -np.inf < total < np.inf:  # NaN included
            drawn.append((-1, float("nan")))
            continue
        token = tokens[r]
        row = logits[r]
        if temperatures[r] > GREEDY_BELOW:
            token = _noisy_argmax(row, token, temperatures[r], seeds[r], positions[r])
        drawn.append((token, float(row[token]) - total))
    return drawn
