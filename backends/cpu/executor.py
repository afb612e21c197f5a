"""The cpu backend's executor: numpy arrays in, logits out; native code does the rest without the GIL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import KvGroupInfo, StepError, StepInput
from enginewright.backends.cpu import _native
from enginewright.recipes.errors import ArtifactError, InputError

__all__ = ["CpuDraft", "CpuExecutor"]


@contextmanager
def _steps_own_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise StepError(str(error)) from None


class _Stepping:
    """What every loaded program does: steps, times and figures of memory."""

    def __init__(self, engine: _native.Engine, max_tokens: int, max_rows: int) -> None:
        self._engine = engine
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.vocab_size: int = engine.vocab_size
        self.threads: int = engine.threads
        self.isa: str = engine.isa
        self.max_positions: int = engine.position_limit
        self.kv_groups: Sequence[KvGroupInfo] = [
            KvGroupInfo(g["window"], g["page_size"], g["page_bytes"], g["format"], len(g["layers"]))
            for g in engine.kv_groups
        ]
        self._step = engine.step

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        # The native side checks all that check_step does, so that a step costs little here.
        logits = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        try:
            self._step(
                step.tokens,
                step.positions,
                step.seq_starts,
                step.context_lens,
                step.page_tables,
                step.logit_rows,
                logits,
            )
        except (ValueError, TypeError) as error:
            raise StepError(str(error)) from None
        return logits

    def row_drawer(self) -> _native.RowDrawer:
        """Draws tokens from logits (`runtime/sampler.py`), on the threads of this executor, between its steps."""
        return _native.RowDrawer.beside(self._engine)

    def set_profiling(self, on: bool) -> None:
        """Begin (from zero) or end the measuring of times."""
        self._engine.set_profiling(on)

    def profile(self) -> list[tuple[str, str, int, int]]:
        """Times since profiling began, one entry an instruction: (op, module, ns of work, ns of waiting).

        They are those of the calling thread; waiting is for the other threads before the instruction begins.
        """
        times: list[tuple[str, str, int, int]] = self._engine.profile()
        return times

    def memory(self) -> Mapping[str, int]:
        """Bytes reserved for weights, pool, arena (values between instructions) and scratch.

        Pages of memory that were never touched cost nothing.
        """
        memory: dict[str, int] = self._engine.memory()
        return memory

    def close(self) -> None:
        self._engine.close()


class CpuDraft(_Stepping):
    """A draft program beside an executor: it reads and writes the executor's pools, and runs on its threads, between its steps.

    Its keys and values are those that the executor itself writes for the layers that both have, bit for bit. Whatever the
    executor shares lasts until both are closed; `memory` counts what is the draft's own.
    """


class CpuExecutor(_Stepping):
    """Runs a lowered program. See `enginewright.backends.base.Executor` for the methods' contract.

    `program`, `weights_file`: program.json and weights.bin. `threads`: None takes one for each core that the process
    may use (affinity and cgroup quota). `weights`: "mmap" shares the file's pages with other processes, "copy" reads
    them into (huge) pages of this one. `max_tokens`, `max_rows`: rows and logit rows a step may have (max_rows:
    max_tokens unless given). `isa`: "avx512", "avx2" or "portable"; what the variable
    ENGINEWRIGHT_ISA says, else the best that the machine has, unless given. `draft`: draft.json, for `draft()`.

    Raises ArtifactError for a program that is damaged or does not fit its weights, InputError for options.
    """

    def __init__(
        self,
        program: str | os.PathLike[str],
        weights_file: str | os.PathLike[str],
        *,
        threads: int | None = None,
        weights: str = "mmap",
        max_tokens: int = 512,
        max_rows: int | None = None,
        isa: str = "",
        draft: str | os.PathLike[str] | None = None,
    ) -> None:
        max_rows = max_tokens if max_rows is None else max_rows
        isa = isa or os.environ.get("ENGINEWRIGHT_ISA", "")
        _check_options(threads, weights, max_tokens, max_rows, isa)
        self._draft_program = draft
        self._draft: CpuDraft | None = None
        with _damaged(program):
            engine = _native.Engine(
                Path(program).read_bytes().decode(),
                os.fspath(weights_file),
                mode=weights,
                max_tokens=max_tokens,
                max_rows=max_rows,
                threads=threads or 0,
                isa=isa,
            )
        super().__init__(engine, max_tokens, max_rows)

    def draft(self) -> CpuDraft | None:
        """The engine's draft program, loaded beside this one at the first call; None where it has none.

        Raises ArtifactError where it is damaged or does not fit this one.
        """
        if self._draft is None and self._draft_program is not None:
            with _damaged(self._draft_program):
                text = Path(self._draft_program).read_bytes().decode()
                engine = _native.Engine.beside(self._engine, text, self.max_tokens, self.max_rows)
            self._draft = CpuDraft(engine, self.max_tokens, self.max_rows)
        return self._draft

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        with _steps_own_errors():
            self._engine.create_pool(list(pages_per_group))

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        with _steps_own_errors():
            self._engine.copy_pages(group, np.asarray(sources, np.int32), np.asarray(destinations, np.int32))

    def fill_pool(self, value: float) -> None:
        """Set every number of the pools: tests fill them with NaN to see that nothing unwritten is read."""
        self._engine.fill_pool(value)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()
        super().close()


@contextmanager
def _damaged(program: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of loading `program`, as ArtifactError."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise ArtifactError(
            f"the engine's program cannot be loaded: {error}",
            found=os.fspath(program),
            action="build the engine again with `optimize`",
        ) from None


def _check_options(threads: int | None, weights: str, max_tokens: int, max_rows: int, isa: str) -> None:
    if threads is not None and not 1 <= threads <= 1024:
        raise InputError("threads cannot be used", found=threads, expected="1 to 1024")
    if weights not in ("mmap", "copy"):
        raise InputError(
            "weights cannot be loaded that way", found=repr(weights), expected="'mmap' or 'copy'"
        )
    for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows)):
        if not 1 <= value <= 1 << 20:
            raise InputError(f"{name} cannot be used", found=value, expected=f"1 to {1 << 20}")
    if isa and isa not in _native.available_isas():
        raise InputError(
            "this machine has no such kernels",
            found=repr(isa),
            expected=", ".join(_native.available_isas()),
            action="unset ENGINEWRIGHT_ISA, or name one of these"
            if "ENGINEWRIGHT_ISA" in os.environ
            else None,
        )
