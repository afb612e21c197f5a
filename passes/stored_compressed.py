"""compressed-tensors' layouts, as llm-compressor writes them.

| format          | tensors                                                                                   |
|-----------------|-------------------------------------------------------------------------------------------|
| pack-quantized  | weight_packed [N, ⌈K · bits / 32⌉] int32, weight_scale [N, G], weight_shape [2],          |
|                 | weight_zero_point [⌈N · bits / 32⌉, G] int32 (asymmetric), weight_g_idx [K] int32 (older)  |
| int-quantized   | weight [N, K] int8, weight_scale [N, G | 1] or [1], weight_zero_point int8 (asymmetric)    |
| float-quantized | weight [N, K] float8_e4m3fn, weight_scale [N, 1] or [1]                                    |
| naive-quantized | as the two above                                                                          |

w = scale · (code - zero), codes signed; packed codes and zero points are stored with 2^(bits - 1) added. A module's scheme
is the first of its targets that match: names, then regular expressions ("re:"), then class names; `ignore` excepts.
Sources: compressed-tensors 0.20, compressors/pack_quantized and naive_quantized, utils/match.py, quantization/quant_args.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enginewright.passes.bit_packing import unpack_words, words
from enginewright.passes.kept import Parts
from enginewright.passes.stored_checks import (
    FROM_ORIGINAL,
    Module,
    checked_group,
    checked_pattern,
    require_kinds,
    require_matrices,
    require_shapes,
    spare_notes,
)
from enginewright.passes.stored_matrix import StoredMatrix, group_name, group_order
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError
from enginewright.recipes.formats import activations_for

__all__ = ["LAYOUT", "CompressedLayout"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_UNSIGNED = {2: "int2", 3: "int3", 4: "int4", 8: "uint8"}


@dataclass(frozen=True)
class Scheme:
    """One config group. group 0: a scale a channel, or one for all (`per_tensor`)."""

    format: str
    bits: int
    is_float: bool
    symmetric: bool
    group: int
    per_tensor: bool
    activation: str | None
    note: str | None

    def weight_format(self) -> str:
        if self.is_float:
            return "fp8"
        if self.bits == 8 and self.symmetric:
            return group_name("int8", self.group, zero_points=False)
        return group_name(_UNSIGNED[self.bits], self.group, zero_points=True)


class CompressedLayout:
    parts = frozenset(
        """weight weight_packed weight_scale weight_zero_point weight_g_idx weight_shape input_scale
        input_zero_point""".split()
    )

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self.path = path
        require_kinds(settings, {"sparsity_config": dict, "ignore": list}, path)
        groups = settings.get("config_groups")
        sparsity = settings.get("sparsity_config") or {}
        problems = {
            "a kv_cache_scheme (rounded keys and values)": bool(settings.get("kv_cache_scheme")),
            "a transform_config (rotations around matrices)": bool(settings.get("transform_config")),
            f"sparsity format {sparsity.get('format')}": sparsity.get("format") not in (None, "dense"),
            f"quantization_status {settings.get('quantization_status')}": settings.get("quantization_status")
            not in (None, "compressed"),
            f"moe_sparsity_config {settings.get('moe_sparsity_config')}": bool(
                settings.get("moe_sparsity_config")
            ),
        }
        for found, is_so in problems.items():
            if is_so:
                raise self._refusal(found, "compressed matrices, quantised and nothing else")
        if not isinstance(groups, dict) or not groups:
            raise self._refusal("no config_groups", "config_groups with weights and targets")
        self.schemes: dict[str, Scheme] = {}
        for name, group in groups.items():
            scheme = self._scheme(name, group, settings.get("format"))
            self.schemes.update(dict.fromkeys(map(str, group.get("targets") or ()), scheme))
        self.exceptions = [str(item) for item in settings.get("ignore") or []]
        for entry in (*self.schemes, *self.exceptions):
            if entry.startswith("re:"):
                checked_pattern(entry.removeprefix("re:"), path)
        self._matched: set[str] = set()

    def _refusal(self, found: object, expected: str) -> InputError:
        return InputError(
            f"{self.path} is a compressed-tensors checkpoint in a form that is not read",
            found=found,
            expected=expected,
            action=FROM_ORIGINAL,
        )

    def _scheme(self, name: str, group: Any, overall: Any) -> Scheme:
        where = f"config_groups.{name}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise self._refusal(f"{where} without weights", "weights in each config group")
        require_kinds(group, {"targets": list, "input_activations": dict}, self.path, f"{where}.")
        require_kinds(group["weights"], {"num_bits": int}, self.path, f"{where}.weights.")
        weights, form = group["weights"], group.get("format") or overall
        strategy = weights.get("strategy") or _strategy(weights.get("group_size"))
        is_float = weights.get("type", "int") == "float"
        bits, symmetric = weights.get("num_bits", 8), bool(weights.get("symmetric", True))
        readable = bits == 8 and symmetric and strategy != "group" if is_float else bits in _UNSIGNED
        if form not in _FORMATS or not readable or strategy not in ("tensor", "channel", "group"):
            raise self._refusal(
                f"{where}: format {form}, {bits}-bit {'float' if is_float else 'int'}, "
                f"{'symmetric' if symmetric else 'asymmetric'}, strategy {strategy}",
                f"{', '.join(_FORMATS)}; integers of 2, 3, 4 or 8 bits or symmetric float8; a scale a tensor, channel or "
                "(integers) group",
            )
        if group.get("output_activations"):
            raise self._refusal(f"{where} rounds outputs", "rounded weights and inputs")
        size = checked_group(weights.get("group_size"), self.path) if strategy == "group" else 0
        scheme = Scheme(form, bits, is_float, symmetric, size, strategy == "tensor", None, None)
        activation, note = _activation(group.get("input_activations"), scheme.weight_format())
        return Scheme(form, bits, is_float, symmetric, size, strategy == "tensor", activation, note)

    def is_packed(self, parts: Mapping[str, Weight]) -> bool:
        return "weight_scale" in parts and ("weight" in parts or "weight_packed" in parts)

    def scheme(self, module: Module) -> Any:
        if any(_matches(item, module) for item in self.exceptions):
            return None
        named = sorted(self.schemes, key=lambda target: ("re:" in target, target))
        found = [target for target in named if _matches_name(target, module)]
        found += [target for target in named if target not in found and _matches(target, module)]
        self._matched.update(found)
        is_matrix = any(base.__name__ in ("Linear", "Embedding") for base in module.kind.__mro__)
        return self.schemes[found[0]] if found and is_matrix else None

    def matrix(self, name: str, parts: Mapping[str, Weight], scheme: Any) -> StoredMatrix:
        packed = scheme.format == "pack-quantized"
        if packed != ("weight_packed" in parts):
            raise InputError(
                f"the packed matrix {name} contradicts its configuration",
                found=", ".join(sorted(parts)),
                expected=f"{'weight_packed' if packed else 'weight'} ({scheme.format})",
                action="check that config.json and the weights belong to one model",
            )
        require_matrices(name, parts, ("weight_packed", "weight"))
        n, k = self._sizes(name, parts, scheme, packed)
        groups = -(-k // scheme.group) if scheme.group else 1
        described = f"{scheme.format}, {scheme.bits} bits, {n} x {k}" + (
            f", groups of {scheme.group}" if scheme.group else ""
        )
        scales = parts["weight_scale"]
        lone = tuple(scales.shape) in ((), (1,)) and scheme.per_tensor
        checks: dict[str, tuple[Weight, tuple[int, ...], tuple[torch.dtype, ...]]] = {
            "weight_scale": (scales, tuple(scales.shape) if lone else (n, groups), _FLOATS),
        }
        if packed:
            checks["weight_packed"] = (parts["weight_packed"], (n, words(k, scheme.bits)), (torch.int32,))
        else:
            wanted = torch.float8_e4m3fn if scheme.is_float else torch.int8
            checks["weight"] = (parts["weight"], (n, k), (wanted,))
        zeros = None if scheme.symmetric else parts.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32 and packed:
            checks["weight_zero_point"] = (zeros, (words(n, scheme.bits), groups), (torch.int32,))
        elif zeros is not None:
            shape = tuple(zeros.shape) if lone and tuple(zeros.shape) in ((), (1,)) else (n, groups)
            checks["weight_zero_point"] = (zeros, shape, (torch.int8,))
        elif not scheme.symmetric:
            raise InputError(
                f"the packed matrix {name} contradicts its configuration",
                found=", ".join(sorted(parts)),
                expected="weight_zero_point (symmetric: false)",
                action="copy or download the folder again",
            )
        require_shapes(name, checks, described)
        middle = 2 ** (scheme.bits - 1)
        signed = scheme.weight_format().startswith("int8")

        def table(values: Tensor) -> Tensor:
            return values.float().reshape(-1, 1).expand(n, 1).contiguous() if lone else values.float()

        def read() -> Parts:
            codes = (
                unpack_words(parts["weight_packed"].load(), scheme.bits, k)
                if packed
                else parts["weight"].load()
            )
            scale = table(scales.load())
            if scheme.is_float:
                return codes, scale, None
            if signed:
                return (codes.short() - 128).to(torch.int8) if packed else codes, scale, None
            if not packed:
                codes = (codes.short() + middle).to(torch.uint8)
            if zeros is None:
                return codes, scale, torch.full((n, groups), float(middle))
            stored = zeros.load()
            if stored.dtype == torch.int32:
                return codes, scale, unpack_words(stored.T, scheme.bits, n).T.float().contiguous()
            return codes, scale, table(stored.short() + middle)

        activation, activation_scale = scheme.activation, 0.0
        if activation == "int8_static":
            if "input_scale" not in parts or parts["input_scale"].numel != 1:
                raise InputError(
                    f"{name} has no scale of its inputs",
                    found=", ".join(sorted(parts)),
                    expected="input_scale of one number (static activations)",
                    action="copy or download the folder again",
                )
            activation_scale = float(parts["input_scale"].load().float().reshape(()))
        return StoredMatrix(
            name,
            (n, k),
            scheme.weight_format(),
            f"{scheme.format} {scheme.weight_format()}",
            read,
            scales,
            input_order=self._order(name, parts, scheme, k),
            activation=activation,
            activation_scale=activation_scale,
        )

    def _sizes(self, name: str, parts: Mapping[str, Weight], scheme: Scheme, packed: bool) -> tuple[int, int]:
        if not packed:
            n, k = parts["weight"].shape
            return n, k
        sizes = parts.get("weight_shape")
        if sizes is None or sizes.numel != 2 or sizes.dtype.is_floating_point:
            raise InputError(
                f"the packed matrix {name} has no size",
                found=", ".join(sorted(parts)),
                expected="weight_shape [2], whole numbers",
                action="copy or download the folder again",
            )
        n, k = (int(size) for size in sizes.load().flatten())
        found = parts["weight_packed"].shape[-1]
        if scheme.bits == 3 and found == -(-k // 10):
            raise InputError(
                f"{name} was packed by an older compressed-tensors, ten codes of 3 bits a word",
                found=f"weight_packed [{n}, {found}]",
                expected=f"[{n}, {words(k, 3)}], packed without gaps",
                action=FROM_ORIGINAL,
            )
        return n, k

    def _order(self, name: str, parts: Mapping[str, Weight], scheme: Scheme, k: int) -> Tensor | None:
        if "weight_g_idx" not in parts or not scheme.group:
            return None
        require_shapes(
            name, {"weight_g_idx": (parts["weight_g_idx"], (k,), (torch.int32, torch.int64))}, f"{k} inputs"
        )
        group_of = parts["weight_g_idx"].load()
        if bool((group_of == -1).all()):
            return None
        try:
            return group_order(group_of, scheme.group)
        except ValueError as error:
            raise InputError(
                f"{name} has groups of inputs that no format here has",
                found=f"weight_g_idx makes {error}",
                expected=f"groups of {scheme.group}",
                action=FROM_ORIGINAL,
            ) from error

    def notes(self, modules: Iterable[str]) -> list[str]:
        known = [Module(name, name, type("", (), {})) for name in modules]
        classes = {"Linear", "Embedding"}
        spare = [
            e for e in self.exceptions if e not in classes and not any(_matches_name(e, m) for m in known)
        ]
        unused = [target for target in self.schemes if target not in self._matched]
        said = dict.fromkeys(scheme.note for scheme in self.schemes.values() if scheme.note)
        return [*spare_notes("ignore", spare), *spare_notes("config_groups targets", unused), *said]


def _strategy(group_size: Any) -> str:
    """As the package infers it where a configuration leaves it out."""
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _matches_name(target: str, module: Module) -> bool:
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in module.names)
    return target in module.names


def _matches(target: str, module: Module) -> bool:
    return _matches_name(target, module) or any(base.__name__ == target for base in module.kind.__mro__)


def _activation(inputs: Any, weight_format: str) -> tuple[str | None, str | None]:
    """The activation format that rounds inputs as the scheme does, or None and a note that says what is done instead."""
    if not inputs:
        return None, None
    strategy = inputs.get("strategy") or _strategy(inputs.get("group_size"))
    integer = inputs.get("type", "int") == "int" and inputs.get("num_bits", 8) == 8
    dynamic, symmetric = inputs.get("dynamic", False), inputs.get("symmetric", True)
    chosen = None
    if integer and symmetric and weight_format != "fp8":
        if dynamic is True:
            group = inputs.get("group_size")
            chosen = {"token": "int8", "group": f"int8_g{group}"}.get(strategy)
        elif not dynamic and strategy == "tensor":
            chosen = "int8_static"
    if chosen in activations_for(weight_format):
        return chosen, None
    kind = f"{inputs.get('num_bits', 8)}-bit {inputs.get('type', 'int')}"
    return None, (
        f"the checkpoint's rounding of activations ({kind}, {'dynamic' if dynamic else 'static'}, {strategy}"
        f"{'' if symmetric else ', asymmetric'}) is not carried: {activations_for(weight_format)[0]} is used"
    )


LAYOUT = CompressedLayout
