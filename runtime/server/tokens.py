"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from enginewright.recipes.errors import RequestError

from ..engine import Engine
from ..request import check_token_ids
from .conversations import check_tools, render
from .errors import ApiError, api_error
from .exchange import Exchange
from .schemas import DetokenizeRequest, TokenizeRequest, parse

__all__ = ["detokenize", "tokenize"]


async def tokenize(exchange: Exchange, body: bytes) -> None:
    """Return the token ids of a text, or of the prompt that a conversation becomes."""
    service = exchange.service
    engine = service.engine.engine
    await exchange.json(await service.prepare(len(body), _tokenize, service, engine, body))


def _tokenize(service: Any, engine: Engine, raw: bytes) -> dict[str, Any]:
    body = parse(TokenizeRequest, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    limits = service.settings.limits
    if engine.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer", code="no_tokenizer")
    if body.prompt is not None:
        try:
            ids = engine.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        except RequestError as error:
            raise api_error(error, "prompt") from error
    else:
        check_tools(body.tools or [], limits)
        ids = render(
            engine,
            body.messages or [],
            limits,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
        ).ids
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": engine.longest,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [engine.tokenizer.piece(token, False) for token in ids]
    return answer


async def detokenize(exchange: Exchange, body: bytes) -> None:
    """Return the text of token ids, special tokens included unless `skip_special_tokens`."""
    service = exchange.service
    engine = service.engine.engine
    await exchange.json(await service.prepare(len(body), _detokenize, service, engine, body))


def _detokenize(service: Any, engine: Engine, raw: bytes) -> dict[str, Any]:
    body = parse(DetokenizeRequest, raw)
    service.check_model(body.model)
    if engine.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer", code="no_tokenizer")
    try:
        ids = check_token_ids("tokens", body.tokens, engine.vocab_size)
    except RequestError as error:
        raise api_error(error, "tokens", fields=("tokens",)) from error
    return {"prompt": engine.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))}
