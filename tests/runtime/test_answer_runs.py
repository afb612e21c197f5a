"""Several tokens from one step, and what ends the answer among them: all as one token a step gives it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.answer import Answer
from enginewright.runtime.async_engine import AsyncEngine
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Completion, Request, SamplingOptions
from enginewright.runtime.speculation import Speculator
from tests.runtime.drafters import Oracle
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.server.serving import LETTERS, Scripted, tiny_engine, write_tokenizer

SCRIPT = [
    *range(12),
    27,
    28,
    0,
    29,
    30,
    31,
    26,
]  # A … L, é in two tokens, A, a byte that is no text, "ab", " ", the end
ENDS: dict[str, dict[str, Any]] = {
    "by itself": {},
    "a stop string within the run": {"stop": "FGH"},
    "the first of several": {"stop": ["IJ", "CD", "EFGHIJKL"]},
    "included": {"stop": ["DEFG"], "include_stop": True},
    "a stop string that waits for its beginning": {"stop": ["CDEX", "FG"]},
    "half a token": {"stop": ["b"]},
    "text of two tokens": {"stop": ["é"]},
    "what a special token spells": {"stop": ["<|end|>"], "include_stop": True},
    "not before": {"stop": ["BC", "JK"], "min_tokens": 4},
    "a stop id": {"stop": ["HI"], "stop_token_ids": [6]},
    "length at a stop string": {"stop": ["EFG"], "max_tokens": 7},
    "length within a stop string": {"stop": ["EFGH"], "max_tokens": 7},
    "a length soon after a stop string": {"stop": ["EF"], "max_tokens": 7},
    "the end soon after a stop string": {"stop": ["ab"]},
    "half a character at the length": {"max_tokens": 13},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tiny"))


def engine_of(folder: Path, tokens: int, errors: float = 0.0, executor: FakeExecutor | None = None) -> Engine:
    """An engine that says SCRIPT, with so many tokens proposed in a step, each wrong with the chance `errors`."""
    engine = tiny_engine(folder, executor or Scripted(SCRIPT, 2, len(LETTERS)))
    if tokens:
        oracle = Oracle(lambda request: SCRIPT, len(LETTERS), errors)
        engine.loop.speculator = Speculator(oracle, tokens)
    return engine


def generated(engine: Engine, **options: Any) -> Completion:
    (completion,) = engine.generate("XY", **{"max_tokens": 40, **options})
    assert engine.loop.idle and engine.loop.pool.idle
    return completion


def streamed(engine: Engine, **options: Any) -> tuple[str, list[int], str | None]:
    deltas = list(engine.stream("XY", **{"max_tokens": 40, **options}))
    assert engine.loop.idle and engine.loop.pool.idle
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        deltas[-1].finish_reason,
    )


def through_asyncio(engine: Engine, **options: Any) -> tuple[Completion, Request]:
    """What the deltas of an AsyncEngine add up to, and the request."""

    async def read() -> tuple[Completion, Request]:
        async with AsyncEngine(engine) as serving:
            stream = await serving.generate("XY", **{"max_tokens": 40, **options})
            deltas = [delta async for delta in stream]
            (request,) = stream.requests
            assert await serving.call(lambda: engine.loop.idle and engine.loop.pool.idle)
            counted = sum(serving.figures.next_token.counts) + sum(serving.figures.first_token.counts)
            assert counted == serving.figures.generated_tokens == len(request.output)
            assert serving.figures.finished == {deltas[-1].finish_reason: 1}
        joined = Completion(
            "XY",
            request.tokens[: request.prompt_length],
            [token for delta in deltas for token in delta.token_ids],
            [value for delta in deltas for value in delta.logprobs],
            "".join(delta.text for delta in deltas),
            deltas[-1].finish_reason or "",
            deltas[-1].error,
            top_logprobs=[best for delta in deltas for best in delta.top_logprobs],
        )
        return joined, request

    return asyncio.run(read())


@pytest.mark.parametrize("tokens", [1, 3, 8, 24])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_where_single_tokens_end(folder: Path, end: str, tokens: int) -> None:
    options = {"logprobs": 2, **ENDS[end]}
    with engine_of(folder, 0) as plain:
        expected = generated(plain, **options)
    with engine_of(folder, tokens) as engine:
        completion = generated(engine, **options)
        assert completion == expected
        assert len(completion.logprobs) == len(completion.top_logprobs) == len(completion.token_ids)
        assert 0 < completion.accepted <= completion.drafted and completion.accepted < len(
            completion.token_ids
        )
        text, ids, reason = streamed(engine, **options)
        assert (text, ids, reason) == (expected.text, expected.token_ids, expected.finish_reason)
    joined, request = through_asyncio(engine_of(folder, tokens), **options)
    assert joined == expected
    assert (request.finish_reason, request.generated) == (expected.finish_reason, len(expected.token_ids))
    assert (request.accepted, request.drafted) == (completion.accepted, completion.drafted)


@pytest.mark.parametrize("errors", [0.2, 1.0])
def test_runs_that_break_off(folder: Path, errors: float) -> None:
    for options in ENDS.values():
        with engine_of(folder, 0) as plain, engine_of(folder, 5, errors) as engine:
            assert generated(engine, **options) == generated(plain, **options)
            assert streamed(engine, **options) == streamed(plain, **options)


class _Poisoned(Scripted):
    """Says SCRIPT, and nothing that can be drawn from after the letter H."""

    def step(self, step: Any) -> Any:
        logits = super().step(step)
        for r, row in enumerate(step.logit_rows.tolist()):
            if int(step.tokens[row]) == LETTERS.index("H"):
                logits[r] = float("nan")
        return logits


@pytest.mark.parametrize("stop", [(), "EF", "GH"])
def test_a_fault_after_a_stop_string_is_none(folder: Path, stop: Any) -> None:
    """The run's later rows cannot be drawn from; an answer that has ended before them never needed them."""

    def poisoned() -> FakeExecutor:
        return _Poisoned(SCRIPT, 2, len(LETTERS))

    with engine_of(folder, 0, executor=poisoned()) as plain:
        expected = generated(plain, stop=stop, errors="return")
    with engine_of(folder, 12, executor=poisoned()) as engine:
        completion = generated(engine, stop=stop, errors="return")
    assert replace(completion, error=None) == replace(expected, error=None)
    assert (completion.finish_reason == "error") == (completion.error is not None) == (not stop)
    joined, request = through_asyncio(engine_of(folder, 12, executor=poisoned()), stop=stop)
    assert (joined.text, joined.finish_reason, joined.token_ids) == (
        expected.text,
        expected.finish_reason,
        expected.token_ids,
    )
    assert (request.error is None) == bool(stop)


def test_only_what_stands_in_the_output_counts_as_accepted(folder: Path) -> None:
    """24 proposed: A comes from the prompt's own step, B, C and D are proposed and stay, the rest is cut."""
    with engine_of(folder, 24) as engine:
        completion = generated(engine, stop="CD")
        assert completion.text == "AB" and completion.accepted == 3
        assert completion.drafted == 24 and len(completion.token_ids) == 4
        several = engine.generate(["ZZ", "YX"], max_tokens=12, n=2, stop=["FG", "JK"])
    assert [c.text for c in several] == ["ABCDE"] * 4 and [c.accepted for c in several] == [6] * 4


def test_text_that_is_looked_at_late_is_cut_all_the_same(folder: Path) -> None:
    """Whoever steps the loop steps it for all: a stop string may be met some steps before its text is looked at."""
    with engine_of(folder, 2) as engine:
        stream = engine.stream("XY", max_tokens=12, stop="EFG")
        request = Request([23, 24], SamplingOptions(max_tokens=12, stop=("EFG",)))
        engine.loop.submit(request)
        engine.generate("ZZ", max_tokens=18)  # steps for both as well
        assert len(request.output) == 12 and request.finish_reason == "length" and request.accepted == 7
        assert "".join(delta.text for delta in stream) == "ABCD" and engine.loop.pool.idle
        delta = Answer(0, "XY", request, engine.tokenizer).take()
    assert delta is not None and (delta.text, delta.finish_reason) == ("ABCD", "stop")
    assert (
        request.generated == len(request.logprobs) == 7
    )  # A, B C D, E F G: the last of three is not proposed
    assert request.accepted == 4 and request.finish_reason == "stop"
