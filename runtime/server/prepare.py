"""From a parsed body to Requests: prompts, sampling options, choices. Runs in a worker, away from the event loop."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from enginewright.recipes.errors import RequestError

from ..constraints import Constraint
from ..engine import Engine
from ..request import Request, SamplingOptions, derived_seed
from .errors import ApiError, api_error
from .schemas import STRUCTURED, SamplingFields
from .settings import Limits

__all__ = ["Demand", "Job", "Prompt", "demand", "json_constraint", "make_job", "structured", "too_long"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and its text where the client gave one. `field` names it in errors."""

    ids: list[int]
    text: str | None
    field: str


@dataclass(frozen=True)
class Demand:
    """A constraint, and the field that asked for it."""

    constraint: Constraint
    field: str


@dataclass
class Job:
    """What one HTTP request asks for. Choice c of prompt p is requests[p * choices + c]."""

    id: str
    created: int
    model: str
    prompts: list[Prompt]
    choices: int
    requests: list[Request]
    stream: bool
    include_usage: bool
    always_usage: bool
    speculates: bool = False
    shown: frozenset[int] = frozenset()
    constraint: Demand | None = None  # to be compiled
    extra: dict[str, Any] = field(default_factory=dict)  # what the endpoint itself needs later

    @property
    def texts(self) -> list[str | None]:
        """The prompt's text of every request."""
        return [prompt.text for prompt in self.prompts for _ in range(self.choices)]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: the prompts' tokens counted once each, generated and proposed tokens of all choices."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        generated = sum(request.generated for request in self.requests)
        cached = sum(request.cached_tokens for request in self.requests[:: self.choices])
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.speculates:
            accepted = sum(request.accepted for request in self.requests)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(request.drafted for request in self.requests) - accepted,
            }
        return usage

    def usage_field(self) -> str:
        """What an event of a stream says of usage, as the end of a JSON object."""
        if self.always_usage:
            return f', "usage": {json.dumps(self.usage())}}}'
        return ', "usage": null}' if self.include_usage else "}"


_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "draft_tokens",
)
_FIELDS = (*_SAME_NAME, "max_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs")


def make_job(
    engine: Engine,
    body: SamplingFields,
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    kind: str,
    model: str,
    max_tokens: int | None,
    names: Mapping[str, str] | None = None,
    choices: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Demand | None = None,
    shown: frozenset[int] = frozenset(),
    usage: tuple[bool, bool] = (False, False),
) -> Job:
    """Make the requests of one body; `names` maps options to the client's names for them, for errors."""
    names = {"logprobs": "top_logprobs", "include_stop": "include_stop_str_in_output", **(names or {})}
    count = _choices(choices, len(prompts), limits)
    values: dict[str, Any] = {"temperature": 1.0, "seed": secrets.randbits(64)}
    for name in _SAME_NAME:
        given = getattr(body, name, None)
        if given is not None:
            values[name] = given
    values |= {
        "max_tokens": max_tokens,
        "stop": _stop(getattr(body, "stop", None), limits),
        "include_stop": bool(body.include_stop_str_in_output),
        "stop_token_ids": _bounded(body.stop_token_ids or (), "stop_token_ids", limits.stop_token_ids),
        "logit_bias": _bias(getattr(body, "logit_bias", None), limits),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "constraint": None if constraint is None else constraint.constraint,
    }
    try:
        options = SamplingOptions(**values)
        _check_ids(engine, options)
        options = engine.stop_at_special_tokens(options)
    except RequestError as error:
        raise api_error(error, fields=_FIELDS, names=names) from error
    priority = body.priority or 0
    if not -1000 <= priority <= 1000:
        raise ApiError(400, "priority cannot be used (expected: -1000 to 1000)", param="priority")
    requests: list[Request] = []
    for prompt in prompts:
        _check_length(engine, prompt)
        for choice in range(count):
            seeded = replace(options, seed=derived_seed(options.seed, choice)) if choice else options
            requests.append(Request(list(prompt.ids), seeded, priority=priority))
    return Job(
        id=f"{kind}-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=model,
        prompts=list(prompts),
        choices=count,
        requests=requests,
        stream=bool(body.stream),
        include_usage=usage[0],
        always_usage=usage[1],
        speculates=engine.loop.speculator is not None,
        shown=shown,
        constraint=constraint,
    )


def _choices(wanted: int | None, prompts: int, limits: Limits) -> int:
    count = 1 if wanted is None else wanted
    if count < 1:
        raise ApiError(400, f"n cannot be used (found: {count}; expected: at least 1)", param="n")
    if count * prompts > limits.choices:
        raise ApiError(
            400,
            f"n is too large (found: {count} choices of {prompts} prompts; expected: at most {limits.choices} in all)",
            param="n",
        )
    return count


def _stop(stop: Any, limits: Limits) -> tuple[str, ...]:
    if stop is None:
        return ()
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ApiError(400, "stop must be a string or a list of strings", param="stop", code="invalid_type")
    _bounded(listed, "stop", limits.stop_strings)
    if any(len(text) > limits.stop_characters for text in listed):
        most = limits.stop_characters
        raise ApiError(400, f"stop holds a string of more than {most} characters", param="stop")
    return tuple(text for text in listed)


def _bounded(values: Sequence[Any], name: str, most: int) -> tuple[Any, ...]:
    if len(values) > most:
        raise ApiError(
            400, f"{name} is too long (found: {len(values):,}; expected: at most {most})", param=name
        )
    return tuple(values)


def _bias(bias: Mapping[str, float] | None, limits: Limits) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    _bounded(list(bias), "logit_bias", limits.logit_bias)
    pairs = []
    for key, value in bias.items():
        if not re.fullmatch(r"-?[0-9]{1,20}", key):
            raise ApiError(
                400, f"logit_bias has the key {key[:40]!r} (expected: a token id)", param="logit_bias"
            )
        pairs.append((int(key), value))
    return tuple(pairs)


def _check_ids(engine: Engine, options: SamplingOptions) -> None:
    """Refuse ids beyond the vocabulary here, where the field's name is known."""
    beyond = engine.vocab_size
    for token, _ in options.bias_pairs:
        if token >= beyond:
            raise RequestError("logit_bias cannot be used", found=token, expected=f"ids below {beyond}")
    for token in options.stop_token_ids:
        if token >= beyond:
            raise RequestError("stop_token_ids cannot be used", found=token, expected=f"ids below {beyond}")


def _check_length(engine: Engine, prompt: Prompt) -> None:
    if len(prompt.ids) >= engine.loop.limits.max_context:
        raise too_long(engine, len(prompt.ids), prompt.field)
    beyond = engine.vocab_size
    if prompt.text is None and any(token >= beyond or token < 0 for token in prompt.ids):
        bad = next(token for token in prompt.ids if token >= beyond or token < 0)
        raise ApiError(
            400,
            f"{prompt.field} holds the id {bad} (expected: 0 to {beyond - 1})",
            param=prompt.field,
            code="invalid_token_id",
        )
    if not prompt.ids:
        raise ApiError(400, "the prompt is empty (expected: at least one token)", param=prompt.field)


def too_long(engine: Engine, length: int, where: str) -> ApiError:
    """Return the answer to a prompt of `length` tokens that the context cannot hold."""
    most = engine.loop.limits.max_context
    return ApiError(
        400,
        f"the prompt is too long (found: {length:,} tokens; expected: at most {most - 1:,}, since the context of {most:,} "
        "holds the prompt and the new tokens)",
        param=where,
        code="context_length_exceeded",
    )


# --------------------------------------------------------------------------------------------- constraints


def structured(body: SamplingFields, limits: Limits) -> Demand | None:
    """Return the constraint that `structured_outputs` (or `guided_choice`) asks for."""
    wanted = body.structured_outputs
    if body.guided_choice is not None:
        if wanted is not None:
            raise ApiError(
                400, "guided_choice and structured_outputs exclude each other", param="guided_choice"
            )
        return _choice(body.guided_choice, "guided_choice", limits)
    if wanted is None:
        return None
    given = {
        "json": wanted.json_,
        "json_object": wanted.json_object or None,
        "regex": wanted.regex,
        "grammar": wanted.grammar,
        "choice": wanted.choice,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ApiError(
            400,
            f"structured_outputs must hold one of {', '.join(STRUCTURED)} (found: {named})",
            param="structured_outputs",
        )
    where = f"structured_outputs.{named[0]}"
    if named[0] == "json":
        return json_constraint(wanted.json_, where, limits)
    if named[0] == "json_object":
        return Demand(Constraint.json_object(), where)
    if wanted.choice is not None:
        return _choice(wanted.choice, where, limits)
    text = given[named[0]]
    _check_size(text, where, limits)
    return demand(Constraint.regex if named[0] == "regex" else Constraint.lark, text, where)


def _choice(texts: Sequence[str], where: str, limits: Limits) -> Demand:
    _check_size("".join(texts), where, limits)
    return demand(Constraint.choice, texts, where)


def demand(make: Callable[[Any], Constraint], value: Any, where: str) -> Demand:
    """Return the constraint that `make` makes of `value`, which the field `where` holds."""
    try:
        return Demand(make(value), where)
    except RequestError as error:
        raise api_error(error, where) from error


def json_constraint(schema: Any, where: str, limits: Limits) -> Demand:
    """Return the constraint of a JSON schema; `where` is its field."""
    if schema is None:
        raise ApiError(400, f"{where} is missing", param=where, code="missing_required_parameter")
    _check_size(schema if isinstance(schema, str) else json.dumps(schema), where, limits)
    return demand(Constraint.json_schema, schema, where)


def _check_size(text: Any, where: str, limits: Limits) -> None:
    if len(str(text)) > limits.schema_bytes:
        raise ApiError(
            400, f"{where} is too large (expected: at most {limits.schema_bytes:,} bytes)", param=where
        )
