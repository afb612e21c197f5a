"""Tool calls: how a family of chat templates has the model write them, and how they are read back, also while they stream.

A format is recognised by what its templates say. Each family's own template is the source:

- `hermes` (Hermes 2 Pro and later, Qwen 2.5 and 3, SmolLM3): `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`.
- `llama3` (Llama 3.1 to 3.3): the whole answer is `{"name": …, "parameters": {…}}`, several are joined by `;`, and
  `<|python_tag|>` may stand before them.
- `mistral` (Mistral, Mixtral, Ministral): the token `[TOOL_CALLS]`, then a list `[{"name": …, "arguments": {…}}]`, or, with the
  token `[ARGS]`, `name[ARGS]{…}` for every call.

What looks like a call and cannot be read is given out as text, whole: nothing of an answer is lost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..stop import overlap

__all__ = ["FORMATS", "Call", "ToolFormat", "ToolParser", "recognise"]


@dataclass(frozen=True)
class Call:
    """A function's name and its arguments, as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """A family's way to write calls.

    Calls begin at one of `opens`, or, where the `whole` answer is calls or text, at its first character; they last until
    `closes` (None: the end of the answer). `special` are tokens that must stay in the text to be seen.
    """

    name: str
    opens: tuple[str, ...]
    closes: str | None
    special: tuple[str, ...] = ()
    arguments: str = "arguments"
    whole: bool = False
    short_ids: bool = False  # nine characters, as the family's templates demand

    def new_id(self) -> str:
        """Return an id for a call."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"

    def grammar(self, functions: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a grammar (llguidance's Lark) of one call of one of `functions`; None where the family has none.

        Each function's parameters stay a schema of their own (`$id`): a `$ref` in them, such as "#/$defs/Place", begins there.
        """
        calls = []
        for place, function in enumerate(functions):
            parameters = {**(function.get("parameters") or {"type": "object"}), "$id": f"function:{place}"}
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, self.arguments: parameters},
                    "required": ["name", self.arguments],
                    "additionalProperties": False,
                }
            )
        schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
        if self.name == "hermes":
            return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'
        if self.name == "llama3":
            return f"start: call\ncall: %json {schema}\n"
        return None


FORMATS = (
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
    ToolFormat("llama3", ("<|python_tag|>",), None, ("<|python_tag|>",), arguments="parameters", whole=True),
    ToolFormat("mistral", ("[TOOL_CALLS]",), None, ("[TOOL_CALLS]", "[ARGS]"), short_ids=True),
)
_HERMES, _LLAMA3, _MISTRAL = FORMATS


def recognise(templates: Mapping[str, str]) -> ToolFormat | None:
    """Return the format that a model's chat templates define; None when it is none of FORMATS."""
    source = templates.get("tool_use") or templates.get("default") or ""
    if "[TOOL_CALLS]" in source:
        return _MISTRAL
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return _HERMES if "arguments" in source else None
    if "<|start_header_id|>" in source and '"parameters"' in source:
        return _LLAMA3
    return None


class ToolParser:
    """Splits a stream of text into text and calls; `finish` ends it."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._held = ""  # text that may begin a call, or spaces before one
        self._call: str | None = None  # the text of a call so far, with what opened it
        self._begun = False  # something other than spaces has been seen
        self.called = False

    def push(self, text: str) -> list[str | Call]:
        """Add `text`; return what has become certain, in order."""
        found: list[str | Call] = []
        self._held += text
        while self._held:
            if self._call is not None:
                if not self._read_call(found):
                    break
            elif not self._read_text(found):
                break
        return found

    def finish(self) -> list[str | Call]:
        """Return what was held back."""
        found: list[str | Call] = []
        if self._call is not None:
            self._end_call(self._call + self._held, found)
        elif self._held and not (self.called and self._held.isspace()):
            found.append(self._held)
        self._held, self._call = "", None
        return found

    def _read_text(self, found: list[str | Call]) -> bool:
        """Take text up to the next call; return whether anything was taken from what is held."""
        held = self._held
        if (self.called or self._form.whole) and not self._begun:
            held = held.lstrip() if self.called else held
            self._held = held
            if not held.strip():
                return False
        if self._form.whole and not self._begun and held.lstrip().startswith("{"):
            self._call, self._held = "", held
            return True
        places = [(held.find(mark), mark) for mark in self._form.opens]
        start, mark = min(((place, mark) for place, mark in places if place >= 0), default=(-1, ""))
        if start >= 0:
            before = held[:start].rstrip()
            if before:
                found.append(before)
            self._begun = False
            self._call, self._held = mark, held[start + len(mark) :]
            return True
        keep = max(overlap(held, mark) for mark in self._form.opens)
        keep = len(held) - len(held[: len(held) - keep].rstrip())
        self._held = held[len(held) - keep :]
        if len(held) > keep:
            self._begun = True
            found.append(held[: len(held) - keep])
        return False

    def _read_call(self, found: list[str | Call]) -> bool:
        closes = self._form.closes
        if closes is None:
            self._call = (self._call or "") + self._held
            self._held = ""
            return False
        end = self._held.find(closes)
        if end < 0:
            return False
        whole = (self._call or "") + self._held[: end + len(closes)]
        self._held, self._call = self._held[end + len(closes) :], None
        self._end_call(whole, found)
        return True

    def _end_call(self, whole: str, found: list[str | Call]) -> None:
        calls = _calls(self._form, whole)
        if calls:
            self.called = True
            self._begun = False
            found.extend(calls)
        else:
            self._begun = True
            found.append(whole)


def _calls(form: ToolFormat, whole: str) -> list[Call] | None:
    """Return the calls in a text that a call opened; None when it is no call."""
    body = whole
    for mark in form.opens:
        body = body.removeprefix(mark) if form is not _MISTRAL else body
    if form.closes is not None:
        if form.closes not in body:
            return None
        body = body[: body.rindex(form.closes)]
    try:
        if form is _MISTRAL:
            return _mistral_calls(body)
        values = _json_values(body, ";") if form is _LLAMA3 else [json.loads(body)]
        return [_call(value, form.arguments) for value in values] or None
    except (ValueError, RecursionError):
        return None


def _mistral_calls(whole: str) -> list[Call]:
    calls: list[Call] = []
    for part in whole.split("[TOOL_CALLS]")[1:]:
        name, mark, arguments = part.partition("[ARGS]")
        if mark:
            calls.append(_call({"name": name.strip(), "arguments": json.loads(arguments)}, "arguments"))
            continue
        values = json.loads(part)
        calls += [_call(value, "arguments") for value in (values if isinstance(values, list) else [values])]
    return calls


def _json_values(text: str, separator: str) -> list[Any]:
    decoder = json.JSONDecoder()
    values: list[Any] = []
    place = len(text) - len(text.lstrip())
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
        rest = text[place:].lstrip()
        if rest and not rest.startswith(separator):
            raise ValueError("text after a call")
        rest = rest.removeprefix(separator).lstrip()
        place = len(text) - len(rest)
    return values


def _call(value: Any, key: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("not a call")
    arguments = value.get(key, value.get("arguments", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    if not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
