"""benchmarks/speculation.py: what does not depend on the clock is exactly what it must be, and a whole small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import enginewright
from benchmarks import speculation, speculation_texts
from benchmarks.speculation import Asked
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import SamplingOptions
from tests.passes.architectures import folder
from tests.runtime.server.serving import LETTERS, Scripted, tiny_engine, write_tokenizer

OPTIONS = SamplingOptions(max_tokens=41, ignore_eos=True)


class Looping(Scripted):
    """Says A to G over and over; from step `turns` on B to H."""

    turns = 10**9

    def __init__(self) -> None:
        super().__init__([i % 7 for i in range(100)], 3, len(LETTERS))

    def step(self, step: Any) -> Any:
        logits = super().step(step)
        return logits if len(self.steps) < self.turns else np.roll(logits, 1, axis=1)


def engine_of(tmp_path: Path, executor: Looping | None = None, **options: Any) -> Engine:
    executor = executor or Looping()
    return tiny_engine(write_tokenizer(tmp_path), executor, speculate="ngram", prefix_cache=False, **options)


def test_figures_are_those_of_the_decoding_that_was_timed(tmp_path: Path) -> None:
    prompts = [Asked([20 + i, 21, 22], OPTIONS) for i in range(3)]
    with engine_of(tmp_path, draft_tokens=4) as engine:
        before = engine.loop.speculator
        row = speculation.compare(engine, prompts, 1, 3)
        full = speculation.compare(engine, prompts, 2, 1)
        assert engine.loop.speculator is before
        plain = speculation.decode(engine, prompts, 1)
    assert row["same"] and row["batch"] == 1 and row["tokens"] == 3 * 40 and len(row["ratios"]) == 3
    # Nine answers of 41 tokens in two places: timed until no prompt is left and a place is empty.
    assert full["same"] and 8 * 40 <= full["tokens"] <= 9 * 41 and full["acceptance_rate"] == 1.0
    assert [len(tokens) for tokens, _ in plain.answers] == [41] * 3
    # The loop is known after its first ten tokens (its first three again), and from then on every step gives five:
    # of 40 timed tokens 9 come alone, 31 in runs of 5, the last of them as the limit allows.
    steps = 9 + -(-31 // 5)
    assert row["tokens_per_step"] == pytest.approx(40 / steps)
    assert row["acceptance_rate"] == 1.0 and row["acceptance_by_position"] == [1.0] * 4
    assert row["accepted_tokens"] == row["drafted_tokens"] == 3 * 3 * (40 - steps)
    assert row["plain_tokens_per_second"] > 0 and row["ratio"] > 0 and 0 < row["drafting_share"] < 1


def test_answers_that_differ_are_seen(tmp_path: Path) -> None:
    executor = Looping()
    with engine_of(tmp_path, executor, draft_tokens=2) as engine:
        prompts = [Asked([20, 21, 22], OPTIONS)]
        assert speculation.compare(engine, prompts, 1, 1)["same"]
        executor.turns = len(executor.steps) + 70  # within the runs that are timed
        assert not speculation.compare(engine, prompts, 1, 2)["same"]


def test_a_batch_is_filled_again_and_again() -> None:
    prompts = [Asked([i], OPTIONS) for i in range(3)]
    assert [[one.ids[0] for one in group] for group in speculation.groups(prompts, 1)] == [[0], [1], [2]]
    for batch in (2, 5):
        (group,) = speculation.groups(prompts, batch)
        asked = [one.ids[0] for one in group]
        assert len(asked) >= speculation.FILLINGS * batch and asked == [0, 1, 2] * (len(asked) // 3)


def test_each_kind_of_work_has_eight_prompts_of_its_own() -> None:
    kinds = [
        [prompt for prompt, _ in speculation_texts.JSON],
        speculation_texts.EDITS,
        speculation_texts.QUOTES,
        speculation_texts.FREE,
    ]
    assert [len(kind) for kind in kinds] == [8] * 4
    assert len({prompt for kind in kinds for prompt in kind}) == 32


def test_a_whole_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDITS", "QUOTES", "FREE"):
        monkeypatch.setattr(speculation, name, ["w5 w6 w7 w5 w6 w7 w5 w6", "w8 w9"])
    path = enginewright.optimize(folder("llama"), "fp32", tmp_path / "llama").path
    arguments = ["--engine", path, "--small", "--threads", 1, "--draft-tokens", 3]
    arguments += [part for name in ("edit", "quote", "free", "free 0.8") for part in ("--work", name)]
    arguments += ["--json", tmp_path / "found.json", "--plot", tmp_path / "found.png"]
    done = CliRunner().invoke(speculation.main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["drafters"]["ngram"]
    assert [(row["work"], row["batch"]) for row in rows] == [
        (work, batch) for work in ("edit", "quote", "free", "free 0.8") for batch in (1, 2)
    ]
    assert all(row["same"] for row in rows) and found["small"] and rows[0]["drafted_tokens"] > 0
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    for words in ("by position", "tokens a step", "yes", "draft tokens 3"):
        assert words in done.output
