"""What is asked for and what comes back: SamplingOptions, Request, Completion.

A request is plain integers. Text is turned into token ids before a request is made and back into text after;
the loop that serves it (`loop.py`) sees neither tokenizers nor templates.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex, cast

from enginewright.recipes.errors import RequestError

from .constraints import Constraint
from .prefix_cache import Block

__all__ = ["Completion", "Request", "SamplingOptions", "Status", "check_token_ids", "derived_seed"]

MAX_SEED = 2**64 - 1
MOST_LOGPROBS = 20
DRAFT_RULES = ("same", "resample")  # how proposed tokens are verified: see `drafters.speculate`
MOST_DRAFT_TOKENS = 64  # proposed for one request in a step

TopLogprobs = list[tuple[int, float]]  # (token id, log-probability), best first, lowest id on ties


def derived_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several answers to a prompt: `seed` itself for choice 0, a hash of both for others.

    So choice i of a request is what a request of its own with this seed gives. (Two rounds of SplitMix64's finaliser;
    its noise in `sampler.py` starts from other constants.)
    """
    if choice == 0:
        return seed
    return _mix((_mix(seed ^ 0xD1B54A32D192ED03) + choice * 0x9E3779B97F4A7C15) & MAX_SEED)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return z ^ (z >> 31)


def _integer(name: str, value: Any, low: int, high: int | None, action: str | None = None) -> int:
    expected = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise RequestError(f"{name} cannot be used", found=repr(value), expected=expected, action=action)
    return number


def _number(
    name: str, value: Any, low: float, high: float, expected: str, *, above_low: bool = False
) -> float:
    """Return `value` as a float in [low, high], or in (low, high] with `above_low`."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high) or (above_low and number == low):
        raise RequestError(f"{name} cannot be used", found=repr(value)[:80], expected=expected)
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
    - `seed`: 0 … 2**64 - 1. A token depends on its seed, its position, the logits and the request's own earlier tokens.
    - `ignore_eos`: go on past the end-of-sequence tokens.
    - `stop`: strings that end the text; it is cut before the earliest (`include_stop` keeps it).
    - `stop_token_ids`: further ids that end the request, as an end-of-sequence token does; `ignore_eos` spares them not.
    - `top_k` (0: off), `top_p`, `min_p`, `typical_p`: which tokens may be drawn (`sampler.py` defines each). One always may.
    - `frequency_penalty`, `presence_penalty`: taken from the logit of a token for each time, and for having been, generated.
    - `repetition_penalty`: divides positive and multiplies negative logits of tokens in the prompt or generated.
    - `logit_bias`: added to the logits of these ids: a mapping, kept as pairs in order of id.
    - `min_tokens`: no end-of-sequence token and no stop id before so many were generated.
    - `logprobs`: N keeps the N best log-probabilities of every generated position; None keeps the drawn token's alone.
    - `prompt_logprobs`: N keeps the log-probability of every prompt token but the first, and the N best beside it.
    - `constraint`: what the text must be (`constraints.py`).
    - `draft_tokens`: at most so many tokens are proposed for verification in a step, where the engine speculates; 0 turns it
      off for the request, None leaves it to the engine. It changes no token.

    Log-probabilities are the model's own at temperature 1, before penalties, bias and constraints.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.max_tokens is not None:
            set_(self, "max_tokens", _integer("max_tokens", self.max_tokens, 0, None))
        set_(self, "seed", _integer("seed", self.seed, 0, MAX_SEED))
        set_(self, "top_k", _integer("top_k", self.top_k, 0, None))
        set_(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        for name, most in (
            ("logprobs", MOST_LOGPROBS),
            ("prompt_logprobs", MOST_LOGPROBS),
            ("draft_tokens", MOST_DRAFT_TOKENS),
        ):
            if getattr(self, name) is not None:
                set_(self, name, _integer(name, getattr(self, name), 0, most))
        for name, (low, high, expected) in _RANGES.items():
            above_low = name == "repetition_penalty"
            set_(self, name, _number(name, getattr(self, name), low, high, expected, above_low=above_low))
        set_(self, "logit_bias", _check_bias(self.logit_bias))
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(
                "constraint must be a Constraint",
                found=repr(self.constraint)[:80],
                action="see constraints.py",
            )
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

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, in the form it is kept in."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)


_SHARE = (0.0, 1.0, "a number from 0 to 1")
_PENALTY = (-2.0, 2.0, "a number from -2 to 2")
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "a finite number of at least 0"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": (0.0, math.inf, "a finite number above 0"),
}


def _check_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs of `bias` in order of id."""
    expected = "a mapping of token ids to numbers from -100 to 100"
    try:
        pairs = [
            (token, value) for token, value in (bias.items() if isinstance(bias, Mapping) else tuple(bias))
        ]
    except (TypeError, ValueError):
        raise RequestError("logit_bias cannot be used", found=repr(bias)[:80], expected=expected) from None
    ids = check_token_ids("logit_bias", [token for token, _ in pairs])
    if len(set(ids)) < len(ids):
        raise RequestError("logit_bias names a token twice", found=repr(bias)[:80], expected=expected)
    values = [
        _number(f"logit_bias[{token}]", value, -100.0, 100.0, "a number from -100 to 100")
        for token, value in pairs
    ]
    return tuple(sorted(zip(ids, values, strict=True)))


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
    priority: int = 0  # lower is served sooner
    grammar: Any = None  # options.constraint compiled (`constraints.Grammar`); choices of one prompt share it

    prompt_length: int = field(init=False)
    scores_prompt: bool = field(init=False)  # logits of prompt positions are wanted, at least at first
    limit: int = field(init=False, default=0)  # len(tokens) never exceeds it; set at admission
    number: int = field(init=False, default=-1)  # order of arrival
    turn: tuple[int, int] = field(init=False, default=(0, 0))  # the scheduler's order; lower is served sooner
    resumed: int = field(init=False, default=0)  # len(tokens) when it was last admitted
    passed: int = field(
        init=False, default=0
    )  # times that another was admitted while this one found no pages
    blocks: list[Block] = field(
        init=False, default_factory=list, repr=False
    )  # its tokens, for the prefix cache
    computed: int = field(init=False, default=0)
    cached_tokens: int = field(init=False, default=0)  # prompt tokens that came from the prefix cache
    drafted: int = field(init=False, default=0)  # proposed tokens that were verified
    accepted: int = field(init=False, default=0)  # of them, those that came true and stand in the output
    # Where a stop string may cut the output: (place of its first token, how many came true) of each proposal.
    accepted_runs: list[tuple[int, int]] = field(init=False, default_factory=list, repr=False)
    slot: int = field(init=False, default=-1)  # row of the page tables while running
    status: Status = field(init=False, default=Status.WAITING)
    preemptions: int = field(init=False, default=0)
    beyond: int = field(init=False, default=0)  # tokens that were drawn, but lie after the output's end
    logprobs: list[float] = field(init=False, default_factory=list)  # of each generated token
    top_logprobs: list[TopLogprobs] = field(
        init=False, default_factory=list
    )  # where options.logprobs is given
    # Where options.prompt_logprobs is given: one entry a prompt token scored so far; None for the first.
    prompt_logprobs: list[tuple[float, TopLogprobs] | None] = field(init=False, default_factory=list)
    logit_rows: list[Any] = field(init=False, default_factory=list)  # float32 [n, vocab] each, in order
    drawing: Any = field(
        init=False, default=None
    )  # what `drawing.py` remembers of the tokens; can be made again
    finish_reason: str | None = field(init=False, default=None)
    error: RequestError | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.scores_prompt = self.keep_logits or self.options.prompt_logprobs is not None
        if self.options.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)

    @property
    def first_row(self) -> int:
        """The first position whose logits are still wanted: tokens before it may come from a cache."""
        if self.keep_logits:
            return sum(len(rows) for rows in self.logit_rows)
        if self.scores_prompt and len(self.prompt_logprobs) < self.prompt_length:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def draws(self) -> bool:
        """Whether a token is drawn from the logits of the last one (else only the prompt is scored)."""
        return not self.keep_logits and self.limit > self.prompt_length

    def wanted_rows(self, count: int) -> range:
        """Return the positions whose logits are wanted from a step that computes the next `count` tokens, with proposed ones."""
        stop = self.computed + count
        if not self.scores_prompt:
            length = len(self.tokens)
            return range(length - 1, stop) if stop >= length else range(0)
        if not self.keep_logits and not self.draws:
            stop = min(stop, self.prompt_length - 1)
        return range(max(self.computed, self.first_row), stop)

    @property
    def generated(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length - self.beyond

    @property
    def output(self) -> list[int]:
        """The generated ids so far."""
        return self.tokens[self.prompt_length : len(self.tokens) - self.beyond]

    def cut(self, generated: int) -> None:
        """Let the output end after so many tokens, with "stop": the rest came in the same step, after what ends it."""
        self.beyond = len(self.tokens) - self.prompt_length - generated
        del self.logprobs[generated:], self.top_logprobs[generated:]
        end = self.prompt_length + generated
        while self.accepted_runs and sum(self.accepted_runs[-1]) > end:
            place, accepted = self.accepted_runs.pop()
            self.accepted -= min(accepted, place + accepted - end)
        if self.finished:  # by something beyond
            self.finish_reason, self.error = "stop", None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status is Status.FINISHED


@dataclass
class Completion:
    """What one prompt became.

    `finish_reason` is "stop" (an end-of-sequence token, a stop id or a stop string), "length" (max_tokens, the context
    limit, or a page pool with nothing left to give), "abort" or "error". `token_ids` includes the token that ended it.
    `logprobs[i]` is the natural logarithm of the probability that the model (at temperature 1) gave `token_ids[i]`,
    `top_logprobs[i]` the best (id, log-probability) there, where they were asked for. `prompt_logprobs[i]` is the same of
    prompt token i: (log-probability, best), None for the first. `choice` counts the answers to one prompt. Where the engine
    speculates, `drafted` tokens were proposed and verified, and `accepted` of them stand in `token_ids`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    error: RequestError | None = None
    choice: int = 0
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TopLogprobs] | None] = field(default_factory=list)
    cached_tokens: int = field(default=0, compare=False)
    drafted: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `error` is its message."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "error": str(self.error) if self.error is not None else None}
