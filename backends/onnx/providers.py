"""ONNX Runtime's execution providers by our names, and the session that a load asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime

from enginewright.recipes.errors import ArtifactError, InputError

__all__ = ["DEVICES", "PROVIDERS", "open_session"]

DEVICES = {"cpu": "cpu", "cuda": "cuda", "tensorrt-rtx": "cuda"}
"""Load option `provider` -> ONNX Runtime's name of the memory that its caches live in."""

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}
"""Load option `provider` -> ONNX Runtime's name."""


def _threads() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _chosen(provider: str) -> list[str]:
    if provider not in PROVIDERS:
        raise InputError("there is no such provider", found=repr(provider), expected=", ".join(PROVIDERS))
    found = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in found:
        extra = {
            "cuda": ": pip install 'enginewright[onnx-gpu]' in place of onnxruntime",
            "tensorrt-rtx": ", which the package onnxruntime-gpu is not",
        }.get(provider, "")
        raise InputError(
            f"this onnxruntime has no {provider} provider",
            found=f"onnxruntime {onnxruntime.__version__} with {', '.join(found)}",
            expected=PROVIDERS[provider],
            action=f"install a build of onnxruntime that has it{extra}, or load with provider=cpu",
        )
    return [PROVIDERS[provider], *(["CPUExecutionProvider"] if provider != "cpu" else [])]


def open_session(model: Path, provider: str, threads: int | None) -> tuple[Any, int]:
    """Load the model; returns ONNX Runtime's session and its number of threads.

    Raises InputError for a provider that is not there, ArtifactError with ONNX Runtime's words for a model that it refuses.
    """
    names = _chosen(provider)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or _threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # one would be kept for every set of shapes that a step ever had
    try:
        session = onnxruntime.InferenceSession(os.fspath(model), options, providers=names)
    except Exception as error:  # its own classes, which share no base but this
        raise ArtifactError(
            f"ONNX Runtime refuses the engine's model: {_words(error)}",
            found=f"{model}, onnxruntime {onnxruntime.__version__}",
            action="build the engine again with `optimize`, or install the onnxruntime that it was verified with",
        ) from error
    if session.get_providers()[0] != names[0]:
        raise InputError(
            f"onnxruntime could not start its {provider} provider",
            found=f"it fell back to {session.get_providers()[0]}",
            expected=names[0],
            action="install the driver and libraries that it needs, or load with provider=cpu",
        )
    return session, options.intra_op_num_threads


def _words(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
