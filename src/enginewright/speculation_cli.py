"""The options of speculation, which `engine serve`, `generate` and `bench` share."""

from __future__ import annotations

from typing import Any

import click

from enginewright.runtime.request import DRAFT_RULES, MOST_DRAFT_TOKENS

__all__ = ["SPECULATION", "speculation_options"]


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


SPECULATION: dict[str, dict[str, Any]] = {
    "--speculate": {
        "metavar": "ngram|self|ENGINE",
        "help": "Let tokens be proposed and verified: faster, and the same tokens (docs/speculation.md).",
    },
    "--draft-tokens": {
        "metavar": "auto|K",
        "type": _DraftTokens(),
        "default": "auto",
        "show_default": True,
        "help": "Tokens proposed for a sequence in a step: as many as pay, or always K.",
    },
    "--draft-rule": {
        "type": click.Choice(DRAFT_RULES),
        "default": DRAFT_RULES[0],
        "show_default": True,
        "help": "Keep a proposed token where it would have come anyway, or by the rule of accept or resample, "
        "which keeps more and keeps no seed.",
    },
}
"""Each option's name, and the settings of its click.option."""


def speculation_options(command: Any) -> Any:
    """Add them to a command."""
    for name, settings in reversed(SPECULATION.items()):
        command = click.option(name, **settings)(command)
    return command
