"""An executor over an interpreted network, behind the contract of backends/base.py. For tests: slow, and it needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import KvGroupInfo, StepError, StepInput, StepLimits, check_step
from enginewright.backends.tensorrt.bindings import pool_names
from enginewright.backends.tensorrt.metadata import pack, step_arrays

from .network import Interpreter, InterpreterError
from .values import Array

__all__ = ["InterpretedExecutor"]


class InterpretedExecutor:
    """Runs steps on a network that a lowering has defined (bindings.py says what its inputs are).

    network, raw, rounding: as Interpreter takes them. groups: the KV groups of the model's facts. Pools are filled with NaN, so
    that whatever reads what was never written shows it; the zero page alone is zeros.
    """

    def __init__(
        self,
        network: Any,
        raw: Mapping[str, Array],
        *,
        groups: Sequence[Any],
        vocab_size: int,
        max_context: int,
        page_size: int = 16,
        max_tokens: int = 512,
        rounding: bool = True,
    ) -> None:
        self._interpreter = Interpreter(network, raw, rounding=rounding)
        self._max_context = max_context
        self._layers = [group.layers for group in groups]
        self._pools: dict[str, Array] = {}
        self._pages: list[int] = []
        self.vocab_size = vocab_size
        self.max_tokens = self.max_rows = max_tokens
        self.kv_groups: Sequence[KvGroupInfo] = [
            KvGroupInfo(
                group.window,
                page_size,
                sum(
                    page_size * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2
                    for layer in group.layers
                ),
                group.layers[0].format,
                len(group.layers),
            )
            for group in groups
        ]

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        if len(pages_per_group) != len(self.kv_groups):
            raise StepError("pools", found=len(pages_per_group), expected=f"{len(self.kv_groups)} groups")
        self._pages = list(pages_per_group)
        self._pools = {}
        for g, (info, layers) in enumerate(zip(self.kv_groups, self._layers, strict=True)):
            for i, layer in enumerate(layers):
                for name, width in zip(pool_names(g, i), (layer.key_dim, layer.value_dim), strict=True):
                    shape = (self._pages[g] + 1, layer.kv_heads, info.page_size, width)
                    pool = np.full(shape, np.nan, np.float32)
                    pool[-1] = 0
                    self._pools[name] = pool

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            for i in range(len(self._layers[group])):
                for name in pool_names(group, i):
                    self._pools[name][destination] = self._pools[name][source]

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        """As the contract has it. Raises InterpreterError where the network does what its layers' documentation forbids."""
        if len(self._pages) != len(self.kv_groups):
            raise StepError("there is no pool", action="call create_pool first")
        check_step(
            step,
            StepLimits(
                self.max_tokens,
                self.max_rows,
                self.vocab_size,
                self._max_context,
                self.kv_groups,
                self._pages,
            ),
        )
        arrays = step_arrays(step, self.kv_groups, self._pages)
        # What the device gets: pieces of one block.
        block, offsets = pack(arrays, len(self.kv_groups))
        given = {
            name: block[at : at + arrays[name].size].reshape(arrays[name].shape)
            for name, at in offsets.items()
        }
        results = self._interpreter.run({**given, **self._pools})
        for name, pool in self._pools.items():
            # A part of a Program (verification/pieces.py) leaves pools alone, and has no output for them.
            if results.get(f"{name}_out", pool) is not pool:
                raise InterpreterError(f"the output '{name}_out' is not its pool")
            if pool[-1].any():
                raise InterpreterError(f"the zero page of '{name}' was written")
        logits: npt.NDArray[np.float32] = results["logits"][: len(step.logit_rows)]
        return logits

    def memory(self) -> Mapping[str, int]:
        """`weights`: the network's constants as they are held here, in float32; `pool`: bytes of all pools."""
        return {
            "weights": self._interpreter.constant_bytes,
            "pool": sum(pool.nbytes for pool in self._pools.values()),
        }

    def close(self) -> None:
        self._pools, self._pages = {}, []
