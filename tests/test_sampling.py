"""Sampling on real engines: prompt log-probabilities are the model's, JSON fits its schema, every option has one answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from enginewright.runtime.constraints import Constraint
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from tests import engines


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def serve(engine: Engine, *requests: Request) -> list[Request]:
    for request in requests:
        engine.loop.submit(request)
    while not engine.loop.idle:
        engine.loop.step()
    assert engine.loop.pool.idle
    return list(requests)


def said(request: Request) -> tuple[object, ...]:
    """All that a request's answer holds; floats compare by their bits."""
    return (
        request.output,
        request.logprobs,
        request.top_logprobs,
        request.prompt_logprobs,
        request.finish_reason,
    )


@pytest.mark.parametrize("chunk", [None, 16])
def test_log_probabilities_of_prompts_are_the_models(chunk: int | None) -> None:
    """One entry a token, the first empty; twice, the second time with the prompt's pages in the cache."""
    with engines.load("smollm2", "fp32", chunk_size=chunk) as engine:
        tokens = engines.text_tokens(engine, 117)
        for length in (1, 15, 16, 17, 100):
            prompt = tokens[length % 7 :][:length]
            expected = log_softmax(engines.eager_logits("smollm2", prompt))
            answers = []
            for max_tokens in (0, 1, 1):
                options = SamplingOptions(
                    max_tokens=max_tokens, prompt_logprobs=1, logprobs=1, ignore_eos=True
                )
                (request,) = serve(engine, Request(list(prompt), options))
                assert len(request.output) == max_tokens and request.prompt_logprobs[0] is None
                assert len(request.prompt_logprobs) == length
                for at, entry in enumerate(request.prompt_logprobs[1:], 1):
                    assert entry is not None
                    logprob, ((best, value),) = entry
                    assert logprob == pytest.approx(expected[at - 1, prompt[at]], abs=1e-4)
                    assert value == pytest.approx(expected[at - 1].max(), abs=1e-4)
                    assert expected[at - 1, best] == pytest.approx(expected[at - 1].max(), abs=1e-4)
                answers.append(request)
            assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
            assert said(answers[1]) == said(answers[2])
            assert answers[1].logprobs[0] == pytest.approx(expected[-1].max(), abs=1e-4)


EVERYTHING: dict[str, object] = {
    "max_tokens": 40,
    "min_tokens": 10,
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.97,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {11: 2.0, 500: -100.0},
    "logprobs": 3,
}


def test_every_option_has_one_answer() -> None:
    """Alone, together, from cached pages, preempted, by another number of threads: tokens and every log-probability."""
    schema = Constraint.json_schema(
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    )

    def requests(engine: Engine) -> list[Request]:
        text = engines.text_tokens(engine, 400)
        made = []
        for i in range(8):
            fields = {**EVERYTHING, "seed": i, "prompt_logprobs": 2 if i % 4 == 1 else None}
            fields["constraint"] = schema if i % 4 == 2 else None
            options = SamplingOptions(**fields)
            made.append(Request(text[: 30 + 7 * (i % 3)] + text[50 * i :][:5], options))
            made[-1].grammar = engine.compile(schema) if i % 4 == 2 else None
        return made

    with engines.load("smollm2", "int4", prefix_cache=False, threads=1) as engine:
        expected = [said(serve(engine, request)[0]) for request in requests(engine)]
        assert all(tokens for tokens, *_ in expected)
    with engines.load("smollm2", "int4", threads=2) as engine:
        for _ in range(2):
            assert [said(request) for request in serve(engine, *requests(engine))] == expected
    with engines.load("smollm2", "int4", cache_tokens=128, chunk_size=13) as engine:
        tight = serve(engine, *requests(engine))
        assert [said(request) for request in tight] == expected
        assert sum(request.preemptions for request in tight) >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_fits_its_schema(temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "at": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "people": {"type": "integer"}},
                "required": ["lat", "people"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "at"],
        "additionalProperties": False,
    }
    prompts = [
        f"{name} as JSON with city and at:\n" for name in ("Paris", "Lima", "Oslo", "Quito", "Rome", "Kyiv")
    ]
    with engines.load("smollm2", "int4") as engine:
        complete = 0
        for most in (5, 50, 200):
            for answer in engine.generate(
                prompts,
                max_tokens=most,
                temperature=temperature,
                seed=3,
                constraint=Constraint.json_schema(schema),
            ):
                if answer.finish_reason == "length":
                    assert len(answer.token_ids) == most
                    continue
                assert answer.finish_reason == "stop"
                value = json.loads(answer.text)
                assert set(value) == {"city", "at"} and set(value["at"]) == {"lat", "people"}
                assert isinstance(value["at"]["people"], int) and len(value["city"]) <= 20
                complete += 1
        assert complete >= 4
