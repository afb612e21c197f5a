"""Running a Program on several sequences at once, whatever stage it has reached, and looking at what its nodes give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from enginewright.passes.program import Execution, Program, Stage

__all__ = ["Watch", "paged_inputs", "run_watched"]

Watch = Callable[[fx.Node, dict[fx.Node, Any]], None]
"""Called before a node runs, with the values that are there."""

Seen = Callable[[fx.Node, Any], None]
"""Called after a node has run, with its value."""


def run_watched(
    program: Program,
    sequences: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]] | None = None,
    *,
    before: Watch | None = None,
    after: Seen | None = None,
) -> list[Tensor]:
    """Logits [rows, vocab] float32 of each sequence at the wanted `rows` (default: all of them).

    A paged Program runs all sequences in one step, any other one after the other. The callbacks see every node that is a call.
    """
    rows = [range(len(tokens)) for tokens in sequences] if rows is None else rows
    if program.stage < Stage.PAGED:
        return [
            _logits(program, {}, tokens, before, after)[list(wanted)]
            for tokens, wanted in zip(sequences, rows, strict=True)
        ]
    starts = np.cumsum([0, *map(len, sequences)])
    wanted = [int(start) + row for start, some in zip(starts, rows, strict=False) for row in some]
    tokens = [token for sequence in sequences for token in sequence]
    logits = _logits(program, paged_inputs(program, sequences, wanted), tokens, before, after)
    if program.stage == Stage.PAGED:
        logits = logits[wanted]
    return list(logits.split([len(some) for some in rows]))


def paged_inputs(
    program: Program, sequences: Sequence[Sequence[int]], logit_rows: Sequence[int]
) -> dict[str, Tensor]:
    """The inputs of one step that computes whole sequences, but for their tokens: pages in order, pools of NaN."""
    lengths = [len(tokens) for tokens in sequences]
    pools = [n for n in program.graph.nodes if n.op == "placeholder" and "_pool_" in str(n.target)]
    size = int(pools[0].meta["val"].shape[1]) if pools else 16
    pages = [-(-length // size) for length in lengths]
    table = np.full((max(len(program.facts.kv_groups), 1), len(lengths), max(pages)), -1, np.int32)
    first = 0
    for index, count in enumerate(pages):
        table[:, index, :count] = np.arange(first, first + count)
        first += count
    return {
        "positions": torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        "seq_starts": torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "page_tables": torch.from_numpy(table),
        "logit_rows": torch.tensor(list(logit_rows), dtype=torch.int32),
        **{str(n.target): torch.full((first, *n.meta["val"].shape[1:]), float("nan")) for n in pools},
    }


def _logits(
    program: Program,
    inputs: dict[str, Tensor],
    tokens: Sequence[int],
    before: Watch | None,
    after: Seen | None,
) -> Tensor:
    whole = program.stage == Stage.CAPTURED
    dtype = torch.int64 if whole else torch.int32
    ids = torch.tensor(tokens, dtype=dtype)
    given = {"tokens": ids, "positions": torch.arange(len(ids), dtype=dtype), **inputs}
    if whole:
        given = {name: value[None] for name, value in given.items()}
    with torch.inference_mode():
        logits: Tensor = _Watched(program, before, after).evaluate(given)
    return (logits[0] if whole else logits).float()


class _Watched(Execution):
    def __init__(self, program: Program, before: Watch | None, after: Seen | None) -> None:
        super().__init__(program)
        self.before, self.after = before, after

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self.before is not None:
            self.before(n, self.env)
        value = super().run_node(n)
        if self.after is not None:
            self.after(n, value)
        return value
