"""A Hugging Face folder as a source of weights.

Rules:
1. The files: `weight_files.py`. The index decides which are opened; others are reported.
2. A missing, truncated or foreign file, a missing tensor and a wrong shape are each one InputError that names them.
3. Packed matrices of other tools: `quantised_folders.py`. Each becomes one leaf weight, held against the configuration.
4. The names: `weight_names.py`. They go through transformers' own renamings and conversions, lazily.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from enginewright.passes.quantised_folders import QuantisedFolder, find_settings
from enginewright.passes.weight_files import read_json, read_tensors
from enginewright.passes.weight_names import convert_names
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError

__all__ = ["HuggingFaceFolder", "Source"]


class Source(Protocol):
    """Where a model comes from: its transformers configuration, and its tensors under the model's names."""

    path: Path
    config: Any

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        """Weights for every name in the meta model's `state_dict()`, tied ones as one object, and notes for the user."""
        ...


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
        raw = read_json(self.path / "config.json")
        settings = find_settings(self.path, raw)
        self.quantised = None if settings is None else QuantisedFolder(self.path, settings)
        self.config = _read_config(self.path, raw)

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        tensors, notes = read_tensors(self.path)
        if self.quantised is not None:
            tensors, said = self.quantised.replace(tensors, model)
            notes += said
        weights, more = convert_names(model, tensors, str(self.path))
        return weights, notes + more


def _read_config(path: Path, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        # Without trust_remote_code=False transformers asks on the terminal whether to run the folder's Python files.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration's own checks raise
        reason = " ".join((str(error) or repr(error)).split())[:300]
        raise InputError(
            f"transformers cannot read {path / 'config.json'}",
            found=f"model_type {raw.get('model_type')!r}: {reason}",
        ) from error
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)  # the model is built for float weights, which the packed ones give
    return config
