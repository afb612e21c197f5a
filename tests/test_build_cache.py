"""Engines that were built before: what the key depends on, two builders at once, a killed one, a damaged entry; equal builds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import enginewright
from enginewright import build, build_cache
from enginewright.backends.artifact import open_engine
from enginewright.build_cache import BuildCache, build_key
from enginewright.cli import optimize
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import load_recipe
from tests.passes.architectures import folder, save

BUILD = "from enginewright.cli import optimize; optimize()"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(optimize, [str(argument) for argument in arguments])


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds llama by int8."""
    root = tmp_path_factory.mktemp("cached")
    result = run(folder("llama"), "-r", "int8", "-o", root / "engine", "--cache", root / "cache")
    assert result.exit_code == 0, result.output
    return root / "cache"


def test_the_same_inputs_are_not_built_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was built again")

    monkeypatch.setattr(build, "capture", never)
    report = enginewright.optimize(folder("llama"), "int8", tmp_path / "again", cache=cache)
    (entry,) = entries(cache)
    kept = open_engine(entry, check=True)
    assert report.manifest == kept.manifest and report.passes == kept.build["passes"]
    assert open_engine(tmp_path / "again", check=True).manifest == kept.manifest
    refused = run(folder("llama"), "-r", "int8", "-o", tmp_path / "again", "--cache", cache)
    assert refused.exit_code == 2 and "exists already" in refused.output
    assert (
        run(folder("llama"), "-r", "int8", "-o", tmp_path / "again", "--cache", cache, "--force").exit_code
        == 0
    )


def test_the_key_is_of_everything_that_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llama", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("some words")

    def key(overrides: tuple[str, ...] = (), **changed: Any) -> str:
        options = {
            "model": model,
            "adapter": None,
            "calibration": text,
            "backend": "cpu",
            "target": "cpu",
            **changed,
        }
        return build_key(recipe=load_recipe("int8", overrides).resolved(), **options)

    usual = key()
    assert key() == usual
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(text, moved / "text.txt")
    assert key(calibration=moved / "text.txt") == usual, "where a file lies does not matter"
    seen = {usual}

    def changes(found: str) -> None:
        assert found not in seen
        seen.add(found)

    changes(key(("linear.weight=int4_g64",)))
    changes(key(("verify.max_kl=0.9",)))
    changes(key(backend="other"))
    changes(key(target="other"))
    changes(key(calibration=None))
    monkeypatch.setenv("ENGINEWRIGHT_ISA", "portable")
    changes(key())
    monkeypatch.delenv("ENGINEWRIGHT_ISA")
    monkeypatch.setattr(build_cache, "_threads", lambda: 61)
    changes(key())
    monkeypatch.setattr(build_cache, "_threads", build_cache._threads)
    monkeypatch.setattr(build_cache, "_versions", lambda: {"torch": "0"})
    changes(key())
    text.write_text("other words")
    changes(key())
    for file in sorted(path for path in model.iterdir() if path.suffix in (".json", ".safetensors")):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        changes(key())


def test_a_damaged_entry_is_built_again(cache: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(cache, tmp_path / "cache"))
    (entry,) = entries(copied)
    weights = entry / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert BuildCache(copied).find(entry.name) is None and not entry.exists()


def test_two_builders_take_turns_and_the_second_finds_the_engine(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        arguments = [folder("llama"), "-r", "fp32", "-o", tmp_path / name, "--cache", tmp_path / "cache"]
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, *map(str, arguments)], stderr=subprocess.PIPE, text=True
        )

    builders = [start("one"), start("two")]
    said = [builder.communicate(timeout=300)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], said
    assert sorted("built before" in text for text in said) == [False, True], said
    assert open_engine(tmp_path / "one").manifest == open_engine(tmp_path / "two").manifest
    assert len(entries(tmp_path / "cache")) == 1


@pytest.mark.slow
def test_a_killed_builder_leaves_the_key_free(tmp_path: Path) -> None:
    arguments = [folder("llama"), "-r", "fp32", "-o", tmp_path / "one", "--cache", tmp_path / "cache"]
    builder = subprocess.Popen([sys.executable, "-c", BUILD, *map(str, arguments)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("cache/*.lock")):
        assert time.monotonic() < until and builder.poll() is None
        time.sleep(0.05)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert entries(tmp_path / "cache") == []
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert len(entries(tmp_path / "cache")) == 1


def test_an_engine_that_failed_is_not_kept(tmp_path: Path) -> None:
    strict = [
        "-r",
        "int4",
        "--set",
        "verify.max_kl=1e-12",
        "-o",
        tmp_path / "e",
        "--cache",
        tmp_path / "cache",
    ]
    assert run(folder("llama"), *strict).exit_code == 1
    assert run(folder("llama"), *strict, "--allow-unverified").exit_code == 0
    assert entries(tmp_path / "cache") == []


def test_equal_builds_are_published_and_others_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = enginewright.optimize(folder("llama"), "int8", tmp_path / "same", check_reproducible=True)
    alone = enginewright.optimize(folder("llama"), "int8", tmp_path / "alone")
    assert report.manifest == alone.manifest
    for name in (*report.manifest["files"], "engine.json"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()

    lower, times = build.get_backend("cpu").lower, []

    def drifting(self: Any, program: Any, recipe: Any, directory: Path, *rest: Any) -> list[str]:
        names = lower(program, recipe, directory, *rest)
        times.append(directory)
        file = directory / "program.json"
        document = json.loads(file.read_text())
        file.write_text(json.dumps(document, indent=len(times)))
        return names

    monkeypatch.setattr(type(build.get_backend("cpu")), "lower", drifting)
    result = run(folder("llama"), "-r", "int8", "-o", tmp_path / "drifts", "--check-reproducible")
    assert result.exit_code == 1 and "program.json" in result.output and "weights.bin" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "same"]


@pytest.mark.parametrize("option", [["--check-reproducible"], ["--dump", "d"], ["--report", "r"]])
def test_what_needs_a_build_does_not_go_with_a_cache(tmp_path: Path, option: list[str]) -> None:
    arguments = [str(tmp_path / part) if part in "dr" else part for part in option]
    result = run(
        folder("llama"), "-r", "int8", "-o", tmp_path / "e", "--cache", tmp_path / "cache", *arguments
    )
    assert result.exit_code == 2 and "do not go together" in result.output


def test_files_in_folders_of_a_model_count(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")

    def key() -> str:
        return build_key(model, None, load_recipe("int8").resolved(), None, "cpu", "cpu")

    seen = {key()}
    for name in ("additional_chat_templates/tools.jinja", "shards/model-00001.safetensors"):
        (model / name).parent.mkdir()
        for text in ("a", "b"):
            (model / name).write_text(text)
            assert key() not in seen
            seen.add(key())


def test_what_is_no_entry_is_not_served_and_gives_way(cache: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(cache, tmp_path / "cache"))
    (entry,) = entries(copied)
    elsewhere = entry.rename(tmp_path / "elsewhere")
    kept = BuildCache(copied)
    for make in (
        lambda: entry.symlink_to(elsewhere),
        lambda: entry.symlink_to("gone"),
        lambda: entry.write_text("x"),
    ):
        make()
        assert kept.find(entry.name) is None and not os.path.lexists(entry)
    assert open_engine(elsewhere, check=True)


def test_an_engine_that_cannot_be_kept_is_published_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(BuildCache, "keep", full)
    result = run(folder("llama"), "-r", "int8", "-o", tmp_path / "e", "--cache", tmp_path / "cache")
    assert result.exit_code == 0 and "not kept: the disk is full" in result.output, result.output
    assert open_engine(tmp_path / "e", check=True)
