"""How a model's tensors follow from a checkpoint's: transformers' renamings and conversions, evaluated on expressions.

Experts stored one by one become a lazy stack, a fused matrix a lazy slice; what cannot be expressed so is converted at
load. Tied tensors are one weight. A tensor that the checkpoint lacks may stand for another only where the configuration
ties them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from enginewright.passes.stored_matrix import StoredMatrix
from enginewright.passes.weights import (
    Computed,
    Weight,
    concatenated,
    permuted,
    reshaped,
    sliced,
    stacked,
    transposed,
)
from enginewright.recipes.errors import InputError, near_matches

__all__ = ["check_bound", "convert_names", "renaming", "tie"]

Rename = Callable[[str], "tuple[str, str | None]"]
"""Checkpoint name -> the model's name, and the pattern of the converter that it goes through."""


def convert_names(
    model: Any, tensors: Mapping[str, Weight], source: str
) -> tuple[dict[str, Weight], list[str]]:
    """Bind checkpoint tensors to the names of the meta `model`'s state dict, following transformers' conversion mapping.

    Returns the weights (tied names share one object) and notes. Raises InputError for a missing or misshapen tensor.
    """
    from transformers.core_model_loading import dot_natural_key

    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    rename, by_pattern = renaming(model)
    turned = {f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    bound: dict[str, Weight] = {}
    origin: dict[str, str] = {}
    groups: dict[str, tuple[Any, dict[str, list[Weight]]]] = {}
    unused: list[str] = []
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename(key)
        if name not in wanted:
            unused.append(key)
        elif pattern is not None:
            _, collected = groups.setdefault(name, (by_pattern[pattern], {}))
            collected.setdefault(pattern, []).append(tensors[key])
        elif name in bound:
            raise InputError(f"two tensors of {source} are both {name}", found=[origin[name], key])
        else:
            bound[name], origin[name] = _as_stored(tensors[key], name in turned), key
    for first, (converter, collected) in groups.items():
        bound.update(_convert(converter, collected, first, model))

    notes = tie(model, bound, wanted)
    check_bound(bound, wanted, tensors, unused, source, model)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    surprising = [key for key in unused if not _matches(key, ignored)]
    if surprising:
        listed = ", ".join(surprising[:4]) + (", …" if len(surprising) > 4 else "")
        notes.append(
            f"{len(surprising)} tensors of the checkpoint are not part of {type(model).__name__} "
            f"and were left out: {listed}"
        )
    return {name: bound[name] for name in wanted if name in bound}, notes


def renaming(model: Any) -> tuple[Rename, dict[str, Any]]:
    """How transformers renames a checkpoint's names for the meta `model`, and its converters by their source patterns."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(model) or []
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings: Any = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        return (key, None) if name not in state and key in state else (name, pattern)

    return rename, {pattern: item for item in converters for pattern in item.source_patterns}


def _as_stored(weight: Weight, turned: bool) -> Weight:
    """A packed matrix is [outputs, inputs] also where the model keeps it the other way round (GPT-2's Conv1D)."""
    return transposed(weight) if turned and isinstance(weight, StoredMatrix) else weight


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, key) for pattern in patterns) or key.endswith("rotary_emb.inv_freq")


def tie(model: Any, bound: dict[str, Weight], wanted: Mapping[str, Any]) -> list[str]:
    """Give tied names one object. As transformers does, a tie holds unless the checkpoint has both tensors and they differ."""
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


def check_bound(
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
    numbers = {name: tensor.is_floating_point() for name, tensor in model.state_dict().items()}
    for name, weight in bound.items():
        said: tuple[str, object, object] | None = None
        if weight.shape != wanted[name]:
            said = "wrong shape", list(weight.shape), list(wanted[name])
        elif numbers.get(name) and not weight.dtype.is_floating_point:
            said = "wrong type", str(weight.dtype).removeprefix("torch."), "a float type"
        if said is not None:
            leaf = next(weight.leaves())
            file = getattr(getattr(leaf, "reader", None), "path", source)
            raise InputError(
                f"the tensor {weight.name} in {file} has the {said[0]} for {name}",
                found=said[1],
                expected=said[2],
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
    packed = [w for items in collected.values() for w in items if isinstance(w, StoredMatrix)]
    if packed:
        raise InputError(
            f"transformers rearranges {packed[0].name} in a way that its stored codes cannot follow",
            found=f"{packed[0].found} and {type(converter.operations[0]).__name__}, to make {first}",
            action="build from the original model; a recipe quantises it",
        )
    shapes = apply({p: [w.meta() for w in items] for p, items in collected.items()})

    def compute(name: str) -> Callable[[], torch.Tensor]:
        return lambda: apply({p: [w.load() for w in items] for p, items in collected.items()})[name]

    return {name: Computed(name, value.shape, value.dtype, compute(name)) for name, value in shapes.items()}


def _named(weight: Weight, name: str) -> Weight:
    """The expression under the model's name, leaving a shared leaf's own name alone."""
    if weight.sources:
        weight.name = name
    return weight
