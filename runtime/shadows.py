"""Drawing for drafters: a token from a draft's row, as the engine itself would draw it.

A drafter that draws with the request's own noise, options and constraint agrees with the engine as often as their rows do. What
drawing remembers of a request must not learn of tokens that may never come, so each request has a shadow here with a memory of
its own, which is taken back to what came true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from .drawing import Drawer
from .request import Request, SamplingOptions

__all__ = ["Shadows"]


@dataclass(eq=False, slots=True)
class _Shadow:
    """What drawing asks of a request, but the memory."""

    tokens: list[int]  # the request's own list, which grows
    options: SamplingOptions
    prompt_length: int
    grammar: Any
    drawing: Any = None
    ahead: list[int] = field(default_factory=list)  # drawn after the first `known` tokens
    known: int = 0


class Shadows:
    """Draws proposals on a loop's drawer, between its steps."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer
        self._of: dict[Request, _Shadow] = {}

    def begin(self, request: Request) -> None:
        """A new proposal for the request: whatever was drawn before and did not come true is forgotten."""
        shadow = self._of.get(request)
        if shadow is None:
            options = replace(request.options, logprobs=None, prompt_logprobs=None)  # nobody asks for them
            shadow = _Shadow(request.tokens, options, request.prompt_length, request.grammar)
            self._of[request] = shadow
        self._take_back(shadow)
        shadow.known = len(shadow.tokens)

    def draw(self, requests: Sequence[Request], logits: np.ndarray) -> list[tuple[int, bool]]:
        """Draw the next token of each proposal from its row of `logits`, float32 [len(requests), vocab].

        Returns (token, whether another may follow) of each; -1 where none can be drawn.
        """
        shadows = [self._of[request] for request in requests]
        drawn = self._drawer.draw_after(
            cast("list[Request]", shadows), range(len(shadows)), logits, [shadow.ahead for shadow in shadows]
        )
        made = []
        for shadow, one in zip(shadows, drawn, strict=True):
            if one.error is not None:
                made.append((-1, False))
                continue
            shadow.ahead.append(one.token)
            ends = one.complete or self._drawer.ends(cast("Request", shadow), one.token)
            made.append((one.token, not ends))
        return made

    def settle(self, request: Request) -> None:
        """The request holds what came of the last proposal: forget the rest."""
        shadow = self._of.get(request)
        if shadow is not None:
            self._take_back(shadow)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._of.pop(request, None)

    def clear(self) -> None:
        """Forget every request."""
        self._of.clear()

    def _take_back(self, shadow: _Shadow) -> None:
        came, ahead = shadow.tokens[shadow.known :], shadow.ahead
        true = next((i for i, (a, b) in enumerate(zip(came, ahead, strict=False)) if a != b), None)
        true = min(len(came), len(ahead)) if true is None else true
        self._drawer.rewind(cast("Request", shadow), shadow.known + true)
        shadow.known, shadow.ahead = shadow.known + true, []
