"""The noise of sampling: Gumbel numbers as a pure function of (seed, position, token id).

It is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) read at counter
`id` of the stream `(seed, position)`. Its logarithms use additions, multiplications and divisions alone, which IEEE 754
rounds the same way everywhere; `backends/cpu/native/noise.h` repeats them bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["gumbel", "gumbel_noise", "random_bits"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH = [1.0 / (2 * k + 1) for k in range(11)]  # log(m) = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.172


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


def random_bits(seed: int, position: int, count: int) -> np.ndarray:
    """Return uint64 [count]: the random bits of token ids 0 … count-1."""
    stream = _mix((_mix((seed + _GAMMA) & _MASK) + position * _GAMMA) & _MASK)
    z = _counters(count) + np.uint64(stream)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z


def gumbel(bits: np.ndarray) -> np.ndarray:
    """Return float64: the Gumbel numbers of random bits."""
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, in (0, 1)
    return -_log(-_log(uniform))


def gumbel_noise(seed: int, position: int, count: int) -> np.ndarray:
    """Return float64 [count]: Gumbel noise of token ids 0 … count-1 at `position` under `seed`."""
    return gumbel(random_bits(seed, position, count))
