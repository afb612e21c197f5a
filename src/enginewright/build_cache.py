"""Engines that were built before, kept by everything that decides their bytes.

`optimize --cache DIR` looks here first. The key is the hash of: every byte of the model, the adapter and the calibration file,
the resolved recipe, backend and target, the versions of what computes, the processor's instruction set, and the number of
threads that torch adds with. What is kept is a published, verified engine; it is hashed again before it is used, and copied.

Two builders of one key take turns: a lock that the system gives back when its holder dies. An entry is renamed into place when
it is whole, so that a killed builder leaves none that is half made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from enginewright import __version__
from enginewright.backends.artifact import Artifact, ArtifactWriter, canonical_json, open_engine
from enginewright.progress import Progress
from enginewright.recipes.errors import ArtifactError, EnginewrightError, InputError, VerificationError

__all__ = ["BuildCache", "build_key", "build_through_cache", "build_twice", "copy_engine"]

_COMPUTING = (
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "onnx",
    "onnxruntime",
    "sentencepiece",
    "protobuf",
    "tensorrt-rtx-cu13",
)
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".jinja", ".gguf", ".txt")
_CHUNK = 1 << 22


Build = Callable[[Path, bool], Artifact]
"""Builds an engine at a path, replacing one there or not."""


def build_key(
    model: Path,
    adapter: Path | None,
    recipe: Mapping[str, Any],
    calibration: Path | None,
    backend: str,
    target: str,
) -> str:
    """The hash of everything that decides an engine's bytes. `recipe` is the resolved one; every file is read whole.

    The recipe's calibration source is left out: a file counts by what it holds and what it is called, not by where it lies.
    """
    plain = {
        **recipe,
        "calibration": {**recipe["calibration"], "source": calibration.name if calibration else "self"},
    }
    what = {
        "model": _digest(model),
        "adapter": None if adapter is None else [adapter.resolve().name, _digest(adapter)],
        "source": model.resolve().name,
        "calibration": None if calibration is None else _digest(calibration),
        "recipe": plain,
        "backend": backend,
        "target": target,
        "versions": {"enginewright": __version__, **_versions()},
        "code": _own_code(),
        "isa": _isa(),
        "threads": _threads(),
        "cores": _cores(),
    }
    return hashlib.sha256(canonical_json(what)).hexdigest()


def _digest(path: Path) -> str:
    """sha256 over names and bytes of a file, or of the files that a model is made of in a folder and below it: shards and chat
    templates may lie in folders of their own."""
    files = (
        [path]
        if path.is_file()
        else sorted(f for f in path.rglob("*") if f.suffix in _MODEL_FILES and f.is_file())
    )
    digest = hashlib.sha256()
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _COMPUTING:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _own_code() -> str:
    """The hash of this package's own files: a working copy changes without its version."""
    import enginewright.backends
    import enginewright.passes
    import enginewright.recipes
    import enginewright.runtime

    digest = hashlib.sha256()
    parts = [
        enginewright,
        enginewright.backends,
        enginewright.passes,
        enginewright.recipes,
        enginewright.runtime,
    ]
    for part in parts:
        root = Path(str(part.__file__)).parent
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".yaml", ".so", ".pyd", ".txt") and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _isa() -> str:
    """The instruction set whose figures verification records, and that calibration's products are computed with."""
    try:
        from enginewright.backends.cpu import _native

        best = os.environ.get("ENGINEWRIGHT_ISA") or _native.available_isas()[0]
    except ImportError:
        best = "none"
    return f"{platform.machine()} {best}"


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cores() -> int:
    """Cores that the process may use: what an engine computes on, and whether verification can ask it on one thread besides."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_engine(engine: Artifact, out: Path, force: bool = False) -> Path:
    """Publish a copy of an engine at `out`, whole or not at all."""
    with ArtifactWriter(out, force=force) as writer:
        for name in engine.manifest["files"]:
            (writer.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engine.path / name, writer.path / name)
        made = {"format_version", "files", "manifest_sha256"}
        manifest = {key: value for key, value in engine.manifest.items() if key not in made}
        return writer.publish(manifest, {k: v for k, v in engine.build.items() if k != "build_sha256"})


class BuildCache:
    """A folder of engines by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the cache {folder} cannot be used: {error.strerror}",
                action="name another folder with --cache",
            ) from error

    def find(self, key: str) -> Artifact | None:
        """The engine of that key, every file hashed; one that was damaged is removed and not found."""
        place = self.folder / key
        if not os.path.lexists(place):
            return None
        if place.is_symlink():  # of somebody else's making, and to what may change
            self._remove(place)
            return None
        try:
            return open_engine(place, check=True)
        except (ArtifactError, InputError):
            self._remove(place)
            return None

    @staticmethod
    def _remove(place: Path) -> None:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                place.unlink()

    def keep(self, key: str, engine: Artifact) -> None:
        """Keep a copy of a published engine."""
        copy_engine(engine, self.folder / key, force=True)

    def _lock(self, key: str) -> IO[str]:
        try:
            return (self.folder / f"{key}.lock").open("w")
        except OSError as error:
            raise InputError(
                f"the cache {self.folder} cannot be used: {error.strerror}",
                action="name another folder with --cache",
            ) from error

    @contextlib.contextmanager
    def alone(self, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the key's lock; `waiting` is called once where another builder has it."""
        with self._lock(key) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def build_through_cache(
    cache: BuildCache, key: str, build: Build, out: Path, force: bool, progress: Progress
) -> Artifact:
    """The engine of that key at `out`: a copy of what the cache holds, or built, and then kept if it passed its verification."""
    with cache.alone(key, lambda: progress.update("another process builds this engine")):
        found = cache.find(key)
        if found is not None:
            with progress.stage("cache") as record:
                record.detail = f"built before: {found.path}"
                return open_engine(copy_engine(found, out, force))
        built = build(out, force)
        if built.manifest["verification"]["verdict"] != "failed":
            with progress.stage("cache") as record:
                try:
                    cache.keep(key, built)
                    record.detail = f"kept as {cache.folder / key}"
                except (
                    EnginewrightError,
                    OSError,
                ) as error:  # the engine is published: a cache is no reason to fail
                    record.detail = f"not kept: {str(error).splitlines()[0]}"
        return built


def build_twice(build: Build, out: Path, force: bool, progress: Progress) -> Artifact:
    """Build in two folders, and publish at `out` only what both have the same. Raises VerificationError naming the files."""
    with ArtifactWriter(out, force=force):
        pass  # that it can be written is known before any work
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.twice-") as folder:
        first = build(Path(folder) / "first" / out.name, False)
        second = build(Path(folder) / "second" / out.name, False)
        with progress.stage("compare") as record:
            differing = _differing(first.manifest, second.manifest)
            if differing:
                raise VerificationError(
                    "two builds of the same inputs differ",
                    found=", ".join(differing),
                    expected="the same bytes in every file but build.json",
                    action="this is a fault of enginewright or of a library it uses: please report it with build.json",
                )
            record.detail = f"{len(first.manifest['files']) + 1} files have the same bytes"
        return open_engine(copy_engine(first, out, force))


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The names of files that differ, engine.json's keys among them."""
    names = sorted({*first["files"], *second["files"]})
    files = [name for name in names if first["files"].get(name) != second["files"].get(name)]
    keys = sorted({*first, *second} - {"files", "manifest_sha256"})
    return files + [f"engine.json ({key})" for key in keys if first.get(key) != second.get(key)]
