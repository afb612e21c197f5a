"""The two real models on ONNX Runtime: fp32 against eager transformers, int4 within the recipe's bound. Minutes: a proof."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import enginewright
from tests import engines, models

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_fp32_gives_what_eager_transformers_gives(model: str, tmp_path: Path) -> None:
    folder = engines.MODELS[model]()
    out = enginewright.optimize(
        folder, "fp32", tmp_path / "e", backend="onnx", overrides=["max_context=1024"]
    )
    with out.engine() as engine:
        tokens = engines.text_tokens(engine, 192)
        found = engine.logits([tokens[:3], tokens[:17], tokens], chunk_size=50)
        wanted = engines.eager_logits(model, tokens)
    for logits in found:
        want = wanted[: len(logits)]
        error = float(np.abs(logits - want).max() / np.abs(want).max())
        print(f"{model} fp32, {len(logits)} tokens: {error:.1e} of the largest logit")
        assert error <= 1e-3


def test_int4_stays_within_the_recipes_bound(tmp_path: Path) -> None:
    out = enginewright.optimize(models.smollm2(), "int4", tmp_path / "e", backend="onnx")
    figures = out.verification
    print(f"SmolLM2 int4 on onnx: KL {figures['mean_kl']:.3f}, top-1 {figures['top1_agreement']:.1%}")
    assert figures["verdict"] == "passed"
    with out.engine(speculate="ngram") as engine:
        prompts = ["The capital of France is", "1, 2, 3, 4, 5,"]
        answers = [completion.text for completion in engine.generate(prompts, max_tokens=12)]
    assert "Paris" in answers[0] and "6, 7" in answers[1]
