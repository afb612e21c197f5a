"""From a step's logits to tokens and log-probabilities: the step's part between run and commit.

Nothing here changes what a request says of itself: `Drawer.draw` returns what the loop then commits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from enginewright.recipes.errors import RequestError

from .request import Request, TopLogprobs
from .sampler import draw, logsumexp_rows

__all__ = ["Drawer", "Drawn", "StepDraws", "logit_rows"]


@dataclass
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


class Drawer:
    """Draws tokens for one loop. `eos_token_ids` end a request, unless it ignores them."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)

    def draw(self, work: list[tuple[Request, int]], row_counts: list[int], logits: np.ndarray) -> StepDraws:
        """Draw the next token of every request that the step brought to its end; score prompt tokens; keep rows."""
        step = StepDraws()
        drawing: list[Request] = []
        at: list[int] = []
        row = 0
        for (request, count), rows in zip(work, row_counts, strict=True):
            if request.scores_prompt and rows:
                if request.keep_logits:
                    step.kept.append((request, logits[row : row + rows].copy()))
                else:
                    step.scored.append((request, _score(request, count, logits[row : row + rows])))
            if rows and request.computed + count == len(request.tokens) and request.draws:
                drawing.append(request)
                at.append(row + rows - 1)
            row += rows
        if drawing:
            step.drawn = list(zip(drawing, self._draw_rows(drawing, at, logits), strict=True))
        return step

    def _draw_rows(self, drawing: list[Request], at: list[int], logits: np.ndarray) -> list[Drawn]:
        drawn = draw(
            logits if len(at) == len(logits) else logits[at],
            [request.options.temperature for request in drawing],
            [request.options.seed for request in drawing],
            [len(request.tokens) for request in drawing],
        )
        return [
            Drawn(token, logprob)
            if token >= 0
            else Drawn(-1, logprob, error=_not_sampled(len(request.tokens) - 1))
            for request, (token, logprob) in zip(drawing, drawn, strict=True)
        ]


def _not_sampled(position: int) -> RequestError:
    return RequestError(
        "the model's logits cannot be sampled from",
        found=f"NaN or infinity at position {position}",
        action="if it happens for ordinary prompts, verify the engine or build it with more bits",
    )


def _score(request: Request, count: int, logits: np.ndarray) -> list[tuple[float, TopLogprobs] | None]:
    """Return an entry for each prompt token that the rows tell of: row i, at position p, tells of token p + 1."""
    first = request.wanted_rows(count).start
    targets = request.tokens[first + 1 : min(first + 1 + len(logits), request.prompt_length)]
    rows = logits[: len(targets)]
    totals = logsumexp_rows(rows).tolist()
    best = request.options.prompt_logprobs or 0
    scored: list[tuple[float, TopLogprobs] | None] = []
    for row, target, total in zip(rows, targets, totals, strict=True):
        order = np.argsort(-row, kind="stable")[:best].tolist() if best else []
        scored.append((float(row[target]) - total, [(i, float(row[i]) - total) for i in order]))
    return scored
