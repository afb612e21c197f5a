"""The bodies of requests. Types are strict (1.0 and "5" are no integers); a field that is not listed is refused by name.

Fields that clients send and that change no answer (user, metadata, store, …) are accepted and not used.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict

from .errors import ApiError

__all__ = [
    "STRUCTURED",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "ResponsesRequest",
    "TokenizeRequest",
    "parse",
    "usage_wanted",
]

_Model = TypeVar("_Model", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every event
    include_obfuscation: bool | None = None


def usage_wanted(options: StreamOptions | None) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every event says it."""
    if options is None:
        return False, False
    always = bool(options.continuous_usage_stats)
    return always or bool(options.include_usage), always


class StructuredOutputs(_Body):
    """Exactly one of these."""

    json_: Any = pydantic.Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


STRUCTURED = tuple(field.alias or name for name, field in StructuredOutputs.model_fields.items())


class SamplingFields(_Body):
    """What all generating endpoints know. OpenAI's fields first, then those that vLLM's clients send."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    draft_tokens: int | None = None  # of this server: at most so many proposed in a step, 0 for none
    structured_outputs: StructuredOutputs | None = None
    guided_choice: list[str] | None = None  # an older name of structured_outputs.choice

    # Accepted, not used.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class _CompletionFields(SamplingFields):
    max_tokens: int | None = None
    n: int | None = None
    stop: Any = None  # text, or a list of them
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionRequest(_CompletionFields):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(_CompletionFields):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(_Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses: text in, text out. State, tools and reasoning are refused."""

    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    include: list[Any] | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Body):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def parse(model: type[_Model], body: bytes) -> _Model:
    """Return the body as `model`; ApiError names the first field that is wrong."""
    if any(
        name in body for name in (b"NaN", b"Infinity")
    ):  # pydantic would take them, in text as well as outside
        try:
            pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refused(first["type"], first["loc"], first["msg"]) from None


def _refused(kind: str, place: tuple[int | str, ...], message: str) -> ApiError:
    param = ""
    for part in place:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    param = param[:200]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}", code="invalid_json")
    if kind == "extra_forbidden":
        known = f" (known: {', '.join(STRUCTURED)})" if place[0] == "structured_outputs" else ""
        return ApiError(400, f"{param} is not known here{known}", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if not param:
        return ApiError(400, f"the body cannot be used: {message}", code="invalid_type")
    return ApiError(400, f"{param} cannot be used: {message}", param=param, code="invalid_type")
