"""A lowered network, interpreted on the imagined GPU, served by the runtime: what lies between a request and the network, in
one piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.backends.tensorrt.api import new_network
from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.cuda import Cuda
from enginewright.backends.tensorrt.executor import TensorRTExecutor
from enginewright.backends.tensorrt.interpreter import Interpreter
from enginewright.backends.tensorrt.lower import Options, define
from enginewright.backends.tensorrt.pools import Description, KvGroupLayers, KvLayerShape
from enginewright.runtime.loop import EngineLoop, LoopLimits
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.backends.stepping import in_chunks
from tests.backends.tensorrt.fake_device import FakeDevice
from tests.backends.tensorrt.fake_tensorrt import PLAN, FakeTensorRT
from tests.backends.tensorrt.programs import final
from tests.gpu.checks import a_graph_gives_the_plain_run_s_bits, pages_hold_what_the_reference_s_hold

PROMPTS = {"a": list(range(3, 31)), "b": [9, 8, 7], "c": [40, 2, 77, 5]}


class Interpreted:
    """An `execute_async_v3` that evaluates the network by its layers' documented meaning, on the bound memory."""

    def __init__(self, program: Any) -> None:
        self._network, self._builder = new_network()
        self._lowered = define(program, self._network, Options(compute="f16"))
        self._interpreter = Interpreter(self._network, self._lowered.arrays)

    def __call__(self, bound: Mapping[str, np.ndarray]) -> None:
        aliases = self._interpreter.aliases
        given = {
            name: bound[name].astype(np.float32) if name in aliases.values() else bound[name].copy()
            for name in self._interpreter.inputs
        }
        results = self._interpreter.run(given)
        for output, source in aliases.items():
            bound[source][:] = results[output].astype(np.float16)
        bound["logits"][:] = results["logits"]


def loaded(
    folder: Path, program: Any, graphs: bool = True
) -> tuple[FakeDevice, FakeTensorRT, TensorRTExecutor]:
    groups = tuple(
        KvGroupLayers(
            group.window,
            tuple(
                KvLayerShape(layer.kv_heads, layer.key_dim, layer.value_dim, layer.format)
                for layer in group.layers
            ),
        )
        for group in program.facts.kv_groups
    )
    limits = Limits(sequences=8, tokens=32, context=128, page_size=16, pages=(25,) * len(groups))
    description = Description(groups, limits, program.facts.vocab_size)
    device = FakeDevice()
    library = FakeTensorRT(device, description, Interpreted(program))
    (folder / "plan.engine").write_bytes(PLAN)
    executor = TensorRTExecutor(
        folder / "plan.engine", description, library.module, Cuda(device.runtime), graphs=graphs
    )
    return device, library, executor


def test_a_windowed_model_is_served_as_the_reference_serves_it(tmp_path: Path) -> None:
    program, _ = final("gemma2")
    device, library, executor = loaded(tmp_path, program)
    reference = ReferenceExecutor(program)
    wanted = in_chunks(reference, PROMPTS, 32)
    largest = max(float(np.abs(rows).max()) for rows in wanted.values())
    for chunk in (11, 1):
        for name, rows in in_chunks(executor, PROMPTS, chunk).items():
            assert np.abs(rows - wanted[name]).max() < 5e-3 * largest, (name, chunk)
    assert {profile for profile, _ in library.ran} == {0, 1} and device.launches > 10
    executor.close()
    device.assert_clean()


def test_requests_get_the_reference_s_tokens(tmp_path: Path) -> None:
    """Three requests share prefixes and pages; decode steps of three are padded to four."""
    program, _ = final("qwen3")
    device, _, executor = loaded(tmp_path, program)
    answers = []
    for serving in (executor, ReferenceExecutor(program)):
        groups = [GroupSpec(group.window, group.page_size) for group in serving.kv_groups]
        loop = EngineLoop(serving, groups, [9] * len(groups), LoopLimits(128, 4, 32))
        requests = [
            Request([*PROMPTS["a"][:20], token], SamplingOptions(max_tokens=6, ignore_eos=True))
            for token in (3, 90, 41)
        ]
        for request in requests:
            loop.submit(request)
        while not loop.idle:
            loop.step()
        answers.append([request.output for request in requests])
    assert answers[0] == answers[1]
    assert device.launches > 0
    executor.close()
    device.assert_clean()


def test_what_is_asked_of_a_gpu_holds_here(tmp_path: Path) -> None:
    """The checks of tests/gpu, which run where there is one."""
    program, _ = final("gemma2")
    device, _, executor = loaded(tmp_path, program)
    a_graph_gives_the_plain_run_s_bits(executor)
    pages_hold_what_the_reference_s_hold(executor, program, 0.01)
    executor.close()
    device.assert_clean()
