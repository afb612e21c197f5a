"""What a machine lacks for an engine is said in one message: what was found, what is needed, how to build a fitting one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginewright.backends.tensorrt import device as device_module
from enginewright.backends.tensorrt import targets
from enginewright.backends.tensorrt.cuda import Cuda, DeviceError
from enginewright.backends.tensorrt.device import Device, check, find_device, require, why_not
from enginewright.recipes.errors import ArtifactError, InputError
from tests.backends.tensorrt.fake_device import FakeDevice, cudaError_t
from tests.runtime.test_no_torch import behind_the_wall

SECTION = {
    "library": "tensorrt_rtx",
    "version": "1.7.1",
    "driver": "580.65",
    "architectures": ["sm80", "sm89"],
}
LIBRARY = SimpleNamespace(__name__="tensorrt_rtx", __version__="1.7.1")
REBUILD = "optimize models/small --recipe fp16"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A machine with the library, cuda-python and a GPU that fits."""
    fake = FakeDevice(architecture=(8, 9))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", LIBRARY)
    monkeypatch.setattr(device_module, "Cuda", lambda: Cuda(fake.runtime))
    monkeypatch.setattr(device_module, "driver_version", lambda: "580.95.05")
    return fake


def test_a_machine_that_fits_is_described(machine: FakeDevice) -> None:
    found = require(SECTION, REBUILD)
    assert found.device == Device("Imagined GPU", "sm89", "580.95.05", 1 << 28)
    assert str(found) == "Imagined GPU, sm89, driver 580.95.05, tensorrt_rtx 1.7.1"
    assert why_not(SECTION) is None


def set_on(name: str, value: Any) -> Any:
    return lambda machine, patch: setattr(machine, name, value)


def patched(what: Any, name: str, value: Any) -> Any:
    return lambda machine, patch: patch.setattr(what, name, value)


def failing(error: cudaError_t) -> Any:
    return lambda machine, patch: machine.fail.update(cudaGetDeviceCount=error)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            set_on("architecture", (9, 0)),
            [
                "another GPU architecture\n  found: Imagined GPU, sm90\n  expected: sm80 or sm89\n",
                "to do: build it for this device: optimize models/small --recipe fp16 --backend tensorrt --target sm90",
            ],
        ),
        (
            patched(LIBRARY, "__version__", "1.8.0"),
            [
                "another version of tensorrt_rtx\n  found: tensorrt_rtx 1.8.0\n  expected: 1.7.1\n",
                "to do: install that version, or build it for this device: optimize models/small",
            ],
        ),
        (
            patched(device_module, "driver_version", lambda: "570.124"),
            [
                "driver is too old for the engine\n  found: driver 570.124\n  expected: 580.65 or later\n",
                "update the driver",
            ],
        ),
        (set_on("driver", 0), ["needs a GPU: this machine has no NVIDIA driver"]),
        (set_on("count", 0), ["needs a GPU: CUDA shows no GPU", "cudaErrorNoDevice"]),
        (
            failing(cudaError_t.cudaErrorInsufficientDriver),
            ["CUDA shows no GPU", "cudaErrorInsufficientDriver"],
        ),
        (
            lambda machine, patch: patch.setattr(device_module, "Cuda", _missing),
            ["needs the package cuda-python", "pip install 'enginewright[tensorrt]'"],
        ),
        (
            lambda machine, patch: patch.setitem(sys.modules, "tensorrt_rtx", None),
            ["needs the package tensorrt_rtx", "pip install 'enginewright[tensorrt]'"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_found_and_what_to_do(
    machine: FakeDevice, monkeypatch: pytest.MonkeyPatch, change: Any, says: list[str]
) -> None:
    change(machine, monkeypatch)
    with pytest.raises(ArtifactError) as refused:
        require(SECTION, REBUILD)
    for words in says:
        assert words in str(refused.value)
    reason = why_not(SECTION)
    assert reason is not None and refused.value.message in reason and "\n" not in reason


def _missing() -> Cuda:
    raise ImportError("No module named 'cuda'")


def test_versions_are_compared_as_numbers() -> None:
    old = Device("GPU", "sm80", "9.100", 1)
    with pytest.raises(ArtifactError, match="too old"):
        check(SECTION, old, LIBRARY, REBUILD)
    for driver in ("580.65", "580.65.06", "1000.1", ""):  # a driver whose version nobody tells is not refused
        check(SECTION, Device("GPU", "sm80", driver, 1), LIBRARY, REBUILD)


def test_the_driver_s_version_is_read_where_nvml_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module
    monkeypatch.setattr(
        device_module.importlib,
        "import_module",
        lambda name: real("no_" + name) if name.startswith("cuda") else real(name),
    )
    proc = tmp_path / "version"
    monkeypatch.setattr(device_module, "_PROC", proc)
    assert device_module.driver_version() == ""
    proc.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    assert device_module.driver_version() == "580.95.05"


def test_this_machine_is_asked_with_the_real_package() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    try:
        found = find_device(Cuda())
    except DeviceError as error:
        assert error.action is not None and ("driver" in error.message or "no GPU" in error.message)
    else:
        assert found.architecture.startswith("sm") and found.memory > 1 << 30


def test_the_current_gpu_is_a_target_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200, which the library lists as no target; then this one."""
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.runtime")
    with monkeypatch.context() as patch:
        patch.setattr(targets, "_look", lambda: "found sm90")
        assert targets.parse_targets("current,sm80") == ["sm90", "sm80"]
        assert targets.parse_targets("sm90") == ["sm90"]
    if device_module.describe_device().startswith("none"):
        with pytest.raises(InputError, match=r"no GPU here to build for\n  found: .*(driver|GPU)"):
            targets.parse_targets("current")
    else:
        assert targets.is_here(targets.parse_targets("current")[0])


def test_a_call_that_fails_is_named_with_the_real_package() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    with pytest.raises(DeviceError, match=r"refused cudaGetDeviceProperties\n  found: cudaError\w+: "):
        Cuda().call("cudaGetDeviceProperties", 1000)


def test_the_executor_imports_without_torch() -> None:
    behind_the_wall("import enginewright.backends.tensorrt.executor, enginewright.backends.tensorrt.device")
