"""POST /v1/responses, for text: one input, one output message. What needs memory or tools of the server is refused by name."""

from __future__ import annotations

import secrets
from typing import Any

from ..async_engine import Stream
from ..engine import Engine
from ..loop import FINISH_ERROR
from .chat import format_constraint
from .conversations import render
from .errors import ApiError, not_computed
from .exchange import Exchange, quote
from .prepare import Job, make_job, structured
from .schemas import ResponsesRequest, parse

__all__ = ["responses"]


async def responses(exchange: Exchange, body: bytes) -> None:
    """Answer one request."""
    service = exchange.service
    engine = service.engine.engine
    job = await service.prepare(len(body), _prepare, service, engine, body)
    async with await exchange.submit(job) as stream:
        if job.stream:
            await _stream(exchange, job, stream)
            return
        ((_, text, reason),) = await exchange.collect(stream)
        await exchange.json(_response(job, text, reason))


def _prepare(service: Any, engine: Engine, raw: bytes) -> Job:
    body = parse(ResponsesRequest, raw)
    service.check_model(body.model)
    limits = service.settings.limits
    if body.tools:
        raise ApiError(
            400,
            "tools are not served here: use /v1/chat/completions",
            param="tools",
            code="unsupported_parameter",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice", code="unsupported_parameter")
    if body.include:
        raise ApiError(400, "include is not served here", param="include", code="unsupported_parameter")
    constraint = structured(body, limits)
    wanted = body.text.format if body.text is not None else None
    if wanted is not None:
        given = format_constraint(wanted.type, wanted.schema_, "text.format.schema", limits)
        if given is not None and constraint is not None:
            raise ApiError(400, "text.format and structured_outputs exclude each other", param="text.format")
        constraint = given or constraint
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    prompt = render(engine, messages, limits, where="input", variables=body.chat_template_kwargs)
    job = make_job(
        engine,
        body,
        [prompt],
        limits,
        kind="resp",
        model=service.settings.model_name,
        max_tokens=body.max_output_tokens,
        names={"max_tokens": "max_output_tokens"},
        constraint=constraint,
    )
    job.extra = {
        "item": f"msg-{secrets.token_hex(16)}",
        "said": {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": job.requests[0].options.temperature,
            "top_p": job.requests[0].options.top_p,
            "text": {
                "format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}
            },
        },
    }
    return job


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the input as messages: a text is a user's; an item's parts are input_text or output_text."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ApiError(
            400, "input must be a string or a list of messages", param="input", code="invalid_type"
        )
    messages = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise ApiError(400, f"{where} is no message", param=where, code="unsupported_parameter")
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        messages.append({"role": item.get("role"), "content": content})
    return messages


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
        raise ApiError(400, f"{where} is not text", param=where, code="unsupported_parameter")
    return {"type": "text", "text": part["text"]}


# -------------------------------------------------------------------------------------------- the answer


def _item(job: Job, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_content(text)]
    return {
        "id": job.extra["item"],
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _content(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(job: Job, text: str | None, reason: str | None) -> dict[str, Any]:
    """The response object; `reason` is None while it is being made."""
    status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
    usage = job.usage()
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": job.model,
        "output": [] if text is None else [_item(job, text, status)],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "usage": None
        if reason is None
        else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        **job.extra["said"],
    }


async def _stream(exchange: Exchange, job: Job, stream: Stream) -> None:
    number = 0

    async def say(kind: str, **values: Any) -> None:
        nonlocal number
        event = {"type": kind, "sequence_number": number, **values}
        number += 1
        await exchange.event(quote(event), kind)

    at = {"item_id": job.extra["item"], "output_index": 0, "content_index": 0}
    await say("response.created", response=_response(job, None, None))
    await say("response.in_progress", response=_response(job, None, None))
    await say("response.output_item.added", output_index=0, item=_item(job, None, "in_progress"))
    await say("response.content_part.added", part=_content(""), **at)
    pieces: list[str] = []
    reason = "stop"
    async for delta in stream:
        if delta.finish_reason == FINISH_ERROR:
            raise not_computed(delta.error)
        if delta.text:
            pieces.append(delta.text)
            await say("response.output_text.delta", delta=delta.text, logprobs=[], **at)
        reason = delta.finish_reason or reason
    text = "".join(pieces)
    response = _response(job, text, reason)
    await say("response.output_text.done", text=text, logprobs=[], **at)
    await say("response.content_part.done", part=_content(text), **at)
    await say("response.output_item.done", output_index=0, item=response["output"][0])
    await say(f"response.{response['status']}", response=response)
    await exchange.end_events()
