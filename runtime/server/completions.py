"""POST /v1/completions: text in, text out; evaluation harnesses score prompts through it, too (echo, logprobs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginewright.recipes.errors import RequestError

from ..async_engine import Delta
from ..engine import Engine
from ..loop import FINISH_ERROR
from ..request import Request
from .errors import ApiError, api_error, not_computed
from .exchange import Exchange, quote
from .logprobs import CompletionLogprobs, finite
from .prepare import Job, Prompt, make_job, structured, too_long
from .schemas import CompletionRequest, parse, usage_wanted
from .settings import Limits

__all__ = ["completions"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(exchange: Exchange, body: bytes) -> None:
    """Answer one request."""
    service = exchange.service
    engine = service.engine.engine
    job = await service.prepare(len(body), _prepare, service, engine, body)
    async with await exchange.submit(job) as stream:
        if job.stream:
            await _stream(exchange, job, stream, engine)
        else:
            answers = await exchange.collect(stream)
            choices = [_choice(job, engine, *answer) for answer in answers]
            await exchange.json({**_head(job), "choices": choices, "usage": job.usage()})


def _prepare(service: Any, engine: Engine, raw: bytes) -> Job:
    body = parse(CompletionRequest, raw)
    service.check_model(body.model)
    limits = service.settings.limits
    _check_plain(body)
    constraint = structured(body, limits)
    prompts = _prompts(engine, body.prompt, body.add_special_tokens is not False, limits)
    echo = bool(body.echo)
    prompt_logprobs = body.prompt_logprobs
    if echo and body.logprobs is not None and (prompt_logprobs is None or prompt_logprobs >= 0):
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    job = make_job(
        engine,
        body,
        prompts,
        limits,
        kind="cmpl",
        model=service.settings.model_name,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        names={"logprobs": "logprobs"},
        choices=body.n,
        logprobs=body.logprobs or None,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        usage=usage_wanted(body.stream_options),
    )
    if engine.tokenizer is None and body.logprobs is not None:
        raise ApiError(400, "logprobs need a tokenizer, and the engine has none", param="logprobs")
    texts = [prompt.text if prompt.text is not None else _decoded(engine, prompt.ids) for prompt in prompts]
    job.extra = {
        "echo": texts if echo else None,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    return job


def _check_plain(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not served here", param="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400, "best_of is not served here, but as n", param="best_of", code="unsupported_parameter"
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")


def _prompts(engine: Engine, given: Any, special: bool, limits: Limits) -> list[Prompt]:
    """A text, a list of ids, or a list of either."""
    listed = given if isinstance(given, list) else [given]
    single = not isinstance(given, list) or (bool(given) and isinstance(given[0], int))
    if single and isinstance(given, list):
        listed = [given]
    if not listed:
        raise ApiError(400, "prompt is empty (expected: at least one prompt)", param="prompt")
    if len(listed) > limits.prompts:
        raise ApiError(
            400,
            f"prompt is too long (found: {len(listed):,} prompts; expected: at most {limits.prompts})",
            param="prompt",
        )
    return [
        _prompt(engine, value, "prompt" if single else f"prompt[{place}]", special)
        for place, value in enumerate(listed)
    ]


def _prompt(engine: Engine, value: Any, where: str, special: bool) -> Prompt:
    if isinstance(value, str):
        try:
            return Prompt(engine.encode_text(value, special), value, where)
        except RequestError as error:
            raise api_error(error, where) from error
    if isinstance(value, list) and len(value) >= engine.loop.limits.max_context:
        raise too_long(engine, len(value), where)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return Prompt(value, None, where)
    raise ApiError(400, f"{where} must be a string or a list of token ids", param=where, code="invalid_type")


def _decoded(engine: Engine, ids: Sequence[int]) -> str:
    return engine.tokenizer.decode(ids) if engine.tokenizer is not None else ""


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "object": "text_completion", "created": job.created, "model": job.model}


def _echoed(job: Job, index: int) -> str:
    return job.extra["echo"][index // job.choices] if job.extra["echo"] is not None else ""


def _choice(job: Job, engine: Engine, index: int, text: str, reason: str) -> dict[str, Any]:
    request = job.requests[index]
    echoed = _echoed(job, index)
    logprobs = None
    if job.extra["logprobs"] is not None:
        assert engine.tokenizer is not None
        parts = [_prompt_logprobs(job, engine, index)] if job.extra["echo"] is not None else []
        made = CompletionLogprobs(engine.tokenizer, len(echoed))
        parts.append(made.take(request.output, request.logprobs, _top(job, request)))
        logprobs = {key: _joined([part[key] for part in parts]) for key in parts[0]}
    choice = {
        "index": index,
        "text": echoed + text,
        "logprobs": logprobs,
        "finish_reason": reason,
    }
    if job.extra["prompt_logprobs"] is not None:
        choice["prompt_logprobs"] = _raw_prompt_logprobs(job, request)
    return choice


def _top(job: Job, request: Request) -> Sequence[Any]:
    return request.top_logprobs if job.extra["logprobs"] else ()


def _joined(values: list[Any]) -> list[Any] | None:
    lists = [value for value in values if value is not None]
    return [entry for value in lists for entry in value] if lists else None


def _prompt_logprobs(job: Job, engine: Engine, index: int) -> dict[str, Any]:
    """The prompt's part of an echoed completion: one entry a token, None for the first."""
    assert engine.tokenizer is not None
    request = job.requests[index]
    known = request.prompt_logprobs
    best = [None if entry is None else entry[1][: job.extra["logprobs"]] for entry in known]
    return CompletionLogprobs(engine.tokenizer, text=job.texts[index] or "").take(
        request.tokens[: request.prompt_length],
        [None if entry is None else entry[0] for entry in known],
        best if job.extra["logprobs"] else (),
    )


def _raw_prompt_logprobs(job: Job, request: Request) -> list[dict[str, Any] | None]:
    """One {token id: log-probability} a prompt token: the token's own first, then the best; None for the first."""
    told: list[dict[str, Any] | None] = []
    for token, entry in zip(request.tokens, request.prompt_logprobs, strict=False):
        if entry is None:
            told.append(None)
            continue
        best = entry[1][: job.extra["prompt_logprobs"]]
        pairs = [(token, entry[0]), *((other, logprob) for other, logprob in best if other != token)]
        told.append({str(id_): finite(logprob) for id_, logprob in pairs})
    return told


async def _stream(exchange: Exchange, job: Job, stream: Any, engine: Engine) -> None:
    head = quote(_head(job))[:-1]
    makers: dict[int, CompletionLogprobs] = {}
    begun: set[int] = set()
    async for delta in stream:
        if delta.finish_reason == FINISH_ERROR:
            raise not_computed(delta.error)
        text, logprobs = delta.text, None
        begins = delta.index not in begun
        begun.add(delta.index)
        if begins and engine.tokenizer is not None:
            makers[delta.index] = CompletionLogprobs(engine.tokenizer, len(_echoed(job, delta.index)))
            text = _echoed(job, delta.index) + text
        if job.extra["logprobs"] is not None:
            logprobs = _delta_logprobs(job, engine, makers[delta.index], delta, begins)
        scored = begins and job.extra["prompt_logprobs"] is not None
        if not text and logprobs is None and delta.finish_reason is None and not scored:
            continue
        said = "null" if logprobs is None else quote(logprobs)
        if scored:
            said += f', "prompt_logprobs": {quote(_raw_prompt_logprobs(job, job.requests[delta.index]))}'
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        await exchange.event(
            f'{head}, "choices": [{{"index": {delta.index}, "text": {quote(text)}, "logprobs": {said}, '
            f'"finish_reason": {reason}}}]{job.usage_field()}'
        )
    if job.include_usage:
        await exchange.event(quote({**_head(job), "choices": [], "usage": job.usage()}))
    await exchange.event("[DONE]")
    await exchange.end_events()


def _delta_logprobs(
    job: Job, engine: Engine, maker: CompletionLogprobs, delta: Delta, begins: bool
) -> dict[str, Any] | None:
    top = delta.top_logprobs if job.extra["logprobs"] else ()
    parts = [_prompt_logprobs(job, engine, delta.index)] if begins and job.extra["echo"] is not None else []
    parts.append(maker.take(delta.token_ids, delta.logprobs, top))
    return {key: _joined([part[key] for part in parts]) for key in parts[0]}
