"""From a StepInput to the network's int32 inputs (bindings.py), and into one block that one transfer carries to the device.

numpy alone. A step may be padded to a fixed shape, so that a recorded CUDA graph fits it (`Shape`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.backends.base import Ints, KvGroupInfo, StepInput
from enginewright.backends.tensorrt.bindings import step_inputs

__all__ = ["ALIGNMENT", "Shape", "block_offsets", "pack", "step_arrays"]

ALIGNMENT = 64
"""An input begins at a multiple of so many int32 in the block: 256 bytes, which TensorRT asks of an address."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of single rows is padded to: `sequences` (rows, and rows wanted, too) and `width` pages a sequence.

    Padding sequences have the token 0 at position 0, and write it to the zero page, of which every one takes a slot. So there are
    at most a page's worth of them.
    """

    sequences: int
    width: int


def step_arrays(
    step: StepInput, groups: Sequence[KvGroupInfo], pages: Sequence[int], shape: Shape | None = None
) -> dict[str, Ints]:
    """The step's int32 inputs by name, in the block's order.

    `step` has passed check_step. pages[g]: those of group g's pool that the runtime knows; the page after them is the zero page.
    Without `shape` page tables are as wide as the longest context needs. With it the step has one row a sequence.
    """
    starts, lens = step.seq_starts, step.context_lens
    rows = np.diff(starts)
    tokens, positions, wanted = step.tokens, step.positions, step.logit_rows
    tables = step.page_tables
    if shape is not None:
        tokens, positions, rows, lens, wanted, tables = _pad(step, shape, groups)
        starts = np.arange(len(tokens) + 1, dtype=np.int32)
    if not len(wanted):
        wanted = np.zeros(1, np.int32)
    longest = int(rows.max())
    unused = (longest - rows).astype(np.int32)
    place = np.arange(longest, dtype=np.int32)
    query_rows = np.where(place >= unused[:, None], place - unused[:, None] + starts[:-1, None], 0)
    sequence = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
    arrays = {
        "tokens": tokens,
        "positions": positions,
        "logit_rows": wanted,
        "query_rows": query_rows.astype(np.int32),
        "row_places": (
            sequence * longest + unused[sequence] + np.arange(len(tokens), dtype=np.int32) - starts[sequence]
        ).astype(np.int32),
        "context_lens": lens,
    }
    first = lens - rows
    for g, (group, count) in enumerate(zip(groups, pages, strict=True)):
        size, zero = group.page_size, count
        width = shape.width if shape is not None else -(-int(lens.max()) // size)
        table = np.full((len(rows), width), zero, np.int32)
        kept = min(width, tables.shape[2])
        page = np.arange(kept)
        oldest = np.maximum(first - group.window + 1, 0) if group.window else np.zeros_like(first)
        seen = (page * size < lens[:, None]) & ((page + 1) * size > oldest[:, None])
        given = tables[g, :, :kept]
        table[:, :kept] = np.where(seen & (given >= 0), given, zero)
        written = table[sequence, positions // size]
        order = np.argsort(written, kind="stable").astype(np.int32)
        page_starts = np.zeros(count + 2, np.int32)
        np.cumsum(np.bincount(written, minlength=count + 1), out=page_starts[1:])
        page_first = np.zeros(count + 1, np.int32)
        # The rows of a page are in order, so the last written of a reversed list is the first.
        page_first[written[::-1]] = (positions % size)[::-1]
        arrays |= {
            f"page_table_{g}": table,
            f"page_order_{g}": order,
            f"page_starts_{g}": page_starts,
            f"page_first_{g}": page_first,
        }
    return arrays


def _pad(
    step: StepInput, shape: Shape, groups: Sequence[KvGroupInfo]
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """tokens, positions, rows of each sequence, context_lens, logit_rows and page_tables of the padded step."""
    count = len(step.tokens)
    more = shape.sequences - count
    smallest = min(group.page_size for group in groups)
    needed = max(-(-int(step.context_lens.max()) // group.page_size) for group in groups)
    if count != len(step.context_lens) or not 0 <= more <= smallest or needed > shape.width:
        raise ValueError(
            f"a step of {count} rows of {len(step.context_lens)} sequences, {needed} pages wide, cannot be padded to {shape}"
        )
    if len(step.logit_rows) > shape.sequences:
        raise ValueError(f"{len(step.logit_rows)} rows are wanted, the padded step has {shape.sequences}")

    def filled(array: Ints, length: int, value: int) -> Ints:
        return np.concatenate([array, np.full(length - len(array), value, np.int32)])

    tables = np.full((len(groups), shape.sequences, step.page_tables.shape[2]), -1, np.int32)
    tables[:, :count] = step.page_tables
    return (
        filled(step.tokens, shape.sequences, 0),
        filled(step.positions, shape.sequences, 0),
        np.ones(shape.sequences, np.int32),
        filled(step.context_lens, shape.sequences, 1),
        filled(step.logit_rows, shape.sequences, 0),
        tables,
    )


def block_offsets(shapes: Mapping[str, Sequence[int]], groups: int) -> tuple[dict[str, int], int]:
    """Where each input begins in the block, in int32 from its start, and the block's length."""
    offsets, at = {}, 0
    for binding in step_inputs(groups):
        offsets[binding.name] = at
        count = int(np.prod(shapes[binding.name], dtype=np.int64))
        at += -(-count // ALIGNMENT) * ALIGNMENT
    return offsets, at


def pack(arrays: Mapping[str, Ints], groups: int, block: Ints | None = None) -> tuple[Ints, dict[str, int]]:
    """The arrays in one int32 block, and where each begins. `block` is filled where it is given and long enough."""
    offsets, length = block_offsets({name: array.shape for name, array in arrays.items()}, groups)
    if block is None or len(block) < length:
        block = np.zeros(length, np.int32)
    for name, at in offsets.items():
        block[at : at + arrays[name].size] = arrays[name].ravel()
    return block[:length], offsets
