"""What a text must be: a JSON value, a match of a regular expression, a sentence of a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from enginewright.recipes.errors import RequestError

__all__ = ["Constraint"]

MOST_CHARACTERS = 512 * 1024  # of a schema, a regular expression or a grammar


@dataclass(frozen=True)
class Constraint:
    """A constraint as the client gave it: make one with the functions below. Nothing is compiled yet.

    `kind`: "json_schema", "json_object", "regex" or "lark". `text`: the schema as JSON, the expression, the grammar.
    """

    kind: str
    text: str = ""

    @classmethod
    def json_schema(cls, schema: Any) -> Constraint:
        """The text is a JSON value that fits `schema`: a dict, a boolean, or the JSON text of one."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError("the JSON schema is not JSON", found=str(error)[:200]) from None
        if not isinstance(schema, (dict, bool)):
            raise RequestError(
                "the JSON schema cannot be used", found=repr(schema)[:80], expected="an object or a boolean"
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("the JSON schema cannot be written as JSON", found=str(error)[:200]) from None
        return cls("json_schema", _bounded("the JSON schema", text))

    @classmethod
    def json_object(cls) -> Constraint:
        """The text is a JSON object, whatever is in it."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """The whole text matches `pattern` (the syntax of Rust's regex crate, without look-around)."""
        return cls("regex", _bounded("the regular expression", pattern))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """The text is a sentence of `grammar`, in llguidance's variant of Lark's notation."""
        return cls("lark", _bounded("the grammar", grammar))


def _bounded(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must be a text that is not empty", found=repr(text)[:80])
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            f"{name} is too long", found=f"{len(text):,} characters", expected=f"at most {MOST_CHARACTERS:,}"
        )
    return text
