"""Engines of the onnx backend from `optimize` to answers: the runtime serves them as it serves any other.

Pages of 16 tokens, and one page a sequence (`kv_cache.page_size=0`), are the same to the model.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import enginewright
from enginewright import build
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.recipes.errors import InputError
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from tests.passes.architectures import folder
from tests.runtime.test_no_torch import BLOCK

CONTEXT = 96
PAGES = pytest.mark.parametrize("page_size", [16, 0], ids=["pages", "one page a sequence"])


@functools.cache
def built(page_size: int) -> Path:
    directory = tempfile.TemporaryDirectory(prefix="enginewright-onnx-")
    _KEPT.append(directory)
    overrides = [f"kv_cache.page_size={page_size}", f"max_context={CONTEXT}"]
    out = Path(directory.name) / "engine"
    report = enginewright.optimize(folder("gemma3_text"), "fp32", out, backend="onnx", overrides=overrides)
    assert report.verification["verdict"] == "passed"
    return report.path


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def loaded(page_size: int, **options: object) -> Engine:
    return enginewright.load(built(page_size), threads=1, **options)  # type: ignore[arg-type]


PROMPTS = [[3 + (7 * i * i + 5 * j) % 120 for j in range(length)] for i, length in enumerate((3, 17, 40, 29))]


@functools.cache
def alone(page_size: int) -> tuple[tuple[int, ...], ...]:
    """The greedy answer to each prompt by itself."""
    with loaded(page_size, max_sequences=1, prefix_cache=False) as engine:
        return tuple(tuple(engine.generate(p, max_tokens=24, ignore_eos=True)[0].token_ids) for p in PROMPTS)


def together(engine: Engine, **options: object) -> tuple[tuple[int, ...], ...]:
    found = engine.generate(PROMPTS, max_tokens=24, ignore_eos=True, **options)  # type: ignore[arg-type]
    return tuple(tuple(completion.token_ids) for completion in found)


def test_both_page_sizes_answer_alike() -> None:
    assert alone(16) == alone(0)


@PAGES
def test_the_manifest_says_how_long_a_page_is(page_size: int) -> None:
    from click.testing import CliRunner

    from enginewright.cli import engine as command

    with loaded(page_size) as engine:
        manifest = engine.artifact.manifest
        assert manifest["backend"] == "onnx" and manifest["onnx"]["opset"] == 24
        assert {group["page_size"] for group in manifest["kv_groups"]} == {page_size or CONTEXT}
        assert {group.page_size for group in engine.executor.kv_groups} == {page_size or CONTEXT}
    told = CliRunner().invoke(command, ["inspect", str(built(page_size))])
    assert told.exit_code == 0 and "onnx" in told.output and str(page_size or CONTEXT) in told.output


@PAGES
def test_requests_batched_chunked_and_speculated_get_their_own_answers(page_size: int) -> None:
    with loaded(page_size, max_sequences=4, token_budget=16, chunk_size=8) as engine:
        assert together(engine) == alone(page_size)
        assert together(engine) == alone(page_size)  # from the prefix cache
        engine.loop.pool.check_invariants()
    with loaded(page_size, max_sequences=4, speculate="ngram", draft_tokens=4) as engine:
        assert together(engine) == alone(page_size)


@PAGES
def test_short_memory_makes_requests_wait_or_start_again(page_size: int) -> None:
    """Room for two sequences at their longest: pages run out while four are served."""
    with loaded(page_size, max_sequences=4, cache_tokens=2 * 64) as engine:
        assert together(engine) == alone(page_size)
        assert engine.loop.pool.idle


@PAGES
def test_choices_share_the_prompt_and_differ(page_size: int) -> None:
    with loaded(page_size, max_sequences=4) as engine:
        options = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
        several = engine.generate(PROMPTS[2], n=3, **options)
        again = engine.generate(PROMPTS[2], n=3, **options)
        assert [c.token_ids for c in several] == [c.token_ids for c in again]
        assert len({tuple(c.token_ids) for c in several}) == 3


@PAGES
def test_a_cancelled_request_leaves_the_others_alone(page_size: int) -> None:
    with loaded(page_size, max_sequences=4) as engine:
        options = SamplingOptions(max_tokens=24, ignore_eos=True)
        requests = [Request(list(prompt), options) for prompt in PROMPTS]
        for request in requests:
            engine.loop.submit(request)
        for _ in range(5):
            engine.loop.step()
        engine.loop.finish(requests[1])
        while not engine.loop.idle:
            engine.loop.step()
            engine.loop.pool.check_invariants()
        for i in (0, 2, 3):
            assert tuple(requests[i].output) == alone(page_size)[i]
        assert requests[1].output == list(alone(page_size)[1][: len(requests[1].output)])
        assert engine.loop.pool.idle


def test_a_provider_is_asked_for_by_name_and_only_of_this_backend() -> None:
    with loaded(16, provider="cpu") as engine:
        assert (
            tuple(engine.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)[0].token_ids) == alone(16)[0][:4]
        )
    with pytest.raises(InputError, match="no such provider"):
        loaded(16, provider="npu")
    artifact = open_engine(built(16))
    other = Artifact(artifact.path, {**artifact.manifest, "backend": "cpu", "target": "cpu"})
    with pytest.raises(InputError, match="cpu backend has no providers"):
        enginewright.load(other, provider="cuda")


def test_memory_for_no_sequence_is_told_with_its_length() -> None:
    with pytest.raises(InputError, match=r"one sequence of 96 tokens.*(.|\n)*smaller max_context"):
        loaded(0, cache_bytes=1000)


def test_it_serves_without_torch_and_onnx() -> None:
    script = f"""
import sys
sys.modules["onnx"] = None
import enginewright
from enginewright.backends.artifact import Artifact, open_engine
with enginewright.load({str(built(16))!r}, threads=1) as engine:
    print(engine.generate({PROMPTS[1]!r}, max_tokens=24, ignore_eos=True)[0].token_ids)
"""
    done = subprocess.run([sys.executable, "-c", BLOCK + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(list(alone(16)[1]))


def test_a_missing_runtime_is_told_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification will run the model: without its runtime nothing is captured."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(build, "capture", lambda *given, **options: pytest.fail("a model was captured"))
    for flavour in ("plain", "genai"):
        with pytest.raises(InputError, match="needs the package onnxruntime"):
            enginewright.optimize(
                folder("llama"), "fp32", tmp_path / "x", backend="onnx", overrides=[f"onnx.flavour={flavour}"]
            )
