"""`engine verify` on engines on disk: whole, damaged, against their model, another, and an earlier engine."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import enginewright
from enginewright.backends.artifact import open_engine
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.build_cache import copy_engine
from enginewright.cli import engine
from enginewright.verification import on_disk
from tests.passes.architectures import folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enginewright.optimize(folder("llama"), "int8", tmp_path_factory.mktemp("engines") / "llama").path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "engine"))


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(engine, ["verify", *map(str, arguments)])


def checks(file: Path) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


def test_an_engine_against_its_model(built: Path, tmp_path: Path) -> None:
    files = ["--json", tmp_path / "v.json", "--junit", tmp_path / "v.xml"]
    result = run(built, "--against", folder("llama"), *files)
    assert result.exit_code == 0, result.output
    found = checks(tmp_path / "v.json")
    assert all(check["passed"] for check in found.values()) and "preemption" in found
    recorded = json.loads((built / "engine.json").read_text())["verification"]
    written = json.loads((tmp_path / "v.json").read_text())
    without_passes = {**recorded, "stages": [], "matrices": {}}  # what lies between model and engine is gone
    assert written["verification"] == without_passes and written["verdict"] == "passed"
    suite = ElementTree.parse(tmp_path / "v.xml").getroot()[0]
    assert int(suite.get("tests", "0")) == len(found) and suite.get("failures") == "0"
    assert {case.get("name") for case in suite.iter("testcase")} == set(found)


def test_one_flipped_byte_anywhere_is_named(copy: Path, tmp_path: Path) -> None:
    assert run(copy).exit_code == 0
    for file in sorted(path for path in copy.iterdir()):
        data = bytearray(file.read_bytes())
        for place in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 1
            file.write_bytes(changed)
            result = run(copy, "--junit", tmp_path / "v.xml")
            assert result.exit_code == 1 and file.name in result.output, (file.name, place, result.output)
            suite = ElementTree.parse(tmp_path / "v.xml").getroot()[0]
            assert suite.get("failures") == "1" and next(suite.iter("failure")) is not None
            assert "bisect" not in result.output, "no pass has changed the file"
        file.write_bytes(data)
    assert run(copy).exit_code == 0


def test_recorded_answers_are_asked_for_again(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> dict[str, Any]:
        run(built, "--json", tmp_path / "v.json")
        return checks(tmp_path / "v.json")["recorded answers"]

    assert found()["passed"] and found()["found"].startswith("the same bits")
    step, off = CpuExecutor.step, 1.0

    def drifting(self: CpuExecutor, *arguments: Any) -> Any:
        return step(self, *arguments) * np.float32(off)

    monkeypatch.setattr(CpuExecutor, "step", drifting)
    off = 1 + 1e-6
    assert not found()["passed"] and "bit for bit" in found()["found"]
    monkeypatch.setattr(on_disk, "__version__", "another")
    assert found()["passed"], "another version need not give the same bits"
    off = 1.5
    assert not found()["passed"] and "of the largest" in found()["found"]


def test_bisect_tells_the_engine_s_files_from_what_made_them(copy: Path, tmp_path: Path) -> None:
    against = ["--against", folder("llama"), "--bisect", "--json", tmp_path / "v.json"]
    good = run(copy, *against)
    assert good.exit_code == 0 and "Nothing left its limit" in good.output, good.output
    data = bytearray((copy / "weights.bin").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = bytes(2000)
    (copy / "weights.bin").write_bytes(data)
    # Published anew, so that its hashes are right.
    spoiled = copy_engine(open_engine(copy), tmp_path / "spoiled")
    bad = run(spoiled, *against)
    assert bad.exit_code == 1 and "the engine's own files or the runtime do not" in bad.output, bad.output
    assert json.loads((tmp_path / "v.json").read_text())["bisection"]["kind"] == "engine"


def test_another_model_is_refused(built: Path) -> None:
    result = run(built, "--against", folder("gpt2"))
    assert result.exit_code == 2 and "was not built from" in result.output


def test_a_baseline_holds_quality_and_size(built: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    model = ["--against", folder("llama")]
    assert run(built, *model, "--json", baseline).exit_code == 0
    result = run(built, *model, "--baseline", baseline)
    assert result.exit_code == 0 and "against the baseline" in result.output
    earlier = json.loads(baseline.read_text())
    figures = earlier["verification"]

    def held(change: dict[str, Any], allowed: dict[str, float] | None = None) -> Result:
        better = {
            **earlier,
            "verification": {**figures, **change},
            "bytes": change.get("bytes", earlier["bytes"]),
        }
        if allowed is not None:
            better["allowed"] = allowed
        baseline.write_text(json.dumps(better))
        return run(built, *model, "--baseline", baseline)

    worse = {
        "mean_kl": figures["mean_kl"] / 2,
        "top1_agreement": 1.1 * figures["top1_agreement"],
        "perplexity_ratio": figures["perplexity_ratio"] / 1.1,
        "bytes": earlier["bytes"] * 0.9,
    }
    for name, value in worse.items():
        result = held({name: value})
        error = result.output.split("error:")[1]
        assert result.exit_code == 1 and f"{name} against the baseline" in error
        assert "since the baseline was written" in " ".join(error.split())
        assert held({name: value}, {name: 2.0}).exit_code == 0
    assert held({}, {"speed": 1.0}).exit_code == 2
    assert run(built, "--baseline", baseline).exit_code == 2
    assert run(built, *model, "--level", "full", "--baseline", baseline).exit_code == 2
    baseline.write_text("{}")
    assert run(built, *model, "--baseline", baseline).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "x"], "no --against"),
        (["--bisect"], "no --against"),
        (["--against", folder("llama"), "--calibration", "x"], "no --bisect"),
        (["--json", "/nowhere/v.json"], "no such folder"),
        (["--level", "thorough"], "thorough"),
    ],
)
def test_what_cannot_be_used_is_said(built: Path, arguments: list[object], said: str) -> None:
    result = run(built, *arguments)
    assert result.exit_code == 2 and said in result.output
