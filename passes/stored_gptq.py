"""GPTQ's layout, as AutoGPTQ and GPTQModel write it: codes packed along the inputs.

    qweight [K · bits / 32, N] int32, qzeros [groups, N · bits / 32] int32, scales [groups, N] f16, g_idx [K] int32

w[n, k] = scale[g, n] · (code[n, k] - zero[g, n]) with g = g_idx[k]. `gptq` (v1) stores zero - 1, `gptq_v2` zero. Sources:
AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel, gptqmodel/utils/model.py
(convert_gptq_v1_to_v2_format_module).

Two things that are not obvious:
1. A v1 zero point of 0 has no code. GPTQModel subtracts 1 from every field of a word at once, with borrows; adding the
   same word gives all fields back. Other tools read such a field as 0, as 2^bits, or spoil the word: refused by name.
2. With `desc_act` a group's inputs lie apart. They are brought together by reordering the codes' inputs, and the activation's
   before the product.
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
    FREE,
    FROM_ORIGINAL,
    Module,
    checked_group,
    checked_pattern,
    is_linear_class,
    require_kinds,
    require_matrices,
    require_shapes,
    spare_notes,
)
from enginewright.passes.stored_matrix import StoredMatrix, group_name, group_order
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError

__all__ = ["LAYOUT", "GptqLayout"]

_CODES = {2: "int2", 3: "int3", 4: "int4", 8: "uint8"}
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_READ_OVERRIDES = ("bits", "group_size", "sym", "desc_act")


@dataclass(frozen=True)
class Scheme:
    """How one module is quantised. group 0: one scale a channel."""

    bits: int
    group: int


class GptqLayout:
    parts = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self.path = path
        require_kinds(settings, {"bits": int, "dynamic": dict, "modules_in_block_to_quantize": list}, path)
        form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        packed_as = str(settings.get("pack_dtype") or "int32")
        refused = {
            f"checkpoint_format {form}": form not in ("gptq", "gptq_v2"),
            "is_marlin_format": bool(settings.get("is_marlin_format")),
            f"pack_dtype {packed_as}": packed_as != "int32",
            "an adapter": bool(settings.get("adapter")),
        }
        for found, is_so in refused.items():
            if is_so:
                raise InputError(
                    f"{path} is a GPTQ checkpoint in a layout that is not read",
                    found=found,
                    expected="checkpoint_format gptq or gptq_v2, packed into int32",
                    action=FROM_ORIGINAL,
                )
        self.first_version = form == "gptq"
        meta = settings.get("meta")
        quantizer = meta.get("quantizer", "") if isinstance(meta, dict) else ""
        self.borrows = "gptqmodel" in str(quantizer).lower()
        self.base = dict(settings)
        self.dynamic: dict[str, Any] = dict(settings.get("dynamic") or {})
        for pattern, changes in self.dynamic.items():
            checked_pattern(_plain(pattern), path)
            require_kinds({pattern: changes or None}, {pattern: dict}, path, "dynamic ")
        self.exceptions = [_plain(key) for key in self.dynamic if key.startswith("-:")]
        self.inside = [
            str(item)
            for block in settings.get("modules_in_block_to_quantize") or []
            for item in (block if isinstance(block, list) else [block])
        ]
        self._scheme_of({})  # refuses what no module could be

    def is_packed(self, parts: Mapping[str, Weight]) -> bool:
        return parts.keys() >= self.parts - {"g_idx"}

    def scheme(self, module: Module) -> Any:
        """FREE where the configuration, which only says what differs, says nothing."""
        if not is_linear_class(module.kind):
            return None
        for pattern, changes in self.dynamic.items():
            if any(re.match(_plain(pattern), name) for name in module.names):
                return None if pattern.startswith("-:") else self._scheme_of(changes or {})
        if self.inside and re.search(r"\.\d+\.", f".{module.name}"):
            named = any(name.endswith(f".{item}") for name in module.names for item in self.inside)
            return self._scheme_of({}) if named else None
        return FREE

    def _scheme_of(self, changes: Mapping[str, Any]) -> Scheme:
        """The base settings with a module's own. Raises InputError for settings that are not read."""
        require_kinds(changes, {"bits": int}, self.path, "dynamic ")
        for key in ("quant_method", "method", "format", "checkpoint_format", "pack_dtype"):
            if key in changes and changes[key] != self.base.get(key):
                raise InputError(
                    f"{self.path} has modules in a layout of their own",
                    found=f"quantization_config.dynamic sets {key} {changes[key]!r}",
                    expected="changes of " + ", ".join(_READ_OVERRIDES),
                    action=FROM_ORIGINAL,
                )
        bits = changes.get("bits", self.base.get("bits"))
        if bits not in _CODES:
            raise InputError(
                f"{self.path} is a GPTQ checkpoint of a width that is not read",
                found=f"{bits} bits",
                expected="2, 3, 4 or 8 bits",
                action=FROM_ORIGINAL,
            )
        group = changes.get("group_size", self.base.get("group_size", 128))
        return Scheme(bits, checked_group(group, self.path))

    def matrix(self, name: str, parts: Mapping[str, Weight], scheme: Any) -> StoredMatrix:
        require_matrices(name, parts, self.parts - {"g_idx"})
        scheme = self._scheme_of({}) if scheme is FREE else scheme
        bits, qweight, qzeros, scales = scheme.bits, parts["qweight"], parts["qzeros"], parts["scales"]
        k, n = qweight.shape[0] * 32 // bits, qweight.shape[-1]
        group = scheme.group
        groups = -(-k // group) if group else 1
        checks: dict[str, tuple[Weight, tuple[int, ...], tuple[torch.dtype, ...]]] = {
            "qweight": (qweight, (words(k, bits), n), (torch.int32,)),
            "qzeros": (qzeros, (groups, words(n, bits)), (torch.int32,)),
            "scales": (scales, (groups, n), (torch.float16, torch.bfloat16, torch.float32)),
        }
        if "g_idx" in parts:
            checks["g_idx"] = (parts["g_idx"], (k,), (torch.int32, torch.int64))
        described = f"GPTQ, {bits} bits, {k} inputs, groups of {group or k}"
        require_shapes(name, checks, described)
        order = None
        if "g_idx" in parts and group:
            try:
                order = group_order(parts["g_idx"].load(), group)
            except ValueError as error:
                raise InputError(
                    f"{name} has groups of inputs that no format here has",
                    found=f"g_idx makes {error}",
                    expected=f"groups of {group}",
                    action=FROM_ORIGINAL,
                ) from error
        if self.first_version:
            self._require_readable_zeros(name, qzeros, bits, n)

        def read() -> Parts:
            codes = unpack_words(qweight.load().T, bits, k)
            zeros = self._zeros(qzeros.load(), bits, n).T.float().contiguous()
            return codes, scales.load().float().T.contiguous(), zeros

        form = group_name(_CODES[bits], group, zero_points=True)
        return StoredMatrix(name, (n, k), form, f"GPTQ {form}", read, scales, input_order=order)

    def _zeros(self, qzeros: Tensor, bits: int, n: int) -> Tensor:
        """[groups, N] uint8."""
        if not self.first_version:
            return unpack_words(qzeros, bits, n)
        if bits in _ONES:  # int32 addition wraps at 2^32, and its carries undo the borrows of the subtraction
            return unpack_words(qzeros + _ONES[bits], bits, n)
        return unpack_words(qzeros, bits, n) + 1

    def _require_readable_zeros(self, name: str, qzeros: Weight, bits: int, n: int) -> None:
        if bits in _ONES and self.borrows:
            return
        stored = unpack_words(qzeros.load(), bits, n)
        if bool((stored == 2**bits - 1).any()):
            raise InputError(
                f"{name} has zero points that the tools read differently",
                found=f"stored zero points of {2**bits - 1} in checkpoint_format gptq, which stores zero - 1",
                expected="zero points from 1, or checkpoint_format gptq_v2",
                action="write the checkpoint again with GPTQModel in the format gptq_v2",
            )

    def notes(self, modules: Iterable[str]) -> list[str]:
        known = list(modules)
        spare = [
            pattern for pattern in self.dynamic if not any(re.match(_plain(pattern), name) for name in known)
        ]
        return spare_notes("dynamic", spare)


def _plain(pattern: str) -> str:
    """A rule's regular expression, without the sign before it."""
    return pattern.removeprefix("-:").removeprefix("+:")


LAYOUT = GptqLayout
