"""From a step's logits to tokens and log-probabilities: the step's part between run and commit.

Nothing here changes what a request says of itself: `Drawer.draw` returns what the loop then commits. What it remembers of a
request (`Request.drawing`) follows from the request's tokens, so a step may be drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginewright.recipes.errors import RequestError

from .constraints import Matcher
from .request import Request, TopLogprobs
from .sampler import draw_row, row_drawer

__all__ = ["Drawer", "Drawn", "StepDraws", "logit_rows"]


@dataclass(slots=True)
class Drawn:
    """One request's next token: `logprob` and the best beside it (`top`), or the `error` that ends the request.

    `complete`: with this token the text is all that its constraint allows, and ends.
    """

    token: int
    logprob: float
    top: TopLogprobs | None = None
    complete: bool = False
    error: RequestError | None = None


@dataclass
class StepDraws:
    """What a step's logits gave: tokens, log-probabilities of prompt tokens, and rows to keep, for requests that want them."""

    drawn: list[tuple[Request, Drawn]] = field(default_factory=list)
    scored: list[tuple[Request, list[tuple[float, TopLogprobs] | None]]] = field(default_factory=list)
    kept: list[tuple[Request, np.ndarray]] = field(default_factory=list)


def logit_rows(work: list[tuple[Request, int]]) -> tuple[list[int], list[int]]:
    """Return the step's rows whose logits are wanted, and how many of them belong to each request."""
    rows: list[int] = []
    row_counts: list[int] = []
    start = 0
    for request, count in work:
        if request.scores_prompt:
            wanted = request.wanted_rows(count)
            rows.extend(start + position - request.computed for position in wanted)
            row_counts.append(len(wanted))
        elif request.computed + count == len(request.tokens):
            rows.append(start + count - 1)
            row_counts.append(1)
        else:
            row_counts.append(0)
        start += count
    return rows, row_counts


@dataclass(slots=True)
class _Memory:
    """What is remembered of one request between its draws."""

    row: Any  # DrawRow
    penalised: bool  # its row must know every token
    matcher: Matcher | None


class Drawer:
    """Draws tokens for one loop. `eos_token_ids` end a request, unless it ignores them.

    `executor`: where it has a `row_drawer`, that draws, on the executor's own threads.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = (), executor: object = None) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        make = getattr(executor, "row_drawer", row_drawer)
        self._rows = make()

    def draw(self, work: list[tuple[Request, int]], row_counts: list[int], logits: np.ndarray) -> StepDraws:
        """Draw the next token of every request that the step brought to its end; score prompt tokens; keep rows."""
        step = StepDraws()
        drawing: list[Request] = []
        at: list[int] = []
        row = 0
        for (request, count), rows in zip(work, row_counts, strict=True):
            if rows and request.scores_prompt:
                if request.keep_logits:
                    step.kept.append((request, logits[row : row + rows].copy()))
                else:
                    step.scored.append((request, self._score(request, count, row, rows, logits)))
            if rows and request.computed + count == len(request.tokens) and request.draws:
                drawing.append(request)
                at.append(row + rows - 1)
            row += rows
        if drawing:
            step.drawn = list(zip(drawing, self._draw_rows(drawing, at, logits), strict=True))
        return step

    def _score(
        self, request: Request, count: int, row: int, rows: int, logits: np.ndarray
    ) -> list[tuple[float, TopLogprobs] | None]:
        """Return an entry for each prompt token that the rows tell of: the one at position p tells of token p + 1."""
        first = request.wanted_rows(count).start + 1
        targets = request.tokens[first : min(first + rows, request.prompt_length)]
        best = request.options.prompt_logprobs or 0
        scored: list[tuple[float, TopLogprobs] | None]
        scored = self._rows.score(logits, range(row, row + len(targets)), targets, best)
        return scored

    def _draw_rows(self, drawing: list[Request], at: list[int], logits: np.ndarray) -> list[Drawn]:
        memories = [request.drawing or self._remember(request) for request in drawing]
        for request, memory in zip(drawing, memories, strict=True):
            if memory.penalised:
                memory.row.extend(request.tokens[memory.row.seen :], request.prompt_length)
        masks, mask_rows, failed = self._masks(drawing, memories)
        results = self._rows.draw(
            logits,
            at,
            [memory.row for memory in memories],
            [len(request.tokens) for request in drawing],
            masks,
            mask_rows,
        )
        drawn = [Drawn(*result) for result in zip(*results, strict=True)]
        for i, one in enumerate(drawn):
            matcher = memories[i].matcher
            if i in failed:
                one.error = failed[i]
            elif one.token < 0:
                one.error = _not_drawn(one.token, len(drawing[i].tokens) - 1)
            elif matcher is not None:
                one.complete, one.error = matcher.accept(one.token)
        return drawn

    def _masks(
        self, drawing: list[Request], memories: list[_Memory]
    ) -> tuple[np.ndarray | None, list[int], dict[int, RequestError]]:
        """Return the constraints' masks (uint32 [M, words]), which one each row obeys, and what failed."""
        bound = [i for i, memory in enumerate(memories) if memory.matcher is not None]
        if not bound:
            return None, [], {}
        masks = np.zeros((len(bound), (self.vocab_size + 31) // 32), np.uint32)
        mask_rows = [-1] * len(drawing)
        failed: dict[int, RequestError] = {}
        for m, i in enumerate(bound):
            matcher, request = memories[i].matcher, drawing[i]
            assert matcher is not None
            error = matcher.follow(request.tokens, request.prompt_length) or matcher.fill(masks[m])
            if error is not None:
                failed[i] = error
            mask_rows[i] = m
        return masks, mask_rows, failed

    def _remember(self, request: Request) -> _Memory:
        options = request.options
        ends = set(options.stop_token_ids)
        if not options.ignore_eos:
            ends |= self.eos_token_ids
        request.drawing = _Memory(
            draw_row(options, request.prompt_length, sorted(i for i in ends if i < self.vocab_size)),
            bool(options.frequency_penalty or options.presence_penalty or options.repetition_penalty != 1.0),
            request.grammar.matcher() if request.grammar is not None else None,
        )
        return request.drawing


def _not_drawn(token: int, position: int) -> RequestError:
    if token == -2:
        return RequestError(
            "no token may be drawn",
            found=f"every one is ruled out at position {position}",
            action="check logit_bias and the constraint: together they leave nothing",
        )
    return RequestError(
        "the model's logits cannot be sampled from",
        found=f"NaN or infinity at position {position}",
        action="if it happens for ordinary prompts, verify the engine or build it with more bits",
    )
