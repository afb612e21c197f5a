"""Whether what this backend needs is installed, and recent enough. Imports neither package unless asked."""

from __future__ import annotations

import importlib
from typing import Any

from enginewright.recipes.errors import InputError

__all__ = ["require_onnx", "require_onnxruntime"]

LEAST_ONNX = (1, 19)  # opset 24
LEAST_RUNTIME = (1, 24)  # Attention of opset 24 with its sequence lengths


def _require(module: str, least: tuple[int, int], extra: str, what: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{what} needs the package {module}",
            found=f"{module} cannot be imported: {error}",
            expected=f"{module} {least[0]}.{least[1]} or later",
            action=f"pip install 'enginewright[{extra}]'",
        ) from error
    version = str(getattr(found, "__version__", "0.0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < least:
        raise InputError(
            f"{module} is too old for {what}",
            found=f"{module} {version}",
            expected=f"{module} {least[0]}.{least[1]} or later, which knows opset 24",
            action=f"pip install --upgrade 'enginewright[{extra}]'",
        )
    return found


def require_onnx() -> None:
    """Raise InputError unless models can be built here."""
    _require("onnx", LEAST_ONNX, "onnx", "building an ONNX model")


def require_onnxruntime() -> None:
    """Raise InputError unless models can be run here."""
    _require("onnxruntime", LEAST_RUNTIME, "onnx", "serving an ONNX model")
