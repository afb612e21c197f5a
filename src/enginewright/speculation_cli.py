"""`--speculate` and `--draft-tokens`, which `engine serve`, `generate` and `bench` share."""

from __future__ import annotations

from typing import Any

import click

from enginewright.runtime.request import MOST_DRAFT_TOKENS

__all__ = ["DRAFT_TOKENS", "SPECULATE", "speculation_options"]


class _DraftTokens(click.ParamType):
    """`auto`, or a number of tokens."""

    name = "draft tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip()
        if text == "auto":
            return text
        if text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_DRAFT_TOKENS:
            return int(text)
        self.fail(f"{value!r} is neither auto nor a number from 1 to {MOST_DRAFT_TOKENS}", param, ctx)


SPECULATE: dict[str, Any] = {
    "metavar": "ngram|self|ENGINE",
    "help": "Let tokens be proposed and verified: faster, and the same tokens (docs/speculation.md).",
}
DRAFT_TOKENS: dict[str, Any] = {
    "metavar": "auto|K",
    "type": _DraftTokens(),
    "default": "auto",
    "show_default": True,
    "help": "Tokens proposed for a sequence in a step: as measured, or always K.",
}


def speculation_options(command: Any) -> Any:
    """Add both options to a command."""
    command = click.option("--draft-tokens", **DRAFT_TOKENS)(command)
    return click.option("--speculate", **SPECULATE)(command)
