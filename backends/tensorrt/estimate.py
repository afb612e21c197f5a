"""What a build and a plan need of memory, before anything is built.

The figures for the host were measured on TensorRT-RTX 1.7 (`PER_WEIGHT` and `BASE`; tests/backends/tensorrt/test_plans.py holds
real builds to them). Those for the device count what is known beforehand; what the kernels need in between is read from the
plan once it stands (plan_text.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginewright.backends.tensorrt.bindings import Limits
from enginewright.recipes.errors import InputError

__all__ = ["Estimate", "available_memory", "estimate", "require_memory"]

PER_WEIGHT = 4.0
"""Bytes of the builder's memory for a byte of the network's constants, the constants themselves among them."""

BASE = 1.5e9
"""Bytes that a build takes beside that: the library, its compilers, the graph."""


@dataclass(frozen=True)
class Estimate:
    """Bytes. host: of the process that builds. weights: of a plan on the device. page: of one page of all layers."""

    host: int
    weights: int
    page: int

    def pool(self, tokens: int, page_size: int) -> int:
        """The cache's memory on the device for so many tokens of full attention."""
        return -(-tokens // page_size) * self.page


def estimate(weight_bytes: int, groups: Sequence[Any], limits: Limits) -> Estimate:
    """`weight_bytes`: of the network's constants. `groups`: KV groups of the model's facts."""
    page = sum(
        limits.page_size * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2
        for group in groups
        for layer in group.layers
    )
    return Estimate(int(BASE + PER_WEIGHT * weight_bytes), weight_bytes, page)


def available_memory() -> int | None:
    """Bytes that can still be had: what the kernel calls available, or what the container's limit leaves; None: nobody says."""
    known = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(
            line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
        )
        known.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" where there is none
        known.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    if not known:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            known.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(known, default=None)


def require_memory(needed: Estimate, available: int | None) -> None:
    """Raise InputError where the machine has less memory than a build is expected to take."""
    if available is not None and available < needed.host:
        raise InputError(
            "there is too little memory to build this plan",
            found=f"{available / 1e9:,.1f} GB available",
            expected=f"about {needed.host / 1e9:,.1f} GB, for {needed.weights / 1e9:,.2f} GB of weights",
            action="build on a machine with more memory, end other processes, or choose a recipe with fewer bits",
        )
