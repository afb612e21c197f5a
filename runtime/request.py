"""What is asked for and what comes back: SamplingOptions, Request, Completion.

A request is plain integers. Text is turned into token ids before a request is made and back into text after;
the loop that serves it (`loop.py`) sees neither tokenizers nor templates.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex, cast

from enginewright.recipes.errors import RequestError

__all__ = ["Completion", "Request", "SamplingOptions", "Status", "check_token_ids"]

MAX_SEED = 2**64 - 1


def _integer(name: str, value: Any, low: int, high: int | None, action: str | None = None) -> int:
    expected = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise RequestError(f"{name} cannot be used", found=repr(value), expected=expected, action=action)
    return number


def check_token_ids(name: str, ids: Iterable[Any], vocab_size: int | None = None) -> list[int]:
    """Return `ids` as plain integers in [0, vocab_size). RequestError names the first that is not."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} must be a list of token ids", found=repr(ids)[:80])
    high = vocab_size - 1 if vocab_size is not None else 2**31 - 1
    ids = list(ids)
    if all(type(value) is int and 0 <= value <= high for value in ids):
        return ids
    return [_integer(f"{name}[{place}]", value, 0, high) for place, value in enumerate(ids)]


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of one request are drawn, and when it ends. Every field is checked on construction.

    - `max_tokens`: at most so many new tokens; None leaves only the context limit.
    - `temperature`: 0 is greedy (lowest id on ties); values up to 1e-5 mean the same.
    - `seed`: 0 … 2**64 - 1. The token at a position depends on (seed, position, logits) and nothing else.
    - `ignore_eos`: go on past the end-of-sequence tokens.
    - `stop`: strings that end the text; it is cut before the earliest (`include_stop` keeps it).
    - `stop_token_ids`: further ids that end the request, as an end-of-sequence token does; `ignore_eos` spares them not.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 0, None))
        object.__setattr__(self, "seed", _integer("seed", self.seed, 0, MAX_SEED))
        object.__setattr__(self, "temperature", self._temperature())
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", found=repr(getattr(self, name)))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise RequestError("stop must be a string or a list of strings", found=repr(self.stop)[:80])
        if not all(stop):
            raise RequestError(
                "stop holds an empty string", action="leave it out: an empty string matches everywhere"
            )
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(
            self, "stop_token_ids", tuple(check_token_ids("stop_token_ids", self.stop_token_ids))
        )

    def _temperature(self) -> float:
        value = self.temperature
        try:
            number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (0.0 <= number < math.inf):
            raise RequestError(
                "temperature cannot be used", found=repr(value), expected="a finite number of at least 0"
            )
        return number


class Status(enum.Enum):
    """Where a request stands. WAITING includes one that was preempted and will be computed again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence on its way through the loop. The loop alone changes it.

    `tokens` is the prompt followed by what was generated. `computed` counts the tokens whose keys and values stand in
    the cache, so `len(tokens) - computed` are pending: the whole prompt at first, one token in steady decoding,
    everything again after a preemption. `keep_logits` asks for the logits of every prompt position and generates nothing.
    """

    tokens: list[int]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    keep_logits: bool = False
    chunk_size: int | None = None  # overrides the loop's own for this request

    prompt_length: int = field(init=False)
    limit: int = field(init=False, default=0)  # len(tokens) never exceeds it; set at admission
    number: int = field(init=False, default=-1)  # order of arrival
    computed: int = field(init=False, default=0)
    slot: int = field(init=False, default=-1)  # row of the page tables while running
    status: Status = field(init=False, default=Status.WAITING)
    preemptions: int = field(init=False, default=0)
    logprobs: list[float] = field(init=False, default_factory=list)
    logit_rows: list[Any] = field(init=False, default_factory=list)  # float32 [n, vocab] each, in order
    finish_reason: str | None = field(init=False, default=None)
    error: RequestError | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The generated ids so far."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status is Status.FINISHED


@dataclass
class Completion:
    """What one prompt became.

    `finish_reason` is "stop" (an end-of-sequence token, a stop id or a stop string), "length" (max_tokens, the context
    limit, or a page pool with nothing left to give), "abort" or "error". `token_ids` includes the token that ended it.
    `logprobs[i]` is the natural logarithm of the probability that the model (at temperature 1) gave `token_ids[i]`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    error: RequestError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `error` is its message."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "error": str(self.error) if self.error is not None else None}
