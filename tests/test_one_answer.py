"""One answer: on the cpu backend a request's logits and tokens are bitwise the same however it is scheduled and loaded."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.engine import Engine
from tests import engines

RECIPES = ["int4", "bf16", "bf16 kv_cache.format=int8"]  # with overrides


def bits(logits: np.ndarray) -> np.ndarray:
    return logits.view(np.int32)


def crowd(engine: Engine, count: int) -> list[list[int]]:
    """`count` prompts of unequal length, 3 to about 120 tokens."""
    tokens = engines.text_tokens(engine, 1200)
    return [tokens[7 * i : 7 * i + 3 + (37 * i) % 118] for i in range(count)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_alone_among_others_in_chunks_and_by_threads(recipe: str) -> None:
    with engines.load("smollm2", *recipe.split(), threads=2) as engine:
        prompts = crowd(engine, 32)
        together = engine.logits(prompts)
        for index in (0, 5, 31):
            for chunk in (1, 7, 64, None):
                alone = engine.logits([prompts[index]], chunk_size=chunk)[0]
                assert np.array_equal(bits(alone), bits(together[index])), (
                    f"prompt {index}, chunks of {chunk}"
                )
        texts = [c.text for c in engine.generate(prompts, max_tokens=12, temperature=0.8, seed=5)]
        assert engine.generate([prompts[5]], max_tokens=12, temperature=0.8, seed=5)[0].text == texts[5]
    with engines.load("smollm2", *recipe.split(), threads=1, weights="copy") as other:
        assert np.array_equal(bits(other.logits([prompts[5]])[0]), bits(together[5]))
        assert other.generate([prompts[5]], max_tokens=12, temperature=0.8, seed=5)[0].text == texts[5]


@pytest.mark.parametrize("recipe", [*RECIPES, "fp32"])
def test_what_the_pool_held_before_does_not_matter(recipe: str) -> None:
    answers = []
    for poison in (0.0, float("nan"), 1e30):
        with engines.load("smollm2", *recipe.split()) as engine:
            engine.executor.fill_pool(poison)
            prompts = crowd(engine, 4)
            answers.append([bits(logits) for logits in engine.logits(prompts, chunk_size=33)])
    for other in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0], other, strict=True))


@pytest.mark.parametrize("overrides", [(), ("kv_cache.format=int8",)], ids=str)
def test_a_windowed_model_with_a_fact_beyond_the_window(overrides: tuple[str, ...]) -> None:
    """Gemma's sliding layers give pages back while its full layers keep everything: chunks and whole agree bit for bit."""
    with engines.load("gemma3", "int4", *overrides) as engine:
        tokens = engines.text_tokens(engine, 900)
        whole = engine.logits([tokens])[0][-40:]
        chunked = engine.logits([tokens], chunk_size=100)[0][-40:]
        assert np.array_equal(bits(whole), bits(chunked))
