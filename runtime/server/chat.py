"""POST /v1/chat/completions: conversations, tool calls, structured answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..async_engine import Delta, Stream
from ..constraints import Constraint
from ..engine import Engine
from ..loop import FINISH_ERROR
from .conversations import check_tools, render
from .errors import ApiError, not_computed
from .exchange import Exchange, quote
from .logprobs import chat_logprobs
from .prepare import Demand, Job, demand, json_constraint, make_job, structured
from .schemas import ChatRequest, parse, usage_wanted
from .settings import Limits
from .tools import FORMATS, Call, ToolFormat, ToolParser

__all__ = ["chat", "format_constraint"]


async def chat(exchange: Exchange, body: bytes) -> None:
    """Answer one request."""
    service = exchange.service
    engine = service.engine.engine
    job = await service.prepare(len(body), _prepare, service, engine, body)
    async with await exchange.submit(job) as stream:
        if job.stream:
            await _stream(exchange, job, stream, engine)
            return
        answers = await exchange.collect(stream)
        choices = [_choice(job, engine, *answer) for answer in answers]
        head = {"id": job.id, "object": "chat.completion", "created": job.created, "model": job.model}
        await exchange.json({**head, "choices": choices, "usage": job.usage(), "system_fingerprint": None})


# ------------------------------------------------------------------------------------------- the request


def _prepare(service: Any, engine: Engine, raw: bytes) -> Job:
    body = parse(ChatRequest, raw)
    service.check_model(body.model)
    limits = service.settings.limits
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ", param="max_tokens")
    form, tools, constraint = _tools(service.tool_format, body, limits)
    wanted = [
        part
        for part in (constraint, _response_format(body, limits), structured(body, limits))
        if part is not None
    ]
    if len(wanted) > 1:
        raise ApiError(
            400,
            "response_format, structured_outputs and a demanded tool call exclude each other",
            param="response_format",
        )
    prompt = render(
        engine,
        body.messages,
        limits,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(engine, body),
    )
    longest = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    job = make_job(
        engine,
        body,
        [prompt],
        limits,
        kind="chatcmpl",
        model=service.settings.model_name,
        max_tokens=longest,
        names={"max_tokens": "max_completion_tokens"} if body.max_completion_tokens is not None else None,
        choices=body.n,
        logprobs=body.top_logprobs or None,
        constraint=wanted[0] if wanted else None,
        shown=_shown(engine, form) if tools else frozenset(),
        usage=usage_wanted(body.stream_options),
    )
    job.extra = {
        "logprobs": bool(body.logprobs),
        "form": form if tools else None,
        "one_call": body.parallel_tool_calls is False,
    }
    return job


def _variables(engine: Engine, body: ChatRequest) -> dict[str, Any] | None:
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
    if template is None or not any("reasoning_effort" in text for text in template.sources.values()):
        raise ApiError(
            400,
            "the model's chat template knows no reasoning_effort",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}


def _tools(
    form: ToolFormat | None, body: ChatRequest, limits: Limits
) -> tuple[ToolFormat | None, list[dict[str, Any]] | None, Demand | None]:
    """Return the format, the tools that the template is to show, and what a demanded call must look like."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return form, None, None
    functions = check_tools(body.tools, limits)
    if choice == "none":
        return form, None, None
    if form is None:
        raise ApiError(
            400,
            "tools cannot be used: the model's chat template defines no tool calls that are known here "
            f"(known: {', '.join(known.name for known in FORMATS)})",
            param="tools",
            code="unsupported_parameter",
        )
    if choice in (None, "auto"):
        return form, body.tools, None
    grammar = form.grammar(_chosen(choice, functions))
    if grammar is None:
        raise ApiError(
            400,
            f"a tool call cannot be demanded in the format {form.name!r}",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return form, body.tools, demand(Constraint.lark, grammar, "tools")


def _chosen(choice: Any, functions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if choice == "required":
        return list(functions)
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    named = [known for known in functions if known["name"] == name]
    if not named:
        raise ApiError(
            400,
            "tool_choice cannot be used (expected: none, auto, required, or a function of tools)",
            param="tool_choice",
        )
    return named


def _shown(engine: Engine, form: ToolFormat | None) -> frozenset[int]:
    if form is None or engine.tokenizer is None:
        return frozenset()
    ids = [engine.tokenizer.special_id(text) for text in form.special]
    return frozenset(token for token in ids if token is not None)


def _response_format(body: ChatRequest, limits: Limits) -> Demand | None:
    wanted = body.response_format
    if wanted is None:
        return None
    schema = wanted.json_schema.get("schema") if wanted.json_schema is not None else None
    return format_constraint(wanted.type, schema, "response_format.json_schema.schema", limits)


def format_constraint(kind: str, schema: Any, where: str, limits: Limits) -> Demand | None:
    """Return the constraint of a format: "text", "json_object" or "json_schema"."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Demand(Constraint.json_object(), where.rpartition(".")[0])
    return json_constraint(schema, where, limits)


# -------------------------------------------------------------------------------------------- the answer


def _choice(job: Job, engine: Engine, index: int, text: str, reason: str) -> dict[str, Any]:
    request = job.requests[index]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    form = job.extra["form"]
    if form is not None:
        parser = ToolParser(form)
        parts = [*parser.push(text), *parser.finish()]
        calls = [part for part in parts if isinstance(part, Call)]
        if calls:
            calls = calls[:1] if job.extra["one_call"] else calls
            said = "".join(part for part in parts if isinstance(part, str))
            message["content"] = said or None
            message["tool_calls"] = [_call(form, call) for call in calls]
            reason = "tool_calls" if reason == "stop" else reason
    logprobs = None
    if job.extra["logprobs"]:
        assert engine.tokenizer is not None
        logprobs = chat_logprobs(engine.tokenizer, request.output, request.logprobs, request.top_logprobs)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _call(form: ToolFormat, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": form.new_id(), "type": "function", "function": function}


async def _stream(exchange: Exchange, job: Job, stream: Stream, engine: Engine) -> None:
    known = {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": job.model}
    head = quote(known)[:-1]
    streams: dict[int, _ToolStream] = {}
    begun: set[int] = set()
    plain = job.extra["form"] is None and not job.extra["logprobs"]

    async def say(index: int, change: str, logprobs: str = "null", reason: str = "null") -> None:
        await exchange.event(
            f'{head}, "choices": [{{"index": {index}, "delta": {change}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}}}]{job.usage_field()}'
        )

    async for delta in stream:
        index = delta.index
        if delta.finish_reason == FINISH_ERROR:
            raise not_computed(delta.error)
        if index not in begun:
            begun.add(index)
            streams[index] = _ToolStream(job.extra["form"], job.extra["one_call"])
            await say(index, '{"role": "assistant", "content": ""}')
        if plain:
            if delta.text:
                await say(index, f'{{"content": {quote(delta.text)}}}')
        else:
            await _say_parts(say, streams[index], delta, job, engine)
        if delta.finish_reason is not None:
            reason = delta.finish_reason
            if reason == "stop" and streams[index].calls:
                reason = "tool_calls"
            await say(index, "{}", reason=quote(reason))
    if job.include_usage:
        await exchange.event(quote({**known, "choices": [], "usage": job.usage()}))
    await exchange.event("[DONE]")
    await exchange.end_events()


async def _say_parts(say: Any, tools: _ToolStream, delta: Delta, job: Job, engine: Engine) -> None:
    """Send what one delta holds: text, calls, and the log-probabilities with the first of them."""
    logprobs = "null"
    if job.extra["logprobs"] and delta.token_ids:
        assert engine.tokenizer is not None
        made = chat_logprobs(engine.tokenizer, delta.token_ids, delta.logprobs, delta.top_logprobs)
        logprobs = quote(made)
    changes = tools.changes(delta.text, delta.finish_reason is not None)
    if not changes and logprobs != "null":
        changes = [{"content": ""}]
    for change in changes:
        await say(delta.index, quote(change), logprobs)
        logprobs = "null"


class _ToolStream:
    """One choice's text on its way into chat deltas."""

    def __init__(self, form: ToolFormat | None, one_call: bool) -> None:
        self._form = form
        self._parser = ToolParser(form) if form is not None else None
        self._one_call = one_call
        self.calls = 0

    def changes(self, text: str, ends: bool) -> list[dict[str, Any]]:
        """Return the deltas of the next text: content, or whole calls."""
        if self._parser is None or self._form is None:
            return [{"content": text}] if text else []
        parts = self._parser.push(text) + (self._parser.finish() if ends else [])
        changes: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                changes.append({"content": part})
            elif not (self._one_call and self.calls):
                changes.append({"tool_calls": [{"index": self.calls, **_call(self._form, part)}]})
                self.calls += 1
        return changes
