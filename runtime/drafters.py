"""From what the user calls a drafter (`--speculate`) to one that fits the engine, or a refusal with the reason."""

from __future__ import annotations

import os
from typing import Any

from enginewright.recipes.errors import InputError

from .loop import EngineLoop
from .ngram import NgramDrafter
from .request import MOST_DRAFT_TOKENS
from .speculation import Speculator

__all__ = ["speculate"]


def speculate(
    loop: EngineLoop, how: str | os.PathLike[str], draft_tokens: int | str = "auto", **options: Any
) -> None:
    """Let the loop speculate: `how` is "ngram", "self" or the folder of another engine.

    `draft_tokens`: "auto" measures what pays, a number proposes always so many. Raises InputError for what cannot be used.
    """
    if draft_tokens != "auto" and not (type(draft_tokens) is int and 1 <= draft_tokens <= MOST_DRAFT_TOKENS):
        raise InputError(
            "draft_tokens cannot be used",
            found=repr(draft_tokens),
            expected=f"'auto', or a whole number from 1 to {MOST_DRAFT_TOKENS}",
        )
    drafter = NgramDrafter()
    loop.speculator = Speculator(drafter, None if draft_tokens == "auto" else int(draft_tokens))
