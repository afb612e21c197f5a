"""The library's runtime over a fake device: plans that are no plans, contexts that keep every rule, and a network that is a
function.

From the Python API's documentation of `Runtime`, `ICudaEngine`, `IRuntimeConfig` and `IExecutionContext`, and the developer
guide's "CUDA Graphs". `execute_async_v3` puts a Python function into the stream; it gets every input and output by name, as
arrays over the bound memory, and writes logits and pools.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.pools import Description
from tests.backends.tensorrt.fake_device import POISON, BrokenRule, FakeDevice, Work

Network = Callable[[Mapping[str, np.ndarray]], None]
PLAN = b"a plan of the imagined library"
VERSION = "1.7.1"
_TYPES = {"int32": np.int32, "f16": np.float16, "bf16": np.uint16, "f32": np.float32}


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: Severity, message: str) -> None: ...


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = range(3)


class FakeTensorRT:
    """`module` stands for `tensorrt_rtx`. `arena`: bytes that a context needs to work in. `capturable`: whether it can be
    captured."""

    def __init__(self, device: FakeDevice, description: Description, network: Network) -> None:
        self.device, self.network = device, network
        limits = description.limits
        self.inputs = bindings.inputs(description.groups, limits.page_size)
        self.outputs = bindings.outputs(description.groups, limits.page_size, description.vocab_size)
        self.profiles = [bindings.profile(kind, self.inputs, limits) for kind in bindings.PROFILES]
        self.aliases = {b.name: b.name.removesuffix("_out") for b in self.outputs if b.name != "logits"}
        self.arena, self.capturable = 4096, True
        self.refuse: set[str] = set()  # calls that say no
        self.contexts: weakref.WeakSet[FakeContext] = weakref.WeakSet()
        self.ran: list[tuple[int, dict[str, tuple[int, ...]]]] = []  # profile and shapes of what was enqueued
        self.module = SimpleNamespace(
            __name__="tensorrt_rtx",
            __version__=VERSION,
            ILogger=ILogger,
            ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
            DynamicShapesKernelSpecializationStrategy=DynamicShapesKernelSpecializationStrategy,
            Runtime=lambda logger: SimpleNamespace(
                deserialize_cuda_engine=lambda content: self._deserialise(content, logger)
            ),
        )

    def _deserialise(self, content: Any, logger: Any) -> FakeEngine | None:
        if bytes(content) != PLAN:
            logger.log(ILogger.Severity.ERROR, "this is no plan")
            return None
        return FakeEngine(self, logger)


class FakeEngine:
    def __init__(self, library: FakeTensorRT, logger: Any) -> None:
        self.library, self.logger = library, logger
        self._names = [b.name for b in (*library.inputs, *library.outputs)]
        self.num_io_tensors = len(self._names)
        self.num_optimization_profiles = len(library.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.library.aliases.get(name)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.library.arena

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=ExecutionContextAllocationStrategy.STATIC)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(
            config, "strategy", strategy
        )
        return config

    def create_execution_context(self, runtime_config: Any) -> FakeContext | None:
        if "create_execution_context" in self.library.refuse:
            self.logger.log(ILogger.Severity.ERROR, "no context today")
            return None
        return FakeContext(self, runtime_config)


class FakeContext:
    def __init__(self, engine: FakeEngine, config: Any) -> None:
        self.engine, self.library = engine, engine.library
        self.user_managed = config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.working: tuple[int, int] | None = None
        self.profile, self.switched = 0, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.version, self.ran_version = 0, -1  # of shapes and addresses; of what was enqueued last
        self.library.contexts.add(self)

    def _no(self, call: str, why: str) -> bool:
        self.engine.logger.log(ILogger.Severity.ERROR, f"{call}: {why}")
        return False

    def set_device_memory(self, memory: int, size: int) -> None:
        if size < self.library.arena or memory % 256:
            raise BrokenRule("working memory is too small, or not aligned to 256 bytes")
        self.library.device.find(memory, size, pinned=False)
        self.working = (memory, size)
        self.version += 1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.library.device.stream(stream_handle)
        if "set_optimization_profile_async" in self.library.refuse:
            return self._no("set_optimization_profile_async", "refused")
        self.profile = profile_index
        self.shapes.clear()  # "will invalidate all dynamic bindings"
        self.version += 1
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        low, _, high = self.library.profiles[self.profile][name]  # KeyError: it is no input
        if len(shape) != len(low) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return self._no("set_input_shape", f"{name} {shape} is not within {low} to {high}")
        self.shapes[name] = tuple(shape)
        self.version += 1
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory % 256:
            raise BrokenRule(f"{name} at {memory:#x} is not aligned to 256 bytes")
        self.addresses[name] = memory
        self.version += 1
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        self.library.device.stream(stream)
        return self.library.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        library, device = self.library, self.library.device
        stream = device.stream(stream_handle)
        if "execute_async_v3" in library.refuse:
            return self._no("execute_async_v3", "refused")
        if stream.captured is not None and self.ran_version != self.version:
            raise BrokenRule("a context is captured that was not run since its shapes or addresses changed")
        if not self.user_managed or self.working is None:
            raise BrokenRule("the context has no working memory of the application's")
        device.find(*self.working, pinned=False)
        sizes = self._sizes()
        arrays, touches = {}, [self.working]
        for binding in (*library.inputs, *library.outputs):
            if binding.name not in self.addresses:
                raise BrokenRule(f"{binding.name} has no address")
            shape = tuple(part if isinstance(part, int) else sizes[part] for part in binding.shape)
            kind = _TYPES[binding.type]
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            address = self.addresses[binding.name]
            arrays[binding.name] = device.find(address, size, pinned=False).view(kind).reshape(shape)
            touches.append((address, size))
        for output, source in library.aliases.items():
            if self.addresses[output] != self.addresses[source]:
                raise BrokenRule(f"{output} has not the address of {source}, which it aliases")
        version = self.version
        itself = weakref.ref(self)

        def unchanged() -> None:
            context = itself()
            if context is None or context.version != version:
                raise BrokenRule(
                    "a graph is launched whose context has gone, or was changed since it was captured"
                )

        def run() -> None:
            device.find(*touches[0])[:] = POISON
            library.network(arrays)

        device.put(stream_handle, Work(run, touches, unchanged))
        self.ran_version = version
        library.ran.append((self.profile, dict(self.shapes)))
        return True

    def _sizes(self) -> dict[str, int]:
        """T, S, Q, … from the inputs' shapes; they must be set, and agree."""
        sizes: dict[str, int] = {}
        for binding in self.library.inputs:
            if binding.name not in self.shapes:
                raise BrokenRule(f"{binding.name} has no shape")
            for part, found in zip(binding.shape, self.shapes[binding.name], strict=True):
                if isinstance(part, int):
                    agrees = part == found
                else:
                    agrees = sizes.setdefault(part, found) == found
                if not agrees:
                    raise BrokenRule(
                        f"{binding.name} has the shape {self.shapes[binding.name]}: {part} differs"
                    )
        for name, value in list(sizes.items()):
            if name.endswith("+1") and sizes[name.removesuffix("+1")] + 1 != value:
                raise BrokenRule(f"{name} is {value}")
        return sizes
