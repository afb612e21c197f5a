"""Whether this machine can run an engine's plans: the library, the driver and the GPU that are found, beside those it needs.

A plan runs on the architectures it was built for, with the version of the library that built it, under a driver of at least
a certain version. Whatever is missing or different is said in one message, with the command that builds a fitting engine.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginewright.backends.tensorrt.cuda import Cuda, DeviceError
from enginewright.recipes.errors import ArtifactError, EnginewrightError

__all__ = ["Device", "Found", "check", "describe_device", "find_device", "require", "why_not"]

_PROC = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """The GPU that CUDA shows first. `architecture`: as "sm90". `driver`: its version, as "580.95.05", "" where nobody tells.
    `memory`: bytes."""

    name: str
    architecture: str
    driver: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, {self.architecture}, driver {self.driver or 'of unknown version'}"


@dataclass(frozen=True)
class Found:
    """What an engine runs with: the CUDA runtime, the library's module, and the GPU."""

    cuda: Cuda
    library: Any
    device: Device

    def __str__(self) -> str:
        return f"{self.device}, {self.library.__name__} {self.library.__version__}"


def driver_version() -> str:
    """The driver's version, from NVML or from Linux's /proc; "" where neither tells."""
    with suppress(Exception):  # a missing library is no error here: only the version stays unknown
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
        try:
            return str(nvml.system_get_driver_version())
        finally:
            nvml.shutdown()
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _PROC.read_text())
        return found[1] if found else ""
    return ""


def find_device(cuda: Cuda) -> Device:
    """The first GPU. Raises DeviceError where there is no driver or no GPU, saying which."""
    if not int(cuda.call("cudaDriverGetVersion")):
        raise DeviceError(
            "this machine has no NVIDIA driver",
            found="CUDA driver version 0",
            action="install a driver, or in a container give it the GPU (docker run --gpus all)",
        )
    try:
        count = int(cuda.call("cudaGetDeviceCount"))
    except DeviceError as error:
        raise DeviceError(
            "CUDA shows no GPU on this machine",
            found=error.found,
            action="see what `nvidia-smi` says, and CUDA_VISIBLE_DEVICES",
        ) from error
    if not count:
        raise DeviceError("CUDA shows no GPU on this machine", found="0 devices", action="see `nvidia-smi`")
    properties = cuda.call("cudaGetDeviceProperties", 0)
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    return Device(
        name.rstrip("\0"),
        f"sm{properties.major}{properties.minor}",
        driver_version(),
        int(properties.totalGlobalMem),
    )


def describe_device() -> str:
    """`found` and the first GPU's architecture, or `none` and the reason, for a process that asks another one (targets.py)."""
    try:
        return f"found {find_device(Cuda()).architecture}"
    except DeviceError as error:
        return f"none {error.message}"
    except ImportError as error:
        return f"none the package cuda-python cannot be imported: {error}"


def require(section: Mapping[str, Any], rebuild: str) -> Found:
    """What the engine of the manifest's section "tensorrt" needs, found and compatible.

    `rebuild`: the command that built the engine, without backend and target. Raises ArtifactError.
    """
    library = _library(section["library"])
    try:
        cuda = Cuda()
    except ImportError as error:
        raise ArtifactError(
            "the engine needs the package cuda-python",
            found=f"it cannot be imported: {error}",
            action="pip install 'enginewright[tensorrt]'",
        ) from error
    try:
        device = find_device(cuda)
    except DeviceError as error:
        raise ArtifactError(
            f"the engine needs a GPU: {error.message}",
            found=error.found,
            expected=" or ".join(section["architectures"]),
            action=error.action,
        ) from error
    check(section, device, library, rebuild)
    return Found(cuda, library, device)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArtifactError(
            f"the engine needs the package {name}",
            found=f"it cannot be imported: {error}",
            action="pip install 'enginewright[tensorrt]'",
        ) from error


def check(section: Mapping[str, Any], device: Device, library: Any, rebuild: str) -> None:
    """Raise ArtifactError unless architecture, library version and driver are those that the plans need."""
    command = f"build it for this device: {rebuild} --backend tensorrt --target {device.architecture}"
    built = list(section["architectures"])
    if device.architecture not in built:
        raise ArtifactError(
            "the engine was built for another GPU architecture",
            found=f"{device.name}, {device.architecture}",
            expected=" or ".join(built),
            action=command,
        )
    if library.__version__ != section["version"]:
        raise ArtifactError(
            f"the engine was built by another version of {section['library']}",
            found=f"{section['library']} {library.__version__}",
            expected=section["version"],
            action=f"install that version, or {command}",
        )
    least = str(section["driver"])
    if device.driver and _numbers(device.driver) < _numbers(least):
        raise ArtifactError(
            "the driver is too old for the engine",
            found=f"driver {device.driver}",
            expected=f"{least} or later",
            action=f"update the driver, or {command} with the library of an older CUDA",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def why_not(section: Mapping[str, Any]) -> str | None:
    """Why this machine cannot run the engine, in a line; None where it can."""
    try:
        require(section, "optimize MODEL")
    except EnginewrightError as error:
        return f"{error.message}, found {error.found}" if error.found is not None else error.message
    return None
