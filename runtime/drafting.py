"""What a drafter is: something that guesses how running requests go on, for the step to verify.

A step may carry tokens that a drafter proposes after a request's own. It gives the logits of every place, and a token is drawn at
each exactly as it would be without the proposal; a proposed token stays while it equals the one that was drawn before it.
So a drafter changes how many tokens a step gives, and never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .request import Request

__all__ = ["Drafter", "Proposal"]


@dataclass(slots=True)
class Proposal:
    """Tokens that may follow a request's own, the next one first.

    Proposals of one `kind`, a number of the drafter's own, come true about as often. `logits`, float32 [len(tokens), vocab]:
    the rows that the tokens were drawn from, where the drafter draws and keeps them; None where they were not drawn.
    `preparation`: seconds that went to what later proposals need not do again, such as reading the prompt; `read`: the tokens
    that were read in them.
    """

    tokens: list[int] = field(default_factory=list)
    kind: int = 0
    logits: Any = None
    preparation: float = 0.0
    read: int = 0


class Drafter(Protocol):
    """Proposes tokens for running requests. Called by the loop alone, between its steps.

    `name`: as in `--speculate`. `free`: proposing costs next to nothing, whether or not it is verified. `keep_logits`: whether
    proposals are to hold the logits that their tokens were drawn from; set before the first call. One with pages of its own
    has their pool as `own_pool`. One that reads a request before it can propose has `unread(request)`: (tokens that it has yet to
    read, calls that this takes at least).
    """

    name: str
    free: bool
    keep_logits: bool

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """Return, for each request, at most so many tokens that may follow its own; fewer, or none, where it has no idea.

        The requests do not change. Their next tokens have pages in the loop's pool already.
        """

    def settle(self, request: Request, accepted: int) -> None:
        """Of the last proposal for the request the first `accepted` tokens came true; what lies beyond them is rolled back.

        The request holds what the step gave by now, and has not ended.
        """

    def forget(self, request: Request) -> None:
        """The request has ended: give back what is held for it."""

    def close(self) -> None:
        """Give back everything."""
