"""Engines that draft with their own first layers: built, looked at, and the same answers as without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import enginewright
from enginewright.backends.artifact import open_engine
from enginewright.cli import engine as engine_command
from enginewright.cli import optimize as optimize_command
from enginewright.recipes.errors import ArtifactError, InputError
from tests.passes.architectures import folder

LAYERS = {"llama": 1, "gemma3_text": 2, "mixtral": 1}
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 17, 40)]
DISTILLED = ["draft.head=distilled", "calibration.samples=32", "calibration.length=40"]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "penalties": {"temperature": 0.6, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "seed": 6},
}


@pytest.fixture(scope="module", params=LAYERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = LAYERS[request.param]
    out = tmp_path_factory.mktemp("engines") / request.param
    return enginewright.optimize(
        folder(request.param), "int8", out, overrides=[f"draft.layers={layers}"]
    ).path


def answers(path: Path, name: str, **options: Any) -> tuple[list[Any], Any]:
    with enginewright.load(path, **options) as engine:
        found = engine.generate(PROMPTS, max_tokens=60, ignore_eos=True, logprobs=2, **SAMPLING[name])
        speculator = engine.loop.speculator
        engine.loop.scheduler.check_invariants()
        assert engine.loop.pool.idle
        return found, None if speculator is None else speculator.figures


@pytest.mark.parametrize("name", SAMPLING)
def test_answers_are_those_without_drafting(built: Path, name: str) -> None:
    want, _ = answers(built, name)
    for draft_tokens in (1, 3, 8, "auto"):
        for most in (1, 4):
            found, figures = answers(
                built, name, speculate="self", draft_tokens=draft_tokens, max_sequences=most
            )
            assert found == want, f"{draft_tokens} tokens, {most} sequences"
            assert figures.failures == 0
            if draft_tokens != "auto":
                assert figures.drafted > figures.accepted > 0


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "distilled"
    return enginewright.optimize(folder("llama"), "int8", out, overrides=[*DISTILLED, "draft.layers=1"]).path


def test_a_distilled_head_brings_the_draft_nearer_and_changes_no_answer(
    distilled: Path, tmp_path: Path
) -> None:
    artifact = open_engine(distilled, check=True)
    found = artifact.manifest["calibration"]["draft_head"]
    assert (
        found["top1"]["distilled"] > found["top1"]["shared"]
        and found["kl"]["distilled"] < found["kl"]["shared"]
    )
    assert found["tokens"] == 30 * 40 and found["judged_tokens"] == 2 * 40
    shown = CliRunner(env={"COLUMNS": None}).invoke(engine_command, ["inspect", str(distilled)])
    assert f"top-1 agreement {found['top1']['distilled']:.1%}" in shown.output
    shared = enginewright.optimize(folder("llama"), "int8", tmp_path / "e", overrides=["draft.layers=1"]).path
    assert (shared / "program.json").read_bytes() == (distilled / "program.json").read_bytes()
    small, large = ((path / "weights.bin").read_bytes() for path in (shared, distilled))
    assert large.startswith(small) and 0 < len(large) - len(small) < 8192, "the map alone is new"
    for name in SAMPLING:
        found_answers, figures = answers(distilled, name, speculate="self", draft_tokens=3)
        assert found_answers == answers(shared, name)[0]
        assert figures.accepted > 0 and figures.failures == 0
    better = answers(distilled, "greedy", speculate="self", draft_tokens=2)[1].acceptance_rate
    assert better > answers(shared, "greedy", speculate="self", draft_tokens=2)[1].acceptance_rate


def test_the_engine_says_that_it_can_draft(built: Path) -> None:
    artifact = open_engine(built, check=True)
    layers = artifact.manifest["recipe"]["draft"]["layers"]
    assert "draft.json" in artifact and layers == LAYERS[built.name]
    shown = CliRunner(env={"COLUMNS": None}).invoke(engine_command, ["inspect", str(built)])
    assert f"first {layers} layer" in shown.output and "draft.json" in shown.output


def test_a_draft_changes_no_other_file(built: Path, tmp_path: Path) -> None:
    plain = enginewright.optimize(folder(built.name), "int8", tmp_path / "plain").path
    for name in ("program.json", "weights.bin"):
        assert (plain / name).read_bytes() == (built / name).read_bytes()
    assert not (plain / "draft.json").exists()
    with pytest.raises(InputError, match="first layers"):
        enginewright.load(plain, speculate="self")
    shown = CliRunner(env={"COLUMNS": None}).invoke(engine_command, ["inspect", str(plain)])
    assert "draft" not in shown.output


def test_a_draft_that_was_changed_is_noticed(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    text = (copy / "draft.json").read_text()
    (copy / "draft.json").write_text(text.replace('"eps"', '"epz"'))
    with pytest.raises(ArtifactError, match=r"draft\.json"):
        open_engine(copy, check=True)
    (copy / "draft.json").unlink()
    with pytest.raises(ArtifactError, match=r"draft\.json"):
        open_engine(copy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "draft.layers=2"], ["draft.layers=2", "2 layers", "1 to 1"]),
        (["--set", "draft.layers=-1"], ["draft.layers", "0 or more"]),
        (["--set", "draft.layers=1.5"], ["draft.layers", "1.5"]),
        (["--set", "draft.layers=true"], ["draft.layers", "True"]),
        (["--set", "draft.head=distilled"], ["draft.layers", "draft.head", "go together"]),
        (["--set", "draft.head=large"], ["draft.head", "shared, distilled"]),
        (["--set", "draft.layer=1"], ["did you mean 'draft.layers'"]),
        (["--set", "draft.layers=1", "--backend", "checkpoint"], ["checkpoint", "writes no drafts"]),
    ],
    ids=[
        "too many",
        "negative",
        "a fraction",
        "true",
        "no layers",
        "no such head",
        "misspelt",
        "another backend",
    ],
)
def test_what_cannot_draft_is_refused(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    out = tmp_path / "out"
    result = CliRunner(env={"COLUMNS": None}).invoke(
        optimize_command, [str(folder("llama")), "--recipe", "int8", "-o", str(out), *arguments]
    )
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    for word in words:
        assert word in result.output
    assert not list(tmp_path.iterdir())


def test_equal_builds_give_equal_engines(tmp_path: Path) -> None:
    for name in ("one", "two"):
        enginewright.optimize(folder("llama"), "int8", tmp_path / name, overrides=["draft.layers=1"])
    one, two = ((tmp_path / name / "engine.json").read_bytes() for name in ("one", "two"))
    assert one == two and json.loads(one)["recipe"]["draft"] == {"layers": 1, "head": "shared"}
