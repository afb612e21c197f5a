"""A plan on the device: deserialised once, run through execution contexts that share one block of working memory.

Rules of the library that this file keeps (NVIDIA TensorRT documentation: Python API, `IExecutionContext`; developer guide,
"CUDA Graphs"):

- every input has a shape within the context's profile, and every input and output an address, before `execute_async_v3`;
- changing the profile drops all shapes, so a context keeps the profile that it is made for;
- a context must be run once after its shapes have changed before it is captured, and is not changed as long as the graph lives:
  so a captured shape has a context of its own;
- contexts that never run at the same time may share memory that the application owns. An engine built with
  REQUIRE_USER_ALLOCATION asks for nothing else while it runs, which capture needs.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginewright.backends.tensorrt.bindings import PROFILES
from enginewright.backends.tensorrt.cuda import Cuda, DeviceError, DeviceMemory, Stream
from enginewright.recipes.errors import ArtifactError

__all__ = ["Context", "Plan"]


def _logger(library: Any) -> Any:
    """A logger of the library that keeps what is said at warning level or worse, in `lines`."""

    class Kept(library.ILogger):
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= library.ILogger.Severity.WARNING:
                self.lines.append(message.strip())

    return Kept()


class Plan:
    """A deserialised plan, with the inputs and outputs that are expected of it.

    `bytes`: the plan's size, which is about that of its weights on the device. Raises ArtifactError where the library refuses
    the plan, or the plan has other inputs or outputs.
    """

    def __init__(
        self, path: Path, library: Any, cuda: Cuda, names: Sequence[str], aliases: Mapping[str, str]
    ) -> None:
        self._cuda, self._library = cuda, library
        self._logger = _logger(library)
        self.bytes = path.stat().st_size
        self._runtime: Any = library.Runtime(self._logger)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine: Any = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise ArtifactError(
                f"{library.__name__} cannot load the plan {path}",
                found="; ".join(self.said()) or "no message",
                action="build the engine again with `optimize … --backend tensorrt`, for this device and library",
            )
        self.names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._check(path, names, aliases)
        sizes = [self._engine.get_device_memory_size_for_profile_v2(i) for i in range(len(PROFILES))]
        self.memory: DeviceMemory | None = DeviceMemory(cuda, max(sizes)) if max(sizes) else None

    def _check(self, path: Path, names: Sequence[str], aliases: Mapping[str, str]) -> None:
        profiles = self._engine.num_optimization_profiles
        odd = sorted(set(self.names) ^ set(names))
        if odd or profiles != len(PROFILES):
            raise ArtifactError(
                f"the plan {path} is not the one that the engine's manifest describes",
                found=f"{profiles} profiles, {len(self.names)} inputs and outputs; unexpected or missing: {odd[:4]}",
                expected=f"{len(PROFILES)} profiles, {len(names)} inputs and outputs",
                action="copy the engine again, or build it again",
            )
        for output, source in aliases.items():
            found = self._engine.get_aliased_input_tensor(output)
            if found != source:
                raise ArtifactError(
                    f"the plan {path} does not update its key/value pools in place",
                    found=f"{output} aliases {found or 'nothing'}",
                    expected=source,
                    action="build the engine again",
                )

    def said(self) -> list[str]:
        """What the library has warned of since this was last asked."""
        lines, self._logger.lines = self._logger.lines, []
        return lines

    def context(self, profile: str, stream: Stream, *, eager: bool) -> Context:
        """A new context of a profile. `eager`: kernels are compiled for exactly its shapes before they run, where the library
        does that at all; otherwise it may run general ones meanwhile."""
        library = self._library
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            library.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        strategies = getattr(library, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is not None:  # TensorRT-RTX compiles kernels when they are first needed
            config.dynamic_shapes_kernel_specialization_strategy = (
                strategies.EAGER if eager else strategies.LAZY
            )
        made = self._engine.create_execution_context(runtime_config=config)
        if made is None:
            raise self.failed("create_execution_context")
        if self.memory is not None:
            made.set_device_memory(self.memory.address, self.memory.size)
        if not made.set_optimization_profile_async(PROFILES.index(profile), int(stream.handle)):
            raise self.failed("set_optimization_profile_async")
        stream.synchronise()
        return Context(self, made)

    def failed(self, call: str) -> DeviceError:
        """The error of a call that said no, with the library's own words."""
        return DeviceError(
            f"{self._library.__name__} refused {call}", found="; ".join(self.said()[-3:]) or "no message"
        )

    def close(self) -> None:
        """Give back engine and working memory. All contexts are closed before."""
        self._engine = self._runtime = None
        if self.memory is not None:
            self.memory.close()


class Context:
    """One execution context, of one profile."""

    def __init__(self, plan: Plan, context: Any) -> None:
        self._plan: Plan = plan
        self._context: Any = context
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Set the inputs' shapes and all tensors' addresses; what has not changed is not set again."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                if not self._context.set_input_shape(name, shape):
                    raise self._plan.failed(f"set_input_shape({name!r}, {shape})")
                self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                if not self._context.set_tensor_address(name, address):
                    raise self._plan.failed(f"set_tensor_address({name!r})")
                self._addresses[name] = address

    def run(self, stream: Stream) -> None:
        """Put the network's kernels into the stream."""
        if not self._context.execute_async_v3(int(stream.handle)):
            raise self._plan.failed("execute_async_v3")

    def capturable(self, stream: Stream) -> bool:
        """Whether a graph can be captured of it; the full TensorRT has no such question."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(int(stream.handle)))

    def close(self) -> None:
        self._context = None
