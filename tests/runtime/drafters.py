"""Drafters for tests: they know what a request will say, and tell as much of it as they are told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from enginewright.runtime.drafting import Proposal
from enginewright.runtime.request import Request

Truth = Callable[[Request], list[int]]


class Oracle:
    """Proposes what `truth(request)` says comes next (its whole output), each token wrong with the chance `errors`.

    It also checks what the loop promises to a drafter.
    """

    name = "oracle"

    def __init__(
        self, truth: Truth, vocab_size: int, errors: float = 0.0, seed: int = 0, free: bool = True
    ) -> None:
        self.truth, self.vocab_size, self.errors, self.free = truth, vocab_size, errors, free
        self.random = random.Random(seed)
        self.open: dict[Request, tuple[int, list[int]]] = {}
        self.known: set[Request] = set()
        self.accepted: list[tuple[int, int]] = []  # (proposed, accepted) of every proposal that was settled
        self.closed = self.keep_logits = False

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        made = []
        for request, most in wanted:
            assert most >= 1 and not request.finished
            self.known.add(request)
            told = self.truth(request)[len(request.output) :][:most]
            told += [self.random.randrange(self.vocab_size) for _ in range(most - len(told))]
            for i in range(len(told)):
                if self.random.random() < self.errors:
                    told[i] = self.random.randrange(self.vocab_size)
            self.open[request] = (len(request.tokens), told)
            made.append(Proposal(told))
        return made

    def settle(self, request: Request, accepted: int) -> None:
        before, told = self.open.pop(request)
        came = request.tokens[before:]
        assert came[:accepted] == told[:accepted]
        self.accepted.append((len(told), accepted))

    def forget(self, request: Request) -> None:
        self.known.discard(request)

    def close(self) -> None:
        self.closed = True
