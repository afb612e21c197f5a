"""The executor on a GPU that is not there: every call held to its documentation, every answer to a model with no pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Executor, StepError, StepInput
from enginewright.backends.tensorrt import executor as executor_module
from enginewright.backends.tensorrt.cuda import Cuda, DeviceError
from enginewright.backends.tensorrt.executor import TensorRTExecutor, buckets
from enginewright.recipes.errors import ArtifactError
from enginewright.runtime.engine import Engine
from enginewright.runtime.loop import EngineLoop, LoopLimits
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.request import Request, SamplingOptions
from tests.backends.stepping import Stepper, alone, in_chunks
from tests.backends.tensorrt.fake_device import BrokenRule, FakeDevice, cudaError_t
from tests.backends.tensorrt.fake_tensorrt import PLAN, FakeTensorRT
from tests.backends.tensorrt.paged_numpy import DESCRIPTION, GROUPS, LIMITS, VOCAB, dense, greedy, network

NEAR = 0.02  # of logits up to 20: one key that is rounded the other way to f16 moves them by some 1e-3
PROMPTS = {"a": [5, 3, 11, 0, 7, 7, 2, 12, 9, 1, 4, 4], "b": [1, 2, 3], "c": list(range(10)) * 2}


class Machine:
    """An imagined GPU, its library, and an executor on it."""

    def __init__(self, folder: Path, description: Any = DESCRIPTION, **options: Any) -> None:
        self.device = FakeDevice()
        self.library = FakeTensorRT(self.device, description, network)
        self.plan = folder / "plan.engine"
        self.plan.write_bytes(PLAN)
        self.description = description
        self.executor = self.load(**options) if options.pop("loaded", True) else None

    def load(self, **options: Any) -> TensorRTExecutor:
        return TensorRTExecutor(
            self.plan,
            self.description,
            self.library.module,
            Cuda(self.device.runtime),
            "an imagined GPU",
            **options,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.executor.close()
    machine.device.assert_clean()
    assert not machine.library.contexts


def test_every_way_of_cutting_prompts_gives_the_model_s_logits(machine: Machine) -> None:
    # The Stepper fills all pages with NaN: nothing unwritten may reach a logit.
    for found in (
        alone(machine.executor, PROMPTS, 16),
        alone(machine.executor, PROMPTS, 1),
        in_chunks(machine.executor, PROMPTS, 5),
        in_chunks(machine.executor, PROMPTS, 1),
    ):
        for name, prompt in PROMPTS.items():
            np.testing.assert_allclose(found[name], dense(prompt), atol=NEAR)
    assert {profile for profile, _ in machine.library.ran} == {0, 1}
    assert machine.device.launches > 20


def loop_over(machine: Machine, pages: int = 20, **limits: Any) -> EngineLoop:
    return EngineLoop(
        machine.executor,
        [GroupSpec(group.window, LIMITS.page_size) for group in GROUPS],
        [pages, pages],
        LoopLimits(LIMITS.context, **{"max_sequences": 5, "token_budget": 16, **limits}),
    )


@pytest.mark.parametrize(("pages", "prefix_cache"), [(40, True), (14, True), (14, False)])
def test_served_requests_get_the_model_s_tokens(machine: Machine, pages: int, prefix_cache: bool) -> None:
    loop = loop_over(machine, pages, prefix_cache=prefix_cache)
    random = np.random.default_rng(2)
    shared = random.integers(0, VOCAB, 9).tolist()
    prompts = [shared + random.integers(0, VOCAB, 1 + i % 7).tolist() for i in range(10)]
    prompts += [random.integers(0, VOCAB, 1 + 3 * i).tolist() for i in range(5)]
    requests = [Request(prompt, options=SamplingOptions(max_tokens=9)) for prompt in prompts]
    for start in range(0, len(requests), 6):  # the later ones find what the first have left in the cache
        for request in requests[start : start + 6]:
            loop.submit(request)
        while not loop.idle:
            loop.step()
            loop.pool.check_invariants()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.error is None and request.tokens[len(prompt) :] == greedy(prompt, 9)
    statistics = loop.statistics()
    assert (statistics.prefix_hit_tokens > 0) == prefix_cache
    assert (statistics.preemptions > 0) == (pages == 14)
    assert machine.device.calls.count("cudaGraphLaunch") > 10


def test_an_engine_takes_no_larger_steps_than_the_plan(machine: Machine, tmp_path: Path) -> None:
    """Asked for 32 sequences and 512 tokens a step, on a plan for 6 and 16."""
    manifest = {"model": {"max_context": 64, "eos_token_ids": []}, "files": {}, "backend": "tensorrt"}
    asked = {"max_sequences": 32, "token_budget": 512, "cache_tokens": 160}
    with Engine(Artifact(tmp_path, manifest), machine.executor, **asked) as engine:
        prompts = [[i, i + 1, *range(i)] for i in range(12)]
        for prompt, completion in zip(prompts, engine.generate(prompts, max_tokens=4), strict=True):
            assert completion.token_ids == greedy(prompt, 4)
        assert engine.loop.statistics().max_sequences == 6 and engine.loop.statistics().token_budget == 16


def pool_bytes(machine: Machine, zero_page: bool = False) -> list[bytes]:
    """What every pool of the device holds, without its zero page."""
    pools = machine.executor._pools
    found = []
    for name, shape in pools.shapes.items():
        size = int(np.prod(shape)) * 2
        memory = machine.device.find(pools.addresses[name], size)
        found.append(memory[: None if zero_page else size - size // shape[0]].tobytes())
    return found


def test_a_padded_step_writes_what_the_plain_one_writes_and_nothing_else(tmp_path: Path) -> None:
    """Three decodes are padded to four sequences: other pages keep their NaN, bit for bit."""
    seen = []
    for graphs, many in ((True, False), (True, True), (False, False)):
        machine = Machine(tmp_path, graphs=graphs)
        stepper = Stepper(machine.executor, pages=12)
        stepper.feed(a=[5, 3, 11, 2, 1], b=[7], c=[4, 4, 4])
        logits = [stepper.feed(a=[i], b=[i + 1], c=[i + 2]) for i in range(6)]
        if many:  # the same again: a decode that is computed twice writes the same
            stepper.lengths = {name: length - 1 for name, length in stepper.lengths.items()}
            logits[-1] = stepper.feed(a=[5], b=[6], c=[7])
        decodes = [shapes for profile, shapes in machine.library.ran if profile == 0]
        assert decodes and all(shapes["tokens"] == (4,) for shapes in decodes)
        assert (machine.device.launches > 0) == graphs
        seen.append((logits, pool_bytes(machine)))
        machine.executor.close()
        machine.device.assert_clean()
    for logits, pools in seen[1:]:
        assert pools == seen[0][1]
        for step, first in zip(logits, seen[0][0], strict=True):
            for name in step:
                np.testing.assert_array_equal(step[name], first[name])


def test_a_graph_is_captured_once_a_shape_and_again_for_new_pools(machine: Machine) -> None:
    def captured() -> int:
        return machine.device.calls.count("cudaStreamBeginCapture")

    stepper = Stepper(machine.executor)
    stepper.feed(a=[1, 2], b=[3])
    for i in range(4):
        stepper.feed(a=[i], b=[i])
    # Two tables were wide enough: of one page, and of two.
    assert captured() == 2 and machine.device.launches == 2
    stepper.feed(a=[1])
    assert captured() == 3
    again = Stepper(machine.executor)  # makes new pools
    assert len(machine.device.executables) == 0
    again.feed(a=[1, 2], b=[3])
    again.feed(a=[1], b=[2])
    assert captured() == 4


def test_the_graph_used_longest_ago_makes_room(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MOST_GRAPHS", 2)
    stepper = Stepper(machine.executor)
    for names in ("a", "bc", "abcd", "ef", "d"):
        stepper.feed(**{name: [1] for name in names})
    assert len(machine.device.executables) == 2
    # Of 1, 2 and 4 sequences; that of 2 was there still, that of 1 was not.
    assert machine.device.calls.count("cudaStreamBeginCapture") == 4 and machine.device.launches == 1


def test_steps_go_on_where_nothing_can_be_captured(machine: Machine) -> None:
    machine.library.capturable = False
    found = in_chunks(machine.executor, PROMPTS, 1)
    np.testing.assert_allclose(found["c"], dense(PROMPTS["c"]), atol=NEAR)
    assert "cudaStreamBeginCapture" not in machine.device.calls
    machine.library.capturable = True
    machine.device.fail["cudaGraphInstantiate"] = cudaError_t.cudaErrorInvalidValue
    found = in_chunks(machine.executor, PROMPTS, 1)
    np.testing.assert_allclose(found["c"], dense(PROMPTS["c"]), atol=NEAR)
    assert not machine.device.graphs and machine.device.launches == 0


def test_one_transfer_each_way_a_step(machine: Machine) -> None:
    stepper = Stepper(machine.executor)
    stepper.feed(a=[1, 2, 3])
    for rows in ([4, 5], [6], [7]):
        machine.device.calls.clear()
        stepper.feed(a=rows)
    assert machine.device.calls == [
        "cudaMemcpyAsync",
        "cudaGraphLaunch",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
    ]


def step_of(count: int = 1, **changes: Any) -> StepInput:
    """The first token of `count` sequences, in pages 0, 1, …"""
    arrays = {
        "tokens": np.arange(count),
        "positions": np.zeros(count),
        "seq_starts": np.arange(count + 1),
        "context_lens": np.ones(count),
        "page_tables": np.stack([np.arange(count)[:, None]] * 2),
        "logit_rows": np.arange(count),
    } | changes
    return StepInput(**{name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()})


def test_the_contract_is_kept(machine: Machine) -> None:
    executor = machine.executor
    assert isinstance(executor, Executor)
    assert (executor.max_tokens, executor.max_rows, executor.max_sequences) == (16, 16, 6)
    assert [(g.window, g.page_size, g.format, g.layers) for g in executor.kv_groups] == [
        (0, 4, "f16", 1),
        (6, 4, "f16", 1),
    ]
    with pytest.raises(StepError, match="there is no pool"):
        executor.step(step_of())
    for pages in ([8], [0, 8], [8, 41]):
        with pytest.raises(StepError, match="pools of so many pages"):
            executor.create_pool(pages)
    executor.create_pool([8, 7])
    pool = executor.memory()["pool"]
    assert pool >= sum(n * g.page_bytes for n, g in zip((9, 8), executor.kv_groups, strict=True))
    ran = len(machine.library.ran)
    for bad, match in (
        (step_of(positions=[1]), "positions"),
        (step_of(tokens=[VOCAB]), "tokens"),
        (step_of(page_tables=[[[8]], [[0]]]), "page_tables"),
        (step_of(7), "at most 6, which the plan was built for"),
        (step_of(tokens=np.zeros(17)), "tokens"),
    ):
        before = pool_bytes(machine, zero_page=True)
        with pytest.raises(StepError, match=match):
            executor.step(bad)
        assert len(machine.library.ran) == ran and pool_bytes(machine, zero_page=True) == before
    np.testing.assert_allclose(executor.step(step_of(6)), [dense([i])[0] for i in range(6)], atol=NEAR)
    assert executor.step(step_of(3, logit_rows=[])).shape == (0, VOCAB)
    first = executor.step(step_of(3, logit_rows=[2]))
    executor.step(step_of(2))
    np.testing.assert_allclose(first, dense([2]), atol=NEAR)  # rows that were given out stay as they are
    assert sum(executor.memory().values()) >= sum(
        len(block.memory) for block in machine.device.blocks.values()
    )


def test_more_rows_than_the_plan_has_are_never_promised(tmp_path: Path) -> None:
    machine = Machine(tmp_path, max_tokens=512, max_rows=9)
    assert (machine.executor.max_tokens, machine.executor.max_rows) == (16, 9)
    machine.executor.create_pool([8, 8])
    with pytest.raises(StepError, match="logit_rows"):
        machine.executor.step(step_of(3, logit_rows=np.zeros(10)))
    machine.executor.close()
    few = Machine(tmp_path, max_tokens=2)
    few.executor.create_pool([8, 8])
    with pytest.raises(StepError, match="1 to 2"):
        few.executor.step(step_of(3))
    few.executor.close()
    few.device.assert_clean()


def test_copied_pages_continue_a_sequence(machine: Machine) -> None:
    stepper = Stepper(machine.executor)
    prompt = PROMPTS["c"]
    stepper.feed(first=prompt[:10])
    stepper.lengths["second"] = 10
    for group in range(2):
        targets = [stepper.free[group].pop(0) for _ in range(3)]
        machine.executor.copy_pages(group, stepper.tables[group]["first"], targets)
        stepper.tables[group]["second"] = targets
    stepper.feed(first=[1, 2, 3])  # the original goes its own way
    found = stepper.feed(second=prompt[10:])["second"]
    np.testing.assert_allclose(found, dense(prompt)[10:], atol=NEAR)
    for group, pages in ((2, [0]), (-1, [0]), (0, [24]), (0, [-1])):
        with pytest.raises(StepError, match="no such"):
            machine.executor.copy_pages(group, pages, [0])
    with pytest.raises(StepError, match="as many"):
        machine.executor.copy_pages(0, [0, 1], [2])


def test_pools_are_as_large_as_the_executor_says_and_no_larger(machine: Machine) -> None:
    most = machine.executor.max_pages
    machine.executor.create_pool(most)
    for group in range(len(most)):
        with pytest.raises(StepError, match="so many pages"):
            machine.executor.create_pool([count + (g == group) for g, count in enumerate(most)])


def test_pools_are_dropped_when_nothing_uses_them_any_more(machine: Machine) -> None:
    """Copies of pages wait in the stream; what they use may not be freed before they have run."""
    for drop in (lambda: machine.executor.create_pool([9, 9]), machine.executor.close):
        machine.executor.create_pool([8, 8])
        machine.executor.copy_pages(0, [1, 2], [3, 3])
        drop()


def test_a_closed_executor_holds_nothing_and_does_nothing(machine: Machine) -> None:
    machine.executor.create_pool([4, 4])
    machine.executor.step(step_of(2))
    machine.executor.close()
    machine.device.assert_clean()
    assert not machine.library.contexts
    machine.executor.close()
    for call in (lambda: machine.executor.step(step_of()), lambda: machine.executor.create_pool([4, 4])):
        with pytest.raises(DeviceError, match="closed"):
            call()


CALLS = [
    "cudaStreamCreateWithFlags",
    "cudaMalloc",
    "cudaMallocHost",
    "cudaMemsetAsync",
    "cudaStreamSynchronize",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_named_and_leaves_nothing_behind(tmp_path: Path, call: str) -> None:
    machine = Machine(tmp_path, loaded=False)
    machine.device.fail[call] = cudaError_t.cudaErrorIllegalAddress
    executor = None
    with pytest.raises(DeviceError, match=rf"{call}\n.*cudaErrorIllegalAddress"):
        executor = machine.load()
        executor.create_pool([4, 4])
    if executor is not None:  # it was made: it can be closed, and used again once the device is well
        machine.device.fail.clear()
        executor.create_pool([4, 4])
        executor.close()
    if call not in ("cudaStreamSynchronize",):  # no way to wait for what may still use the memory
        machine.device.assert_clean()


@pytest.mark.parametrize("call", ["create_execution_context", "set_optimization_profile_async"])
def test_what_the_library_refuses_is_named_with_its_own_words(tmp_path: Path, call: str) -> None:
    machine = Machine(tmp_path, loaded=False)
    machine.library.refuse.add(call)
    with pytest.raises(DeviceError, match=f"tensorrt_rtx refused {call}"):
        machine.load()
    machine.device.assert_clean()


def test_a_step_that_the_library_refuses_can_be_made_again(machine: Machine) -> None:
    machine.executor.create_pool([8, 8])
    machine.library.refuse.add("execute_async_v3")
    for step in (
        step_of(),
        step_of(2, seq_starts=[0, 2], context_lens=[2], positions=[0, 1], page_tables=[[[0]]] * 2),
    ):
        with pytest.raises(DeviceError, match=r"execute_async_v3(?s:.*)refused"):
            machine.executor.step(step)
    machine.library.refuse.clear()
    np.testing.assert_allclose(machine.executor.step(step_of()), dense([0]), atol=NEAR)


def test_too_little_memory_is_a_memory_error_and_smaller_pools_can_be_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.executor.create_pool([4, 4])
    machine.device.total = sum(len(b.memory) for b in machine.device.blocks.values() if not b.pinned) + 2048
    with pytest.raises(MemoryError, match=r"too little memory: cudaMalloc.*cudaErrorMemoryAllocation"):
        machine.executor.create_pool([40, 40])
    with pytest.raises(StepError, match="there is no pool"):
        machine.executor.step(step_of())
    machine.executor.create_pool([4, 4])
    machine.executor.step(step_of())
    machine.executor.close()
    machine.device.assert_clean()


def test_another_plan_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, loaded=False)
    machine.plan.write_bytes(b"something else")
    with pytest.raises(ArtifactError, match=r"cannot load the plan(?s:.*)this is no plan"):
        machine.load()
    machine.plan.write_bytes(PLAN)
    machine.library.aliases = dict.fromkeys(machine.library.aliases)
    with pytest.raises(ArtifactError, match=r"in place(?s:.*)aliases nothing"):
        machine.load()
    other = dataclasses.replace(DESCRIPTION, groups=GROUPS[:1])
    machine.description = dataclasses.replace(other, limits=dataclasses.replace(LIMITS, pages=(41,)))
    with pytest.raises(ArtifactError, match="not the one that the engine's manifest describes"):
        machine.load()
    machine.device.assert_clean()


def test_buckets_hold_every_batch_with_little_padding() -> None:
    assert buckets(32, 16) == [1, 2, 4, 8, 16, 24, 32]
    assert buckets(1, 16) == [1]
    for most in range(1, 70):
        for page_size in (1, 2, 4, 16):
            found = buckets(most, page_size)
            assert found == sorted(set(found)) and found[-1] == most
            for count in range(1, most + 1):
                bucket = next(b for b in found if b >= count)
                assert bucket - count < min(8, page_size, count + 1)


# ------------------------------------------------------------------------------------- the imagined GPU itself


def test_the_imagined_gpu_sees_what_is_forbidden() -> None:
    device = FakeDevice()
    cuda = device.runtime
    (_, stream), (_, at), (_, pinned) = (
        cuda.cudaStreamCreateWithFlags(1),
        cuda.cudaMalloc(64),
        cuda.cudaMallocHost(64),
    )
    pageable = np.zeros(64, np.uint8)
    to_device, to_host = (
        cuda.cudaMemcpyKind.cudaMemcpyHostToDevice,
        cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost,
    )
    for forbidden in (
        lambda: cuda.cudaMemcpyAsync(at, pageable.ctypes.data, 64, to_device, stream),
        lambda: cuda.cudaMemcpyAsync(at, pinned, 65, to_device, stream),
        lambda: cuda.cudaMemcpyAsync(at, pinned, 64, to_host, stream),
        lambda: cuda.cudaMemcpyAsync(at, pinned, 64, to_device, 0),
        lambda: cuda.cudaFree(pinned),
        lambda: cuda.cudaFree(at + 1),
        lambda: cuda.cudaStreamEndCapture(stream),
    ):
        with pytest.raises(BrokenRule):
            forbidden()
    cuda.cudaMemcpyAsync(at, pinned, 64, to_device, stream)
    with pytest.raises(BrokenRule, match="waiting work"):
        cuda.cudaFree(at)
    device.find(pinned, 64)[:] = 1
    with pytest.raises(BrokenRule, match="while a copy of it was on its way"):
        cuda.cudaStreamSynchronize(stream)
    cuda.cudaMemcpyAsync(pinned, at, 64, to_host, stream)
    assert (device.find(pinned, 64) == 0xA5).all()
    cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    assert cuda.cudaStreamSynchronize(stream)[0] == cudaError_t.cudaErrorStreamCaptureUnsupported
    assert cuda.cudaStreamEndCapture(stream)[0] == cudaError_t.cudaErrorStreamCaptureInvalidated
    cuda.cudaStreamSynchronize(stream)
    cuda.cudaFreeHost(pinned)
    with pytest.raises(AssertionError, match="leak"):
        device.assert_clean()


# -------------------------------------------------------------------------------------------- random sequences

NAMES = "abcdef"
fed = st.dictionaries(
    st.sampled_from(NAMES), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), min_size=1
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), fed),
        st.tuples(st.just("decode"), st.sets(st.sampled_from(NAMES), min_size=1)),
        st.tuples(st.just("copy"), st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))),
        st.tuples(st.just("pool"), st.integers(30, 40)),
        st.tuples(st.just("close"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(operations)
def test_any_sequence_of_calls_keeps_the_rules_and_the_answers(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, Any]]
) -> None:
    machine = Machine(tmp_path_factory.mktemp("plan"))
    stepper, texts = Stepper(machine.executor, pages=40), {name: [] for name in NAMES}

    def feed(rows: dict[str, list[int]]) -> None:
        rows = {name: new for name, new in rows.items() if len(texts[name]) + len(new) <= 24}
        if not rows or sum(map(len, rows.values())) > LIMITS.tokens:
            return
        for name, logits in stepper.feed(**rows).items():
            texts[name] += rows[name]
            np.testing.assert_allclose(logits, dense(texts[name])[-len(logits) :], atol=NEAR)

    for call, argument in calls:
        if call == "feed":
            feed(argument)
        elif call == "decode":
            feed({name: [len(texts[name]) % VOCAB] for name in argument})
        elif call == "copy" and argument[0] != argument[1] and texts[argument[0]] and not texts[argument[1]]:
            source, target = argument
            for group in range(2):
                pages = stepper.tables[group][source]
                taken = [stepper.free[group].pop(0) if page >= 0 else -1 for page in pages]
                held = [(p, t) for p, t in zip(pages, taken, strict=True) if p >= 0]
                machine.executor.copy_pages(group, [p for p, _ in held], [t for _, t in held])
                stepper.tables[group][target] = taken
            stepper.lengths[target], texts[target] = stepper.lengths[source], list(texts[source])
        elif call == "pool":
            stepper, texts = Stepper(machine.executor, pages=argument), {name: [] for name in NAMES}
        elif call == "close":
            machine.executor.close()
            machine.device.assert_clean()
            machine.executor = machine.load()
            stepper, texts = Stepper(machine.executor, pages=40), {name: [] for name in NAMES}
    machine.executor.close()
    machine.device.assert_clean()
    assert not machine.library.contexts
