"""One answer: on the cpu backend a request's logits and tokens are bitwise the same however it is scheduled and loaded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from tests import engines

RECIPES = [
    "int4",
    "bf16 kv_cache.format=int8",  # with an override
    pytest.param("bf16", marks=pytest.mark.slow),
]


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


@pytest.mark.parametrize("recipe", [*RECIPES, pytest.param("fp32", marks=pytest.mark.slow)])
def test_what_the_pool_held_before_does_not_matter(recipe: str) -> None:
    answers = []
    for poison in (0.0, float("nan"), 1e30):
        with engines.load("smollm2", *recipe.split()) as engine:
            engine.executor.fill_pool(poison)
            prompts = crowd(engine, 4)
            answers.append([bits(logits) for logits in engine.logits(prompts, chunk_size=33)])
    for other in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("kv_cache.format=int8",)], ids=str)
def test_a_windowed_model_with_a_fact_beyond_the_window(overrides: tuple[str, ...]) -> None:
    """Gemma's sliding layers give pages back while its full layers keep everything: chunks and whole agree bit for bit."""
    with engines.load("gemma3", "int4", *overrides) as engine:
        tokens = engines.text_tokens(engine, 640)  # the window is 512
        whole = engine.logits([tokens])[0][-40:]
        chunked = engine.logits([tokens], chunk_size=100)[0][-40:]
        assert np.array_equal(bits(whole), bits(chunked))


SERVED = [
    "smollm2 int4",
    "smollm2 bf16 kv_cache.format=int8",
    pytest.param("gemma3 int4", marks=pytest.mark.slow),
]


def ask(tokens: list[int], new_tokens: int, seed: int) -> Request:
    return Request(
        list(tokens),
        SamplingOptions(
            max_tokens=new_tokens, temperature=0.8, seed=seed, ignore_eos=True, frequency_penalty=0.5
        ),
    )


def serve(engine: Engine, requests: list[Request]) -> list[tuple[list[int], bytes]]:
    """Serve the requests together; return each one's tokens and its log-probabilities' bits."""
    for request in requests:
        engine.loop.submit(request)
    while not engine.loop.idle:
        engine.loop.step()
        engine.loop.scheduler.check_invariants()
    assert engine.loop.pool.idle and all(request.error is None for request in requests)
    return [(request.output, np.array(request.logprobs).tobytes()) for request in requests]


@pytest.mark.parametrize("what", SERVED)
def test_from_cached_pages_and_after_preemptions(what: str) -> None:
    """Prompts that begin alike: alone without a cache, then together, then from the cache."""
    length = 560 if what.startswith("gemma3") else 90  # beyond gemma's window
    with engines.load(*what.split(), prefix_cache=False) as engine:
        text = engines.text_tokens(engine, length + 200)
        prompts = [text[: length + 3 * (i % 2)] + text[length + 11 * i :][: 9 * (i % 3)] for i in range(6)]
        expected = [serve(engine, [ask(prompt, 24, i)])[0] for i, prompt in enumerate(prompts)]
    with engines.load(*what.split(), policy="throughput") as engine:
        engine.executor.fill_pool(float("nan"))
        for already in (0, 1):  # the first of them computes the prefix; then nobody does
            requests = [ask(prompt, 24, i) for i, prompt in enumerate(prompts)]
            assert serve(engine, requests) == expected
            assert all(request.cached_tokens >= length - 16 for request in requests[1 - already :])


@pytest.mark.parametrize("what", SERVED)
def test_preempted_again_and_again(what: str) -> None:
    """Six requests that grow to 150 tokens, in pages for 208: some are computed three times."""
    with engines.load(*what.split(), prefix_cache=False) as engine:
        text = engines.text_tokens(engine, 200)
        prompts = [text[9 * i : 12 * i + 20] for i in range(6)]
        expected = [serve(engine, [ask(prompt, 100, i)])[0] for i, prompt in enumerate(prompts)]
    with engines.load(*what.split(), cache_tokens=208, chunk_size=31, max_sequences=6) as engine:
        engine.executor.fill_pool(float("nan"))
        requests = [ask(prompt, 100, i) for i, prompt in enumerate(prompts)]
        assert serve(engine, requests) == expected
        assert sum(request.preemptions >= 2 for request in requests) >= 2


@pytest.mark.parametrize("what", SERVED)
def test_survivors_of_cancellations_on_one_prefix(what: str) -> None:
    """A prefix of 600 tokens in chunks of 64; whoever writes it is cancelled on the way, and others begin at once."""
    with engines.load(*what.split(), chunk_size=64, max_sequences=4, cache_tokens=1600) as engine:
        engine.executor.fill_pool(float("nan"))
        text = engines.text_tokens(engine, 900)
        prompts = [text[:600], text[:600] + text[700:705], text[300:420]]
        survivors: list[list[tuple[list[int], bytes]]] = []
        for cancelled_at in (1, 4, 9, 11):
            first, second, other = (ask(prompt, 8, 3) for prompt in prompts)
            engine.loop.submit(first)
            engine.loop.submit(second)
            for _ in range(cancelled_at):
                engine.loop.step()
                engine.loop.scheduler.check_invariants()
            engine.loop.finish(first)
            survivors.append(serve(engine, [other, ask(prompts[2][:50], 8, 3)]))
            survivors[-1].append((second.output, np.array(second.logprobs).tobytes()))
    with engines.load(*what.split(), prefix_cache=False) as engine:
        for prompt, at in ((prompts[2], 0), (prompts[2][:50], 1), (prompts[1], 2)):
            expected = serve(engine, [ask(prompt, 8, 3)])[0]
            assert all(answers[at] == expected for answers in survivors)


@pytest.mark.parametrize("drafter", ["ngram", "engine"])
@pytest.mark.parametrize("tokens", [3, "auto"])
def test_speculated_in_a_crowd_in_chunks_and_after_preemptions(drafter: str, tokens: int | str) -> None:
    """Pages for 208 tokens, six requests that grow to 120: some repeat themselves, some do not, two are not speculated."""
    with engines.load("smollm2", "int4", prefix_cache=False) as engine:
        text = engines.text_tokens(engine, 200)
        prompts = [(text[9 * i : 9 * i + 10] * 3)[: 20 + 3 * i] for i in range(6)]
        expected = [serve(engine, [ask(prompt, 80, i)])[0] for i, prompt in enumerate(prompts)]
    how = drafter if drafter == "ngram" else engines.built("smollm2", "int4")
    options = {
        "cache_tokens": 208,
        "chunk_size": 31,
        "max_sequences": 6,
        "speculate": how,
        "draft_tokens": tokens,
    }
    with engines.load("smollm2", "int4", **options) as engine:
        engine.executor.fill_pool(float("nan"))
        requests = [ask(prompt, 80, i) for i, prompt in enumerate(prompts)]
        for request in requests[:2]:
            request.options = dataclasses.replace(request.options, draft_tokens=0)
        assert serve(engine, requests) == expected
        assert sum(request.preemptions > 0 for request in requests) >= 2
        assert any(request.drafted for request in requests) and not any(
            request.drafted for request in requests[:2]
        )
