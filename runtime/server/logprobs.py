"""Log-probabilities in OpenAI's two shapes: chat's list of objects, and the parallel lists of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..request import TopLogprobs
from ..text import IncrementalDetokenizer, Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "finite"]


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text; one that is part of a character is spelled as OpenAI does, `bytes:\\xe2\\x82`."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _spelled(tokenizer, token), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return logprob if logprob > -9999.0 else -9999.0  # JSON has no infinity; OpenAI says -9999


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Return chat's `logprobs` object of some generated tokens; `top` is empty where none were asked for."""
    content = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        best = [_entry(tokenizer, *pair) for pair in top[place]] if top else []
        content.append({**_entry(tokenizer, token, logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the `logprobs` object of a completion, piece by piece; `offset` is where its text begins in the choice's.

    `text` is a prompt that is echoed as the client spelled it: its special tokens, which decoding leaves out, stand in it.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, text: str = "") -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = offset
        self._text = text

    def take(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TopLogprobs | None],
    ) -> dict[str, Any]:
        """Return the object of the next tokens; a log-probability is None for the first token of a prompt."""
        tokens, offsets = [], []
        for token in ids:
            tokens.append(_spelled(self._tokenizer, token))
            place = self._offset + len(self._detokenizer.held)
            offsets.append(place)
            self._offset += len(self._detokenizer.push([token])) + self._spelled_out(token, place)
        return {
            "tokens": tokens,
            "token_logprobs": [None if value is None else finite(value) for value in logprobs],
            "top_logprobs": [self._best(best) for best in top] if top else None,
            "text_offset": offsets,
        }

    def _spelled_out(self, token: int, place: int) -> int:
        """Return the characters of a special token that stands in the text there; 0 where it was put before it, as `<bos>` is."""
        piece = self._tokenizer.piece(token, False) if token in self._tokenizer.hidden_ids else None
        return len(piece) if piece and self._text.startswith(piece, place) else 0

    def _best(self, best: TopLogprobs | None) -> dict[str, float] | None:
        if best is None:
            return None
        named: dict[str, float] = {}
        for token, logprob in best:
            named.setdefault(_spelled(self._tokenizer, token), finite(logprob))
        return named
