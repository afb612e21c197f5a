"""Layers that are alike: which of a model's layers one captured layer can stand for, and a model that runs only some of them.

A plan needs no more than one layer of each kind. Two layers are of one kind when nothing that a trace could see tells them apart:
classes of modules, shapes of parameters and buffers, numbers and words that a module holds (a window, a scale, a type of
attention), what the configuration's lists say of the layer, and which of a recipe's patterns match its modules. A layer's own
number is left out: an attribute that equals it in every layer.

Layers that are left out hand on their input. They stay where they are, without parameters, so that whatever a model looks up by a
layer's number is found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

__all__ = ["Layers", "find_layers", "keep_only"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layers:
    """A model's layers: the path of their list (`model.layers`), how many there are, and the kinds as lists of numbers,
    ascending.

    A model whose layers were not found has the path "" and no kinds: all of it is captured.
    """

    path: str = ""
    count: int = 0
    kinds: tuple[tuple[int, ...], ...] = ()

    def of_module(self, module: str) -> int | None:
        """The number of the layer that a module path lies in."""
        if not self.path or not module.startswith(f"{self.path}."):
            return None
        number = module[len(self.path) + 1 :].partition(".")[0]
        return int(number) if number.isdigit() else None

    def stands_for(self, module: str) -> int:
        """How many layers the one that a module lies in stands for; 1 outside of layers."""
        layer = self.of_module(module)
        return next((len(kind) for kind in self.kinds if layer in kind), 1)


def find_layers(
    model: Any, patterns: Sequence[str] = (), told: Callable[[str], Hashable] = lambda name: None
) -> Layers:
    """The kinds of a meta model's layers. `patterns` are a recipe's globs over module paths; `told` is what else tells
    parameters apart, by their names: how a checkpoint holds them."""
    count = int(getattr(model.config, "num_hidden_layers", 0) or 0)
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if count < 2 or not lists:
        return Layers()
    path, layers = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    found = [_signature(layer, f"{path}.{i}", patterns, told) for i, layer in enumerate(layers)]
    listed = _listed(model.config, count)
    numbers = {
        key
        for key in set().union(*(values for _, values in found))
        if all(_is_number(values[key], i) for i, (_, values) in enumerate(found) if key in values)
    }
    kinds: dict[Hashable, list[int]] = {}
    for i, (shape, values) in enumerate(found):
        plain = tuple((key, repr(value)) for key, value in sorted(values.items()) if key not in numbers)
        kinds.setdefault((shape, plain, tuple(repr(items[i]) for items in listed)), []).append(i)
    return Layers(path, count, tuple(map(tuple, kinds.values())))


def _signature(
    layer: Any, path: str, patterns: Sequence[str], told: Callable[[str], Hashable]
) -> tuple[Hashable, dict[tuple[str, str], Any]]:
    """What tells a layer apart: its structure, and the plain values that its modules hold, by (module, attribute)."""
    structure: list[Hashable] = []
    values: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        shapes = tuple((key, None if t is None else (tuple(t.shape), t.dtype)) for key, t in tensors)
        whole = f"{path}.{name}" if name else path
        stored = tuple(told(f"{whole}.{key}") for key in module._parameters)
        matched = tuple(i for i, pattern in enumerate(patterns) if fnmatchcase(whole, pattern))
        structure.append((name, type(module).__module__, type(module).__qualname__, shapes, stored, matched))
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN) or (
                isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value)
            ):
                values[name, key] = value
    return tuple(structure), values


def _is_number(value: Any, number: int) -> bool:
    """Whether a value is this whole number; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value == number


def _listed(config: Any, count: int) -> list[Sequence[Any]]:
    """The configuration's lists with an item for each layer."""
    return [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count]


def keep_only(model: Any, layers: Layers, kept: Iterable[int]) -> None:
    """Make a meta model run only some of its layers, in place. The others lose their tensors and hand on what they get.

    The first layer must be kept: a layer that is left out returns what the last one that ran returned, its hidden states
    replaced.
    """
    wanted = set(kept)
    if 0 not in wanted:
        raise ValueError("the first layer must be kept")
    last: list[Any] = [None]
    for i, layer in enumerate(model.get_submodule(layers.path)):
        if i in wanted:
            layer.register_forward_hook(lambda module, args, result: last.__setitem__(0, result))
            continue
        for module in layer.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))
        layer.forward = _handing_on(last)


def _handing_on(last: list[Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *last[0][1:]) if isinstance(last[0], tuple) else hidden

    return forward
