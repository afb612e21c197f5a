"""From a step's logits to tokens and log-probabilities: the step's part between run and commit.

Nothing here changes what a request says of itself: `Drawer.draw` returns what the loop then commits. What it remembers of a
request (`Request.drawing`) follows from the request's tokens, so a step may be drawn twice.

Where proposed tokens stand after a request's own, a token is drawn from the request's last row, then from the row of each
proposed token as long as that is what was drawn before it: one token more than were proposed rightly. Each is drawn as it
would be in a step of its own: penalties count the tokens before it, those of this step included, and the constraint follows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from enginewright.recipes.errors import RequestError

from .constraints import Matcher
from .request import Request, TopLogprobs
from .resampling import Dice, applies
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
    """What a step's logits gave: tokens, log-probabilities of prompt tokens, and rows to keep, for requests that want them.

    `drawn` has a request's tokens in order; the last may be an error. There are several only after proposed tokens.
    """

    drawn: list[tuple[Request, list[Drawn]]] = field(default_factory=list)
    scored: list[tuple[Request, list[tuple[float, TopLogprobs] | None]]] = field(default_factory=list)
    kept: list[tuple[Request, np.ndarray]] = field(default_factory=list)


def logit_rows(work: list[tuple[Request, int]]) -> tuple[list[int], list[int]]:
    """Return the step's rows whose logits are wanted, and how many of them belong to each request."""
    rows: list[int] = []
    row_counts: list[int] = []
    start = 0
    for request, count in work:
        last = (
            len(request.tokens) - request.computed
        )  # a row's token is drawn from the last one, or a proposed one
        if request.scores_prompt:
            wanted = request.wanted_rows(count)
            rows.extend(start + position - request.computed for position in wanted)
            row_counts.append(len(wanted))
        elif count >= last:
            rows.extend(range(start + last - 1, start + count))
            row_counts.append(count - last + 1)
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

    def draw(
        self,
        work: list[tuple[Request, int]],
        row_counts: list[int],
        logits: np.ndarray,
        drafts: Mapping[Request, list[int]] = MappingProxyType({}),
        drafted_from: Mapping[Request, np.ndarray | None] = MappingProxyType({}),
    ) -> StepDraws:
        """Draw the next tokens of every request that the step brought to its end; score prompt tokens; keep rows.

        `drafts` are the proposed tokens among those that were computed. Those of requests in `drafted_from` are verified by
        `resampling.py`'s rule, given the rows that they were drawn from, float32 [len(draft), vocab].
        """
        step = StepDraws()
        drawing: list[Request] = []
        at: list[int] = []
        row = 0
        for (request, count), rows in zip(work, row_counts, strict=True):
            if rows and request.scores_prompt:
                if request.keep_logits:
                    step.kept.append((request, logits[row : row + rows].copy()))
                else:
                    scores = self._score(request, count, row, rows, logits)
                    bad = next((i for i, entry in enumerate(scores) if entry and math.isnan(entry[0])), None)
                    if bad is not None:
                        error = _not_drawn(-1, request.wanted_rows(count).start + bad)
                        step.drawn.append((request, [Drawn(-1, math.nan, error=error)]))
                        row += rows
                        continue
                    step.scored.append((request, scores))
            if rows and request.computed + count >= len(request.tokens) and request.draws:
                drawing.append(request)
                at.append(row + rows - 1 - (len(drafts[request]) if request in drafts else 0))
            row += rows
        if drafts:
            step.drawn += self._draw_runs(drawing, at, logits, drafts, drafted_from)
        elif drawing:
            drawn = self._draw_rows(drawing, at, logits)
            step.drawn += [(request, [one]) for request, one in zip(drawing, drawn, strict=True)]
        return step

    def _draw_runs(
        self,
        drawing: list[Request],
        at: list[int],
        logits: np.ndarray,
        drafts: Mapping[Request, list[int]],
        drafted_from: Mapping[Request, np.ndarray | None],
    ) -> list[tuple[Request, list[Drawn]]]:
        """Draw tokens from each request's last row and from those of the proposed tokens that come true.

        Rows that do not depend on what was drawn before them are drawn together, the others one a request at a time.
        """
        runs: list[list[Drawn]] = [[] for _ in drawing]
        left = [drafts.get(request, ()) for request in drawing]
        for i, request in enumerate(drawing):
            if request in drafted_from and applies(request.options.temperature):
                runs[i] = self._verify(request, at[i], logits, drafts[request], drafted_from[request])
        # (place in `drawing`, tokens before the row's): first every request's last row
        due = [
            (i, len(run)) for i, run in enumerate(runs) if not run or self._goes_on(drawing[i], run, left[i])
        ]
        for i, request in enumerate(drawing):
            if runs[i]:
                continue
            memory = self._memory(request)
            if not memory.penalised and memory.matcher is None:
                due += [(i, ahead + 1) for ahead in range(len(left[i]))]
        while due:
            drawn = self._draw_rows(
                [drawing[i] for i, _ in due],
                [at[i] + ahead for i, ahead in due],
                logits,
                [left[i][:ahead] for i, ahead in due],
            )
            for (i, ahead), one in zip(due, drawn, strict=True):
                if ahead == len(runs[i]) and (not ahead or runs[i][-1].token == left[i][ahead - 1]):
                    runs[i].append(one)
            due = [
                (i, len(runs[i]))
                for i in {i: None for i, _ in due}
                if self._goes_on(drawing[i], runs[i], left[i])
            ]
        return list(zip(drawing, runs, strict=True))

    def _verify(
        self, request: Request, at: int, logits: np.ndarray, draft: list[int], drafted_from: np.ndarray | None
    ) -> list[Drawn]:
        """Accept or resample the proposed tokens, from the request's last row on; the row after them is not looked at."""
        matcher = self._memory(request).matcher
        dice = Dice.of(request.options, request.prompt_length, self._end_ids(request), request.tokens)
        mask = np.zeros((self.vocab_size + 31) // 32, np.uint32) if matcher is not None else None
        best = request.options.logprobs
        run: list[Drawn] = []
        while len(run) < len(draft) and (not run or self._goes_on(request, run, draft)):
            place = len(run)
            if matcher is not None and mask is not None:
                tokens = [*request.tokens, *draft[:place]]
                error = matcher.follow(tokens, request.prompt_length) or matcher.fill(mask)
                if error is not None:
                    run.append(Drawn(-1, 0.0, error=error))
                    break
            row, position = logits[at + place], len(request.tokens) + place
            given = None if drafted_from is None else drafted_from[place]
            token = dice.verify(row, draft[place], given, position, mask)
            if token < 0:
                run.append(Drawn(token, 0.0, error=_not_drawn(token, position - 1)))
                break
            ((logprob, top),) = self._rows.score(logits, [at + place], [token], best or 0)
            one = Drawn(token, logprob, top if best is not None else None)
            if matcher is not None:
                one.complete, one.error = matcher.accept(token)
            run.append(one)
            dice.state.extend([token], request.prompt_length)
        return run

    def _goes_on(self, request: Request, run: list[Drawn], draft: Sequence[int]) -> bool:
        """Whether another row of the request is to be drawn from: its token is what was drawn last."""
        last = run[-1]
        return (
            len(run) <= len(draft)
            and last.token == draft[len(run) - 1]
            and last.error is None
            and not last.complete
            and not self.ends(request, last.token)
        )

    def ends(self, request: Request, token: int) -> bool:
        """Whether the token ends the request."""
        options = request.options
        return (token in self.eos_token_ids and not options.ignore_eos) or token in options.stop_token_ids

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

    def _draw_rows(
        self,
        drawing: list[Request],
        at: list[int],
        logits: np.ndarray,
        ahead: Sequence[Sequence[int]] = (),
    ) -> list[Drawn]:
        """Draw a token from row at[i] for drawing[i]; `ahead[i]` are tokens between the request's own and that one."""
        memories = [self._memory(request) for request in drawing]
        positions = [len(request.tokens) for request in drawing]
        if ahead:
            positions = [position + len(tokens) for position, tokens in zip(positions, ahead, strict=True)]
        for i, (request, memory) in enumerate(zip(drawing, memories, strict=True)):
            if memory.penalised:
                self._count(request, memory, ahead[i] if ahead else ())
        masks, mask_rows, failed = self._masks(drawing, memories, ahead)
        results = self._rows.draw(
            logits,
            at,
            [memory.row for memory in memories],
            positions,
            masks,
            mask_rows,
        )
        drawn = [Drawn(*result) for result in zip(*results, strict=True)]
        for i, one in enumerate(drawn):
            matcher = memories[i].matcher
            if i in failed:
                one.error = failed[i]
            elif one.token < 0:
                one.error = _not_drawn(one.token, positions[i] - 1)
            elif matcher is not None:
                one.complete, one.error = matcher.accept(one.token)
        return drawn

    def draw_after(
        self, drawing: list[Request], at: Sequence[int], logits: np.ndarray, ahead: Sequence[Sequence[int]]
    ) -> list[Drawn]:
        """Draw a token from row at[i] of `logits` for drawing[i], as it would be drawn after ahead[i] had come, for drafters."""
        return self._draw_rows(drawing, list(at), logits, ahead)

    def rewind(self, request: Request, length: int) -> None:
        """Forget whatever is remembered of the request after its first `length` tokens."""
        memory = request.drawing
        if memory is None:
            return
        if memory.penalised and memory.row.seen > length:
            memory.row = self._row(request)
        if memory.matcher is not None and memory.matcher.follow(
            request.tokens[:length], request.prompt_length
        ):
            request.drawing = None  # it cannot go back: it is made again

    def _memory(self, request: Request) -> _Memory:
        return request.drawing or self._remember(request)

    def _count(self, request: Request, memory: _Memory, ahead: Sequence[int]) -> None:
        """Let penalties know the request's tokens and those `ahead`, and no others."""
        if memory.row.seen > len(request.tokens) + len(ahead):  # a step that failed after it had drawn
            memory.row = self._row(request)
        new = request.tokens[memory.row.seen :]
        beyond = memory.row.seen + len(new) - len(request.tokens)
        memory.row.extend([*new, *ahead[beyond:]], request.prompt_length)

    def _masks(
        self, drawing: list[Request], memories: list[_Memory], ahead: Sequence[Sequence[int]]
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
            tokens = [*request.tokens, *ahead[i]] if ahead and ahead[i] else request.tokens
            error = matcher.follow(tokens, request.prompt_length) or matcher.fill(masks[m])
            if error is not None:
                failed[i] = error
            mask_rows[i] = m
        return masks, mask_rows, failed

    def _end_ids(self, request: Request) -> list[int]:
        options = request.options
        ends = set(options.stop_token_ids)
        if not options.ignore_eos:
            ends |= self.eos_token_ids
        return sorted(i for i in ends if i < self.vocab_size)

    def _row(self, request: Request) -> Any:
        return draw_row(request.options, request.prompt_length, self._end_ids(request))

    def _remember(self, request: Request) -> _Memory:
        options = request.options
        request.drawing = _Memory(
            self._row(request),
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
