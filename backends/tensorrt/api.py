"""The library: TensorRT or TensorRT-RTX, whichever imports. Their Python interfaces are one; what differs is in `LIBRARIES`.

Neither needs a GPU, a driver or the CUDA toolkit to be imported and to define networks. Only TensorRT-RTX builds plans
without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import Any

from enginewright.recipes.errors import InputError

__all__ = ["LIBRARIES", "Library", "last_word", "library", "log", "new_network"]


@dataclass(frozen=True)
class Library:
    """One of the two libraries.

    module: what is imported. ahead_of_time: whether plans are built for named architectures, with no GPU at hand (TensorRT
    builds for the GPU that it finds, and times kernels on it). driver: the oldest driver that runs its plans, as NVIDIA's
    CUDA 13 release notes have it. `trt` is the imported module, `version` its own word.
    """

    name: str
    module: str
    ahead_of_time: bool
    driver: str
    trt: Any = None
    version: str = ""


LIBRARIES = (
    Library("TensorRT-RTX", "tensorrt_rtx", ahead_of_time=True, driver="580.65"),
    Library("TensorRT", "tensorrt", ahead_of_time=False, driver="580.65"),
)
"""In the order in which they are tried: the one that needs no GPU is first."""


@functools.cache
def library() -> Library:
    """The library that imports. Raises InputError naming the extra when neither is installed."""
    for known in LIBRARIES:
        try:
            trt = importlib.import_module(known.module)
        except ImportError:
            continue
        return Library(known.name, known.module, known.ahead_of_time, known.driver, trt, str(trt.__version__))
    raise InputError(
        "the tensorrt backend needs TensorRT-RTX or TensorRT",
        found="neither of the modules " + " and ".join(item.module for item in LIBRARIES),
        expected="one of them; TensorRT-RTX builds plans without a GPU",
        action="pip install 'enginewright[tensorrt]'",
    )


@functools.cache
def _log_class() -> type:
    trt = library().trt

    class Log(trt.ILogger):  # type: ignore[name-defined]
        """Keeps what the library says, warnings and worse, line by line; writes it to the file `echo` too, if there is one."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []
            self.echo: int | None = None

        def log(self, severity: Any, message: str) -> None:
            # Without a driver every call complains of it once more; a build ahead of time does without.
            if severity.value <= trt.ILogger.Severity.WARNING.value and "CUDA driver version" not in message:
                self.lines.append(f"[{severity.name}] {message}")
                if self.echo is not None:
                    os.write(self.echo, f"{self.lines[-1]}\n".encode())

    return Log


@functools.cache
def log() -> Any:
    """The one log of this process: `lines` is what the library has said since the last network was made.

    The library registers the first logger that it is given, and ignores every other.
    """
    return _log_class()()


def new_network() -> tuple[Any, Any]:
    """An empty network, and the builder it belongs to."""
    log().lines.clear()
    builder = library().trt.Builder(log())
    return builder.create_network(0), builder


def last_word() -> str:
    """The library's last line, for a message."""
    lines = log().lines
    return lines[-1] if lines else "it does not say why"
