"""This machine as a device: its memory, how fast it reads, and how fast the engine's own kernels multiply. About two seconds."""

from __future__ import annotations

from collections.abc import Iterable

from enginewright.planning.devices import Device
from enginewright.runtime.memory import machine_memory

__all__ = ["this_machine"]

_MEGABYTES = 512  # all threads' buffers together, where that is more than caches hold


def this_machine(
    products: Iterable[tuple[str, str]], megabytes: int = _MEGABYTES, seconds: float = 0.1
) -> Device:
    """Measure the machine, for products of (weight format, activation format).

    A rate is one thread's, times the threads: threads that share a core make less of it.
    """
    from enginewright.backends.cpu import _native
    from enginewright.backends.cpu.speed import product_rate
    from enginewright.runtime.bench import read_bandwidth

    threads = _native.usable_cpus()
    bandwidth = 1e9 * read_bandwidth(threads, max(8, min(192, megabytes // threads)), rounds=3)
    rates: dict[str, float] = {}
    for weight, activation in sorted({*products, ("bf16", "bf16"), ("f32", "f32")}):
        kind = "int8" if activation.startswith("int8") else activation
        rate = threads * product_rate(weight, activation, seconds)
        rates[kind] = min(rate, rates.get(kind, rate))
    source = f"measured just now: {threads} threads, kernels for {_native.available_isas()[0]}"
    return Device("this machine", float(machine_memory() or 0), bandwidth, rates, source, measured=True)
