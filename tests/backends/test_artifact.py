"""An engine on disk appears whole or not at all, and one that cannot be used says so in one clear message."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact, ArtifactWriter, open_engine
from enginewright.recipes.errors import ArtifactError, InputError

MANIFEST = {
    "enginewright_version": "0.1.0",
    "backend": "cpu",
    "target": "x86_64",
    "recipe": {"name": "int4-rtn"},
    "model": {"source": "smollm2", "model_type": "llama"},
    "verification": {"verdict": "passed", "max_kl": 1.5e-05},
}


def build(out: Path, force: bool = False, **manifest: Any) -> Path:
    with ArtifactWriter(out, force) as writer:
        (writer.path / "weights.bin").write_bytes(bytes(range(256)) * 10)
        (writer.path / "tokenizer").mkdir()
        (writer.path / "tokenizer" / "tokenizer.json").write_text("{}")
        return writer.publish({**MANIFEST, **manifest}, {"seconds": 1.25, "host": os.uname().nodename})


def edit(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    change(manifest)
    (engine / "engine.json").write_text(json.dumps(manifest))


def nothing_beside(out: Path) -> bool:
    return sorted(entry.name for entry in out.parent.iterdir()) == ([out.name] if out.exists() else [])


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    out = build(tmp_path / "deep" / "engine")
    engine = open_engine(out, check=True)
    assert engine.path == out and engine.manifest["verification"] == MANIFEST["verification"]
    assert engine.build["seconds"] == 1.25
    assert engine.file("weights.bin").stat().st_size == 2560 and "tokenizer/tokenizer.json" in engine
    assert sorted(engine.manifest["files"]) == ["tokenizer/tokenizer.json", "weights.bin"]
    with pytest.raises(ArtifactError, match="holds no file 'other'"):
        engine.file("other")
    assert nothing_beside(out)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    assert (first / "engine.json").read_bytes() == (second / "engine.json").read_bytes()


def test_an_engine_moved_to_a_read_only_place_loads(tmp_path: Path) -> None:
    out = build(tmp_path / "engine")
    moved = tmp_path / "elsewhere"
    shutil.move(out, moved)
    for path in [*moved.rglob("*"), moved]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert open_engine(moved, check=True).file("weights.bin").read_bytes()[:2] == b"\0\1"
    finally:
        for path in [moved, moved / "tokenizer"]:
            path.chmod(0o755)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a fault"), SystemExit(1)])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), ArtifactWriter(tmp_path / "engine") as writer:
        (writer.path / "weights.bin").write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_publish_leaves_the_old_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build(tmp_path / "engine")
    before = (out / "engine.json").read_bytes()
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(out, force=True, target="aarch64")
    assert (out / "engine.json").read_bytes() == before
    assert nothing_beside(out)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_plainly(tmp_path: Path, code: int) -> None:
    with pytest.raises(InputError, match="disk is full"), ArtifactWriter(tmp_path / "engine") as writer:
        raise OSError(code, os.strerror(code), str(writer.path / "weights.bin"))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_build_are_cleared(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    (tmp_path / f".engine.tmp-{dead}").mkdir()
    (tmp_path / f".engine.tmp-{os.getppid()}").mkdir()  # a build that still runs
    build(tmp_path / "engine").rename(tmp_path / f".engine.old-{dead}")  # killed between two renames
    with pytest.raises(InputError, match="exists already"):
        build(tmp_path / "engine")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".engine.tmp-{os.getppid()}", "engine"]
    open_engine(tmp_path / "engine", check=True)


def test_only_an_engine_is_replaced_and_only_by_force(tmp_path: Path) -> None:
    out = build(tmp_path / "engine")
    with pytest.raises(InputError, match="exists already"):
        build(out)
    build(out, force=True, target="aarch64")
    assert open_engine(out).manifest["target"] == "aarch64" and nothing_beside(out)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    with pytest.raises(InputError, match="is not an engine"):
        build(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter1").exists()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write an engine"):
        build(tmp_path / "file" / "engine")


def test_a_path_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no engine"):
        open_engine(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"a model's folder[\s\S]*optimize "):
        open_engine(tmp_path)


def set_item(**items: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(items)


def add_file(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": ""}})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (set_item(format_version=99, enginewright_version="9.0"),
              r"found: format 99, built with enginewright 9.0\n  expected: format 1,[\s\S]*"
              r"install enginewright 9.0 or later, or rebuild it: optimize smollm2 --recipe int4-rtn"),
    "older": (set_item(format_version=0), r"format 0[\s\S]*rebuild it: optimize smollm2"),
    "no version": (lambda m: m.pop("format_version"), r"format None"),
    "a word for a version": (set_item(format_version="1"), r"format '1'"),
    "target": (set_item(target="sm_90"), "has changed since it was built"),
    "a number for a backend": (set_item(backend=7), r"'backend' must be text"),
    "hash": (set_item(manifest_sha256="0" * 64), "has changed since it was built"),
    "no files": (lambda m: m.pop("files"), "lacks files"),
    "files of another kind": (set_item(files=["weights.bin"]), "must map names"),
    "escape": (add_file("../secret"), "outside its folder"),
    "absolute": (add_file("/etc/hosts"), "outside its folder"),
    "missing": (add_file("more.bin"), "lacks its file more.bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_manifest_gives_one_clear_message(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / "engine")
    edit(out, DAMAGE[name][0])
    with pytest.raises(ArtifactError, match=DAMAGE[name][1]):
        open_engine(out)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_manifest_that_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    out = build(tmp_path / "engine")
    (out / "engine.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"engine\.json is not"):
        open_engine(out)


def test_a_truncated_file_and_a_changed_one(tmp_path: Path) -> None:
    out = build(tmp_path / "engine")
    weights = out / "weights.bin"
    content = weights.read_bytes()
    weights.write_bytes(b"\xff" + content[1:])
    open_engine(out)
    with pytest.raises(ArtifactError, match="has changed since it was built"):
        open_engine(out, check=True)
    weights.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"wrong size\n  found: 2,559 bytes\n  expected: 2,560 bytes"):
        open_engine(out)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    out = build(tmp_path / "engine")
    (out / "weights.bin").rename(tmp_path / "weights.bin")
    (out / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ArtifactError, match="outside its folder"):
        open_engine(out)


def test_strays_beside_the_listed_files_are_never_opened(tmp_path: Path) -> None:
    out = build(tmp_path / "engine")
    (out / "weights-2.bin").write_bytes(b"stray")
    engine = open_engine(out, check=True)
    assert "weights-2.bin" not in engine
    with pytest.raises(ArtifactError, match="holds no file"):
        engine.file("weights-2.bin")


def test_another_backend_or_target_is_refused(tmp_path: Path) -> None:
    engine: Artifact = open_engine(build(tmp_path / "engine"))
    engine.require("cpu", ["aarch64", "x86_64"])
    with pytest.raises(
        ArtifactError, match=r"found: backend 'cpu', target 'x86_64'[\s\S]*rebuild it: optimize smollm2"
    ):
        engine.require("cpu", ["aarch64"])
    with pytest.raises(ArtifactError, match="built for another target"):
        engine.require("tensorrt", ["x86_64"])


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({}, "--recipe int4-rtn --output"),
        ({"backend": "onnx"}, "--recipe int4-rtn --backend onnx --output"),
        ({"backend": "tensorrt", "target": "sm80,sm89"}, "--backend tensorrt --target sm80,sm89 --output"),
        (
            {"backend": "onnx", "recipe": {"name": "int8", "onnx": {"flavour": "genai"}}},
            "--recipe int8 --backend onnx --set onnx.flavour=genai --output",
        ),
    ],
)
def test_an_engine_is_rebuilt_for_its_own_backend(
    manifest: dict[str, Any], words: str, tmp_path: Path
) -> None:
    out = build(tmp_path / "engine", **manifest)
    (out / "weights.bin").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=f"rebuild it: optimize smollm2 [^\n]*{words}"):
        open_engine(out)


def test_a_backend_refuses_an_engine_built_for_another_target(tmp_path: Path) -> None:
    engine = open_engine(build(tmp_path / "engine", target="a machine of tomorrow"))
    with pytest.raises(ArtifactError, match=r"built for another target[\s\S]*rebuild it"):
        get_backend("cpu").load(engine)
