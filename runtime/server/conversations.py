"""What chat and responses share: messages as templates take them, tools, and the prompt that a template makes of both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from enginewright.recipes.errors import RequestError

from ..engine import Engine
from .errors import ApiError, api_error
from .prepare import Prompt
from .settings import Limits

__all__ = ["check_messages", "check_tools", "render"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_messages(
    messages: Sequence[Mapping[str, Any]], engine: Engine, limits: Limits, where: str = "messages"
) -> list[dict[str, Any]]:
    """Return the messages as templates know them.

    A role that is not one of ROLES is refused: templates put it between their own marks. The arguments of an earlier tool call
    become an object, as in transformers. "developer" becomes "system" for a template that does not know it.
    """
    if not messages:
        raise ApiError(400, f"{where} is empty (expected: at least one message)", param=where)
    if len(messages) > limits.messages:
        raise ApiError(400, f"{where} is too long (expected: at most {limits.messages})", param=where)
    template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
    developer = template is not None and any("developer" in text for text in template.sources.values())
    checked = []
    for place, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(
                400,
                f"{where}[{place}].role cannot be used (found: {str(role)[:40]!r}; expected: {', '.join(ROLES)})",
                param=f"{where}[{place}].role",
            )
        plain = dict(message)
        if role == "developer" and not developer:
            plain["role"] = "system"
        if plain.get("tool_calls") is not None:
            plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}[{place}].tool_calls")
        checked.append(plain)
    return checked


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError(400, f"{where} must be a list", param=where, code="invalid_type")
    known = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where}[{place}].function needs a name", param=f"{where}[{place}].function")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                at = f"{where}[{place}].function.arguments"
                raise ApiError(400, f"{at} is not JSON", param=at) from None
        known.append({**call, "function": {**function, "arguments": arguments}})
    return known


def check_tools(tools: Sequence[Mapping[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Return the functions of `tools`; ApiError for anything that is not a function with a name."""
    if len(tools) > limits.tools:
        raise ApiError(400, f"tools is too long (expected: at most {limits.tools})", param="tools")
    if len(json.dumps(tools)) > limits.schema_bytes:
        raise ApiError(
            400, f"tools is too large (expected: at most {limits.schema_bytes:,} bytes)", param="tools"
        )
    functions = []
    for place, tool in enumerate(tools):
        function = tool.get("function")
        where = f"tools[{place}]"
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(400, f"{where} is no function", param=where, code="unsupported_parameter")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, f"{where}.function.name is missing", param=f"{where}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            at = f"{where}.function.parameters"
            raise ApiError(400, f"{at} must be an object", param=at, code="invalid_type")
        functions.append(function)
    return functions


def render(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    limits: Limits,
    *,
    where: str = "messages",
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt that the model's template makes of a conversation; ApiError 400 with the template's own words."""
    if variables and len(json.dumps(variables)) > limits.template_variables_bytes:
        raise ApiError(400, "chat_template_kwargs is too large", param="chat_template_kwargs")
    hidden = {"messages", "tools", "documents", "add_generation_prompt"} & set(variables or {})
    if hidden:
        raise ApiError(400, f"chat_template_kwargs cannot set {sorted(hidden)}", param="chat_template_kwargs")
    options: dict[str, Any] = {"continue_final_message": continue_final_message}
    if tools:
        options["tools"] = list(tools)
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    if variables:
        options["variables"] = dict(variables)
    try:
        text, ids = engine.encode(check_messages(messages, engine, limits, where), True, options)
    except RequestError as error:
        raise api_error(error, where, fields=(where,)) from error
    return Prompt(ids, text, where)
