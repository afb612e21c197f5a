"""The GPUs a plan is built for: `sm80` is compute capability 8.0. Which of them the library takes, it says itself."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from enginewright.backends.tensorrt.api import library
from enginewright.recipes.errors import InputError, near_matches

__all__ = ["CURRENT", "GPUS", "PLAN", "is_here", "parse_targets", "plan_name", "supported", "turing"]

GPUS = {
    "sm70": "V100", "sm72": "Jetson Xavier", "sm75": "T4, RTX 20", "sm80": "A100, A30", "sm86": "A10, A40, RTX 30",
    "sm87": "Jetson Orin", "sm89": "L4, L40, RTX 40", "sm90": "H100, H200", "sm100": "B200, GB200", "sm103": "B300, GB300",
    "sm110": "Jetson Thor", "sm120": "RTX 50, RTX PRO Blackwell", "sm121": "DGX Spark",
}  # fmt: skip
"""Compute capabilities as targets, with GPUs that have them."""

PLAN = "plan-{}.engine"
CURRENT = "current"

_LIKE_A_TARGET = re.compile(r"(?:sm|compute)[_-]?\d+|\d{1,2}\.?\d")
_REASONS = {
    "sm90": "it builds for sm90 only where such a GPU is at hand, and lists it as no target of its own",
}


def supported() -> list[str]:
    """Targets that the installed library builds for ahead of time, by its own list."""
    members = library().trt.ComputeCapability.__members__
    found = [name.lower() for name in members if name.startswith("SM")]
    return sorted(found, key=lambda name: int(name[2:]))


def parse_targets(asked: str | Iterable[str]) -> list[str]:
    """`sm80,sm86`, or a list of such names, in order and once each; `current` is the GPU of this machine.

    Raises InputError for what cannot be a target.
    """
    names = asked.split(",") if isinstance(asked, str) else list(asked)
    given = (name.strip().lower() for name in names if name.strip())
    targets = list(dict.fromkeys(_here() if name == CURRENT else name for name in given))
    if not targets:
        raise InputError("no target is given", expected="one or several of " + ", ".join(supported()))
    for target in targets:
        _check(target)
    return targets


@functools.cache
def _look() -> str:
    """What device.py says of this machine, asked of another process, once.

    A process that has begun with CUDA cannot fork a child that uses it, and plans are built in a fork (build.py).
    """
    ask = "from enginewright.backends.tensorrt.device import describe_device; print(describe_device())"
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "none " + " ".join(said.stderr.strip().splitlines()[-1:])


def _here() -> str:
    """The architecture of this machine's GPU. Raises InputError where there is none."""
    kind, _, words = _look().partition(" ")
    if kind != "found":
        raise InputError(
            "there is no GPU here to build for",
            found=words,
            expected="one or several of " + ", ".join(supported()),
            action="name the targets: those are built without a GPU",
        )
    return words


def is_here(target: str) -> bool:
    """Whether `target` is this machine's own GPU, for which a library may build what it does not list."""
    try:
        return _here() == target
    except InputError:
        return False


def _check(target: str) -> None:
    taken = supported()
    if target in taken or is_here(target):
        return
    lib = library()
    listed = ", ".join(f"{name} ({GPUS[name]})" if name in GPUS else name for name in taken)
    if target not in GPUS:
        named = [name for name, gpus in GPUS.items() if target.upper() in gpus.upper().split(", ")]
        close = [name for name in named if name in taken]
        if _LIKE_A_TARGET.fullmatch(target):
            close = near_matches(f"sm{''.join(filter(str.isdigit, target))}", taken)
        raise InputError(
            "there is no such target",
            found=repr(target) + (f", which is {named[0]}" if named else ""),
            expected=listed,
            action=f"did you mean {close[0]}?" if close else None,
        )
    why = _REASONS.get(target, f"its list of architectures has no {target.upper()}")
    raise InputError(
        f"{lib.name} {lib.version} builds no plan for {target} ahead of time",
        found=f"{target} ({GPUS[target]}): {why}",
        expected=listed,
        action="choose one of these targets",
    )


def turing(targets: Sequence[str]) -> list[str]:
    """Those before compute capability 8.0: see turing.py for what they lack."""
    return [target for target in targets if int(target[2:]) < 80]


def plan_name(targets: Sequence[str]) -> str:
    """The file of the plan for these targets: `plan-sm80.engine`, `plan-sm80-sm86.engine`."""
    return PLAN.format("-".join(targets))
