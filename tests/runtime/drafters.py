"""Drafters for tests: one knows what a request will say, and tells as much of it as it is told to; one is a fake engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.drafting import Proposal
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request
from enginewright.runtime.speculation import Speculator
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, make_loop

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


class Relative(FakeExecutor):
    """Its logits are FakeExecutor's in about `likeness` of all places, and others elsewhere."""

    def __init__(self, groups: Sequence[GroupSpec], likeness: float = 1.0, **options: Any) -> None:
        super().__init__(groups, **options)
        self.likeness = likeness

    def _logits(self, value: int) -> np.ndarray:
        other = (value >> 7) % 1000 >= 1000 * self.likeness
        return super()._logits(value ^ 0x5DEECE66D if other else value)


def draft_with(
    loop: EngineLoop,
    executor: FakeExecutor,
    pages: Sequence[int] = (64, 64),
    tokens: int | None = 4,
    max_context: int = 64,
    resample: bool = False,
) -> EngineDrafter:
    """Let the loop speculate with a fake engine."""
    drafter = EngineDrafter(
        executor,
        pages,
        max_sequences=loop.limits.max_sequences,
        max_context=max_context,
        eos_token_ids=loop.drawer.eos_token_ids,
    )
    loop.speculator = Speculator(drafter, tokens, resample=resample)
    return drafter


def speculating(
    likeness: float = 1.0,
    tokens: int | None = 4,
    draft_pages: tuple[int, int] = (64, 64),
    draft_context: int = 64,
    **limits: Any,
) -> tuple[EngineLoop, EngineDrafter]:
    """A loop and its drafting engine, whose function is about the same."""
    loop = make_loop(**limits)
    return loop, draft_with(loop, Relative(GROUPS, likeness), draft_pages, tokens, draft_context)


def is_empty(drafter: EngineDrafter) -> bool:
    """Whether the drafter holds nothing of any request."""
    return drafter.own_pool.idle and not drafter._drafts and not drafter._shadows._of
