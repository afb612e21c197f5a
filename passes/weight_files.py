"""Which file of a Hugging Face folder holds which tensor. Only headers are read; the index decides.

With `model.safetensors.index.json` only the shards it names are opened, and a tensor is taken from the shard
it is assigned to; without one, `model.safetensors` alone; else `pytorch_model.bin`, with or without an index.
Any other weight file beside them is reported as a note and never opened.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from enginewright.passes.weights import CheckpointTensor, Weight
from enginewright.recipes.errors import InputError

__all__ = ["PickledFile", "SafetensorsFile", "read_json", "read_tensors"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)  # what reading a header that is none raises
_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON", found=error) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object", found=type(content).__name__)
    return content


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read", found=error, action="copy or download the file again")


class SafetensorsFile:
    """One safetensors file, its header read and its size checked."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
                if length > size - 8:
                    raise InputError(
                        f"{path} is truncated or not a safetensors file",
                        found=f"{size} bytes, a header of {length}",
                        action="copy or download the file again",
                    )
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            types = {key: entry["dtype"] for key, entry in header.items()}
            shapes = {key: tuple(entry["shape"]) for key, entry in header.items()}
            needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except _DAMAGE as error:
            raise _unreadable(path, error) from error
        if needed > size:
            raise InputError(
                f"{path} is truncated",
                found=f"{size} bytes",
                expected=f"{needed} bytes",
                action="copy or download the file again",
            )
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for key, dtype in types.items():
            if not isinstance(dtype, str) or dtype not in _DTYPES:
                raise InputError(f"{path} holds {key} in a type that is not supported", found=dtype)
            self.entries[key] = (shapes[key], _DTYPES[dtype])
        try:
            with safe_open(str(path), framework="pt"):
                pass  # checks that the tensors fill the file, in order and without overlap
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def read(self, key: str) -> torch.Tensor:
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(key)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_slice(key)[start:stop]


class PickledFile:
    """One `pytorch_model.bin`, mapped and never executed (`weights_only`)."""

    def __init__(self, path: Path):
        self.path = path
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise InputError(
                f"{path} cannot be read",
                found=str(error).splitlines()[0] if str(error) else repr(error),
                action="copy the file again, or convert it to safetensors",
            ) from error
        self.tensors = {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}
        self.entries = {key: (tuple(t.shape), t.dtype) for key, t in self.tensors.items()}

    def read(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[key][start:stop]


_WeightFile = SafetensorsFile | PickledFile


def read_tensors(path: Path) -> tuple[dict[str, Weight], list[str]]:
    """Every tensor the folder's checkpoint holds, by its name there, and notes about files that were left unopened."""
    opener: Callable[[Path], _WeightFile]
    for index, single, opener in ((_SAFE_INDEX, _SAFE, SafetensorsFile), (_BIN_INDEX, _BIN, PickledFile)):
        if (path / index).is_file():
            tensors, used, notes = _sharded(path, index, opener)
            break
        if (path / single).is_file():
            file = opener(path / single)
            tensors = {k: CheckpointTensor(k, *entry, reader=file) for k, entry in file.entries.items()}
            used, notes = {single}, []
            break
    else:
        raise InputError(
            f"{path} holds no weights",
            found=sorted(p.name for p in path.iterdir())[:8],
            expected=f"{_SAFE} or {_SAFE_INDEX} (or {_BIN})",
        )
    weight_like = (p for suffix in ("safetensors", "bin", "pt", "pth") for p in path.glob(f"*.{suffix}"))
    for stray in sorted(p.name for p in weight_like if p.name not in used):
        notes.append(f"{stray} was not opened: the weights come from {', '.join(sorted(used)[:3])}")
    return tensors, notes


def _sharded(
    path: Path, index: str, opener: Callable[[Path], _WeightFile]
) -> tuple[dict[str, Weight], set[str], list[str]]:
    mapping = read_json(path / index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise InputError(f"{path / index} has no weight_map", action="copy or download the file again")
    unnamed = sorted(key for key, shard in mapping.items() if not isinstance(shard, str))
    if unnamed:
        raise InputError(
            f"{path / index} assigns tensors to no file", found=unnamed[:3], expected="file names"
        )
    shards = sorted(set(mapping.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise InputError(f"{path / index} names files outside its folder", found=outside[:3])
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise InputError(
            f"{path} lacks {len(missing)} of the {len(shards)} files that {index} names",
            found=sorted(p.name for p in path.glob("*" + Path(missing[0]).suffix)),
            expected=missing,
            action="copy or download the missing files",
        )
    files = {shard: opener(path / shard) for shard in shards}
    tensors: dict[str, Weight] = {}
    notes: list[str] = []
    for key, shard in mapping.items():
        entry = files[shard].entries.get(key)
        if entry is None:
            holders = [s for s in shards if key in files[s].entries]
            raise InputError(
                f"{index} assigns the tensor {key} to {shard}, which does not hold it",
                found=f"it stands in {', '.join(holders)}" if holders else "no file holds it",
                expected=f"{key} in {shard}",
                action="copy or download the index and the files again, from one version of the model",
            )
        tensors[key] = CheckpointTensor(key, *entry, reader=files[shard])
    for shard in shards:
        extra = sorted(key for key in files[shard].entries if mapping.get(key) != shard)
        if extra:
            where = f"; the index assigns {extra[0]} to {mapping[extra[0]]}" if extra[0] in mapping else ""
            notes.append(
                f"{shard} holds {len(extra)} tensors that {index} does not assign to it, unused{where}"
            )
    return tensors, set(shards), notes
