"""A pool of pages in memory, for running a paged Program in torch: one sequence, pages in a scrambled order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from enginewright.passes.program import Program

__all__ = ["Pools"]


class Pools:
    """The key and value pools of one sequence; unwritten slots hold NaN, so that reading one shows."""

    def __init__(self, program: Program, page_size: int, context: int = 64):
        self.program = program
        pages = -(-context // page_size)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        groups = program.facts.kv_groups
        self.page_tables = torch.stack([order.roll(i) for i in range(len(groups))])[:, None]
        self.pools: dict[str, Tensor] = {}
        for g, group in enumerate(groups):
            for i, layer in enumerate(group.layers):
                for kind, width in (("key", layer.key_dim), ("value", layer.value_dim)):
                    shape = (pages, page_size, layer.kv_heads, width)
                    self.pools[f"{kind}_pool_{g}_{i}"] = torch.full(shape, float("nan"))

    def step(self, tokens: Sequence[int], start: int, logit_rows: Sequence[int] | None = None) -> Tensor:
        """Run the tokens at positions start, start + 1, …; every row's logits, or those of `logit_rows`."""

        def numbers(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32)

        count = len(tokens)
        rows = range(count) if logit_rows is None else logit_rows
        return self.program.run(
            tokens,
            numbers(range(start, start + count)),
            seq_starts=numbers([0, count]),
            context_lens=numbers([start + count]),
            page_tables=self.page_tables,
            logit_rows=numbers(rows),
            **self.pools,
        )
