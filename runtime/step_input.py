"""A step's arrays, in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from enginewright.backends.base import StepInput

__all__ = ["InputBuffers", "Sequence"]


class Sequence(Protocol):
    """`tokens` of which the first `computed` have their keys and values."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def computed(self) -> int: ...


class InputBuffers:
    """The arrays of a StepInput of at most `most_tokens` tokens of `most_sequences` sequences. Each step overwrites the last."""

    def __init__(self, most_tokens: int, most_sequences: int) -> None:
        self._tokens = np.zeros(most_tokens, np.int32)
        self._positions = np.zeros(most_tokens, np.int32)
        self._starts = np.zeros(most_sequences + 1, np.int32)
        self._lengths = np.zeros(most_sequences, np.int32)
        self._rows = np.zeros(most_tokens, np.int32)

    def fill(
        self,
        work: Iterable[tuple[Sequence, int]],
        rows: list[int],
        page_tables: np.ndarray,
        drafts: Mapping[Any, list[int]] = MappingProxyType({}),
    ) -> StepInput:
        """Return the step that computes the next tokens of each sequence, so many, those that `drafts` adds included.

        `rows`: whose logits are wanted. `page_tables`: int32 [groups, sequences, pages].
        """
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        lengths: list[int] = []
        for sequence, count in work:
            computed = sequence.computed
            if count == 1:
                tokens.append(sequence.tokens[computed])
                positions.append(computed)
            else:
                tokens += sequence.tokens[computed : computed + count]
                if sequence in drafts:
                    tokens += drafts[sequence]
                positions += range(computed, computed + count)
            starts.append(len(tokens))
            lengths.append(computed + count)
        return self._put(tokens, positions, starts, lengths, rows, page_tables)

    def fill_one_each(self, tokens: list[int], positions: list[int], page_tables: np.ndarray) -> StepInput:
        """Return the step that computes one token of each sequence, at these positions, and all logits."""
        starts = list(range(len(tokens) + 1))
        lengths = [position + 1 for position in positions]
        return self._put(tokens, positions, starts, lengths, starts[:-1], page_tables)

    def _put(
        self,
        tokens: list[int],
        positions: list[int],
        starts: list[int],
        lengths: list[int],
        rows: list[int],
        page_tables: np.ndarray,
    ) -> StepInput:
        return StepInput(
            tokens=_put(self._tokens, tokens),
            positions=_put(self._positions, positions),
            seq_starts=_put(self._starts, starts),
            context_lens=_put(self._lengths, lengths),
            page_tables=page_tables,
            logit_rows=_put(self._rows, rows),
        )


def _put(buffer: np.ndarray, values: list[int]) -> np.ndarray:
    view = buffer[: len(values)]
    view[:] = values
    return view
