"""The token sequences on which an engine is held against its source."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import numpy as np

__all__ = ["sample_tokens", "text_tokens"]

Encode = Callable[[str], list[int]]

_LENGTHS = (1, 2, 17, 33, 96, 180)
"""Tokens of the samples: around the edges of a page, and enough text for a perplexity."""

_MORE = (513, 1025, 2049)
"""Tokens of the further samples of a full verification."""

_PAST_WINDOW = 96  # tokens that the last sample runs past the widest window, to cross the window's edge
_DISTINCT = 32  # different tokens that a sample of real text has at least
_LOGIT_BYTES = 768 << 20  # what the longest sample's logits may take, in float32


def sample_tokens(
    encode: Encode | None, vocab_size: int, max_context: int, window: int, level: str = "quick"
) -> list[list[int]]:
    """Return the token sequences that both sides are run on.

    The last sample is longer than `window` (0 = no window), as far as `max_context` and memory allow. With `level` "full" there
    are longer ones besides.
    """
    lengths = [*_LENGTHS, *(_MORE if level == "full" else ())]
    most = max(min(max_context, _LOGIT_BYTES // (4 * vocab_size)), 1)
    lengths[-1] = max(lengths[-1], window + _PAST_WINDOW if window else 0)
    lengths = [min(length, most) for length in lengths]
    stream = text_tokens(encode, vocab_size, sum(lengths))
    starts = np.cumsum([0, *lengths[:-1]])
    return [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def text_tokens(encode: Encode | None, vocab_size: int, wanted: int) -> list[int]:
    """So many tokens of the text that ships with the package, repeated where it is too short.

    A model without a tokenizer (`encode` is None), or with one that makes hardly any different tokens of it, gets evenly
    spread ids instead.
    """
    stream: list[int] = []
    if encode is not None:
        text = resources.files("enginewright").joinpath("verification").joinpath("text.txt")
        stream = encode(text.read_text(encoding="utf-8"))
    if len(set(stream)) < min(_DISTINCT, vocab_size // 2):
        stream = [(i * 7919 + 11) % vocab_size for i in range(wanted)]
    return (stream * -(-wanted // len(stream)))[:wanted]
