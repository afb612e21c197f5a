"""A Hugging Face folder as a source of weights: which file holds which tensor, and how the model's tensors
follow from them.

Nothing is read but headers. Rules:
1. The index decides. With `model.safetensors.index.json` only the shards it names are opened, and a tensor is
   taken from the shard the index assigns it to; without one, `model.safetensors` alone; else
   `pytorch_model.bin` with or without an index. Any other weight file beside them is reported as a note and
   never opened.
2. A missing, truncated or foreign file, a missing tensor and a wrong shape are each one InputError that names
   them.
3. Names go through transformers' own renamings and conversions, evaluated symbolically: experts stored one by
   one become a lazy stack, a fused matrix a lazy slice. What cannot be expressed so is converted at load.
4. Tied tensors are one weight. A tensor absent from the checkpoint may stand for another only where the
   configuration ties them.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from enginewright.passes.weights import (
    CheckpointTensor,
    Computed,
    Weight,
    concatenated,
    permuted,
    reshaped,
    sliced,
    stacked,
)  # fmt: skip
from enginewright.recipes.errors import InputError, near_matches

__all__ = ["HuggingFaceFolder", "Source", "convert_names", "open_source"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class Source(Protocol):
    """Where a model comes from: its transformers configuration, and its tensors under the model's names."""

    path: Path
    config: Any

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        """Weights for every name in the meta model's `state_dict()`, tied ones as one object, and notes for
        the user.
        """
        ...


def open_source(path: str | Path) -> Source:
    """The source at a path: a Hugging Face folder, or a GGUF file (or a folder that holds one and no
    config.json).
    """
    path = Path(path)
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if ggufs and not (path / "config.json").is_file():
        if len(ggufs) > 1:
            raise InputError(
                f"{path} holds several GGUF files", found=[g.name for g in ggufs], action="name one of them"
            )
        from enginewright.passes.gguf import GgufSource

        return GgufSource(ggufs[0])
    return HuggingFaceFolder(path)


class HuggingFaceFolder:
    """A folder as `save_pretrained` writes it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(
                f"there is no model folder {self.path}",
                action="give a local Hugging Face folder or a GGUF file",
            )
        if not (self.path / "config.json").is_file():
            raise InputError(
                f"{self.path} is not a Hugging Face model folder",
                found=sorted(p.name for p in self.path.iterdir())[:8],
                expected="config.json and *.safetensors",
            )
        self.config = _read_config(self.path)

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        tensors, notes = read_tensors(self.path)
        weights, more = convert_names(model, tensors, str(self.path))
        return weights, notes + more


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    raw = _read_json(path / "config.json")
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if raw.get("quantization_config"):
        raise InputError(
            f"{path} holds weights that another tool has quantised already",
            found=f"quantization_config with quant_method {method!r}",
            expected="float weights (safetensors in bf16, f16 or f32)",
            action="build from the original model; a recipe quantises it",
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise InputError(
            f"transformers cannot read {path / 'config.json'}",
            found=f"model_type {raw.get('model_type')!r}: {reason}",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON", found=error) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object", found=type(content).__name__)
    return content


# Files.


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
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} cannot be read", found=error, action="copy or download the file again"
            ) from error
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if needed > size:
            raise InputError(
                f"{path} is truncated",
                found=f"{size} bytes",
                expected=f"{needed} bytes",
                action="copy or download the file again",
            )
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for key, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise InputError(f"{path} holds {key} in a type that is not supported", found=entry["dtype"])
            self.entries[key] = (tuple(entry["shape"]), _DTYPES[entry["dtype"]])

    def read(self, key: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(key)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        from safetensors import safe_open

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


def read_tensors(path: Path) -> tuple[dict[str, Weight], list[str]]:
    """Every tensor the folder's checkpoint holds, by its name there, and notes about files that were left
    unopened.
    """
    opener: Callable[[Path], Any]
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
    path: Path, index: str, opener: Callable[[Path], Any]
) -> tuple[dict[str, Weight], set[str], list[str]]:
    mapping = _read_json(path / index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise InputError(f"{path / index} has no weight_map", action="copy or download the file again")
    shards = sorted(set(mapping.values()))
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


# Names.


def convert_names(
    model: Any, tensors: Mapping[str, Weight], source: str
) -> tuple[dict[str, Weight], list[str]]:
    """Bind checkpoint tensors to the names of the meta `model`'s state dict, following transformers'
    conversion mapping.

    Returns the weights (tied names share one object) and notes. Raises InputError for a missing or misshapen
    tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    mapping = get_model_conversion_mapping(model) or []
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings: Any = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()

    bound: dict[str, Weight] = {}
    origin: dict[str, str] = {}
    groups: dict[str, tuple[Any, dict[str, list[Weight]]]] = {}
    unused: list[str] = []
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            unused.append(key)
        elif pattern is not None:
            _, collected = groups.setdefault(name, (by_pattern[pattern], {}))
            collected.setdefault(pattern, []).append(tensors[key])
        elif name in bound:
            raise InputError(f"two tensors of {source} are both {name}", found=[origin[name], key])
        else:
            bound[name], origin[name] = tensors[key], key
    for first, (converter, collected) in groups.items():
        bound.update(_convert(converter, collected, first, model))

    notes = _tie(model, bound, wanted)
    _check(bound, wanted, tensors, unused, source, model)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    surprising = [key for key in unused if not _matches(key, ignored)]
    if surprising:
        listed = ", ".join(surprising[:4]) + (", …" if len(surprising) > 4 else "")
        notes.append(
            f"{len(surprising)} tensors of the checkpoint are not part of {type(model).__name__} "
            f"and were left out: {listed}"
        )
    return {name: bound[name] for name in wanted if name in bound}, notes


def _matches(key: str, patterns: Iterable[str]) -> bool:
    import re

    return any(re.search(pattern, key) for pattern in patterns) or key.endswith("rotary_emb.inv_freq")


def _tie(model: Any, bound: dict[str, Weight], wanted: Mapping[str, Any]) -> list[str]:
    """Give tied names one object. As transformers does, a tie holds unless the checkpoint has both tensors
    and they differ.
    """
    notes = []
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name not in wanted or other not in wanted:
            continue
        if name in bound and other in bound and bound[name] is not bound[other]:
            if _equal(bound[name], bound[other]):
                bound[name] = bound[other]
            else:
                notes.append(
                    f"the configuration ties {name} to {other}, but the checkpoint holds different values "
                    "for the two: they are kept apart"
                )
        elif other in bound:
            bound[name] = bound[other]
        elif name in bound:
            bound[other] = bound[name]
    return notes


def _equal(a: Weight, b: Weight) -> bool:
    if a.shape != b.shape:
        return False
    step = max(1, (1 << 24) // max(1, a.numel // max(1, a.shape[0])))
    for start in range(0, a.shape[0], step):
        stop = min(a.shape[0], start + step)
        if not torch.equal(a.load_rows(start, stop), b.load_rows(start, stop)):
            return False
    return True


def _check(
    bound: Mapping[str, Weight],
    wanted: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Weight],
    unused: list[str],
    source: str,
    model: Any,
) -> None:
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    missing = [name for name in wanted if name not in bound and not _matches(name, optional)]
    if missing:
        near = near_matches(missing[0], unused or tensors)
        raise InputError(
            f"{source} lacks {len(missing)} tensors of {type(model).__name__}, the first is {missing[0]}",
            found=f"{len(tensors)} tensors" + (f", among them {', '.join(near)}" if near else ""),
            expected=f"{missing[0]} of shape {list(wanted[missing[0]])}",
            action="check that config.json and the weights belong to one model, and that every file is there",
        )
    for name, weight in bound.items():
        if weight.shape != wanted[name]:
            leaf = next(weight.leaves())
            file = getattr(getattr(leaf, "reader", None), "path", source)
            raise InputError(
                f"the tensor {weight.name} in {file} has the wrong shape for {name}",
                found=list(weight.shape),
                expected=list(wanted[name]),
                action="check that config.json and the weights belong to one model",
            )


# Conversions, evaluated on expressions.


class _Lazy:
    """Stands for a tensor while a conversion runs: layout operations on it build Weight expressions."""

    def __init__(self, weight: Weight):
        self.weight = weight
        self.shape = torch.Size(weight.shape)
        self.dtype = weight.dtype
        self.ndim = len(weight.shape)

    def contiguous(self) -> _Lazy:
        return self

    def reshape(self, *shape: Any) -> _Lazy:
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = 1
            for size in sizes:
                known *= size if size != -1 else 1
            sizes[sizes.index(-1)] = self.weight.numel // known
        return _Lazy(reshaped(self.weight, sizes))

    view = reshape

    def transpose(self, dim0: int, dim1: int) -> _Lazy:
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return _Lazy(permuted(self.weight, axes))

    def permute(self, *axes: Any) -> _Lazy:
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return _Lazy(permuted(self.weight, [a % self.ndim for a in order]))

    def split(self, sizes: int | list[int], dim: int = 0) -> tuple[_Lazy, ...]:
        total = self.shape[dim]
        lengths = [min(sizes, total - s) for s in range(0, total, sizes)] if isinstance(sizes, int) else sizes
        parts, start = [], 0
        for length in lengths:
            parts.append(_Lazy(sliced(self.weight, dim % self.ndim, start, start + length)))
            start += length
        return tuple(parts)

    def chunk(self, count: int, dim: int = 0) -> tuple[_Lazy, ...]:
        return self.split(-(-self.shape[dim] // count), dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("stack", "cat", "concat"):
            dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
            parts = [item.weight for item in args[0]]
            if name != "stack":
                return _Lazy(concatenated(parts, dim % len(parts[0].shape)))
            if dim == 0:
                return _Lazy(stacked(parts))
        elif name in ("transpose", "permute", "reshape", "split", "chunk"):
            return getattr(args[0], name)(*args[1:], **kwargs)
        raise NotImplementedError(name)


def _convert(converter: Any, collected: dict[str, list[Weight]], first: str, model: Any) -> dict[str, Weight]:
    """What a transformers WeightConverter makes of its sources, as {model name: Weight}."""

    def apply(values: dict[str, list[Any]]) -> dict[str, Any]:
        # A converter carries state of one conversion: work on a copy, and let `convert` expand the names.
        worker = copy.deepcopy(converter)
        for pattern, items in values.items():
            worker.collected_tensors[pattern] = list(items)
        made = worker.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    try:
        made = apply({p: [_Lazy(w) for w in items] for p, items in collected.items()})
        return {name: _named(value.weight, name) for name, value in made.items()}
    except (NotImplementedError, AttributeError, TypeError):
        pass
    shapes = apply({p: [w.meta() for w in items] for p, items in collected.items()})

    def compute(name: str) -> Callable[[], torch.Tensor]:
        return lambda: apply({p: [w.load() for w in items] for p, items in collected.items()})[name]

    return {name: Computed(name, value.shape, value.dtype, compute(name)) for name, value in shapes.items()}


def _named(weight: Weight, name: str) -> Weight:
    """The expression under the model's name, leaving a shared leaf's own name alone."""
    if weight.sources:
        weight.name = name
    return weight
