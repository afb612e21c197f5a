"""Requests served in every way: an engine whose answers depend on it is refused, and the way is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginewright
from enginewright.backends.base import StepInput
from enginewright.runtime.engine import Engine
from enginewright.verification.samples import text_tokens
from enginewright.verification.schedules import compare_schedules
from tests.passes.architectures import folder

WAYS = [
    "other requests beside",
    "chunked prefill",
    "a prefix hit",
    "preemption",
    "proposed tokens",
    "one thread",
]
Change = Callable[[StepInput, np.ndarray], None]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enginewright.optimize(folder("llama"), "int8", tmp_path_factory.mktemp("engines") / "llama").path


@pytest.fixture
def engine(built: Path) -> Iterator[Engine]:
    with enginewright.load(built, threads=2, max_sequences=8) as engine:
        yield engine


class Changed:
    """The engine's executor, with `change` applied to each step's logits."""

    def __init__(self, executor: Any, change: Change) -> None:
        self._executor, self._change = executor, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, step: StepInput) -> np.ndarray:
        logits = self._executor.step(step).copy()
        self._change(step, logits)
        return logits


def served(engine: Engine) -> dict[str, dict[str, Any]]:
    stream = text_tokens(None, engine.vocab_size, 320)
    return {way["name"]: way for way in compare_schedules(engine, stream)}


def test_every_way_comes_about_and_gives_the_same(engine: Engine) -> None:
    found = served(engine)
    assert list(found) == WAYS
    assert all(way["same"] and way["happened"] and not way["found"] for way in found.values())


def in_company(step: StepInput, logits: np.ndarray) -> None:
    if len(step.context_lens) > 1:
        logits *= np.float32(1 + 1e-6)


def after_chunks(step: StepInput, logits: np.ndarray) -> None:
    """Wrong where a prompt's end is computed on top of cached positions."""
    rows = np.diff(step.seq_starts)
    cached = (step.context_lens > rows) & (rows > 1)
    if cached.any():
        logits[:, 3] += 40


def several_rows(step: StepInput, logits: np.ndarray) -> None:
    """Wrong where several rows of a step are asked for, as when proposed tokens are verified."""
    if len(step.logit_rows) > len(step.context_lens):
        logits[:, 5] += 40


FAULTS: dict[str, tuple[Change, str]] = {
    "in company": (in_company, "other requests beside"),
    "after chunks": (after_chunks, "chunked prefill"),
    "verified rows": (several_rows, "proposed tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_depends_on_the_schedule_is_found(engine: Engine, fault: str) -> None:
    change, way = FAULTS[fault]
    engine.executor = Changed(engine.executor, change)  # type: ignore[assignment]
    found = served(engine)
    assert not found[way]["same"] and "request" in found[way]["found"]
