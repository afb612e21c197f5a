"""Drives an executor by hand: pages handed out in a shuffled order, any mix of sequences and chunk sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import StepInput

Floats = npt.NDArray[np.float32]


class Stepper:
    """Holds sequences and their pages; `feed` appends tokens to some of them in one step.

    Pages whose positions have left a group's window are given back at once and filled by others, and their entries become -1.
    """

    def __init__(self, executor: Any, pages: int = 24, seed: int = 0) -> None:
        self.executor = executor
        self.groups = list(executor.kv_groups)
        executor.create_pool([pages] * len(self.groups))
        if hasattr(executor, "fill_pool"):
            executor.fill_pool(float("nan"))
        orders = [np.random.default_rng(seed + g).permutation(pages) for g in range(len(self.groups))]
        self.free = [[int(page) for page in order] for order in orders]
        self.tables: list[dict[str, list[int]]] = [{} for _ in self.groups]
        self.lengths: dict[str, int] = {}

    def feed(self, **rows: Sequence[int]) -> dict[str, Floats]:
        """Run one step of new tokens by sequence name; logits of every row come back by name."""
        step = self.step_of(**rows)
        logits = self.executor.step(step)
        assert logits.shape == (len(step.tokens), self.executor.vocab_size) and logits.dtype == np.float32
        starts = step.seq_starts
        return {name: logits[starts[s] : starts[s + 1]] for s, name in enumerate(rows)}

    def step_of(self, **rows: Sequence[int]) -> StepInput:
        """The step of new tokens by sequence name, with pages for them; it asks for every row. The tokens count as fed."""
        starts, lens, positions, tokens = [0], [], [], []
        for name, new in rows.items():
            before = self.lengths.get(name, 0)
            self.lengths[name] = before + len(new)
            self._reserve(name, before)
            tokens += list(new)
            positions += range(before, self.lengths[name])
            starts.append(len(tokens))
            lens.append(self.lengths[name])
        width = max(len(table[name]) for table in self.tables for name in rows)
        tables = np.full((len(self.groups), len(rows), width), -1, np.int32)
        for g, table in enumerate(self.tables):
            for s, name in enumerate(rows):
                tables[g, s, : len(table[name])] = table[name]
        whole = np.arange(len(tokens), dtype=np.int32)
        arrays = [np.array(part, np.int32) for part in (tokens, positions, starts, lens)]
        return StepInput(*arrays, tables, whole)

    def _reserve(self, name: str, before: int) -> None:
        for group, free, table in zip(self.groups, self.free, self.tables, strict=True):
            pages = table.setdefault(name, [])
            if group.window:
                for at in range(max(0, before - group.window + 1) // group.page_size):
                    if pages[at] >= 0:
                        free.append(pages[at])
                        pages[at] = -1
            while len(pages) * group.page_size < self.lengths[name]:
                pages.append(free.pop(0))


def in_chunks(executor: Any, prompts: dict[str, list[int]], chunk: int) -> dict[str, Floats]:
    """Feed every prompt `chunk` tokens a step, all sequences together as long as they last."""
    stepper = Stepper(executor)
    found: dict[str, list[Floats]] = {name: [] for name in prompts}
    for start in range(0, max(map(len, prompts.values())), chunk):
        rows = {n: p[start : start + chunk] for n, p in prompts.items() if start < len(p)}
        for name, logits in stepper.feed(**rows).items():
            found[name].append(logits)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def alone(executor: Any, prompts: dict[str, list[int]], chunk: int) -> dict[str, Floats]:
    """As `in_chunks`, one sequence after the other, each in an empty pool."""
    return {name: in_chunks(executor, {name: prompt}, chunk)[name] for name, prompt in prompts.items()}
