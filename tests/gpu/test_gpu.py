"""TensorRT engines on the GPU of this machine: built for it, held to the reference, to their goldens, and to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import enginewright
from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.backends.tensorrt.executor import TensorRTExecutor
from enginewright.runtime.bench import bench
from enginewright.runtime.first_load import STRUCTURE_ONLY, cache_folder, held_to_goldens
from tests import models
from tests.backends.stepping import alone, in_chunks
from tests.backends.tensorrt.programs import final
from tests.gpu.checks import a_graph_gives_the_plain_run_s_bits, pages_hold_what_the_reference_s_hold
from tests.gpu.conftest import Build
from tests.passes.architectures import folder

NEAR = 0.02  # of the largest logit: f16 beside f32, of models with large random weights
PROMPTS = {"a": list(range(3, 63)), "b": [9, 8, 7], "c": [40, 2, 77, 5] * 6}
CASES = [
    ("qwen3", "fp16", ()),
    ("gemma2", "fp16", ()),
    ("gpt_oss", "fp16", ()),
    ("mixtral", "fp16", ()),
    ("llama", "int4", ("compute=f16", "linear.activation=f16", "head.activation=f16", "kv_cache.format=f16")),
]


@pytest.fixture
def executor(build: Build) -> Iterator[TensorRTExecutor]:
    """That of a windowed model's engine."""
    artifact = open_engine(build(folder("gemma2"), "fp16"))
    loaded = get_backend("tensorrt").load(artifact)
    assert isinstance(loaded, TensorRTExecutor)
    yield loaded
    loaded.close()


@pytest.mark.parametrize(("arch", "recipe", "overrides"), CASES, ids=lambda value: str(value)[:12])
def test_logits_are_the_reference_s(build: Build, arch: str, recipe: str, overrides: tuple[str, ...]) -> None:
    """Prompts whole, in chunks at offsets, and token by token (graphs), in batches of shrinking size; pools begin as NaN."""
    artifact = open_engine(build(folder(arch), recipe, *overrides))
    assert artifact.manifest["verification"]["verdict"] == "passed"
    program, _ = final(arch, recipe, *overrides)
    wanted = alone(ReferenceExecutor(program), PROMPTS, 64)
    largest = max(float(np.abs(rows).max()) for rows in wanted.values())
    loaded = get_backend("tensorrt").load(artifact)
    try:
        for chunk in (64, 13, 1):
            for name, rows in in_chunks(loaded, PROMPTS, chunk).items():
                assert np.isfinite(rows).all()
                off = np.abs(rows - wanted[name]).max(1) / largest
                assert np.median(off) < NEAR / 4 and (off < NEAR).mean() > 0.95, (name, chunk, off.max())
    finally:
        loaded.close()


@pytest.mark.parametrize("arch", ["gemma3_text", "llama"])
def test_the_shared_backend_tests(build: Build, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Every scenario of tests/backends/test_shared.py, with the plan of the GPU."""
    shared = pytest.importorskip("tests.backends.test_shared")
    artifact = open_engine(build(folder(arch), "fp16"))
    monkeypatch.setitem(
        shared.BACKENDS, "gpu", lambda program, recipe: get_backend("tensorrt").load(artifact)
    )
    shared.play(shared.Case("gpu", arch, bound=NEAR, tips=0.05), shared.SCENARIOS)


def test_a_graph_gives_what_the_plain_run_gives(executor: TensorRTExecutor) -> None:
    a_graph_gives_the_plain_run_s_bits(executor)


def test_the_paged_update_writes_the_reference_s_keys_and_values(executor: TensorRTExecutor) -> None:
    pages_hold_what_the_reference_s_hold(executor, final("gemma2")[0], NEAR)


def test_memory_is_given_back(build: Build) -> None:
    """Loading and closing many times leaves the device's memory as it was after the first."""
    artifact = open_engine(build(folder("qwen3"), "fp16"))
    free = []
    for _ in range(4):
        loaded = get_backend("tensorrt").load(artifact)
        in_chunks(loaded, PROMPTS, 1)
        cuda = loaded._cuda
        loaded.close()
        free.append(int(cuda.call("cudaMemGetInfo")[0]))
    assert max(free) - min(free[1:]) < 64 << 20, free


def test_the_goldens_hold_and_the_first_load_is_remembered(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEWRIGHT_CACHE", str(tmp_path))
    artifact = open_engine(build(folder("gemma2"), "fp16"))
    loaded = get_backend("tensorrt").load(artifact)
    report = held_to_goldens(artifact, loaded)
    loaded.close()
    assert report.passed, report.failures
    # The same engine, as one that was built where there was no GPU.
    verification = {**artifact.manifest["verification"], "verdict": STRUCTURE_ONLY}
    elsewhere: Artifact = replace(artifact, manifest={**artifact.manifest, "verification": verification})
    for _ in range(2):
        with enginewright.load(elsewhere) as engine:
            assert engine.generate([[5, 3, 11]], max_tokens=8)[0].token_ids
    assert len(list((cache_folder() / "first-loads").iterdir())) == 1


def test_answers_do_not_depend_on_company_beyond_rounding(build: Build) -> None:
    """Log-probabilities of a text, scored alone and beside others, in chunks and whole."""
    with enginewright.load(build(folder("gemma2"), "fp16")) as engine:
        texts = list(PROMPTS.values())
        together = engine.logits(texts, chunk_size=7)
        largest = max(float(np.abs(rows).max()) for rows in together)
        for text, rows in zip(texts, together, strict=True):
            assert np.abs(engine.logits([text])[0] - rows).max() < NEAR * largest


def test_a_row_of_the_benchmark(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    """A real model's rates, printed: `pytest tests/gpu -s` shows them."""
    engine = build(models.smollm2(), "fp16")
    figures = bench(engine, batches=(1, 16), prompt_tokens=256, new_tokens=32, repeat=2)
    rows = [f"prefill {entry['tokens_per_second']:,.0f}" for entry in figures["prefill"]]
    rows += [f"decode x{entry['batch']} {entry['tokens_per_second']:,.0f}" for entry in figures["decode"]]
    with capsys.disabled():
        print(f"\nSmolLM2-135M fp16, tokens/s: {', '.join(rows)}")
    assert all(entry["tokens_per_second"] > 0 for entry in (*figures["prefill"], *figures["decode"]))
