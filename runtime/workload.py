"""What arrives when: made-up traffic, or a recorded one, as a list of `Arrival`s that any driver (`traffic.py`) can play.

| name | arrivals | requests |
|---|---|---|
| `poisson` | independent, `rate` a second on average | one kind |
| `burst` | `burst` at one moment, and so many moments that the average is `rate` | one kind |
| `mixed` | as `poisson` | chat turns, long documents, long answers: `_KINDS` |
| a file | as recorded | as recorded |

Lengths are log-uniform between two ends: short ones are many, long ones make most of the work. All is a function of the seed.

A file has one JSON object a line: `{"at": seconds, "prompt_tokens": 120, "max_tokens": 64}`, with `"prompt"` (a string or
token ids) in place of the number where the text matters, and `"priority"` at will. Lines of the Mooncake traces (`timestamp` in
milliseconds, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens) are understood too; equal hashes become equal
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.recipes.errors import InputError

__all__ = ["WORKLOADS", "Arrival", "Lengths", "Traffic", "make_workload"]

WORKLOADS = ("poisson", "burst", "mixed")

_KINDS = (0.60, 0.25, 0.15)
"""Shares of `mixed`: chat turns behind a shared beginning; long documents, short answers; short questions, long answers."""
_SHARED = 4  # beginnings that the chat turns share
_SHARED_TOKENS = 256
_HASHED_TOKENS = 512  # tokens of a Mooncake block


@dataclass(frozen=True)
class Arrival:
    """One request: `at` seconds after the start come `prompt` (token ids, or text) and `max_tokens` to generate."""

    at: float
    prompt: tuple[int, ...] | str
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True)
class Lengths:
    """Token counts from `low` to `high`, log-uniform; both ends may be the same."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `N` or `LOW:HIGH`; ValueError when it is neither."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(text)
        return lengths

    def draw(self, chance: np.random.Generator) -> int:
        """One length."""
        low, high = math.log(self.low), math.log(self.high + 1)
        return min(self.high, int(math.exp(low + (high - low) * chance.random())))


@dataclass(frozen=True)
class Traffic:
    """How much of it. `requests`: so many in all (of a file: its first). `rate`: a second on average. `burst`: at one moment.
    `speed`: a file is played so many times faster."""

    requests: int = 64
    rate: float = 4.0
    burst: int = 16
    prompt: Lengths = Lengths(32, 512)
    new: Lengths = Lengths(16, 256)
    speed: float = 1.0
    seed: int = 0


def make_workload(
    name: str, traffic: Traffic, *, vocab_size: int, max_context: int, all_of_file: bool = True
) -> list[Arrival]:
    """The arrivals of one of WORKLOADS or of the file `name`, in order of time.

    Of a file, all lines are played unless `all_of_file` is false, then the first `traffic.requests`. Synthetic requests fit in
    `max_context` tokens: their prompts are cut where they must be. InputError says what is wrong with a file, and where.
    """
    if name not in WORKLOADS:
        arrivals = list(_recorded(Path(name), vocab_size))
        arrivals = sorted(arrivals, key=lambda arrival: arrival.at)
        arrivals = arrivals if all_of_file else arrivals[: traffic.requests]
        first = arrivals[0].at
        arrivals = [replace(arrival, at=(arrival.at - first) / traffic.speed) for arrival in arrivals]
    else:
        chance = np.random.default_rng(traffic.seed)
        times = _times(name, traffic, chance)
        make = _mixed if name == "mixed" else _plain
        arrivals = [make(at, traffic, chance, vocab_size) for at in times]
    return [_fitting(arrival, max_context, cut=name in WORKLOADS) for arrival in arrivals]


def _times(name: str, traffic: Traffic, chance: np.random.Generator) -> list[float]:
    if name == "burst":
        return [number // traffic.burst * traffic.burst / traffic.rate for number in range(traffic.requests)]
    gaps = chance.exponential(1.0 / traffic.rate, traffic.requests)
    return (np.cumsum(gaps) - gaps[0]).tolist()  # the first arrives at once


def _plain(at: float, traffic: Traffic, chance: np.random.Generator, vocab_size: int) -> Arrival:
    length, new = traffic.prompt.draw(chance), traffic.new.draw(chance)
    return Arrival(at, _tokens(chance, length, vocab_size), new)


def _mixed(at: float, traffic: Traffic, chance: np.random.Generator, vocab_size: int) -> Arrival:
    kind = chance.random()
    short = Lengths(traffic.prompt.low, max(traffic.prompt.low, traffic.prompt.high // 4))
    brief = Lengths(traffic.new.low, max(traffic.new.low, traffic.new.high // 4))
    if kind < _KINDS[0]:
        group = int(chance.integers(_SHARED))
        shared = _tokens(np.random.default_rng((traffic.seed, group)), _SHARED_TOKENS, vocab_size)
        return Arrival(at, shared + _tokens(chance, short.draw(chance), vocab_size), traffic.new.draw(chance))
    if kind < _KINDS[0] + _KINDS[1]:
        long = Lengths(traffic.prompt.high, 2 * traffic.prompt.high)
        return Arrival(at, _tokens(chance, long.draw(chance), vocab_size), brief.draw(chance))
    long = Lengths(max(traffic.new.low, traffic.new.high // 2), traffic.new.high)
    return Arrival(at, _tokens(chance, short.draw(chance), vocab_size), long.draw(chance))


def _tokens(chance: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(chance.integers(vocab_size, size=count).tolist())


def _fitting(arrival: Arrival, max_context: int, cut: bool) -> Arrival:
    if isinstance(arrival.prompt, str):
        return arrival  # the engine says so if it does not fit
    room = max_context - arrival.max_tokens
    if len(arrival.prompt) <= room:
        return arrival
    if not cut or room < 1:
        raise InputError(
            "a request of the workload does not fit in the engine's context",
            found=f"{len(arrival.prompt)} prompt tokens and {arrival.max_tokens} new ones",
            expected=f"at most {max_context} together",
        )
    return replace(arrival, prompt=arrival.prompt[:room])


# ---------------------------------------------------------------------------------------------------- files


def _recorded(path: Path, vocab_size: int) -> Iterator[Arrival]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "the workload cannot be read",
            found=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            expected=f"a file of one JSON object a line, or one of {', '.join(WORKLOADS)}",
        ) from error
    empty = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        empty = False
        try:
            yield _line(json.loads(line), number, vocab_size)
        except (ValueError, TypeError, KeyError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise InputError(
                "a line of the workload cannot be used",
                found=f"{path}, line {number}: {what}",
                expected='an object like {"at": 0.5, "prompt_tokens": 120, "max_tokens": 64}',
            ) from error
    if empty:
        raise InputError("the workload is empty", found=str(path), expected="a JSON object a line")


def _line(entry: Any, number: int, vocab_size: int) -> Arrival:
    if not isinstance(entry, dict):
        raise TypeError(f"{type(entry).__name__} instead of an object")
    if "timestamp" in entry:
        at = _number("timestamp", entry["timestamp"]) / 1000
        length, new = (_count(name, entry[name]) for name in ("input_length", "output_length"))
        return Arrival(at, _hashed(entry.get("hash_ids") or [], length, number, vocab_size), new)
    at, new = _number("at", entry["at"]), _count("max_tokens", entry["max_tokens"])
    priority = entry.get("priority", 0)
    if type(priority) is not int:
        raise TypeError(f"priority {priority!r}")
    return Arrival(at, _prompt(entry, number, vocab_size), new, priority)


def _prompt(entry: dict[str, Any], number: int, vocab_size: int) -> tuple[int, ...] | str:
    prompt = entry.get("prompt")
    if prompt is None:
        return _tokens(
            np.random.default_rng((number, 1)), _count("prompt_tokens", entry["prompt_tokens"]), vocab_size
        )
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise ValueError(f"prompt {str(prompt)[:60]!r} is neither text nor token ids")


def _hashed(hashes: list[Any], length: int, number: int, vocab_size: int) -> tuple[int, ...]:
    """Blocks of tokens that are functions of their hashes, then tokens of this line alone."""
    blocks: list[int] = []
    for value in hashes:
        chance = np.random.default_rng((_count("hash_ids", value, 0), 2))
        blocks.extend(_tokens(chance, _HASHED_TOKENS, vocab_size))
    own = _tokens(np.random.default_rng((number, 3)), max(0, length - len(blocks)), vocab_size)
    return (*blocks[:length], *own)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {value!r} is not a time")
    return float(value)


def _count(name: str, value: Any, low: int = 1) -> int:
    if type(value) is not int or value < low:
        raise ValueError(f"{name} {value!r} is not a whole number of at least {low}")
    return value
