"""What `--speculate` and `--draft-tokens` take, and what is said of all else, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginewright.backends.artifact import Artifact
from enginewright.recipes.errors import InputError
from enginewright.runtime.drafters import check
from tests.runtime.server.serving import tiny_engine, write_tokenizer


@pytest.mark.parametrize(
    ("how", "draft_tokens", "says"),
    [
        ("ngrm", "auto", "did you mean ngram"),
        ("\0", "auto", "no such drafter"),
        ("a drafter", "auto", "no such drafter"),
        ("nowhere/engine", "auto", "no such drafter"),
        ("FOLDER", "auto", "is not an engine"),
        (["ngram"], "auto", "speculate cannot be used"),
        (7, "auto", "speculate cannot be used"),
        ("ngram", 0, "from 1 to 64"),
        ("ngram", 65, "from 1 to 64"),
        ("ngram", True, "from 1 to 64"),
        ("ngram", "4", "from 1 to 64"),
        ("ngram", 1.0, "from 1 to 64"),
        ("ngram", None, "from 1 to 64"),
        (None, 4, "draft_tokens means nothing without speculation"),
    ],
)
def test_what_cannot_speculate_is_said(tmp_path: Path, how: Any, draft_tokens: Any, says: str) -> None:
    target = Artifact(tmp_path, {})
    with pytest.raises(InputError, match=says):
        check(target, str(tmp_path) if how == "FOLDER" else how, draft_tokens)


def test_a_rule_is_one_of_two_and_needs_a_drafter(tmp_path: Path) -> None:
    target = Artifact(tmp_path, {})
    assert check(target, "ngram", 4, "resample") == "ngram" and check(target, None) is None
    with pytest.raises(InputError, match="same or resample"):
        check(target, "ngram", "auto", "sample")
    with pytest.raises(InputError, match="draft_rule means nothing without speculation"):
        check(target, None, "auto", "resample")


def test_an_engine_speculates_as_it_is_told(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    with tiny_engine(folder) as engine:
        assert engine.loop.statistics().speculation is None and engine.loop.statistics().tokens_per_step == 1
    with tiny_engine(folder, speculate="ngram", draft_tokens=3) as engine:
        assert engine.loop.speculator is not None and engine.loop.speculator.tokens == 3
        before = engine.loop.statistics()
        (completion,) = engine.generate("ABC", max_tokens=20, ignore_eos=True, logit_bias={0: 100})
        after = engine.loop.statistics()
    assert completion.token_ids == [0] * 20 and completion.accepted > 9
    assert before.speculation is not None and before.speculation.drafted == 0, "it is a picture of its time"
    assert after.speculation is not None and after.speculation.accepted == completion.accepted
    assert after.tokens_per_step == 20 / (20 - after.speculation.gained) > 1
    found = after.speculation.since(before.speculation)
    assert found == after.speculation and found.acceptance_by_position[0] == 1.0
    again = after.speculation.since(after.speculation)
    assert (again.drafted, again.by_position) == (0, []) and again.acceptance_rate == 0
