"""Runs a paged Program step by step in torch, behind the contract of `backends/base.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from enginewright.backends.base import KvGroupInfo, StepError, StepInput, StepLimits, check_step
from enginewright.passes.program import Execution, Program, Stage
from enginewright.recipes.errors import LoweringError

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor:
    """Owns a Program's page pools and evaluates its graph node by node.

    Weights are loaded when a node needs them and freed after it, so that memory holds one layer's at a time. `program`
    is at stage PAGED or FINAL and is not changed. Its attentions round keys and values to their layer's cache format;
    the pools hold the rounded values in f32.
    """

    def __init__(self, program: Program, *, page_size: int = 16, max_tokens: int = 512) -> None:
        if program.stage < Stage.PAGED:
            raise LoweringError(
                "only a paged program runs on the reference backend",
                found=program.stage.name,
                expected="PAGED or FINAL",
            )
        self._program = program
        self._pools: dict[str, torch.Tensor] = {}
        self._pages: list[int] = []
        self.vocab_size = program.facts.vocab_size
        self.max_tokens = self.max_rows = max_tokens
        self.kv_groups: Sequence[KvGroupInfo] = [
            KvGroupInfo(
                group.window,
                page_size,
                page_size
                * 4
                * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in group.layers),
                group.layers[0].format,
                len(group.layers),
            )
            for group in program.facts.kv_groups
        ]

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        if len(pages_per_group) != len(self.kv_groups):
            raise StepError("pools", found=len(pages_per_group), expected=f"{len(self.kv_groups)} groups")
        self._pages = list(pages_per_group)
        self._pools = {}
        for g, group in enumerate(self._program.facts.kv_groups):
            for i, layer in enumerate(group.layers):
                shape = (self._pages[g], self.kv_groups[g].page_size, layer.kv_heads)
                for kind, width in (("key", layer.key_dim), ("value", layer.value_dim)):
                    # What no step has written is NaN: reading it would show.
                    self._pools[f"{kind}_pool_{g}_{i}"] = torch.full((*shape, width), float("nan"))

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            for name, pool in self._pools.items():
                if name.split("_")[2] == str(group):
                    pool[destination] = pool[source]

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        if len(self._pages) != len(self.kv_groups):
            raise StepError("there is no pool", action="call create_pool first")
        check_step(
            step,
            StepLimits(
                self.max_tokens,
                self.max_rows,
                self.vocab_size,
                self._program.facts.max_context,
                self.kv_groups,
                self._pages,
            ),
        )
        inputs = {name: torch.from_numpy(getattr(step, name)) for name in StepInput.__slots__}
        logits = Execution(self._program).evaluate({**inputs, **self._pools})
        if self._program.stage == Stage.PAGED:
            logits = logits[inputs["logit_rows"]]
        result: npt.NDArray[np.float32] = logits.numpy()
        return result

    def memory(self) -> Mapping[str, int]:
        """`weights`: the largest one, as float32 (they come one at a time); `pool`: bytes of all pools."""
        largest = max((weight.numel * 4 for weight in self._program.weights.values()), default=0)
        return {"weights": largest, "pool": sum(pool.nbytes for pool in self._pools.values())}

    def close(self) -> None:
        self._pools, self._pages = {}, []
