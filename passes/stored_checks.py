"""What the layouts of quantised checkpoints share: the module they are asked about, their interface, their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from enginewright.passes.stored_matrix import StoredMatrix
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import GROUPS

__all__ = [
    "FREE",
    "FROM_ORIGINAL",
    "Layout",
    "Module",
    "Parts",
    "checked_group",
    "checked_pattern",
    "excepted",
    "is_linear_class",
    "require_kinds",
    "require_matrices",
    "require_shapes",
    "spare_notes",
]

Parts = Mapping[str, Weight]
"""The tensors of one module, by the last part of their names."""

FREE = object()
"""A layout's answer where the configuration does not say whether a module is quantised."""

FROM_ORIGINAL = "build from the original model; a recipe quantises it"


@dataclass(frozen=True)
class Module:
    """A module that may be quantised: by its name in the checkpoint and in the model, with the model's class."""

    stored: str
    name: str
    kind: type

    @property
    def names(self) -> tuple[str, ...]:
        return (self.stored,) if self.stored == self.name else (self.stored, self.name)


class Layout(Protocol):
    """How one tool stores matrices. Its class is called with (settings, where) and refuses what it cannot read."""

    parts: frozenset[str]
    """Last parts of the names of a packed matrix's tensors."""

    exceptions: list[str]
    """The entries of the configuration that name modules which are not quantised."""

    def is_packed(self, parts: Parts) -> bool:
        """Whether these tensors of one module are a packed matrix."""

    def scheme(self, module: Module) -> Any:
        """How the configuration says that a module is quantised, None (it is not), or FREE."""

    def matrix(self, name: str, parts: Parts, scheme: Any) -> StoredMatrix:
        """The matrix that the parts hold. Raises InputError where they contradict the scheme or each other."""

    def notes(self, modules: Iterable[str]) -> list[str]:
        """What a user should know, once all modules' names are known."""


def is_linear_class(kind: type) -> bool:
    """Linear and GPT-2's Conv1D, which the tools replace; not their subclasses that do more."""
    return kind.__name__ in ("Linear", "Conv1D")


def spare_notes(key: str, entries: list[str]) -> list[str]:
    """One note on the entries of a setting that match nothing."""
    if not entries:
        return []
    listed = ", ".join(entries[:4]) + (", …" if len(entries) > 4 else "")
    return [f"{len(entries)} entries of quantization_config.{key} name no module of this model: {listed}"]


def excepted(name: str, entries: Iterable[str]) -> bool:
    """Whether transformers' rule (quantizers_utils.should_convert_module) leaves a module as it is."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    return not should_convert_module(name, list(entries))


def checked_group(group: Any, path: Path) -> int:
    """A group size as ours: -1, a whole channel, is 0. Raises InputError for sizes that no format has."""
    if group in (-1, None):
        return 0
    if group not in GROUPS:
        raise InputError(
            f"{path} has groups of a size that no format here has",
            found=f"group_size {group}",
            expected="-1, or one of " + ", ".join(map(str, GROUPS)),
            action=FROM_ORIGINAL,
        )
    return int(group)


def checked_pattern(pattern: str, path: Path) -> str:
    """A regular expression of the settings. Raises InputError for one that is none."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"{path} names modules by a regular expression that cannot be read",
            found=f"{pattern!r}: {error}",
            action="correct config.json's quantization_config, or take the folder as it was published",
        ) from error
    return pattern


def require_kinds(
    settings: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], path: Path, where: str = ""
) -> None:
    """Raise InputError for the first setting, of those that are given, whose value is of another type than `kinds` says."""
    for key, kind in kinds.items():
        value = settings.get(key)
        if value is not None and not isinstance(value, kind):
            names = [item.__name__ for item in (kind if isinstance(kind, tuple) else (kind,))]
            raise InputError(
                f"{path} has a quantization_config that cannot be read",
                found=f"{where}{key} {value!r}"[:120],
                expected=f"{where}{key} of type {' or '.join(names)}",
                action="take config.json as it was published",
            )


def require_matrices(name: str, parts: Parts, expected: Iterable[str]) -> None:
    """Raise InputError for the first of some parts that has not two axes."""
    for part in expected:
        if part in parts and len(parts[part].shape) != 2:
            raise InputError(
                f"the packed matrix {name} is none",
                found=f"{part} {list(parts[part].shape)}",
                expected="two axes",
                action="copy or download the folder again",
            )


def require_shapes(
    name: str,
    parts: Mapping[str, tuple[Weight, tuple[int, ...], tuple[torch.dtype, ...]]],
    described: str,
) -> None:
    """Raise InputError for the first part whose shape or type is not the one that the others and the settings ask for."""
    for part, (tensor, shape, dtypes) in parts.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            said = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InputError(
                f"the packed matrix {name} contradicts its configuration",
                found=f"{part} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}",
                expected=f"{part} {list(shape)} {said} ({described})",
                action="check that config.json and the weights belong to one model",
            )
