"""From a defined network to a plan, in a process of its own.

The library ends its process on some errors (a failed check in its compiler calls abort), and returns None on others. So a
child builds, and what it leaves behind is told apart here: a plan, the library's own complaint, a signal, the kernel's
out-of-memory killer. The child is a **fork**: it finds the network, and the weights in memory, as they are, and shares their
pages. (A spawned process would have to make both again: a network cannot be sent, and a model's passes take minutes.) It calls
the library alone, no torch; the threads of torch, which a fork leaves behind, are never waited for. All that the library
writes, to its logger or past it, goes to a file that is read when something went wrong.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.api import Library, library, log
from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.lower import Lowered
from enginewright.recipes.errors import InputError, LoweringError

__all__ = ["Built", "build_plan", "in_child"]

_REFUSED, _RAISED = 3, 4  # exit codes of the child
_LINES = 12  # of the log that an error shows
_WATCH = 0.2  # seconds between two looks at the child


@dataclass(frozen=True)
class Built:
    """A plan that was written: its size, how long it took, and the most memory that its process held, in bytes."""

    path: Path
    size: int
    seconds: float
    peak: int


def build_plan(
    lowered: Lowered,
    builder: Any,
    targets: Sequence[str],
    limits: Limits,
    path: Path,
    tick: Callable[[float], None] = lambda seconds: None,
) -> Built:
    """Build one plan for all `targets` into the file `path`.

    `tick` is told the seconds so far now and then. Raises LoweringError with the library's last lines.
    """
    started = time.perf_counter()
    peak = in_child(
        lambda: _build(lowered, builder, targets, limits, path), f"the plan for {', '.join(targets)}", tick
    )
    return Built(path, path.stat().st_size, time.perf_counter() - started, peak)


def _build(lowered: Lowered, builder: Any, targets: Sequence[str], limits: Limits, path: Path) -> None:
    """In the child: configure, build, write."""
    lib = library()
    trt = lib.trt
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # what is computed in float32 is meant to be
    if hasattr(
        trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"
    ):  # else steps cannot be captured as CUDA graphs (plan.py)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    _aim(lib, config, targets)
    for kind in bindings.PROFILES:
        profile = builder.create_optimization_profile()
        for name, shapes in bindings.profile(kind, lowered.inputs, limits).items():
            profile.set_shape(name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise Refusal(f"the library refuses the optimisation profile '{kind}'")
    plan = builder.build_serialized_network(lowered.network, config)
    if plan is None:
        raise Refusal("the builder returned nothing")
    with open(path, "wb") as file:
        file.write(memoryview(plan))


def _aim(lib: Library, config: Any, targets: Sequence[str]) -> None:
    if not lib.ahead_of_time:
        return  # it builds for the GPU that it finds
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        listed = lib.trt.ComputeCapability.__members__
        capability = listed.get(
            target.upper(), lib.trt.ComputeCapability.CURRENT
        )  # targets.py: it is this machine's
        if config.set_compute_capability(capability, index) is False:
            raise Refusal(f"the library refuses the target {target}")


class Refusal(Exception):
    """The library says no; its log has the words."""


# The child.


def in_child(
    work: Callable[[], None], what: str, tick: Callable[[float], None] = lambda seconds: None
) -> int:
    """Run `work` in a fork; returns the most memory it held, in bytes. `what` names its result in messages.

    Raises LoweringError for whatever goes wrong there, InputError where it ran out of memory. Nothing of the child is left
    when this process is interrupted.
    """
    with tempfile.TemporaryFile("w+b") as output:
        kills = _memory_kills()
        started = time.perf_counter()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _work(work, output.fileno())
        try:
            while True:
                pid, status, usage = os.wait4(child, os.WNOHANG)
                if pid:
                    break
                tick(time.perf_counter() - started)
                time.sleep(_WATCH)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        if status:
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").splitlines()
            raise _told(what, os.waitstatus_to_exitcode(status), lines, _memory_kills() > kills)
        return int(usage.ru_maxrss) * 1024


def _work(work: Callable[[], None], output: int) -> None:
    """The child's whole life."""
    code = _RAISED
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for stream in (1, 2):
            os.dup2(output, stream)
        faulthandler.disable()  # what it would print belongs to no one
        log().echo = output
        work()
        code = 0
    except Refusal as refusal:
        os.write(output, f"{refusal}\n".encode())
        code = _REFUSED
    except MemoryError:
        os.write(output, b"MemoryError\n")
    except BaseException:
        os.write(output, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _memory_kills() -> int:
    """How many processes the kernel has killed for memory: in this container, or else on the machine."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _told(what: str, code: int, lines: list[str], memory_killed: bool) -> LoweringError | InputError:
    """The error for how a child ended. code: its exit code, or minus a signal's number."""
    words = [line for line in lines if line.strip()]
    shown = "".join(f"\n    {line[:400]}" for line in words[-_LINES:]) or " nothing was said"
    short = any(
        word in line for line in words for word in ("bad_alloc", "MemoryError", "Cannot allocate memory")
    )
    if short or (code == -signal.SIGKILL and memory_killed):
        ended = (
            "the kernel killed the process that builds it"
            if code == -signal.SIGKILL
            else "an allocation failed"
        )
        return InputError(
            f"{what} could not be built: memory ran out",
            found=ended,
            action="build on a machine with more memory, end other processes, or choose a recipe with fewer bits",
        )
    if code < 0:
        name = signal.Signals(-code).name
        how = "somebody killed" if code == -signal.SIGKILL else f"{library().name} ended"
        return LoweringError(
            f"{what} could not be built: {how} the process that builds it ({name})",
            found=f"its last lines:{shown}",
            action="build again"
            if code == -signal.SIGKILL
            else "change the recipe's formats, or report it with these lines",
        )
    return LoweringError(
        f"{what} could not be built: {library().name} {library().version} refuses the network",
        found=f"its last lines:{shown}",
        action="change the recipe's formats, or report it with these lines",
    )
