"""An executor without a model, made to notice every fault of paging and scheduling.

What it stores for a token is a hash of the token, its position and everything that the token sees through the
page tables, group by group; the logits are a hash of that. So a wrong page, a stale or missing token, a wrong
position, a page given away too early change the logits of every later token. Reading a slot that holds
another position, or one that nobody has written since the pool was made, raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginewright.backends.base import KvGroupInfo, StepInput, StepLimits, check_step
from enginewright.runtime.pages import GroupSpec

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class FakeExecutor:
    """Fulfils `Executor`. `poison_token`: its logits are NaN; `crash_token`: a step that holds it raises."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        vocab_size: int = 32,
        max_tokens: int = 512,
        poison_token: int | None = None,
        crash_token: int | None = None,
    ) -> None:
        self.groups = list(groups)
        self.vocab_size = vocab_size
        self.max_tokens = self.max_rows = max_tokens
        self.kv_groups = [KvGroupInfo(group.window, group.page_size, 16, "f32", 1) for group in groups]
        self.poison_token = poison_token
        self.crash_token = crash_token
        self.steps: list[tuple[int, int]] = []  # tokens and sequences of each step
        self.closed = False
        self._weights = [_mix(i + 1) | 1 for i in range(4096)]

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        self._limits = StepLimits(
            self.max_tokens, self.max_rows, self.vocab_size, 1 << 20, self.kv_groups, list(pages_per_group)
        )
        self._values = [
            [[0] * g.page_size for _ in range(n)] for g, n in zip(self.groups, pages_per_group, strict=True)
        ]
        self._positions = [
            [[-1] * g.page_size for _ in range(n)] for g, n in zip(self.groups, pages_per_group, strict=True)
        ]

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            self._values[group][destination] = list(self._values[group][source])
            self._positions[group][destination] = list(self._positions[group][source])

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True

    def step(self, step: StepInput) -> np.ndarray:
        check_step(step, self._limits)
        starts = step.seq_starts.tolist()
        hashes: list[int] = []
        for s in range(len(starts) - 1):
            tokens = step.tokens[starts[s] : starts[s + 1]].tolist()
            positions = step.positions[starts[s] : starts[s + 1]].tolist()
            for token, position in zip(tokens, positions, strict=True):
                hashes.append(self._write(token, position, step.page_tables[:, s].tolist()))
        if self.crash_token is not None and self.crash_token in step.tokens.tolist():
            raise RuntimeError("the executor was told to crash")
        logits = (
            np.stack([self._logits(hashes[row]) for row in step.logit_rows.tolist()])
            if len(step.logit_rows)
            else (np.zeros((0, self.vocab_size), np.float32))
        )
        if self.poison_token is not None:
            for r, row in enumerate(step.logit_rows.tolist()):
                if int(step.tokens[row]) == self.poison_token:
                    logits[r, 3] = np.nan
        self.steps.append((len(step.tokens), len(starts) - 1))
        return logits

    def _write(self, token: int, position: int, tables: list[list[int]]) -> int:
        seen = _mix(token * 1_000_003 + position + 1)
        for g, group in enumerate(self.groups):
            first = max(0, position - group.window + 1) if group.window else 0
            for at in range(first, position):
                seen = (seen + self._read(g, tables[g], at) * self._weights[(at * 7 + g) % 4096]) & _MASK
        value = _mix(seen)
        for g, group in enumerate(self.groups):
            page, slot = tables[g][position // group.page_size], position % group.page_size
            assert page >= 0, f"position {position} has no page in group {g}"
            self._values[g][page][slot] = value
            self._positions[g][page][slot] = position
        return value

    def _read(self, g: int, table: list[int], position: int) -> int:
        size = self.groups[g].page_size
        page = table[position // size]
        assert page >= 0, f"position {position} is read but has no page in group {g}"
        assert self._positions[g][page][position % size] == position, f"position {position} was never written"
        return self._values[g][page][position % size]

    def _logits(self, value: int) -> np.ndarray:
        return np.array([(_mix(value + v) >> 40) / 2.0**21 - 4.0 for v in range(self.vocab_size)], np.float32)
