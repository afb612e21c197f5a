"""A Hugging Face folder that another tool has quantised: its packed parts become one leaf weight a matrix.

    model.layers.0.mlp.up_proj.{qweight, qzeros, scales}  ->  model.layers.0.mlp.up_proj.weight, a StoredMatrix

So transformers' own renamings and conversions (weight_names.py) move packed matrices like any tensor. One file a layout:
stored_awq.py, stored_gptq.py, stored_compressed.py, stored_bitsandbytes.py.

The configuration is held against the tensors: a matrix that it says is quantised and that is plain, or the reverse, is an
error by name, since one of the two was made for other module names. What the configuration does not say is decided
by the tensors, if all layers agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from enginewright.passes.stored_checks import FREE, FROM_ORIGINAL, Layout, Module, Parts, is_linear_class
from enginewright.passes.stored_matrix import PlainTensor
from enginewright.passes.weight_names import renaming
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError, near_matches

__all__ = ["QuantisedFolder", "find_settings"]

_METHODS = {
    "awq": "enginewright.passes.stored_awq",
    "gptq": "enginewright.passes.stored_gptq",
    "compressed-tensors": "enginewright.passes.stored_compressed",
    "bitsandbytes": "enginewright.passes.stored_bitsandbytes",
}


def find_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The folder's quantisation settings: of config.json, or of the files that AutoGPTQ and AutoAWQ wrote beside it."""
    from enginewright.passes.weight_files import read_json

    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is not None and not isinstance(settings, dict):
        raise InputError(
            f"{path / 'config.json'}: quantization_config is no object", found=repr(settings)[:80]
        )
    if settings:
        return dict(settings)
    for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (path / file).is_file():
            beside = read_json(path / file)
            names = {"w_bit": "bits", "q_group_size": "group_size"}
            return {"quant_method": method, **{names.get(key, key): value for key, value in beside.items()}}
    return None


class QuantisedFolder:
    """The settings of a quantised folder, read. Raises InputError for a tool or a layout that is not supported."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        import importlib

        self.path = path
        method = str(settings.get("quant_method") or "").lower()
        if not method and ("load_in_8bit" in settings or "load_in_4bit" in settings):
            method = "bitsandbytes"  # as transformers wrote it before the method had a name
        if method not in _METHODS:
            raise InputError(
                f"{path} holds weights in a quantised form that is not read",
                found=f"quantization_config with quant_method {method!r}",
                expected=", ".join(_METHODS),
                action=FROM_ORIGINAL,
            )
        self.method = method
        self.layout: Layout = importlib.import_module(_METHODS[method]).LAYOUT(settings, path)

    def replace(self, tensors: Mapping[str, Weight], model: Any) -> tuple[dict[str, Weight], list[str]]:
        """The checkpoint's tensors with every packed matrix as one weight, and notes. Raises InputError, see above."""
        modules = dict(model.named_modules())
        rename, _ = renaming(model)
        result: dict[str, Weight] = {}
        packed: dict[str, str] = {}
        plain: dict[str, str] = {}
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for stored, parts in self._by_module(tensors).items():
            name, _ = rename(f"{stored}.weight")
            module = Module(stored, name.removesuffix(".weight"), _class(modules, name))
            is_packed = self.layout.is_packed(parts)
            if name not in model.state_dict() or (not is_packed and name in tied):
                result.update(_named(stored, parts))
                continue
            scheme = self.layout.scheme(module)
            if is_packed:
                self._require_alone(module, parts)
                if scheme is None:
                    raise self._mismatch(module, packed=True)
                matrix = self.layout.matrix(stored, parts, scheme)
                result[f"{stored}.weight"] = matrix
                result.update(_named(stored, {k: v for k, v in parts.items() if k not in self.layout.parts}))
                packed[stored] = matrix.found
            else:
                stray = sorted(part for part in parts if part in self.layout.parts and part != "weight")
                if stray:
                    raise InputError(
                        f"{self.path} holds parts of a packed matrix that are not all there: {stored}",
                        found=", ".join(sorted(parts)),
                        expected=self._packed_form(),
                        action="copy or download the folder again",
                    )
                if scheme is not None and scheme is not FREE and "weight" in parts:
                    raise self._mismatch(module, packed=False)
                if "weight" in parts and is_linear_class(module.kind):
                    plain[stored] = str(getattr(parts["weight"], "dtype", "")).removeprefix("torch.")
                result.update(_named(stored, parts))
        self._require_agreement(packed, plain)
        notes = [f"{count} matrices are stored as {found}" for found, count in _counted(packed.values())] + [
            f"{count} linear layers are stored as {dtype}" for dtype, count in _counted(plain.values())
        ]
        known = {*modules, *packed, *plain, *self._by_module(tensors)}
        return {key: PlainTensor.of(value) for key, value in result.items()}, [
            *notes,
            *self.layout.notes(known),
        ]

    def _by_module(self, tensors: Mapping[str, Weight]) -> dict[str, dict[str, Weight]]:
        """Tensors by their module; a module is whatever stands before a name's last dot."""
        found: dict[str, dict[str, Weight]] = {}
        for key, tensor in tensors.items():
            stored, _, part = key.rpartition(".")
            found.setdefault(stored, {})[part] = tensor
        return found

    def _require_alone(self, module: Module, parts: Parts) -> None:
        """A packed matrix whose plain values are stored too could be either."""
        if "weight" in parts and "weight" not in self.layout.parts:
            raise InputError(
                f"{self.path} holds {module.stored} twice",
                found=f"{module.stored}.weight beside " + ", ".join(sorted(set(parts) & self.layout.parts)),
                expected="one of the two",
                action="copy or download the folder again",
            )

    def _packed_form(self) -> str:
        return f"{self.method} parts ({', '.join(sorted(self.layout.parts))})"

    def _mismatch(self, module: Module, packed: bool) -> InputError:
        exceptions = self.layout.exceptions
        near = near_matches(module.stored, exceptions) or [
            item for item in exceptions if item.rsplit(".", 1)[-1] == module.stored.rsplit(".", 1)[-1]
        ]
        hint = f"; it names {', '.join(near[:3])}" if near else ""
        found = (
            f"{self._packed_form()}, while quantization_config leaves this module out{hint}"
            if packed
            else f"plain values, while quantization_config says that this module is quantised{hint}"
        )
        return InputError(
            f"the configuration of {self.path} and its tensors disagree about {module.stored}",
            found=found,
            expected="plain values" if packed else self._packed_form(),
            action="correct the module names in config.json's quantization_config, "
            "or take the folder as it was published",
        )

    def _require_agreement(self, packed: Mapping[str, str], plain: Mapping[str, str]) -> None:
        """Where the configuration is silent, a module is quantised in every layer or in none."""
        numbered = {re.sub(r"\d+", "#", name): name for name in packed}
        for name in plain:
            twin = numbered.get(re.sub(r"\d+", "#", name))
            if twin is not None and self.layout.scheme(Module(name, name, _Linear)) is FREE:
                raise InputError(
                    f"{self.path} holds {name} as plain values, but the same module of another layer is quantised",
                    found=f"{name}.weight beside the packed {twin}",
                    expected="either in all layers, or an exception in quantization_config",
                    action="copy or download the folder again",
                )


class _Linear:
    """Stands for torch's class where only a name is known."""


_Linear.__name__ = "Linear"


def _class(modules: Mapping[str, Any], weight: str) -> type:
    """The class of a weight's module. What transformers fuses (experts) is no module of the model: Linear in the checkpoint."""
    module = modules.get(weight.removesuffix(".weight")) if weight.endswith(".weight") else None
    return _Linear if module is None else type(module)


def _named(stored: str, parts: Parts) -> dict[str, Weight]:
    return {f"{stored}.{part}".lstrip("."): tensor for part, tensor in parts.items()}


def _counted(items: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return sorted(counts.items())
