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
from enginewright.backends.artifact import _own_hash, open_engine
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.build_cache import copy_engine
from enginewright.cli import engine
from enginewright.verification import on_disk
from enginewright.verification.checks import Check, EngineReport, checks_of, junit
from tests.passes.architectures import ARCHITECTURES, folder


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
    baseline.write_text(json.dumps({**earlier, "model": {**earlier["model"], "parameters": 5}}))
    result = run(built, *model, "--baseline", baseline)
    assert result.exit_code == 2 and "another model's" in result.output
    baseline.write_text(json.dumps(earlier))
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


def rewritten(engine_folder: Path, change: Any) -> None:
    """Change the manifest, and set its hash right."""
    manifest = json.loads((engine_folder / "engine.json").read_text())
    change(manifest)
    manifest["manifest_sha256"] = _own_hash(manifest, "manifest_sha256")
    (engine_folder / "engine.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("key", ["model", "recipe", "kv_groups", "verification"])
@pytest.mark.parametrize("value", [None, [None], {}, 10**30])
def test_a_manifest_of_another_shape_fails_and_has_a_page(
    copy: Path, tmp_path: Path, key: str, value: object
) -> None:
    rewritten(copy, lambda manifest: manifest.update({key: value}))
    page = tmp_path / "engine.html"
    page.write_text("an earlier one: passed")
    result = run(copy, "--against", folder("llama"), "--html", page)
    assert result.exit_code == 1 and f"no usable {key}" in result.output, result.output
    assert "failed" in page.read_text() and "passed" not in page.read_text()


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000])
def test_json_that_cannot_be_hashed_is_damage(copy: Path, text: str) -> None:
    for name in ("build.json", "engine.json"):
        (copy / name).write_text(text)
        result = run(copy)
        assert result.exit_code == 1 and name in result.output, result.output


def test_names_that_no_file_has_are_refused(copy: Path) -> None:
    (copy / "circle").symlink_to("circle")
    for name in ("a\0b", "circle"):
        rewritten(
            copy, lambda manifest, name=name: manifest["files"].update({name: {"bytes": 1, "sha256": ""}})
        )
        result = run(copy)
        assert result.exit_code == 1 and "names a file outside" in result.output, result.output


def test_an_engine_that_its_build_refused_does_not_verify(tmp_path: Path) -> None:
    built = enginewright.optimize(
        folder("llama"), "int8", tmp_path / "e", overrides=["verify.max_kl=1e-12"], allow_unverified=True
    )
    result = run(built.path)
    assert result.exit_code == 1 and "verdict of the build" in result.output, result.output


def test_every_failure_of_a_verification_is_a_failed_check(built: Path) -> None:
    recorded = json.loads((built / "engine.json").read_text())["verification"]
    assert all(check.passed for check in checks_of(recorded))
    uneven = {
        **recorded,
        "invariant": False,
        "failures": ["logits depend on how the requests were scheduled"],
    }
    assert [check.group for check in checks_of(uneven) if check.passed is False] == ["schedules"]
    other = {**recorded, "failures": ["something new"]}
    assert [check.found for check in checks_of(other) if check.passed is False] == ["something new"]


def test_another_model_of_the_same_shapes_fails(built: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    ARCHITECTURES["llama"](matrix_std=0.201).save_pretrained(twin)
    result = run(built, "--against", twin)
    assert result.exit_code == 1 and "the model that it was built from" in result.output, result.output


def test_results_that_cannot_be_written_are_said(built: Path) -> None:
    for option in ("--json", "--junit", "--html"):
        result = run(built, option, "/dev/full")
        assert result.exit_code == 2 and "cannot be written" in result.output, result.output


def test_junit_is_xml_whatever_a_check_says() -> None:
    hostile = "<script>\"'&\n\x00\x1b\ud800\ufffe]]>é𝄞"
    report = EngineReport(hostile, {}, "quick", checks=[Check("files", hostile, False, hostile, hostile)])
    case = next(ElementTree.fromstring(junit(report)).iter("testcase"))
    assert str(case.get("name")).startswith("<script>\"'&\n\\x00\\x1b\\ud800")


@pytest.mark.parametrize("value", [None, float("nan"), "0.1", True])
def test_a_baseline_without_a_figure_is_refused(built: Path, tmp_path: Path, value: object) -> None:
    figures = {"mean_kl": 0.1, "p999_kl": 0.1, "top1_agreement": 0.9, "perplexity_ratio": 1.0}
    baseline = tmp_path / "baseline.json"
    baseline.write_text(
        json.dumps({"level": "quick", "bytes": 1, "verification": {**figures, "top1_agreement": value}})
    )
    result = run(built, "--against", folder("llama"), "--baseline", baseline)
    assert result.exit_code == 2 and "has no top1_agreement" in result.output, result.output
