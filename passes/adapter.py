"""A LoRA adapter, merged into the weights that it changes: W + scale · B · A (Hu et al. 2021, eq. 3), lazily.

The adapter is a folder as PEFT writes it: adapter_config.json and adapter_model.safetensors. Rules:
1. scale is lora_alpha / r, or lora_alpha / √r with `use_rslora`; `rank_pattern` and `alpha_pattern` change r and alpha by module.
2. The sum is computed in float32 and stays float32: merging rounds nothing.
3. What cannot be merged exactly is refused by name: other kinds than LoRA, DoRA, trained biases, embeddings or whole modules,
   weights that are tied or quantised, modules that the model does not have. Nothing of an adapter is left out silently.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from enginewright.passes.weight_files import SafetensorsFile, read_json
from enginewright.passes.weights import CheckpointTensor, Weight
from enginewright.recipes.errors import InputError

__all__ = ["Adapter", "LowRankSum"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED = {  # settings whose effect is not W + scale · B · A
    "use_dora": "DoRA",
    "modules_to_save": "modules that were trained whole",
    "lora_bias": "biases in its low-rank matrices",
    "trainable_token_indices": "trained embeddings of single tokens",
    "target_parameters": "parameters that are no modules",
    "layer_replication": "layers that are repeated",
    "megatron_config": "a parallel layout",
    "alora_invocation_tokens": "a change in mid-text (aLoRA)",
    "use_qalora": "QALoRA",
}


class LowRankSum(Weight):
    """base + scale · (up @ down), or its transpose for a base of [in, out]; float32.

    `up` is [out, r], `down` [r, in]. Rows are products of rows of their own, so a matrix that streams costs no more.
    """

    def __init__(
        self, base: Weight, up: Weight, down: Weight, scale: float, transposed: bool = False
    ) -> None:
        self.base, self.up, self.down = base, up, down
        self.scale, self.transposed = scale, transposed
        self.name = base.name
        self.shape = base.shape
        self.dtype = torch.float32

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.base, self.up, self.down)

    def load(self) -> torch.Tensor:
        return self.load_rows(0, self.shape[0])

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        if self.transposed:
            change = self.down.load()[:, start:stop].T.float() @ self.up.load().T.float()
        else:
            change = self.up.load_rows(start, stop).float() @ self.down.load().float()
        return self.base.load_rows(start, stop).float() + change * self.scale


class Adapter:
    """An opened adapter. Raises InputError for one that cannot be merged, whatever the model."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / _CONFIG).is_file():
            raise InputError(
                f"there is no adapter at {self.path}",
                expected=f"a folder as PEFT writes it, with {_CONFIG} and {_WEIGHTS}",
            )
        self.name = self.path.resolve().name
        self.settings = read_json(self.path / _CONFIG)
        _check_settings(self.path, self.settings)
        if not (self.path / _WEIGHTS).is_file():
            raise InputError(
                f"the adapter {self.path} has no {_WEIGHTS}",
                found=sorted(file.name for file in self.path.iterdir())[:8],
                action="save it again with safe_serialization=True"
                if (self.path / "adapter_model.bin").is_file()
                else None,
            )
        file = SafetensorsFile(self.path / _WEIGHTS)
        self.tensors = {
            key: CheckpointTensor(key, *entry, reader=file) for key, entry in file.entries.items()
        }

    @property
    def fingerprint(self) -> str:
        """sha256 over both files."""
        digest = hashlib.sha256()
        for name in (_CONFIG, _WEIGHTS):
            digest.update((self.path / name).read_bytes())
        return digest.hexdigest()

    def merge(self, model: Any, weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], str]:
        """Return the weights of `model` (by the names of its state dict) with the adapter in them, and a note."""
        merged = dict(weights)
        modules = self._modules()
        for path, (down, up) in sorted(modules.items()):
            name = f"{path}.weight"
            base = weights.get(name)
            if base is None:
                raise self._refused(f"{path}, which the model does not have", "an adapter of this model")
            tied = [other for other, weight in weights.items() if weight is base and other != name]
            if tied:
                raise self._refused(f"{path}, whose weight is {tied[0]} as well", "weights that are not tied")
            module = model.get_submodule(path)
            kind = type(module).__name__
            if kind not in ("Linear", "Conv1D"):
                raise self._refused(f"{path}, a {kind}", "linear layers only")
            if not base.dtype.is_floating_point or not all(
                isinstance(leaf, CheckpointTensor) for leaf in base.leaves()
            ):
                raise self._refused(
                    f"{path}, which is no float tensor of a folder", "a model that is not quantised"
                )
            merged[name] = self._sum(path, base, up, down, kind == "Conv1D")
        return merged, f"the adapter {self.name} was merged into {len(modules)} matrices"

    def _sum(self, path: str, base: Weight, up: Weight, down: Weight, transposed: bool) -> Weight:
        shape = (up.shape[0], down.shape[1]) if len(up.shape) == len(down.shape) == 2 else ()
        expected = tuple(reversed(base.shape)) if transposed else base.shape
        if shape != expected or up.shape[1] != down.shape[0]:
            raise self._refused(
                f"{path} with {list(up.shape)} · {list(down.shape)}", f"a product of {list(expected)}"
            )
        rank, alpha = self._figures(path)
        if rank != down.shape[0]:
            raise self._refused(f"{path} with rank {down.shape[0]}", f"rank {rank}, as {_CONFIG} says")
        scale = alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank
        return LowRankSum(base, up, down, scale, transposed)

    def _figures(self, path: str) -> tuple[int, float]:
        """Return rank and alpha of a module: the first pattern that fits the end of its name, else the adapter's own."""
        figures: list[Any] = []
        for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            own = self.settings.get(patterns) or {}
            fits = (pattern for pattern in own if re.match(rf"(.*\.)?({pattern})$", path))
            found = next(fits, None)
            figures.append(own[found] if found is not None else self.settings.get(key))
        rank, alpha = figures
        if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, (int, float)) and alpha > 0):
            raise self._refused(f"{path} with r and lora_alpha {figures}", "positive numbers")
        return rank, float(alpha)

    def _modules(self) -> dict[str, tuple[Weight, Weight]]:
        """Return (A, B) of every adapted module; every tensor of the file belongs to one."""
        found: dict[str, dict[str, Weight]] = {}
        for key, tensor in self.tensors.items():
            fits = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", key)
            if fits is None:
                raise self._refused(f"the tensor {key}", "pairs of lora_A.weight and lora_B.weight")
            found.setdefault(fits[1], {})[fits[2]] = tensor
        for path, pair in found.items():
            if len(pair) != 2:
                raise self._refused(f"{path} with lora_{next(iter(pair))} alone", "both matrices")
        if not found:
            raise self._refused("no tensor at all", "pairs of lora_A.weight and lora_B.weight")
        return {path: (pair["A"], pair["B"]) for path, pair in found.items()}

    def _refused(self, found: str, expected: str) -> InputError:
        return InputError(f"the adapter {self.path} cannot be merged", found=found, expected=expected)


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    def refused(found: str) -> InputError:
        return InputError(
            f"the adapter {path} cannot be merged",
            found=found,
            expected="a LoRA adapter of linear layers",
            action="merge it with peft's merge_and_unload(), and build from the model that it saves",
        )

    kind = settings.get("peft_type")
    if kind != "LORA":
        raise refused(f"peft_type {kind!r}")
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise refused(f"task_type {settings['task_type']!r}")
    if settings.get("bias", "none") != "none":
        raise refused(f"trained biases (bias {settings['bias']!r})")
    for key, what in _REFUSED.items():
        if settings.get(key):
            raise refused(f"{what} ({key})")
