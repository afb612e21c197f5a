"""The tests of this folder run wherever a GPU is found that the library builds for, and skip with the reason elsewhere."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.passes.architectures import folder

_KEEP = tempfile.TemporaryDirectory(prefix="enginewright-gpu-")
_BUILD = """
import sys, enginewright
model, recipe, out, *overrides = sys.argv[1:]
enginewright.optimize(model, recipe, out, backend="tensorrt", target="current", overrides=overrides)
"""

Build = Callable[..., Path]


def _missing() -> str | None:
    """What this machine lacks; None where it has all."""
    try:
        from enginewright.backends.tensorrt.api import library

        library()
    except Exception as error:  # the extra is not installed, or is for another system
        return f"TensorRT: {error}".splitlines()[0]
    from enginewright.backends.tensorrt.device import describe_device

    said = describe_device()
    return None if said.startswith("found") else f"no GPU: {said.removeprefix('none ')}"


@functools.cache
def _built(model: Path, recipe: str, *overrides: str) -> tuple[Path, str]:
    """The engine, and what went wrong. Every build is a process of its own: plans are built in forks, and CUDA bears none."""
    out = Path(_KEEP.name) / "-".join([model.name, recipe, *overrides]).replace("/", "_")
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(model), recipe, str(out), *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    return out, "" if done.returncode == 0 else done.stderr


@pytest.fixture(scope="session")
def build() -> Build:
    """build(model, recipe, *overrides) -> the engine's folder, for the GPU of this machine, built and verified on it."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)
    _, error = _built(folder("qwen3"), "fp16")
    if "LoweringError" in error or "builds no plan" in error:
        pytest.skip(f"the library builds no plan for this GPU: {error.strip().splitlines()[-1]}")

    def made(model: Path, recipe: str, *overrides: str) -> Path:
        out, error = _built(model, recipe, *overrides)
        assert not error, error
        return out

    return made
