"""What a build says while it runs: in a terminal, and where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from enginewright import progress
from enginewright.progress import Progress
from tests.test_cli import folder, run_optimize


def told(monkeypatch: pytest.MonkeyPatch, clock: list[float], terminal: bool) -> tuple[Progress, io.StringIO]:
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    text = io.StringIO()
    return Progress(Console(file=text, force_terminal=terminal, width=100)), text


def test_a_long_stage_writes_a_line_every_ten_seconds_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    shown, text = told(monkeypatch, clock, terminal=False)
    with shown.stage("passes"):
        for second in range(1, 26):
            clock[0] = 100.0 + second
            shown.update(f"model.layers.{second}, {25 - second} s left [x]")
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert lines[:2] == [
        "passes … model.layers.10, 15 s left [x]",
        "passes … model.layers.20, 5 s left [x]",
    ]
    assert len(lines) == 3 and lines[2].startswith("25.00 s  passes")


def test_a_short_stage_writes_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    shown, text = told(monkeypatch, clock, terminal=False)
    for _ in range(3):
        with shown.stage("verify"):
            clock[0] += 6.0
            shown.update("sample 1 of 2")
    assert [line.split()[2] for line in text.getvalue().splitlines()] == ["verify"] * 3


def test_a_terminal_shows_what_the_stage_is_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, text = told(monkeypatch, [0.0], terminal=True)
    with shown.stage("passes"):
        shown.update("model.layers.3")
        assert shown._status is not None
        shown._status._live.refresh()
    assert "passes … model.layers.3" in text.getvalue()


def test_a_calibrated_build_tells_place_and_time_left(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    small = (
        "--set",
        "calibration.samples=3",
        "--set",
        "calibration.length=40",
        "--set",
        "linear.weight=int4_g16",
    )
    result = run_optimize(folder("llama"), "--recipe", "int4-gptq", *small, "-o", tmp_path / "engine")
    assert "tokens written by the model" in result.output and "calibrate …" in result.output, result.output
    assert "passes … model.layers." in result.output and "s left" in result.output
