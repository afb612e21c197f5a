"""What every backend promises: how it lowers a program, and how its executor runs a step.

A step is T tokens of S sequences laid end to end, prefill chunks and decodes mixed freely. Executors own the memory of
the key/value pools; the runtime owns the page tables. Neither torch nor transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from enginewright.recipes.errors import EnginewrightError

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.passes.manager import Pass
    from enginewright.passes.program import Program
    from enginewright.passes.source import ModelSource
    from enginewright.recipes.recipe import Recipe

__all__ = [
    "Answers",
    "Backend",
    "Executor",
    "KvGroupInfo",
    "LowerProgress",
    "StepError",
    "StepInput",
    "StepLimits",
    "check_step",
]

Ints = npt.NDArray[np.int32]

LowerProgress = Callable[[str, int, int], None]
"""Called as progress(name, done, total), in bytes, before each weight is written and (unnamed) at the end."""


class StepError(EnginewrightError):
    """A step's arrays contradict each other or the executor's limits. Nothing has run."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's inputs: contiguous int32 arrays.

    tokens [T]: ids of all sequences' new tokens, one sequence after the other.
    positions [T]: absolute positions; a sequence's rows are the last ones of its context, in order.
    seq_starts [S + 1]: sequence s holds rows seq_starts[s] .. seq_starts[s + 1] - 1, at least one.
    context_lens [S]: tokens visible after this step, cached ones and this step's.
    page_tables [G, S, P]: for each KV group, the page of positions from p * page_size; -1 for none. Pages of
        positions that a group's window has passed may be -1. A page that is written belongs to one sequence.
    logit_rows [R]: the rows of the step whose logits are wanted; may be empty.
    """

    tokens: Ints
    positions: Ints
    seq_starts: Ints
    context_lens: Ints
    page_tables: Ints
    logit_rows: Ints


@dataclass(frozen=True, slots=True)
class KvGroupInfo:
    """Layers that share page tables. `page_bytes`: bytes of one page over all of the group's layers, each in its own format
    (`format` is the group's, from which a layer may differ)."""

    window: int
    page_size: int
    page_bytes: int
    format: str
    layers: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold. `max_positions`: positions lie below it. `pages[g]`: the pool of KV group g."""

    max_tokens: int
    max_rows: int
    vocab_size: int
    max_positions: int
    groups: Sequence[KvGroupInfo]
    pages: Sequence[int]


@runtime_checkable
class Executor(Protocol):
    """A loaded engine: pools and steps. One caller at a time.

    max_tokens: rows a step may have; max_rows: logit rows it may ask for.
    """

    kv_groups: Sequence[KvGroupInfo]
    vocab_size: int
    max_tokens: int
    max_rows: int

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        """Make pools of so many pages a KV group and drop earlier ones. Raises StepError, MemoryError."""

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy page sources[i] to destinations[i], in order, in every layer of the group."""

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Run a step: write its keys and values, return new logits [R, vocab_size].

        Raises StepError where the input is malformed; then nothing has run.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes by purpose: weights, pool, and what else the backend has."""

    def close(self) -> None:
        """Give back threads and memory. Calling it again does nothing."""


class Answers(Protocol):
    """What verification asks of a written engine; a context manager."""

    artifact: Artifact
    vocab_size: int
    max_context: int

    @property
    def tokenizer(self) -> Any:
        """`encode(text)` gives token ids; None without a tokenizer."""

    def logits(
        self, sequences: Sequence[Sequence[int]], chunk_size: int | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """Logits [T, vocab_size] of each sequence."""

    def __enter__(self) -> Answers: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """A way to run programs.

    name: as in engine.json. target: what the engine needs of a machine. exact: whether a row's logits
    are bitwise the same in any batch, chunking and thread count. capabilities: what it can lower. stage: how far a
    program goes before `lower` (a name of passes.program.Stage): "FINAL", or "QUANTISED", whose matrices are the
    model's own, neither joined nor reordered. serves: whether `load` gives an executor; where it does not,
    `answers` stands for the engine in verification. drafts: whether an engine may hold a draft program beside its own; then
    the executor's `draft()` gives what runs it, over the executor's pools.
    """

    name: str
    target: str
    exact: bool
    stage: str
    serves: bool
    drafts: bool

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What `lower` accepts: `ops` by name, `weight_formats`, `activation_formats` of each, `kv_formats`, `wider_kv_formats`
        (a cache format, and the wider one that stands for it), and `compute`, whose first is what `auto` means. A key that is
        missing says nothing."""

    def gate(self, recipe: Recipe, source: ModelSource) -> Pass | None:
        """A pass that changes nothing and refuses what the backend cannot hold, before matrices are calibrated or rounded.

        Making it refuses what no model could have. None: there is nothing to refuse.
        """

    def lower(
        self,
        program: Program,
        recipe: Recipe,
        directory: Path,
        progress: LowerProgress | None = None,
        source: ModelSource | None = None,
        draft: Program | None = None,
    ) -> list[str]:
        """Write what `load` needs into `directory`; returns the files' names. Raises LoweringError.

        `source` is the opened model, for a backend that writes its configuration. `draft` is a draft of the program
        (passes/cut_draft.py), only for a backend that `drafts`.
        """

    def runs_here(self, manifest: Mapping[str, Any]) -> str | None:
        """Why this machine cannot run the engine of a manifest, in a line; None where it can."""

    def rehearse(self, program: Program, recipe: Recipe, engine: Artifact) -> Executor | None:
        """What evaluates the lowered form of `program` by its documented meaning, on any machine; None where nothing does.

        Asked for where the engine itself cannot run.
        """

    def sections(self) -> Mapping[str, Any]:
        """What engine.json says of what `lower` wrote, beyond what it says of every engine: sections by name."""

    def load(self, engine: Artifact, **options: Any) -> Executor:
        """Load what `lower` wrote. Options are the backend's own. Raises ArtifactError."""

    def answers(self, engine: Artifact) -> Answers:
        """The logits that what `lower` wrote gives, without an executor; for a backend that does not serve."""


def _bad(what: str, found: object, expected: object) -> StepError:
    return StepError(f"malformed step: {what}", found=found, expected=expected)


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Raise StepError unless the arrays have their dtypes and shapes, agree, and fit `limits`."""
    for name in StepInput.__slots__:
        array = getattr(step, name)
        dims = 3 if name == "page_tables" else 1
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != dims:
            kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise _bad(name, kind, f"a contiguous int32 array of {dims} dimension(s)")
        if not array.flags.c_contiguous:
            raise _bad(name, "a strided view", "a contiguous array")
    tokens, positions, starts, lens = step.tokens, step.positions, step.seq_starts, step.context_lens
    count, sequences = len(tokens), len(lens)
    if not 1 <= count <= limits.max_tokens:
        raise _bad("tokens", count, f"1 to {limits.max_tokens}")
    if len(positions) != count:
        raise _bad("positions", len(positions), f"as many as tokens, {count}")
    if len(step.logit_rows) > limits.max_rows:
        raise _bad("logit_rows", len(step.logit_rows), f"at most {limits.max_rows}")
    if sequences < 1 or len(starts) != sequences + 1:
        raise _bad("seq_starts", len(starts), f"one more than the {sequences} sequences of context_lens")
    if starts[0] != 0 or starts[-1] != count or (starts[1:] <= starts[:-1]).any():
        raise _bad("seq_starts", starts.tolist(), f"ascending from 0 to {count}")
    if step.page_tables.shape[:2] != (len(limits.groups), sequences):
        raise _bad("page_tables", step.page_tables.shape, f"({len(limits.groups)}, {sequences}, pages)")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise _bad("tokens", f"ids {tokens.min()} to {tokens.max()}", f"0 to {limits.vocab_size - 1}")
    rows = step.logit_rows
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        raise _bad("logit_rows", f"{rows.min()} to {rows.max()}", f"0 to {count - 1}")
    lengths = starts[1:] - starts[:-1]
    first = lens - lengths
    if first.min() < 0 or lens.max() > limits.max_positions:
        raise _bad(
            "context_lens",
            lens.tolist(),
            f"at least the rows of each sequence, at most {limits.max_positions}",
        )
    expected = np.arange(count, dtype=np.int32) + np.repeat(first - starts[:-1], lengths)
    if not np.array_equal(positions, expected):
        row = int(np.flatnonzero(positions != expected)[0])
        raise _bad(
            f"positions, row {row}",
            int(positions[row]),
            f"{expected[row]}: rows are the last of their context",
        )
    for index, (group, pages) in enumerate(zip(limits.groups, limits.pages, strict=True)):
        _check_pages(index, group, pages, step.page_tables[index], first, lens)


def _check_pages(index: int, group: KvGroupInfo, pages: int, table: Ints, first: Ints, lens: Ints) -> None:
    """Check one group's table [S, P]: visible positions have pages, each written page is used once."""
    size, width = group.page_size, table.shape[1]
    if int(lens.max()) > width * size:
        raise _bad(
            f"page_tables of group {index}", f"{width} pages of {size}", f"room for {lens.max()} positions"
        )
    seen = np.maximum(first - group.window + 1, 0) if group.window else np.zeros_like(first)
    page = np.arange(width)
    last = (lens - 1) // size
    visible = (page >= (seen // size)[:, None]) & (page <= last[:, None])
    bad = visible & ((table < 0) | (table >= pages))
    if bad.any():
        sequence, at = (int(i) for i in np.argwhere(bad)[0])
        raise _bad(
            f"page_tables, group {index}, sequence {sequence}, positions from {at * size}",
            int(table[sequence, at]),
            f"a page of the pool of {pages}",
        )
    written = table[(page >= (first // size)[:, None]) & (page <= last[:, None])]
    if len(np.unique(written)) != len(written):
        raise _bad(
            f"page_tables of group {index}", "a page that is written for two places", "each page written once"
        )
