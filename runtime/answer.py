"""From a request's token ids back to text: pieces as they become certain, stop strings, the whole at the end."""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.recipes.errors import RequestError

from .loop import FINISH_ERROR, FINISH_STOP
from .request import Completion, Request
from .stop import StopMatcher
from .text import IncrementalDetokenizer, Tokenizer

__all__ = ["Answer", "TextDelta"]


@dataclass(frozen=True)
class TextDelta:
    """A piece of one prompt's answer: `text` follows what came before, `token_ids` are the ids since the last piece.

    `index` is the prompt's, `choice` tells several answers to it apart. The last piece of an answer carries its
    `finish_reason` (and `error`, for "error"); `text` may be empty.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: RequestError | None = None
    choice: int = 0


class Answer:
    """One prompt's request with its way back to text; `shown` are special tokens that stay in the text.

    Stop strings are looked for in the text that follows the first `min_tokens` tokens.
    """

    def __init__(
        self,
        index: int,
        prompt: str | None,
        request: Request,
        tokenizer: Tokenizer | None,
        shown: frozenset[int] = frozenset(),
        choice: int = 0,
    ) -> None:
        self.index = index
        self.choice = choice
        self.prompt = prompt
        self.request = request
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown=shown) if tokenizer is not None else None
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(request.options.stop, request.options.include_stop)
        self._taken = 0  # generated ids that have been turned into text
        self._to_stop = 0  # of the last new ones, those up to the one with which the text met a stop string
        self._pieces: list[str] = []
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether the text met a stop string."""
        return self._matcher.stopped

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something."""
        request = self.request
        return not self._ended and (
            request.finished or len(request.tokens) - request.prompt_length > self._taken
        )

    def take(self) -> TextDelta | None:
        """Return what is new since the last call; None when nothing is."""
        request = self.request
        if not self.has_news:
            return None
        new = request.tokens[request.prompt_length + self._taken :]
        text = self._text(new)
        if self.stopped:
            del new[self._to_stop :]
            request.cut(self._taken + len(new))
        self._taken += len(new)
        reason = FINISH_STOP if self.stopped else request.finish_reason
        self._ended = reason is not None
        self._pieces.append(text)
        error = request.error if reason == FINISH_ERROR else None
        return TextDelta(self.index, text, new, reason, error, self.choice)

    def _text(self, new: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        early = max(self.request.options.min_tokens - self._taken, 0)
        shown = self._detokenizer.push(new[:early]) if early else ""
        late = new[early:] if early else new
        if len(late) < 2 or not self.request.options.stop:
            shown += self._matcher.push(self._detokenizer.push(late))
            self._to_stop = len(new)
        else:  # the token that completes a stop string is the last
            for self._to_stop in range(len(new) - len(late) + 1, len(new) + 1):
                shown += self._matcher.push(self._detokenizer.push([new[self._to_stop - 1]]))
                if self.stopped:
                    break
        if self.request.finished and not self.stopped:
            shown += self._matcher.push(self._detokenizer.finish())
        if self.request.finished and not self.stopped:
            shown += self._matcher.finish() + self._special_stop()
        return shown

    def _special_stop(self) -> str:
        """The text of a special token that was asked for as a stop string, where it is to be included."""
        request = self.request
        options = request.options
        if not options.include_stop or request.finish_reason != FINISH_STOP or self._tokenizer is None:
            return ""
        return next(
            (text for text in options.stop if self._tokenizer.special_id(text) == request.tokens[-1]), ""
        )

    def completion(self) -> Completion:
        """The whole answer, once it has ended."""
        request = self.request
        reason = FINISH_STOP if self.stopped else request.finish_reason
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=request.tokens[: request.prompt_length],
            token_ids=request.output,
            logprobs=request.logprobs,
            text="".join(self._pieces),
            finish_reason=reason or "",
            error=request.error,
            choice=self.choice,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            cached_tokens=request.cached_tokens,
            drafted=request.drafted,
            accepted=request.accepted,
        )
