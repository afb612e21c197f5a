"""From what the user calls a drafter (`--speculate`) to one that fits the engine, or a refusal with the reason."""

from __future__ import annotations

import os
from typing import Any

from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.recipes.errors import InputError, near_matches

from .draft_engine import EngineDrafter
from .drafting import Drafter
from .facts import cache_identity, longest_context
from .loop import EngineLoop
from .memory import plan_draft_pages
from .ngram import NgramDrafter
from .request import DRAFT_RULES, MOST_DRAFT_TOKENS
from .self_draft import SelfDrafter
from .speculation import Speculator
from .vocabulary import check_vocabulary

__all__ = ["check", "speculate"]

NAMES = ("ngram", "self")

How = str | os.PathLike[str] | Artifact
"""A drafter's name, or another engine: its folder, or what `open_engine` returned."""


def check(
    target: Artifact,
    how: How | None,
    draft_tokens: int | str = "auto",
    draft_rule: str = "same",
    cache_bytes: int | None = None,
) -> str | Artifact | None:
    """Return the drafter's name or the opened engine, or raise InputError for what the engine `target` cannot use.

    The options are `speculate`'s. Nothing large is read.
    """
    if draft_tokens != "auto" and not (type(draft_tokens) is int and 1 <= draft_tokens <= MOST_DRAFT_TOKENS):
        raise InputError(
            "draft_tokens cannot be used",
            found=repr(draft_tokens),
            expected=f"'auto', or a whole number from 1 to {MOST_DRAFT_TOKENS}",
        )
    if draft_rule not in DRAFT_RULES:
        raise InputError(
            "draft_rule cannot be used", found=repr(draft_rule), expected=" or ".join(DRAFT_RULES)
        )
    if how is None:
        if draft_tokens != "auto":
            raise _means_nothing("draft_tokens", draft_tokens)
        if draft_rule != DRAFT_RULES[0]:
            raise _means_nothing("draft_rule", draft_rule)
        if cache_bytes is not None:
            raise _means_nothing("draft_cache_bytes", cache_bytes)
        return None
    if not isinstance(how, (str, os.PathLike, Artifact)):
        raise InputError("speculate cannot be used", found=repr(how)[:80], expected=_named())
    if not isinstance(how, Artifact):
        name = os.fspath(how)
        if name in NAMES:
            if cache_bytes is not None:
                raise InputError(
                    "draft_cache_bytes cannot be used",
                    found=f"the drafter {name!r}, which has no cache of its own",
                    expected="the folder of another engine as drafter",
                    action="leave it out",
                )
            return name
        if not name or not os.path.exists(name):
            likely = near_matches(name, NAMES)
            raise InputError(
                "there is no such drafter",
                found=repr(name)[:200],
                expected=_named(),
                action=f"did you mean {likely[0]}?" if likely else None,
            )
        how = open_engine(name)
    longest_context(how)
    check_vocabulary(target, how)
    return how


def _named() -> str:
    return f"{', '.join(map(repr, NAMES))}, or the folder of another engine"


def _means_nothing(name: str, value: Any) -> InputError:
    return InputError(
        f"{name} means nothing without speculation",
        found=repr(value),
        action=f"say how to speculate, or leave {name} out",
    )


def speculate(
    loop: EngineLoop,
    how: How,
    draft_tokens: int | str = "auto",
    draft_rule: str = "same",
    *,
    target: Artifact,
    threads: int | None = None,
    weights: str = "mmap",
    cache_bytes: int | None = None,
) -> None:
    """Let the loop speculate: `how` is "ngram", "self", or another engine, by its folder or opened.

    `draft_tokens`: "auto" measures what pays, a number proposes always so many. `draft_rule`: "same" keeps a proposed token where
    it is the one that would have come anyway; "resample" keeps more of them (`resampling.py`), at the price that tokens
    follow the same distribution but depend on what was proposed. `target` is the loop's engine. Another engine is loaded with
    `threads` and `weights`, and has a cache of `cache_bytes` at most. Raises InputError for what cannot be used.
    """
    checked = check(target, how, draft_tokens, draft_rule, cache_bytes)
    drafter: Drafter
    if isinstance(checked, Artifact):
        drafter = _load(loop, checked, threads, weights, cache_bytes)
    elif checked == "self":
        drafter = SelfDrafter.of(loop)
    else:
        drafter = NgramDrafter()
    tokens = None if draft_tokens == "auto" else int(draft_tokens)
    loop.speculator = Speculator(drafter, tokens, resample=draft_rule == "resample")


def _load(
    loop: EngineLoop, draft: Artifact, threads: int | None, weights: str, cache_bytes: int | None
) -> EngineDrafter:
    """Load the engine that drafts for the loop, with a cache of as many tokens as the loop's, where they fit."""
    limits = loop.limits
    context = min(limits.max_context, longest_context(draft))
    executor = get_backend(draft.manifest["backend"]).load(
        draft,
        threads=threads,
        weights=weights,
        max_tokens=max(limits.token_budget, ROWS_TO_CATCH_UP * limits.max_sequences),
        max_rows=limits.max_sequences,
    )
    try:
        if executor.vocab_size != loop.executor.vocab_size:  # its manifest says something else
            raise InputError(
                f"the engine at {draft.path} cannot draft for this one: their token ids differ",
                found=f"a vocabulary of {executor.vocab_size} tokens",
                expected=f"{loop.executor.vocab_size}, as the target has",
            )
        pool = loop.pool
        tokens = max(count * group.page_size for count, group in zip(pool.capacity, pool.groups, strict=True))
        pages = plan_draft_pages(
            executor.kv_groups,
            max_context=context,
            max_sequences=limits.max_sequences,
            chunk=executor.max_tokens,
            tokens=tokens,
            limit_bytes=cache_bytes,
        )
        return EngineDrafter(
            executor,
            pages,
            max_sequences=limits.max_sequences,
            max_context=context,
            eos_token_ids=loop.drawer.eos_token_ids,
            identity=cache_identity(draft, executor),
        )
    except BaseException:
        executor.close()
        raise


ROWS_TO_CATCH_UP = 4  # of every sequence in a step, at least: twice what a step usually leaves
