"""A step as it is planned: who gets how many tokens, what is copied first, and who ends before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .pages import Copy
from .request import Request

__all__ = ["Plan"]


@dataclass
class Plan:
    """One step's work: `counts[request]` tokens of each, and one row each of `padding`.

    `drafts[request]` are proposed tokens that follow the request's own; `counts` includes them. Those in `drafted_from` are
    verified by resampling.py's rule, given the logits that they were drawn from. `copies` are made first, in order.
    `exhausted` ended for want of pages; of `failed`, the pool raised an error.
    """

    rows: int  # logit rows that may still be asked for
    most: int  # tokens that the step may hold
    tokens: int = 0
    counts: dict[Request, int] = field(default_factory=dict)
    padding: list[Request] = field(default_factory=list)
    drafts: dict[Request, list[int]] = field(default_factory=dict)
    drafted_from: dict[Request, np.ndarray | None] = field(default_factory=dict)
    copies: list[tuple[Request, Copy]] = field(default_factory=list)
    exhausted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that may still be planned."""
        return self.most - self.tokens

    def put(self, request: Request, count: int) -> None:
        """Plan `count` tokens of a request that has none yet."""
        self.counts[request] = count
        self.tokens += count
        self.rows -= len(request.wanted_rows(count))

    def draft(self, request: Request, tokens: list[int]) -> None:
        """Let proposed tokens follow those that are planned of the request, which are all that it has."""
        self.drafts[request] = tokens
        self.counts[request] += len(tokens)
        self.tokens += len(tokens)
        self.rows -= len(tokens)

    def undraft(self, request: Request) -> None:
        """Plan none of the request's proposed tokens."""
        count = len(self.drafts.pop(request, ()))
        self.drafted_from.pop(request, None)
        self.counts[request] -= count
        self.tokens -= count
        self.rows += count

    def take_back(self, request: Request) -> int:
        """Plan none of the request's tokens; return how many they were."""
        assert request not in self.drafts
        count = self.counts.pop(request, 0)
        if count:
            self.tokens -= count
            self.rows += len(request.wanted_rows(count))
        return count
