"""AutoAWQ's GEMM layout: 4-bit codes, packed along the outputs.

    qweight [K, N / 8] int32, qzeros [K / G, N / 8] int32, scales [K / G, N] f16:   w = scale · (code - zero)

A word's eight codes, from its lowest bits up, are the outputs 0 2 4 6 1 3 5 7 of their eight. Source: AutoAWQ 0.2.7,
awq/modules/linear/gemm.py (WQLinear_GEMM.from_linear) and awq/utils/packing_utils.py. It always writes zero points, also
where its configuration says zero_point: false.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from enginewright.passes.bit_packing import unpack_words
from enginewright.passes.kept import Parts
from enginewright.passes.stored_checks import (
    FREE,
    FROM_ORIGINAL,
    Module,
    checked_group,
    excepted,
    is_linear_class,
    require_kinds,
    require_matrices,
    require_shapes,
    spare_notes,
)
from enginewright.passes.stored_matrix import StoredMatrix, group_name
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError

__all__ = ["LAYOUT", "AwqLayout"]

_BITS = 4
_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word an output of eight stands: the inverse of AutoAWQ's order 0 2 4 6 1 3 5 7."""
_SCALED_ACTIVATION = (".act.scales", ".gelu_impl.scales")


class AwqLayout:
    parts = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self.path = path
        require_kinds(settings, {"modules_to_not_convert": list}, path)
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        backend = str(settings.get("backend") or "autoawq").lower()
        if version != "gemm" or bits != _BITS or backend == "llm-awq":
            raise InputError(
                f"{path} is an AWQ checkpoint in a layout that is not read",
                found=f"version {version}, {bits} bits"
                + (", packed by llm-awq" if backend == "llm-awq" else ""),
                expected="version gemm, 4 bits",
                action=FROM_ORIGINAL,
            )
        self.group = checked_group(settings.get("group_size", settings.get("q_group_size", 128)), path)
        self.exceptions = [str(item) for item in settings.get("modules_to_not_convert") or []]

    def is_packed(self, parts: Mapping[str, Weight]) -> bool:
        return self.parts <= parts.keys()

    def scheme(self, module: Module) -> Any:
        """AutoAWQ takes an entry as any part of a name, transformers as a whole component: where they differ, the tensors
        decide. The head is not converted unless it is stored so."""
        if not is_linear_class(module.kind):
            return None
        answers = {excepted(name, self.exceptions) for name in module.names}
        answers |= {any(entry in name for entry in self.exceptions) for name in module.names}
        if len(answers) > 1 or module.name.rsplit(".", 1)[-1] in ("lm_head", "embed_out"):
            return FREE
        return None if answers.pop() else self.group

    def matrix(self, name: str, parts: Mapping[str, Weight], scheme: Any) -> StoredMatrix:
        require_matrices(name, parts, self.parts)
        qweight, qzeros, scales = (parts[part] for part in ("qweight", "qzeros", "scales"))
        k, n = qweight.shape[0], 8 * qweight.shape[-1]
        groups = -(-k // self.group) if self.group else 1
        require_shapes(
            name,
            {
                "qweight": (qweight, (k, n // 8), (torch.int32,)),
                "qzeros": (qzeros, (groups, n // 8), (torch.int32,)),
                "scales": (scales, (groups, n), (torch.float16, torch.bfloat16, torch.float32)),
            },
            f"AWQ, 4 bits, {k} inputs, groups of {self.group or k}",
        )

        def read() -> Parts:
            codes = _unpack(qweight.load()).T.contiguous()
            zeros = _unpack(qzeros.load()).T.float().contiguous()
            return codes, scales.load().float().T.contiguous(), zeros

        form = group_name("int4", self.group, zero_points=True)
        return StoredMatrix(name, (n, k), form, f"AWQ {form}", read, scales)

    def notes(self, modules: Iterable[str]) -> list[str]:
        known = list(modules)
        scaled = [name for name in known if f".{name}.scales".endswith(_SCALED_ACTIVATION)]
        if scaled:
            raise InputError(
                f"{self.path} holds scales between an activation and a matrix, which no graph here has",
                found=", ".join(f"{name}.scales" for name in sorted(scaled)[:3]),
                action=FROM_ORIGINAL,
            )
        spare = [e for e in self.exceptions if not any(e in name or excepted(name, [e]) for name in known)]
        return spare_notes("modules_to_not_convert", spare)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """[R, N / 8] int32 -> [R, N] uint8, the outputs in their natural order."""
    rows = len(packed)
    codes = unpack_words(packed, _BITS, 8 * packed.shape[1]).reshape(rows, -1, 8)
    return codes[:, :, list(_PLACE_OF_OUTPUT)].reshape(rows, -1)


LAYOUT = AwqLayout
