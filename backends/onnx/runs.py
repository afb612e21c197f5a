"""From one step's arrays to the inputs of one or several runs of the model. Plain numpy.

Attention pads every sequence's queries to the longest of its run. So a step in which a prompt's chunk stands beside many
decodes is run in parts of sequences of like lengths, each over all its rows: the weights are read again, which costs a
decode's time, where padding every decode to the chunk would cost many times the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import StepInput

__all__ = ["Reading", "Run", "parts", "run_of"]

Ints = npt.NDArray[np.int64]

PADDING = 2  # query rows of a run, padded, are at most so many times its rows


@dataclass(frozen=True)
class Reading:
    """What a KV group reads: `zero_slot` is the slot that is always zero; `sinks`: it also comes first in every row."""

    window: int
    page_size: int
    zero_slot: int
    sinks: bool


@dataclass(frozen=True)
class Run:
    """One run: its inputs by name, and where its logits go in the step's."""

    inputs: dict[str, Ints]
    logit_places: Ints


def parts(lengths: Ints) -> Iterator[Ints]:
    """Sequences in groups, the longest first, such that padding no more than doubles a group's rows."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    rows = 0
    for end, sequence in enumerate(order):
        longest, rows_with = lengths[order[start]], rows + lengths[sequence]
        if end > start and longest * (end - start + 1) > PADDING * rows_with:
            yield np.sort(order[start:end])
            start, rows_with = end, int(lengths[sequence])
        rows = int(rows_with)
    yield np.sort(order[start:])


def run_of(step: StepInput, chosen: Ints, groups: Sequence[Reading]) -> Run:
    """The run of the `chosen` sequences [n] of a step, which `check_step` has passed."""
    starts = step.seq_starts.astype(np.int64)
    lengths = (starts[1:] - starts[:-1])[chosen]
    rows = np.concatenate(
        [np.arange(starts[s], starts[s + 1]) for s in chosen]
    )  # of the step, in the run's order
    ends = step.context_lens[chosen].astype(np.int64)
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])  # of the run
    depth = int(lengths.max())
    sequence = np.repeat(np.arange(len(chosen)), lengths)
    within = np.arange(len(rows)) - np.repeat(firsts, lengths)
    places = sequence * depth + depth - np.repeat(lengths, lengths) + within
    query_rows = np.zeros(len(chosen) * depth, np.int64)
    query_rows[places] = np.arange(len(rows))
    positions = step.positions[rows].astype(np.int64)
    where = np.full(len(step.tokens), -1, np.int64)
    where[rows] = np.arange(len(rows))
    wanted = where[step.logit_rows]
    inputs = {
        "tokens": step.tokens[rows].astype(np.int64),
        "positions": positions,
        "logit_rows": wanted[wanted >= 0],
        "query_rows": query_rows.reshape(len(chosen), depth),
        "row_places": places,
        "context_lens": ends,
    }
    for index, group in enumerate(groups):
        table = step.page_tables[index][chosen].astype(np.int64)
        slots = table[sequence, positions // group.page_size] * group.page_size + positions % group.page_size
        inputs[f"write_slots_{index}"] = slots[:, None]
        first, read = _read_slots(table, ends, ends - lengths, group)
        inputs[f"first_keys_{index}"], inputs[f"read_slots_{index}"] = first, read
    return Run(inputs, np.flatnonzero(wanted >= 0))


def _read_slots(table: Ints, ends: Ints, before: Ints, group: Reading) -> tuple[Ints, Ints]:
    """Position of the first key that a sequence reads [S], and the slots of all [S, keys]."""
    first = np.maximum(before - group.window + 1, 0) if group.window else np.zeros_like(ends)
    width = int((ends - first).max())
    position = first[:, None] + np.arange(width)
    inside = position < ends[:, None]
    page = np.where(inside, position // group.page_size, 0)
    slots = np.take_along_axis(table, page, 1) * group.page_size + position % group.page_size
    slots = np.where(inside, slots, group.zero_slot)
    if group.sinks:
        slots = np.concatenate([np.full((len(ends), 1), group.zero_slot), slots], axis=1)
    return first, slots
