"""From what the user calls a drafter (`--speculate`) to one that fits the engine, or a refusal with the reason."""

from __future__ import annotations

import os
from typing import Any

from enginewright.recipes.errors import InputError

from .drafting import Drafter
from .loop import EngineLoop
from .ngram import NgramDrafter
from .request import MOST_DRAFT_TOKENS
from .self_draft import SelfDrafter
from .speculation import Speculator

__all__ = ["RULES", "speculate"]

RULES = ("same", "resample")


def speculate(
    loop: EngineLoop,
    how: str | os.PathLike[str],
    draft_tokens: int | str = "auto",
    draft_rule: str = "same",
    **options: Any,
) -> None:
    """Let the loop speculate: `how` is "ngram", "self" or the folder of another engine.

    `draft_tokens`: "auto" measures what pays, a number proposes always so many. `draft_rule`: "same" keeps a proposed token where
    it is the one that would have come anyway; "resample" keeps more of them (`resampling.py`), at the price that tokens
    follow the same distribution but depend on what was proposed. Raises InputError for what cannot be used.
    """
    if draft_tokens != "auto" and not (type(draft_tokens) is int and 1 <= draft_tokens <= MOST_DRAFT_TOKENS):
        raise InputError(
            "draft_tokens cannot be used",
            found=repr(draft_tokens),
            expected=f"'auto', or a whole number from 1 to {MOST_DRAFT_TOKENS}",
        )
    if draft_rule not in RULES:
        raise InputError("draft_rule cannot be used", found=repr(draft_rule), expected=" or ".join(RULES))
    drafter: Drafter = SelfDrafter.of(loop) if how == "self" else NgramDrafter()
    tokens = None if draft_tokens == "auto" else int(draft_tokens)
    loop.speculator = Speculator(drafter, tokens, resample=draft_rule == "resample")
