"""A draft beside an executor: one set of weights, pools and threads, two programs."""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.backends.base import StepError
from enginewright.backends.cpu.executor import CpuDraft, CpuExecutor
from enginewright.recipes.errors import ArtifactError
from tests.backends.cpu.small_programs import Pages, model, step_input

PAGES = 64
TEXT = [int(i) for i in np.random.default_rng(7).integers(0, 50, 300)]


def first_layer(document: dict[str, Any]) -> dict[str, Any]:
    """The program of `model`, cut after its first layer."""
    draft = copy.deepcopy(document)
    codes = draft["instructions"]
    second = [i for i, code in enumerate(codes) if code["op"] == "rope_write"][
        1
    ] - 3  # norm, linear, norm, rope
    tail = codes[-3:]
    assert [code["op"] for code in tail] == ["select_rows", "rms_norm", "linear"]
    tail[0]["in"] = codes[second - 1]["out"]
    draft["instructions"] = codes[:second] + tail
    return draft


def pair(folder: Path, *, pages: int = PAGES, threads: int = 2, **shape: Any) -> tuple[CpuExecutor, CpuDraft]:
    program = model(**shape)
    program.write(folder)
    (folder / "draft.json").write_text(json.dumps(first_layer(program.document)))
    executor = CpuExecutor(
        folder / "program.json", folder / "weights.bin", draft=folder / "draft.json", threads=threads
    )
    executor.create_pool([pages] * len(program.document["kv_groups"]))
    draft = executor.draft()
    assert draft is not None and executor.draft() is draft
    return executor, draft


def feed(executor: CpuExecutor | CpuDraft, pages: Pages, start: int, stop: int, chunk: int) -> np.ndarray:
    """Logits of TEXT[start:stop], the later part of one sequence, `chunk` tokens a step."""
    out = []
    for at in range(start, stop, chunk):
        out.append(executor.step(step_input(pages, [(0, at, TEXT[at : min(at + chunk, stop)])])))
    return np.concatenate(out)


def fresh(executor: CpuExecutor) -> Pages:
    executor.fill_pool(float("nan"))
    return Pages([group.page_size for group in executor.kv_groups], PAGES)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"experts": 5}, {"format": "int4_g32"}], ids=str)
def test_a_draft_reads_what_the_engine_writes(
    tmp_path: Path, threads: int, kv_format: str, shape: dict[str, Any]
) -> None:
    """Its own keys and values give the same bits as the engine's, in any chunks, with all else poisoned."""
    executor, draft = pair(tmp_path, threads=threads, kv_format=kv_format, **shape)
    want = feed(draft, fresh(executor), 0, 150, 1)
    assert not np.isnan(want).any()
    for chunk in (1, 7, 64):
        pages = fresh(executor)
        feed(executor, pages, 0, 100, chunk)
        assert same(feed(draft, pages, 100, 150, 1), want[100:])
    executor.close()


@pytest.mark.parametrize("kv_format", ["f32", "int8"])
def test_the_engine_gives_the_same_after_a_draft_has_gone_ahead(tmp_path: Path, kv_format: str) -> None:
    """The draft writes positions 100 … 107, with the right tokens and with wrong ones; the engine writes them again."""
    executor, draft = pair(tmp_path, kv_format=kv_format)
    want = feed(executor, fresh(executor), 0, 150, 50)
    for wrong in (0, 1):
        pages = fresh(executor)
        found = [feed(executor, pages, 0, 100, 50)]
        for at in range(100, 108):
            draft.step(step_input(pages, [(0, at, [(TEXT[at] + wrong) % 50])]))
        found.append(feed(executor, pages, 100, 108, 8))
        found.append(feed(executor, pages, 108, 150, 42))
        assert same(np.concatenate(found), want)
    executor.close()


def test_pages_are_written_once_a_step_whoever_stepped_before(tmp_path: Path) -> None:
    """Both programs count their steps together: neither takes the other's step for its own."""
    executor, draft = pair(tmp_path)
    pages = fresh(executor)
    for at in range(20):
        (executor if at % 3 else draft).step(step_input(pages, [(0, at, [TEXT[at]])]))
        (draft if at % 3 else executor).step(step_input(pages, [(0, at, [TEXT[at]])]))
    twice = step_input(pages, [(0, 20, [1]), (1, 0, [1])])
    twice.page_tables[0, 1, 0] = twice.page_tables[0, 0, 1]
    with pytest.raises(StepError, match="written twice"):
        draft.step(twice)
    executor.close()


def test_new_pools_are_both_programs_pools(tmp_path: Path) -> None:
    executor, draft = pair(tmp_path, pages=2)
    step = step_input(Pages([16, 32], PAGES), [(0, 0, TEXT[:40])], [39])
    with pytest.raises(StepError, match="the pool has 2"):
        draft.step(step)
    executor.create_pool([PAGES, PAGES])
    want = draft.step(step)
    executor.step(step)
    assert same(draft.step(step), want)
    executor.close()


def test_a_draft_shares_memory_and_threads(tmp_path: Path) -> None:
    threads = len(os.listdir("/proc/self/task"))
    executor, draft = pair(tmp_path, threads=3)
    assert len(os.listdir("/proc/self/task")) == threads + 2
    assert (draft.threads, draft.isa, draft.vocab_size) == (3, executor.isa, executor.vocab_size)
    assert draft.memory()["weights"] == draft.memory()["pool"] == 0 < draft.memory()["arena"]
    assert executor.memory()["weights"] and executor.memory()["pool"]
    executor.close()
    assert len(os.listdir("/proc/self/task")) == threads and executor.memory()["pool"] == 0


def test_the_engine_may_be_closed_before_its_draft_and_after(tmp_path: Path) -> None:
    threads = len(os.listdir("/proc/self/task"))
    pages = Pages([16, 32], PAGES)
    step = step_input(pages, [(0, 0, TEXT[:40])], [39])
    for first in ("engine", "draft", "neither"):
        executor, draft = pair(tmp_path)
        want, drafted = executor.step(step), draft.step(step)
        if first == "engine":
            executor._engine.close()  # the draft still holds what they share
            assert same(draft.step(step), drafted)
            with pytest.raises(RuntimeError, match="closed"):
                executor.step(step)
            draft.close()
        elif first == "draft":
            draft.close()
            assert same(executor.step(step), want)
            with pytest.raises(RuntimeError, match="closed"):
                draft.step(step)
            executor.close()
        del executor, draft
        gc.collect()
        assert len(os.listdir("/proc/self/task")) <= threads
    executor, draft = pair(tmp_path)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        draft.step(step)
    draft.close()
    executor.close()


def test_only_one_of_them_runs_at_a_time(tmp_path: Path) -> None:
    executor, draft = pair(tmp_path, experts=4)
    step = step_input(Pages([16, 32], PAGES), [(0, 0, TEXT[:200])], [199])
    want = {"engine": executor.step(step), "draft": draft.step(step)}
    results: list[object] = []

    def run(name: str, one: CpuExecutor | CpuDraft) -> None:
        for _ in range(20):
            try:
                results.append(same(one.step(step), want[name]))
            except RuntimeError as error:
                results.append(str(error))

    workers = [threading.Thread(target=run, args=item) for item in (("engine", executor), ("draft", draft))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 40 and True in results
    assert set(results) <= {True, "another step is running on this engine"}
    executor.close()


def change(document: dict[str, Any], fault: str) -> None:
    group = document["kv_groups"][1]
    if fault == "vocabulary":
        document["vocab_size"] = 49
    elif fault == "window":
        group["window"] = 21
        for code in document["instructions"]:
            if code["op"] == "attention" and code["attrs"]["group"] == 1:
                code["attrs"]["window"] = 21
    elif fault == "format":
        group["format"] = "bf16"
    elif fault == "page":
        group["page_size"] = 16
    elif fault == "heads":
        group["layers"][0]["kv_heads"] = 1
    elif fault == "layers":
        group["layers"] *= 2
    else:
        document["kv_groups"].pop()


@pytest.mark.parametrize("fault", ["vocabulary", "window", "format", "page", "heads", "layers", "groups"])
def test_a_draft_with_another_cache_is_refused(tmp_path: Path, fault: str) -> None:
    executor, _ = pair(tmp_path)
    document = json.loads((tmp_path / "draft.json").read_text())
    change(document, fault)
    (tmp_path / "draft.json").write_text(json.dumps(document))
    executor._draft = None
    with pytest.raises(ArtifactError, match=r"as in the program beside it|output"):
        executor.draft()
    executor.close()


@pytest.mark.parametrize("text", ["", "{}", "no JSON"])
def test_a_damaged_draft_is_refused_by_name(tmp_path: Path, text: str) -> None:
    executor, _ = pair(tmp_path)
    (tmp_path / "draft.json").write_text(text)
    executor._draft = None
    with pytest.raises(ArtifactError, match=r"draft\.json"):
        executor.draft()
    executor.close()
    with pytest.raises(ArtifactError, match="closed"):
        executor.draft()


def test_an_engine_without_a_draft_gives_none(tmp_path: Path) -> None:
    executor = model().load(tmp_path)
    assert executor.draft() is None
    executor.close()
