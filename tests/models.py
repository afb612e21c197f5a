"""The two real models of the tests. A model whose package is not installed skips the tests that need it, visibly."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "fetch_models.py"


def _fetch(name: str) -> Path:
    spec = importlib.util.spec_from_file_location("fetch_models", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fetch: Callable[[], Path] = getattr(module, name)
    try:
        return fetch()
    except module.PackageMissing as missing:
        pytest.skip(str(missing))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    return _fetch("smollm2")


def smollm2_gguf() -> Path:
    """The Q4_1 GGUF that SmolLM2's package carries."""
    return _fetch("smollm2_gguf")


def gemma3() -> Path:
    """Gemma-3-270M (base) as a Hugging Face folder."""
    return _fetch("gemma3")
