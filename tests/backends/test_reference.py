"""The reference executor: the Program itself behind the executor's contract."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from enginewright.backends import get_backend
from enginewright.backends.base import Executor, StepError, StepInput
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.program import Program, Stage
from enginewright.passes.select_rows import SelectRows
from enginewright.recipes.errors import InputError, LoweringError
from tests.backends.stepping import Stepper, alone, in_chunks
from tests.passes.graphs import Build

aten = torch.ops.aten
PROMPTS = {"a": [5, 3, 11, 0, 7, 7, 2, 12, 9, 1, 4, 4], "b": [1, 2, 3], "c": list(range(10)) * 2}


@functools.cache
def two_layers(final: bool = True, kv_format: str = "f32") -> tuple[Program, Program]:
    """A two-layer model, one windowed and one full layer, before and after paging."""
    b = Build(Stage.FUSED)
    x = b.hidden(16)
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.3])
    cos, sin = b.table("cos", angles.cos()), b.table("sin", angles.sin())
    for layer, window in enumerate((5, 0)):
        q, k, v = (
            b.view(b.linear(x, heads * 4, f"{n}{layer}"), heads, 4)
            for n, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        q, k = (b.call("rope", part, cos, sin, 4, False) for part in (q, k))
        out = b.call("attention", q, k, v, None, None, 0.5, window, 0.0, layer)
        x = b.call("rms_norm", b.call(aten.add.Tensor, x, b.view(out, 16)), None, 1e-6)
    program = b.finish(b.linear(x, 13, "head"))
    paged = program.clone()
    InsertPagedKv(16, kv_format).run(paged)
    remove_dead_code(paged)
    paged.stage = Stage.PAGED
    if final:
        SelectRows().run(paged)
        paged.stage = Stage.FINAL
    paged.recompile()
    return program, paged


@pytest.mark.parametrize("final", [True, False])
def test_every_way_of_cutting_prompts_gives_the_program_s_logits(final: bool) -> None:
    program, paged = two_layers(final)
    executor = ReferenceExecutor(paged)
    want = {name: program.run(prompt).numpy() for name, prompt in PROMPTS.items()}
    ways = [alone(executor, PROMPTS, 32), alone(executor, PROMPTS, 1), in_chunks(executor, PROMPTS, 7)]
    for found in ways:
        for name in PROMPTS:
            np.testing.assert_allclose(found[name], want[name], atol=1e-4)


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_a_cache_rounds_keys_and_values(kv_format: str) -> None:
    program, paged = two_layers(kv_format=kv_format)
    executor = ReferenceExecutor(paged)
    assert [group.format for group in executor.kv_groups] == [kv_format] * 2
    found = alone(executor, PROMPTS, 7)
    error = np.abs(found["a"] - program.run(PROMPTS["a"]).numpy()).max()
    assert 1e-3 < error < 0.5
    np.testing.assert_allclose(alone(executor, PROMPTS, 1)["c"], found["c"], atol=1e-4)


def test_copied_pages_continue_a_sequence() -> None:
    program, paged = two_layers()
    executor = ReferenceExecutor(paged)
    stepper = Stepper(executor)
    prompt = PROMPTS["c"]
    stepper.feed(first=prompt[:10])
    stepper.lengths["second"] = 10
    for group in range(2):
        target = stepper.free[group].pop(0)
        executor.copy_pages(group, stepper.tables[group]["first"], [target])
        stepper.tables[group]["second"] = [target]
    stepper.feed(first=[1, 2, 3])  # the original goes its own way
    found = stepper.feed(second=prompt[10:])["second"]
    np.testing.assert_allclose(found, program.run(prompt).numpy()[10:], atol=1e-4)


def test_only_the_wanted_rows_come_back() -> None:
    _, paged = two_layers()
    executor = ReferenceExecutor(paged)
    executor.create_pool([2, 2])
    arrays = [np.array(part, np.int32) for part in ([5, 3, 1], [0, 1, 2], [0, 3], [3], [[[0]], [[1]]])]
    both = executor.step(StepInput(*arrays, np.array([0, 2], np.int32)))
    last = executor.step(StepInput(*arrays, np.array([2], np.int32)))
    np.testing.assert_allclose(last[0], both[1], atol=1e-5)
    assert executor.step(StepInput(*arrays, np.array([], np.int32))).shape == (0, 13)


def test_the_contract_is_kept() -> None:
    _, paged = two_layers()
    executor = ReferenceExecutor(paged, max_tokens=8)
    assert isinstance(executor, Executor)
    assert [(g.window, g.layers, g.page_bytes) for g in executor.kv_groups] == [
        (5, 1, 16 * 2 * 8 * 4),
        (0, 1, 16 * 2 * 8 * 4),
    ]
    arrays = [np.array(part, np.int32) for part in ([5], [0], [0, 1], [1], [[[0]], [[1]]], [0])]
    with pytest.raises(StepError, match="there is no pool"):
        executor.step(StepInput(*arrays))
    executor.create_pool([2, 2])
    assert executor.memory()["pool"] == 2 * 2 * 16 * 2 * 8 * 4
    executor.step(StepInput(*arrays))
    with pytest.raises(StepError, match="positions"):
        executor.step(StepInput(arrays[0], np.array([1], np.int32), *arrays[2:]))
    with pytest.raises(StepError, match="tokens"):
        executor.step(StepInput(np.zeros(9, np.int32), *arrays[1:]))
    executor.close()
    executor.close()


def test_what_it_cannot_do_is_refused() -> None:
    program, _ = two_layers()
    with pytest.raises(LoweringError, match="only a paged program"):
        ReferenceExecutor(program)
    with pytest.raises(InputError, match="no such backend"):
        get_backend("reference")
