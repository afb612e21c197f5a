"""The engine on disk: a folder that `engine.json` describes in full, written all at once or not at all.

`engine.json` lists every file with its size and sha256, and carries its own hash. It holds nothing that
changes from one build to the next (no time, host or path), so that the same inputs give the same bytes; such
things stand in `build.json`. Neither torch nor numpy is imported here.

Writing: a hidden folder beside the target is filled, flushed to disk and renamed (`ArtifactWriter`). Whatever
goes wrong before the rename, a full disk or Ctrl-C, leaves the target as it was; what a killed process left
behind is removed by the next build of the same engine.

Reading: `open_engine` opens nothing outside the folder: names in the manifest are plain relative paths, and a link that
leads out is refused.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from enginewright.recipes.errors import ArtifactError, InputError

__all__ = ["FORMAT_VERSION", "Artifact", "ArtifactWriter", "canonical_json", "open_engine"]

FORMAT_VERSION = 1
MANIFEST = "engine.json"
BUILD = "build.json"
_CHUNK = 1 << 20
_REQUIRED = ("enginewright_version", "backend", "target", "files", "manifest_sha256")


def canonical_json(value: object) -> bytes:
    """Return `value` as JSON whose bytes depend on the value alone: sorted keys, UTF-8, a final newline."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _own_version() -> str:
    try:
        return importlib.metadata.version("enginewright")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _own_hash(document: Mapping[str, Any], key: str) -> str:
    """The hash of a document without `key`, under which it stands in it."""
    without = {name: value for name, value in document.items() if name != key}
    return hashlib.sha256(canonical_json(without)).hexdigest()


def _rebuild(manifest: Mapping[str, Any], path: Path) -> str:
    """Return the command that builds this engine again, as far as the manifest tells."""
    model, recipe = manifest.get("model"), manifest.get("recipe")
    source = model.get("source") if isinstance(model, Mapping) else None
    name = recipe.get("name") if isinstance(recipe, Mapping) else None
    words = f"optimize {source or 'MODEL'} --recipe {name or 'RECIPE'}"
    if (backend := manifest.get("backend") or "cpu") != "cpu":
        words += f" --backend {backend}"
    if backend == "tensorrt":  # no other takes targets
        words += f" --target {manifest.get('target') or 'TARGET'}"
    onnx = recipe.get("onnx") if isinstance(recipe, Mapping) else None
    flavour = onnx.get("flavour") if isinstance(onnx, Mapping) else None
    if flavour not in (None, "plain"):
        words += f" --set onnx.flavour={flavour}"
    return f"rebuild it: {words} --output {path} --force"


# -------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Artifact:
    """An engine that passed `open_engine`'s checks.

    `path` is the folder, absolute. `manifest` is engine.json, `build` is build.json ({} where it is missing: it only informs).
    """

    path: Path
    manifest: dict[str, Any]
    build: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest["files"]

    def file(self, name: str) -> Path:
        """Return the path of the engine's file `name`; only files that the manifest lists can be had."""
        if name not in self.manifest["files"]:
            listed = ", ".join(sorted(self.manifest["files"]))
            raise ArtifactError(
                f"the engine at {self.path} holds no file {name!r}", found=listed or "no files"
            )
        return self.path / name

    def require(self, backend: str, targets: Iterable[str]) -> None:
        """Raise ArtifactError unless the engine was built for `backend` and for one of `targets`."""
        accepted = list(targets)
        if self.manifest["backend"] != backend or self.manifest["target"] not in accepted:
            raise ArtifactError(
                f"the engine at {self.path} was built for another target",
                found=f"backend {self.manifest['backend']!r}, target {self.manifest['target']!r}",
                expected=f"backend {backend!r}, target {' or '.join(map(repr, accepted))}",
                action=_rebuild(self.manifest, self.path),
            )


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes(), parse_constant=_no_number)
        canonical_json(value)  # hashes are of that
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # numbers without end, half a surrogate pair, too deep
        raise ArtifactError(
            f"{path} is not valid JSON",
            found=str(error),
            action="the engine is damaged: rebuild it or copy it again",
        ) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} is not a JSON object", found=type(value).__name__)
    return value


def _check_version(manifest: Mapping[str, Any], path: Path) -> None:
    version = manifest.get("format_version")
    if version == FORMAT_VERSION and type(version) is int:
        return
    built = manifest.get("enginewright_version", "an unknown version")
    newer = type(version) is int and version > FORMAT_VERSION
    action = _rebuild(manifest, path)
    raise ArtifactError(
        f"the engine at {path} has another format",
        found=f"format {version!r}, built with enginewright {built}",
        expected=f"format {FORMAT_VERSION}, which this enginewright {_own_version()} reads",
        action=f"install enginewright {built} or later, or {action}" if newer else action,
    )


def _check_shape(manifest: Mapping[str, Any], path: Path) -> None:
    """The fields that loading relies on are there and of the right kind."""
    missing = [key for key in _REQUIRED if key not in manifest]
    if missing:
        raise ArtifactError(
            f"{path / MANIFEST} lacks {', '.join(missing)}",
            action="it is no engine, or a damaged one: rebuild it",
        )
    odd = [key for key in ("enginewright_version", "backend", "target") if not isinstance(manifest[key], str)]
    if odd:
        raise ArtifactError(f"{path / MANIFEST}: '{odd[0]}' must be text", found=repr(manifest[odd[0]])[:200])
    files = manifest["files"]
    good = isinstance(files, Mapping) and all(
        isinstance(entry, Mapping)
        and type(entry.get("bytes")) is int
        and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )
    if not good:
        raise ArtifactError(
            f"{path / MANIFEST}: 'files' must map names to {{bytes, sha256}}", found=repr(files)[:200]
        )


def _check_name(name: str, path: Path) -> Path:
    """Return where the file lies; a name or a link that leads out of the folder is refused."""
    pure = PurePosixPath(name)
    inside = (
        name and not pure.is_absolute() and ".." not in pure.parts and "\\" not in name and str(pure) == name
    )
    located = path / name
    try:
        inside = bool(inside) and located.resolve().is_relative_to(path)
    except (OSError, ValueError, RuntimeError):  # a zero byte, links that lead around in a circle
        inside = False
    if not inside:
        raise ArtifactError(
            f"the engine at {path} names a file outside its folder",
            found=repr(name),
            action="rebuild it or copy it again",
        )
    return located


def _check_file(
    name: str, entry: Mapping[str, Any], path: Path, manifest: Mapping[str, Any], check: bool
) -> None:
    located = _check_name(name, path)
    action = f"copy the engine again, or {_rebuild(manifest, path)}"
    try:
        size = located.stat().st_size
    except FileNotFoundError as error:
        raise ArtifactError(f"the engine at {path} lacks its file {name}", action=action) from error
    except OSError as error:
        raise ArtifactError(f"cannot read {located}: {error.strerror}") from error
    if not located.is_file() or size != entry["bytes"]:
        raise ArtifactError(
            f"the engine's file {located} has the wrong size",
            found=f"{size:,} bytes",
            expected=f"{entry['bytes']:,} bytes",
            action=action,
        )
    if check and (found := _sha256_of_file(located)) != entry["sha256"]:
        raise ArtifactError(
            f"the engine's file {located} has changed since it was built",
            found=f"sha256 {found}",
            expected=f"sha256 {entry['sha256']}",
            action=action,
        )


def open_engine(path: str | os.PathLike[str], check: bool = False) -> Artifact:
    """Return the engine in the folder `path`, with its version, manifest and file sizes checked.

    `check` also hashes every file. Raises InputError where there is no engine at all, ArtifactError for one
    that cannot be used; the message says what was found, what is needed and the command that rebuilds it.
    """
    folder = Path(path).resolve()
    if not folder.exists():
        raise InputError(
            f"there is no engine at {folder}", action=f"build one: optimize MODEL --output {folder}"
        )
    if not (folder / MANIFEST).is_file():
        is_model = (folder / "config.json").is_file()
        raise InputError(
            f"{folder} is not an engine: it holds no {MANIFEST}",
            found="a model's folder" if is_model else ("a folder" if folder.is_dir() else "a file"),
            action=f"build an engine first: optimize {folder if is_model else 'MODEL'} --recipe RECIPE",
        )
    _check_name(MANIFEST, folder)
    manifest = _read_json(folder / MANIFEST)
    _check_version(manifest, folder)
    _check_shape(manifest, folder)
    for name, entry in sorted(manifest["files"].items()):
        _check_file(name, entry, folder, manifest, check)
    if (found := _own_hash(manifest, "manifest_sha256")) != manifest["manifest_sha256"]:
        raise ArtifactError(
            f"{folder / MANIFEST} has changed since it was built",
            found=f"sha256 {found}",
            expected=f"sha256 {manifest['manifest_sha256']}",
            action=_rebuild(manifest, folder),
        )
    has_build = (folder / BUILD).is_file() and (folder / BUILD).resolve().is_relative_to(folder)
    build = _read_json(folder / BUILD) if has_build else {}
    if check and has_build and (found := _own_hash(build, "build_sha256")) != build.get("build_sha256"):
        raise ArtifactError(
            f"{folder / BUILD} has changed since it was written",
            found=f"sha256 {found}",
            expected=f"sha256 {build.get('build_sha256')}",
            action="copy the engine again; the file only tells how the engine was made, and may also be removed",
        )
    return Artifact(folder, manifest, build)


# -------------------------------------------------------------------------------------------------- writing


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class ArtifactWriter:
    """Context manager that fills a temporary folder and publishes it as the engine `out`.

        with ArtifactWriter(out) as writer:
            (writer.path / "weights.bin").write_bytes(...)
            writer.publish(manifest, build)

    `force` replaces an engine that stands at `out`; anything else there is never replaced. Leaving the block without
    `publish`, by any exception, removes the temporary folder. Raises InputError before any work when `out` cannot be used.
    """

    def __init__(self, out: str | os.PathLike[str], force: bool = False) -> None:
        self.out = Path(out).absolute()
        self.force = force
        self.path = self.out.parent / f".{self.out.name}.tmp-{os.getpid()}"
        self._aside = self.out.parent / f".{self.out.name}.old-{os.getpid()}"
        self._published = False

    def __enter__(self) -> ArtifactWriter:
        if not self.out.name or self.out.name == "..":
            raise InputError(f"{self.out} cannot name an engine", action="give a folder that can be created")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            self._check_out()
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise InputError(
                f"cannot write an engine to {self.out}: {error.strerror}", action="choose another --output"
            ) from error
        return self

    def _check_out(self) -> None:
        if not os.path.lexists(self.out):
            return
        if not self.force:
            raise InputError(
                f"{self.out} exists already", action="choose another --output, or replace it with --force"
            )
        empty = self.out.is_dir() and not any(self.out.iterdir())
        if self.out.is_symlink() or not ((self.out / MANIFEST).is_file() or empty):
            raise InputError(
                f"{self.out} exists and is not an engine, so --force does not replace it",
                action="choose another --output",
            )

    def _clear_leftovers(self) -> None:
        """Remove what killed builds left; put back an engine whose replacement was cut short."""
        pattern = re.compile(rf"\.{re.escape(self.out.name)}\.(tmp|old)-(\d+)")
        for entry in self.out.parent.iterdir():
            match = pattern.fullmatch(entry.name)
            if match is None or (_alive(int(match[2])) and int(match[2]) != os.getpid()):
                continue
            if match[1] == "old" and not os.path.lexists(self.out):
                entry.rename(self.out)
            else:
                shutil.rmtree(entry, ignore_errors=True)

    def publish(self, manifest: Mapping[str, Any], build: Mapping[str, Any] | None = None) -> Path:
        """Complete `manifest` (version, files, hashes), write both JSON files, rename the folder to `out`."""
        names = sorted(
            path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()
        )
        files = {
            name: {"bytes": (self.path / name).stat().st_size, "sha256": _sha256_of_file(self.path / name)}
            for name in names
            if name not in (MANIFEST, BUILD)
        }
        full = {**manifest, "format_version": FORMAT_VERSION, "files": files}
        full["manifest_sha256"] = _own_hash(full, "manifest_sha256")
        missing = [key for key in _REQUIRED if key not in full]
        if missing:
            raise ValueError(f"the manifest lacks {missing}")
        told = dict(build or {})
        told["build_sha256"] = _own_hash(told, "build_sha256")
        (self.path / BUILD).write_bytes(canonical_json(told))
        (self.path / MANIFEST).write_bytes(canonical_json(full))
        for path in sorted(self.path.rglob("*"), reverse=True):
            _sync(path)
        _sync(self.path)
        self._swap()
        self._published = True
        _sync(self.out.parent)
        return self.out

    def _swap(self) -> None:
        """Rename the folder into place; an engine that stood there is put back on failure."""
        self._check_out()
        replaced = os.path.lexists(self.out)
        if replaced:
            self.out.rename(self._aside)
        try:
            self.path.rename(self.out)
        except BaseException:
            if replaced:
                self._aside.rename(self.out)
            raise
        shutil.rmtree(self._aside, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._published:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.out.parent).free
            raise InputError(
                f"the disk is full: the engine at {self.out} was not written",
                found=f"{free / 2**20:,.0f} MiB free after clearing the unfinished build",
                action="free some space or choose another --output",
            ) from error
