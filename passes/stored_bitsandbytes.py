"""bitsandbytes' int8 layout (load_in_8bit): one scale an output channel.

    weight [N, K] int8, SCB [N] f32 (each row's largest magnitude), weight_format uint8 (0: rows):   w = code · SCB / 127

Source: bitsandbytes 0.50, nn/modules.py (Linear8bitLt._save_to_state_dict) and functional.py (int8_vectorwise_dequant).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from enginewright.passes.kept import Parts
from enginewright.passes.stored_checks import (
    FREE,
    FROM_ORIGINAL,
    Module,
    excepted,
    is_linear_class,
    require_kinds,
    require_matrices,
    require_shapes,
    spare_notes,
)
from enginewright.passes.stored_matrix import StoredMatrix
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError

__all__ = ["LAYOUT", "BitsandbytesLayout"]


class BitsandbytesLayout:
    parts = frozenset(("weight", "SCB", "weight_format"))

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self.path = path
        require_kinds(settings, {"llm_int8_skip_modules": list, "llm_int8_threshold": (int, float)}, path)
        if not (settings.get("load_in_8bit") or settings.get("_load_in_8bit")):
            kind = settings.get("bnb_4bit_quant_type", "fp4")
            raise InputError(
                f"{path} holds weights in a form that no format here has",
                found=f"bitsandbytes 4-bit ({kind}), whose codes are not evenly spaced",
                expected="bitsandbytes int8 (load_in_8bit)",
                action=FROM_ORIGINAL,
            )
        self.threshold = float(settings.get("llm_int8_threshold") or 0.0)
        self.chosen = settings.get("llm_int8_skip_modules")
        self.exceptions = [str(item) for item in self.chosen or []]

    def is_packed(self, parts: Mapping[str, Weight]) -> bool:
        return "weight" in parts and "SCB" in parts and parts["weight"].dtype == torch.int8

    def scheme(self, module: Module) -> Any:
        """Without a list of its own the tool leaves the head; a list's entries are read in two ways (stored_awq.py)."""
        if not is_linear_class(module.kind):
            return None
        if module.name.rsplit(".", 1)[-1] in ("lm_head", "embed_out") and self.chosen is None:
            return FREE
        answers = {excepted(name, self.exceptions) for name in module.names}
        answers |= {any(entry in name for entry in self.exceptions) for name in module.names}
        return FREE if len(answers) > 1 else None if answers.pop() else "int8"

    def matrix(self, name: str, parts: Mapping[str, Weight], scheme: Any) -> StoredMatrix:
        require_matrices(name, parts, ("weight",))
        weight, maxima = parts["weight"], parts["SCB"]
        n, k = weight.shape
        checks = {"weight": (weight, (n, k), (torch.int8,)), "SCB": (maxima, (n,), (torch.float32,))}
        require_shapes(name, checks, f"bitsandbytes int8, {n} outputs")
        tiles = parts["weight_format"].load() if "weight_format" in parts else torch.zeros(())
        if bool((tiles != 0).any()):
            raise InputError(
                f"{name} is stored in the order of a GPU's tiles",
                found=f"weight_format {tiles.tolist()}",
                expected="weight_format 0 (rows)",
                action="save the model again with a current bitsandbytes",
            )

        def read() -> Parts:
            return weight.load(), (maxima.load() / 127)[:, None], None

        return StoredMatrix(name, (n, k), "int8", "bitsandbytes int8", read, maxima)

    def notes(self, modules: Iterable[str]) -> list[str]:
        known = list(modules)
        spare = [e for e in self.exceptions if not any(e in name or excepted(name, [e]) for name in known)]
        notes = spare_notes("llm_int8_skip_modules", spare)
        if self.threshold:
            notes.append(
                f"llm_int8_threshold {self.threshold:g} is not carried: activations are rounded with a scale a token and "
                "group of inputs, which an outlier outside the group does not coarsen"
            )
        return notes


LAYOUT = BitsandbytesLayout
