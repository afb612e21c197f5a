"""What Python costs beside the model when the server is full.

    python benchmarks/overhead.py --engine DIR [--streams 32] [--tokens 300] [--threads N] [--json FILE]

A server in this process, a client in another on the same cores: `--streams` requests at one moment, each streamed over a
connection of its own. Counted are the steps in which all decode. A step's period is the time from one executor call to the next;
what the executor and the row passes of sampling do not take of it, the loop's thread spends in Python: planning, bookkeeping,
turning tokens into text, handing pieces to readers. The event loop writes responses beside it, in a thread of its own:
it takes turns with the loop's Python, and a core from the executor where there are no more cores than threads.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.run import HttpServer, load_engine
from enginewright.runtime.server.settings import Settings


class Clock:
    """Times of each step, seconds: `periods` between executor calls, `native` work, `python` (CPU of the loop's own thread)
    and `events` (CPU of the event loop's thread) in a period."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self.streams = streams
        self.event_thread = 0
        self.periods: list[float] = []
        self.native: list[float] = []
        self.python: list[float] = []
        self.events: list[float] = []
        self._native = self._own = 0.0
        self._last: tuple[float, float, float] | None = None
        engine.executor.step = self._step(engine.executor.step)  # type: ignore[method-assign]
        rows = engine.loop._drawer._rows
        engine.loop._drawer._rows = _Rows(rows, self)

    def _step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(step: Any) -> Any:
            now = (time.perf_counter(), time.thread_time(), _cpu(self.event_thread))
            full = len(step.context_lens) == len(step.tokens) == self.streams
            if self._last is not None and full:
                self.periods.append(now[0] - self._last[0])
                self.python.append(now[1] - self._last[1] - self._own)
                self.events.append(now[2] - self._last[2])
                self.native.append(self._native)
            self._last = now if full else None
            self._native = self._own = 0.0
            return self.timed(call, step)

        return step

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call what is native, and count its time as such."""
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            return call(*arguments)
        finally:
            self._native += time.perf_counter() - started
            self._own += time.thread_time() - cpu

    def medians(self) -> dict[str, float]:
        """Milliseconds a step, and shares of it."""
        period, native, python, events = (
            1000 * statistics.median(times) for times in (self.periods, self.native, self.python, self.events)
        )
        return {
            "steps": len(self.periods),
            "period": period,
            "native": native,
            "loop": period - native,
            "loop_cpu": python,
            "events_cpu": events,
            "loop_share": (period - native) / period,
            "loop_cpu_share": python / period,
        }


class _Rows:
    def __init__(self, rows: Any, clock: Clock) -> None:
        self._rows, self._clock = rows, clock

    def draw(self, *arguments: Any) -> Any:
        return self._clock.timed(self._rows.draw, *arguments)

    def score(self, *arguments: Any) -> Any:
        return self._clock.timed(self._rows.score, *arguments)


def _cpu(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if thread else 0.0


def serve(settings: Settings, clocks: list[Clock], streams: int) -> tuple[HttpServer, threading.Thread]:
    """Start a server in a thread, with a clock on its engine; return once it is ready."""

    def loading() -> Engine:
        engine = load_engine(settings)
        clocks.append(Clock(engine, streams))
        return engine

    server = HttpServer(settings, loading)

    def run() -> None:
        asyncio.run(server.serve())

    thread = threading.Thread(target=run, name="events")
    thread.start()
    while server.service.phase != "ready":
        if server.failure is not None:
            raise server.failure
        time.sleep(0.05)
    clocks[0].event_thread = thread.ident or 0
    return server, thread


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--engine", type=click.Path(path_type=Path, exists=True), required=True, help="The engine's folder."
)
@click.option(
    "--streams", type=click.IntRange(min=1), default=32, show_default=True, help="Requests at once."
)
@click.option("--tokens", type=click.IntRange(min=2), default=300, show_default=True, help="Of each answer.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the executor; one a core unless given.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures.")
def main(engine: Path, streams: int, tokens: int, threads: int | None, json_file: Path | None) -> None:
    """Measure what Python costs beside the model when the server is full."""
    clocks: list[Clock] = []
    settings = Settings(engine, port=0, threads=threads, max_sequences=streams)
    server, thread = serve(settings, clocks, streams)
    try:
        host, port = server.addresses[0]
        client = [sys.executable, "-m", "enginewright", "bench", str(engine), "--workload", "burst"]
        client += ["--burst", str(streams), "--requests", str(streams), "--rate", "1000"]
        client += [
            "--prompt-tokens",
            "16:32",
            "--new-tokens",
            str(tokens),
            "--url",
            f"http://{host}:{port}",
            "--json",
        ]
        done = subprocess.run(client, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(done.stderr)
    finally:
        server.stop()
        thread.join()
    figures = clocks[0].medians()
    table = Table(title=f"{streams} streams, medians of {figures['steps']:,} steps")
    for column in ("", "ms a step", "of the step"):
        table.add_column(column, justify="left" if not column else "right")
    names = {
        "period": "step, from one to the next",
        "native": "executor and row passes",
        "loop": "the loop's Python, waiting included",
        "loop_cpu": "the loop's Python, CPU",
        "events_cpu": "responses (event loop), CPU",
    }
    for name, label in names.items():
        table.add_row(label, f"{figures[name]:.2f}", f"{figures[name] / figures['period']:.1%}")
    Console(width=100).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
