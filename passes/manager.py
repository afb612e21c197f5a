"""Runs passes over a Program: legality and dead code between them, times, match counts, progress, dumps.

A pass is one file: a docstring with its rewrite rules as a numbered list, and a class with `name`, `options`
and `run(program) -> PassResult`. `pipeline.py` puts passes in order as `Step`s; `run_steps` runs them.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from enginewright.passes import legality
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError

__all__ = [
    "Pass",
    "PassRecord",
    "PassResult",
    "Progress",
    "Step",
    "remove_dead_code",
    "rules_of",
    "run_steps",
]


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one run of a pass did: how many places it rewrote, notes worth a user's attention, and what the manifest keeps."""

    matches: int
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Pass(Protocol):
    """A rewrite of the whole Program, in place, by the numbered rules of its docstring."""

    name: str
    options: Mapping[str, Any]

    def run(self, program: Program) -> PassResult: ...


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the pipeline: a pass, the stage the Program has reached once it ran, whether it must match."""

    rewrite: Pass
    stage: Stage
    required: bool = False


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """One line of the pass log: nodes are counted before the pass and after dead code is gone."""

    name: str
    matches: int
    seconds: float
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)


#: Called as progress(name, index, total) before each pass, and progress(None, total, total) at the end.
Progress = Callable[[str | None, int, int], None]


def run_steps(
    program: Program,
    steps: Sequence[Step],
    *,
    progress: Progress | None = None,
    dump: Path | None = None,
    check: Callable[[Program, str], None] | None = None,
) -> list[PassRecord]:
    """Run the steps in order on `program`, in place; returns one record a pass.

    The graph's legality is checked before the first pass and after each. With `dump`, the graph is written to that
    folder as text, before the first pass and after each. `check(program, name)` is called after each pass. Raises
    LoweringError, naming the passes that ran, when a graph is illegal or a required pass matched nothing.
    """
    records: list[PassRecord] = []
    ran: list[str] = []
    legality.check(program, ran)
    _write(program, dump, 0, "input")
    for index, step in enumerate(steps):
        name = step.rewrite.name
        if progress is not None:
            progress(name, index, len(steps))
        before, started = len(program.graph.nodes), time.perf_counter()
        result = step.rewrite.run(program)
        ran.append(name)
        if step.required and not result.matches:
            raise LoweringError(
                f"pass `{name}` must match, and found nothing to rewrite",
                found=f"{before} nodes, none as its rules describe; passes so far: {', '.join(ran)}",
                action=f"write the graph with --dump DIR and compare it with the rules of passes/{name}.py",
            )
        remove_dead_code(program)
        program.stage = step.stage
        program.recompile()
        legality.check(program, ran)
        seconds = time.perf_counter() - started
        records.append(
            PassRecord(
                name, result.matches, seconds, before, len(program.graph.nodes), result.notes, result.record
            )
        )
        program.notes.extend(f"{name}: {note}" for note in result.notes)
        _write(program, dump, index + 1, name)
        if check is not None:
            check(program, name)
    if progress is not None:
        progress(None, len(steps), len(steps))
    return records


def remove_dead_code(program: Program) -> None:
    """Erase every node that nothing reads, inputs excepted (fx's own routine wants the module to hold the weights)."""
    for node in reversed(program.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            program.graph.erase_node(node)


def rules_of(rewrite: Pass) -> str:
    """The docstring of the pass's file: its numbered rules."""
    return inspect.getdoc(inspect.getmodule(type(rewrite))) or ""


def _write(program: Program, folder: Path | None, index: int, name: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{index:02d}_{name}.txt").write_text(program.dump(), encoding="utf-8")
