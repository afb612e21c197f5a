"""Devices by name: memory, bandwidth and dense throughput as their vendors state them. Nothing here was measured by this project.

Throughputs are dense (vendors often state twice as much, with 2:4 sparsity) and with float32 accumulation, in units of 10^12
operations a second, a multiplication and an addition being two. Memory is in GB and bandwidth in GB/s, both of 10^9, as sold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from enginewright.recipes.errors import InputError, near_matches

__all__ = ["DEVICES", "Device", "find_device"]


@dataclass(frozen=True)
class Device:
    """memory [bytes], bandwidth [bytes/s]; rates: what a product's factors are (`f16`, `bf16`, `int8`, `fp8`, `f32`) ->
    operations/s."""

    name: str
    memory: float
    bandwidth: float
    rates: Mapping[str, float]
    source: str
    measured: bool = False

    def rate(self, activation: str) -> float:
        """Operations a second with activations of a format. What a device has no unit for is done in the next wider one it
        has."""
        kind = "int8" if activation.startswith("int8") else activation
        wider = {
            "int8": ("int8", "f16", "bf16"),
            "fp8": ("fp8", "bf16", "f16"),
            "bf16": ("bf16", "f16", "f32"),
            "f16": ("f16", "bf16", "f32"),
            "f32": ("f32", "bf16", "f16"),
        }
        return next(self.rates[name] for name in (*wider[kind], *self.rates) if name in self.rates)


def _device(
    name: str,
    memory: float,
    bandwidth: float,
    f16: float,
    int8: float,
    fp8: float | None,
    f32: float,
    source: str,
) -> Device:
    rates = {"f16": f16, "bf16": f16, "int8": int8, "f32": f32, **({} if fp8 is None else {"fp8": fp8})}
    return Device(
        name, memory * 1e9, bandwidth * 1e9, {key: rate * 1e12 for key, rate in rates.items()}, source
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023; half of the figures with sparsity"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, 2021; FP16 with FP32 accumulate"
_ADA = "NVIDIA Ada GPU Architecture whitepaper v2.02, 2023; FP16 and FP8 with FP32 accumulate"

# name, GB, GB/s; 10^12 operations/s in fp16 (and bf16), int8, fp8 (None: no units for it), fp32
DEVICES: tuple[Device, ...] = (
    _device("A100-40GB", 40, 1555, 312, 624, None, 19.5, _A100),
    _device("A100-80GB", 80, 2039, 312, 624, None, 19.5, f"{_A100} (SXM; the PCIe card reads 1,935 GB/s)"),
    _device("A30", 24, 933, 165, 330, None, 10.3, "NVIDIA A30 datasheet, 2022"),
    _device("A40", 48, 696, 149.7, 299.3, None, 37.4, "NVIDIA A40 datasheet, 2022"),
    _device("A10", 24, 600, 125, 250, None, 31.2, "NVIDIA A10 datasheet, 2021"),
    _device(
        "L4", 24, 300, 121, 242, 242, 30.3, "NVIDIA L4 datasheet, 2023; half of the figures with sparsity"
    ),
    _device("L40S", 48, 864, 362, 733, 733, 91.6, "NVIDIA L40S datasheet, 2023"),
    _device("H100-SXM", 80, 3350, 989.4, 1978.9, 1978.9, 67, _H100),
    _device("H100-PCIe", 80, 2039, 756, 1513, 1513, 51, _H100),
    _device("H100-NVL", 94, 3900, 835.5, 1670.5, 1670.5, 60, _H100),
    _device(
        "H200",
        141,
        4800,
        989.4,
        1978.9,
        1978.9,
        67,
        "NVIDIA H200 datasheet, 2024; half of the figures with sparsity",
    ),
    _device(
        "B200",
        180,
        8000,
        2250,
        4500,
        4500,
        75,
        "NVIDIA HGX B200 data, 2024: an eighth of the board's, half of those with sparsity",
    ),
    _device("RTX-3090", 24, 936, 71, 284, None, 35.6, _GA102),
    _device("RTX-4090", 24, 1008, 165.2, 660.6, 330.3, 82.6, _ADA),
    _device(
        "RTX-5090",
        32,
        1792,
        209.5,
        838,
        419,
        104.8,
        "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, 2025; FP32 accumulate",
    ),
    _device("MI300X", 192, 5300, 1307.4, 2614.9, 2614.9, 163.4, "AMD Instinct MI300X datasheet, 2023"),
    _device("MI325X", 256, 6000, 1307.4, 2614.9, 2614.9, 163.4, "AMD Instinct MI325X datasheet, 2024"),
)


def find_device(name: str) -> Device:
    """The device of that name; case, blanks and dashes do not count. Raises InputError with names like it."""
    wanted = _plain(name)
    for device in DEVICES:
        if wanted in (
            _plain(device.name),
            _plain(device.name).removesuffix("gb"),
            f"nvidia{_plain(device.name)}",
        ):
            return device
    names = {_plain(device.name): device.name for device in DEVICES}
    near = [name for plain, name in names.items() if wanted and plain.startswith(wanted)]
    near = near or [names[plain] for plain in near_matches(wanted, names)]
    raise InputError(
        "there is no such device",
        found=repr(name),
        expected="one of " + ", ".join(names.values()),
        action=f"did you mean {' or '.join(near)}?"
        if near
        else "leave --device out to plan for this machine",
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).removeprefix("geforce")
