"""Self-drafting: an engine's own first layers and its head propose, over the engine's own pages.

The draft's layers are the engine's, so what they write for a token is what the engine writes, bit for bit. The draft therefore
reads the pages of the engine's committed tokens and needs no prompt of its own; what it writes for proposed tokens lies in pages
reserved for them, where the verifying step writes the same again, and later layers besides. Nothing is to be rolled back in
them: they lie beyond the sequence's end until its tokens come true.

Elhoushi et al., "LayerSkip" (2024), §3.3; Zhang et al., "Draft & Verify" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import StepInput
from enginewright.recipes.errors import InputError

from .drafting import Proposal
from .drawing import Drawer
from .pages import PagePool
from .request import Request
from .shadows import Shadows
from .step_input import InputBuffers

if TYPE_CHECKING:
    from .loop import EngineLoop

__all__ = ["DraftExecutor", "SelfDrafter"]


class DraftExecutor(Protocol):
    """What an executor's `draft()` gives: steps over the executor's own pools. max_tokens: rows a step may have."""

    max_tokens: int

    def step(self, step: StepInput) -> npt.NDArray[np.float32]: ...


class SelfDrafter:
    """Proposes with the draft program of the loop's executor, all requests together: a step of one token each for each place.

    `pool` and `drawer` are the loop's.
    """

    name = "self"
    free = False

    @classmethod
    def of(cls, loop: EngineLoop) -> SelfDrafter:
        """The drafter of a loop. Raises InputError where its engine holds no draft."""
        draft = getattr(loop.executor, "draft", lambda: None)()
        if draft is None:
            raise InputError(
                "the engine cannot draft with its own first layers",
                found="an engine that was built without draft.layers",
                action="build it with `optimize … --set draft.layers=N`, or draft with ngram or another engine",
            )
        return cls(draft, loop.pool, loop.drawer)

    def __init__(self, draft: DraftExecutor, pool: PagePool, drawer: Drawer) -> None:
        self._draft = draft
        self._pool = pool
        self._shadows = Shadows(drawer)
        self._input = InputBuffers(pool.max_sequences, pool.max_sequences)
        self.keep_logits = False

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """See `Drafter`. Each request's last token is the one that has not been computed."""
        made = [Proposal() for _ in wanted]
        kept: list[list[np.ndarray]] = [[] for _ in wanted]
        for request, _ in wanted:
            self._shadows.begin(request)
        tables = self._pool.rows([request.slot for request, _ in wanted])
        active = [i for i, (_, most) in enumerate(wanted) if most > 0]
        place = 0
        while active:
            requests = [wanted[i][0] for i in active]
            last = [made[i].tokens[-1] if place else wanted[i][0].tokens[-1] for i in active]
            rows = tables if len(active) == len(wanted) else np.take(tables, active, axis=1)
            positions = [len(request.tokens) - 1 + place for request in requests]
            logits = self._draft.step(self._input.fill_one_each(last, positions, rows))
            going = []
            for row, (i, (token, more)) in enumerate(
                zip(active, self._shadows.draw(requests, logits), strict=True)
            ):
                if token < 0:
                    continue
                made[i].tokens.append(token)
                if self.keep_logits:
                    kept[i].append(logits[row])
                if more and place + 1 < wanted[i][1]:
                    going.append(i)
            active, place = going, place + 1
        for proposal, rows_of in zip(made, kept, strict=True):
            if rows_of:
                proposal.logits = np.stack(rows_of)
        return made

    def settle(self, request: Request, accepted: int) -> None:
        """See `Drafter`: the pages need nothing, the drawing's memory is taken back."""
        self._shadows.settle(request)

    def forget(self, request: Request) -> None:
        self._shadows.forget(request)

    def close(self) -> None:
        self._shadows.clear()  # the draft is the executor's own, and closes with it
