"""The executor by itself: caches stay where they are, nothing unseen is read, runs of like lengths, options and bad input."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from enginewright.backends import get_backend  # noqa: E402
from enginewright.backends.base import StepError, StepInput  # noqa: E402
from enginewright.backends.onnx import installed, pools, providers  # noqa: E402
from enginewright.backends.onnx.executor import OnnxExecutor  # noqa: E402
from enginewright.backends.onnx.graph import Graph  # noqa: E402
from enginewright.backends.onnx.lower import check_model  # noqa: E402
from enginewright.backends.onnx.runs import Reading, parts, run_of  # noqa: E402
from enginewright.recipes.errors import ArtifactError, InputError, LoweringError  # noqa: E402
from tests.backends.onnx.programs import PROMPTS, load, lowered  # noqa: E402
from tests.backends.stepping import Stepper  # noqa: E402


def model() -> Path:
    return Path(lowered("llama").name) / "model.onnx"


# Caches.


def test_a_step_writes_its_rows_in_place_and_nothing_else() -> None:
    executor = load("llama")
    stepper = Stepper(executor)
    before = dict(executor.cache_addresses())
    stepper.feed(a=PROMPTS["long"][:20], b=PROMPTS["short"])
    held = {name: memory.read().copy() for name, memory in executor._pools.memory.items()}
    stepper.feed(a=PROMPTS["long"][20:21])
    assert dict(executor.cache_addresses()) == before and len(before) == 4
    page = stepper.tables[0]["a"][20 // 16]
    for name, cache in executor._pools.memory.items():
        memory = cache.read()
        changed = np.flatnonzero((memory != held[name]).any(axis=1))
        assert changed.tolist() == [page * 16 + 20 % 16], name
        assert not memory[-1].any(), "the zero slot was written"
    bound = executor._binding.get_outputs()
    addresses = {value.data_ptr() for value in bound}
    assert set(before.values()) <= addresses, "an output lies elsewhere"
    executor.close()


def test_the_model_makes_no_copy_of_a_cache() -> None:
    """Whatever reads a whole cache is the ScatterND that is bound in place, or a Gather of chosen slots."""
    graph = onnx.load(str(model()), load_external_data=False).graph
    caches = {value.name for value in graph.input if "_cache_" in value.name}
    outputs = {value.name for value in graph.output if value.name != "logits"}
    assert {f"{name}_out" for name in caches} == outputs
    readers = [node.op_type for node in graph.node if caches & set(node.input)]
    assert readers == ["ScatterND"] * len(caches)
    assert {node.op_type for node in graph.node if outputs & set(node.input)} == {"Gather"}
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    assert len(attentions) == 2 and all(node.input[6] for node in attentions)  # with each sequence's length


def test_pages_are_copied_in_order() -> None:
    executor = load("llama")
    stepper = Stepper(executor)
    stepper.feed(a=PROMPTS["long"][:17])
    memory = executor._pools.memory["key_cache_0_0"].read()
    first = stepper.tables[0]["a"][0]
    executor.copy_pages(0, [first, 9], [9, 10])
    assert (memory[160:176] == memory[first * 16 : first * 16 + 16]).all()
    with pytest.raises(StepError, match="page to copy"):
        executor.copy_pages(0, [0], [24])
    executor.close()
    with pytest.raises(StepError, match="closed"):
        stepper.feed(a=[5])


def test_caches_of_a_device_are_held_and_copied_by_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a GPU's provider would have, here that of ONNX Runtime's CPU: the same logits, pages copied."""

    def feed(executor: OnnxExecutor) -> list[np.ndarray]:
        stepper = Stepper(executor)
        found = [stepper.feed(a=PROMPTS["long"][:17])["a"]]
        pages = stepper.tables[0]["a"]
        stepper.tables[0]["b"] = [stepper.free[0].pop(0) for _ in pages]
        executor.copy_pages(0, pages, stepper.tables[0]["b"])
        stepper.lengths["b"] = 17
        return [*found, *stepper.feed(a=PROMPTS["long"][17:20], b=PROMPTS["long"][17:20]).values()]

    usual = load("llama")
    wanted = feed(usual)
    usual.close()
    monkeypatch.setattr(
        pools.Pools, "_made", lambda self, slots, size: pools.DeviceMemory(slots, size, self.device)
    )
    executor = load("llama")
    found = feed(executor)
    executor.close()
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert np.array_equal(found[1], found[2])


# Runs.


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1, 1, 1], [[0, 1, 2]]),
        ([1, 200, 1, 5, 1], [[1, 3], [0, 2, 4]]),
        ([7, 8, 9], [[0, 1, 2]]),
        ([4], [[0]]),
    ],
)
def test_sequences_of_like_lengths_run_together(lengths: list[int], expected: list[list[int]]) -> None:
    assert [part.tolist() for part in parts(np.array(lengths))] == expected


def test_a_run_names_its_slots() -> None:
    """Two sequences, a window of 4, pages of 4; the second's queries are the third and fourth of their places."""
    step = StepInput(
        np.array([11, 12, 13, 21, 22], np.int32),
        np.array([5, 6, 7, 0, 1], np.int32),
        np.array([0, 3, 5], np.int32),
        np.array([8, 2], np.int32),
        np.array([[[2, 0], [1, -1]], [[-1, 3], [0, -1]]], np.int32),
        np.array([4, 0], np.int32),
    )
    run = run_of(step, np.array([0, 1]), [Reading(0, 4, 16, False), Reading(4, 4, 16, True)])
    found = {name: array.tolist() for name, array in run.inputs.items()}
    assert found["query_rows"] == [[0, 1, 2], [0, 3, 4]] and found["row_places"] == [0, 1, 2, 4, 5]
    assert found["write_slots_0"] == [[1], [2], [3], [4], [5]]
    assert found["read_slots_0"] == [[8, 9, 10, 11, 0, 1, 2, 3], [4, 5, *[16] * 6]]
    assert found["first_keys_1"] == [2, 0]
    assert found["read_slots_1"][0][3:] == [12, 13, 14, 15] and found["read_slots_1"][0][0] == 16
    assert found["read_slots_1"][1] == [16, 0, 1, 16, 16, 16, 16]
    assert found["logit_rows"] == [4, 0] and run.logit_places.tolist() == [0, 1]


# Options and bad input.


@pytest.mark.parametrize("provider", ["cuda", "tensorrt-rtx"])
def test_a_provider_that_is_not_installed_is_refused_with_those_that_are(provider: str) -> None:
    if providers.PROVIDERS[provider] in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has {provider}")
    with pytest.raises(InputError, match=f"no {provider} provider") as refused:
        OnnxExecutor(model(), provider=provider)
    assert "CPUExecutionProvider" in str(refused.value)
    assert ("enginewright[onnx-gpu]" in str(refused.value)) == (provider == "cuda")  # it brings CUDA's alone


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"provider": "coreml"}, "no such provider"),
        ({"weights": "copy"}, "cannot load weights that way"),
        ({"threads": 0}, "threads"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_options_that_it_cannot_honour_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        OnnxExecutor(model(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("package", "use"), [("onnx", "require_onnx"), ("onnxruntime", "require_onnxruntime")]
)
def test_a_package_that_is_missing_or_too_old_is_named(
    package: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require = getattr(installed, use)
    monkeypatch.setattr(sys.modules[package], "__version__", "1.16.3")
    with pytest.raises(InputError, match=f"{package} is too old") as old:
        require()
    assert "opset 24" in str(old.value)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"needs the package {package}") as missing:
        require()
    assert "pip install 'enginewright[onnx]'" in str(missing.value)
    if package == "onnx":
        with pytest.raises(InputError, match="needs the package onnx"):
            _ = get_backend("onnx").capabilities


def test_a_model_of_others_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    other = onnx.load(str(model()), load_external_data=False)
    del other.metadata_props[:]
    (tmp_path / "model.onnx.data").write_bytes(model().with_name("model.onnx.data").read_bytes())
    (tmp_path / "model.onnx").write_bytes(other.SerializeToString())
    with pytest.raises(ArtifactError, match="no model that this runtime serves"):
        OnnxExecutor(tmp_path / "model.onnx", threads=1)
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ArtifactError, match="ONNX Runtime refuses the engine's model"):
        OnnxExecutor(tmp_path / "model.onnx", threads=1)


def test_what_the_checker_says_is_shown(tmp_path: Path) -> None:
    wrong = onnx.load(str(model()), load_external_data=False)
    node = next(node for node in wrong.graph.node if node.op_type == "Gemm")
    node.op_type = "Gamm"
    (tmp_path / "model.onnx.data").write_bytes(model().with_name("model.onnx.data").read_bytes())
    (tmp_path / "model.onnx").write_bytes(wrong.SerializeToString())
    with pytest.raises(LoweringError, match="onnx refuses the model") as refused:
        check_model(tmp_path / "model.onnx")
    assert "Gamm" in str(refused.value)


def test_pages_that_are_not_there_are_not_copied() -> None:
    executor = load("llama")
    with pytest.raises(StepError, match="there is no pool"):
        executor.copy_pages(0, [0], [1])
    executor.create_pool([4])
    for group in (-1, 1):
        with pytest.raises(StepError, match="no such pool"):
            executor.copy_pages(group, [0], [1])
    with pytest.raises(StepError, match="a page to copy"):
        executor.copy_pages(0, [0], [4])
    executor.close()
    with pytest.raises(StepError, match="closed"):
        executor.copy_pages(0, [0], [1])


def test_no_two_values_have_one_name() -> None:
    graph = Graph()
    asked = ["scale", "scale.1", "scale", "scale", "scale.1", "scale.1.1"]
    assert len({graph.fresh(name) for name in asked}) == len(asked)


def test_too_much_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load("llama")

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(MemoryError, match="smaller max_context"):
        executor.create_pool([4])
    monkeypatch.undo()
    executor.close()
