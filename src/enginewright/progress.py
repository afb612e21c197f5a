"""What a person sees while an engine is built: the running stage and what it is at, then one line for each that is done.

A terminal shows the running stage on a line that changes. Where there is none (a pipe, a file, a container's log), a stage that
takes long writes a line of its own every ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.status import Status

EVERY_SECONDS = 10.0  # between two lines about a running stage, where there is no terminal


@dataclass
class StageRecord:
    """One finished stage or pass: `seconds` of wall clock, `matches` for a pass, a few words of `detail`."""

    name: str
    seconds: float
    matches: int | None = None
    detail: str = ""


@dataclass
class Progress:
    """Collects the records of a build and shows them on `console` (None shows nothing)."""

    console: Console | None = None
    records: list[StageRecord] = field(default_factory=list)
    _status: Status | None = None
    _stage: str = ""
    _told: float = 0.0  # when the last line was written

    @contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        """Time a stage. The body may set `detail` on the record that it gets."""
        record = StageRecord(name, 0.0)
        started = time.perf_counter()
        self._stage, self._told = name, started
        try:
            if self.console is None:
                yield record
            else:
                with self.console.status(f"{name} …") as self._status:
                    yield record
        finally:
            self._status = None
        record.seconds = time.perf_counter() - started
        self.add(record)

    def update(self, text: str) -> None:
        """Say what the running stage is at."""
        if self.console is None or self._status is None:
            return
        says = f"{self._stage} … {escape(text)}"
        if self.console.is_terminal:
            self._status.update(says)
        elif (now := time.perf_counter()) - self._told >= EVERY_SECONDS:
            self._told = now
            self.console.print(f"           {says}", highlight=False, soft_wrap=True)

    def add(self, record: StageRecord, indent: int = 0) -> None:
        """Keep a finished record and print its line."""
        self.records.append(record)
        if self.console is None:
            return
        matches = (
            "" if record.matches is None else f"{record.matches} match{'' if record.matches == 1 else 'es'}"
        )
        detail = "  ".join(part for part in (matches, escape(record.detail)) if part)
        self.console.print(
            f"[dim]{record.seconds:7.2f} s[/dim]  {' ' * indent}{record.name:<{22 - indent}}  {detail}",
            highlight=False,
            soft_wrap=True,
        )
