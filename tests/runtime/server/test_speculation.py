"""`--speculate ngram` through real servers: beside one without it, every answer is the same, and figures tell what was gained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.run import load_engine
from enginewright.runtime.server.settings import Settings
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.server.serving import (
    GROUPS,
    LETTERS,
    Running,
    Scripted,
    request_log,
    said,
    serving,
    sse,
    tiny_engine,
    wait_until,
    write_tokenizer,
)
from tests.runtime.server.test_answers import HERMES, TOOLS, WORDS, _script
from tests.runtime.server.test_operations import metrics

DRAFT = {"speculate": "ngram", "draft_tokens": 4}


class Repeating(FakeExecutor):
    """Leans towards what stood a period ago: a token's logits follow from all before it, and the letters mostly repeat.

    From step `hold_at` on it waits until `gate` is set.
    """

    PERIOD = 7

    def __init__(self) -> None:
        super().__init__(GROUPS, len(LETTERS))
        self.gate = threading.Event()
        self.hold_at: int | None = None

    def step(self, step: Any) -> Any:
        if self.hold_at is not None and len(self.steps) >= self.hold_at:
            assert self.gate.wait(30)
        logits = super().step(step)
        for r, row in enumerate(step.logit_rows.tolist()):
            logits[r] *= 0.3
            logits[r, (int(step.positions[row]) + 1) % self.PERIOD] += 4
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Running]:
    with serving(tiny_engine(folder, Repeating(), chunk_size=5)) as running:
        yield running


@pytest.fixture(scope="module")
def fast(folder: Path) -> Iterator[Running]:
    with serving(tiny_engine(folder, Repeating(), chunk_size=5, **DRAFT)) as running:
        yield running


def added_up(events: list[Any]) -> dict[int, list[Any]]:
    """What a stream's events say of each choice: text, calls, tokens, log-probabilities and offsets, reason."""
    found: dict[int, list[Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            parts = found.setdefault(choice["index"], ["", [], [], [], [], [], None])
            delta = choice.get("delta", {})
            parts[0] += choice.get("text", delta.get("content") or "")
            parts[1] += [call["function"] for call in delta.get("tool_calls", [])]
            if choice["logprobs"] is not None:
                parts[2] += choice["logprobs"].get("content", [])
                for place, key in enumerate(("tokens", "token_logprobs", "text_offset"), 3):
                    parts[place] += choice["logprobs"].get(key, [])
            assert parts[6] is None
            parts[6] = choice["finish_reason"]
    return found


HOT = {"temperature": 0.9, "seed": 11}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": HOT,
    "scored and echoed": {**HOT, "echo": True, "logprobs": 3},
    "scored": {"temperature": 0, "logprobs": 0},
    "prompt scored": {"temperature": 0, "prompt_logprobs": 2},
    "several prompts and choices": {**HOT, "prompt": ["ABCDEFGABCDEFG", "XY", [7, 8, 9]], "n": 2, "logprobs": 1},
    "a stop string of one token": {"temperature": 0, "stop": "F"},
    "a stop string of several": {"temperature": 0, "stop": ["EFGA", "BCDX"], "logprobs": 2},
    "an included stop string": {**HOT, "stop": ["FGAB"], "include_stop_str_in_output": True},
    "a stop string not before": {"temperature": 0, "stop": ["CDE"], "min_tokens": 17, "logprobs": 1},
    "a stop id": {"temperature": 0, "stop_token_ids": [5], "min_tokens": 9},
    "penalties": {**HOT, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.05},
    "bias": {**HOT, "logit_bias": {"3": -5, "20": 3}},
    "cuts": {**HOT, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "past the end": {**HOT, "ignore_eos": True, "logit_bias": {"26": 3}},
    "up to the end": {**HOT, "logit_bias": {"26": 2}},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2},
    "all of the context": {"temperature": 0, "max_tokens": None, "ignore_eos": True},
    "a pattern": {**HOT, "structured_outputs": {"regex": "(ABCDEFG)+[A-Z]{3}"}, "logprobs": 1},
    "no proposals": {"temperature": 0, "draft_tokens": 0},
    "long proposals": {"temperature": 0, "draft_tokens": 64, "logprobs": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", COMPLETIONS)
def test_a_completion_is_what_it_is_without(plain: Running, fast: Running, case: str) -> None:
    body = {"prompt": "ABCDEFGABCDEFGABC", "max_tokens": 30, **COMPLETIONS[case]}
    if "structured_outputs" in body:
        pytest.importorskip("llguidance")
    expected, answer = (server.post("/v1/completions", **body).json() for server in (plain, fast))
    assert said(answer) == said(expected) and "choices" in answer
    details = answer["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert 0 <= accepted <= answer["usage"]["completion_tokens"] and rejected >= 0
    assert (accepted > 0) == (case not in ("no proposals", "one token")), "nothing was tried"
    assert "completion_tokens_details" not in expected["usage"]
    streams = [server.events("/v1/completions", **body) for server in (plain, fast)]
    assert added_up(streams[1]) == added_up(streams[0])
    for choice in answer["choices"]:
        text, _, _, *lists, reason = added_up(streams[1])[choice["index"]]
        assert (text, reason) == (choice["text"], choice["finish_reason"])
        if choice["logprobs"] is not None:
            assert lists == [choice["logprobs"][key] for key in ("tokens", "token_logprobs", "text_offset")]
    assert fast.all_pages_free()


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "scored, several": {**HOT, "n": 3, "logprobs": True, "top_logprobs": 2},
    "stopped": {"temperature": 0, "stop": ["DEF"], "logprobs": True},
}


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_is_what_it_is_without(plain: Running, fast: Running, case: str) -> None:
    messages = [{"role": "user", "content": "ABCDEFGABCDEFGABC"}]
    body = {"messages": messages, "max_completion_tokens": 30, **CHATS[case]}
    expected, answer = (server.post("/v1/chat/completions", **body).json() for server in (plain, fast))
    assert said(answer) == said(expected) and "choices" in answer
    usage = {"stream_options": {"include_usage": True}}
    streams = [server.events("/v1/chat/completions", **body, **usage) for server in (plain, fast)]
    assert added_up(streams[1]) == added_up(streams[0])
    assert said(streams[1][-2]) == said(streams[0][-2]) and "completion_tokens" in streams[1][-2]["usage"]
    details = streams[1][-2]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 <= details["rejected_prediction_tokens"]
    assert "completion_tokens_details" not in streams[0][-2]["usage"]


def test_a_response_is_what_it_is_without(plain: Running, fast: Running) -> None:
    body = {"input": "ABCDEFGABCDEFG", "max_output_tokens": 20, "temperature": 0}
    expected, answer = (server.post("/v1/responses", **body).json() for server in (plain, fast))
    assert said(answer) == said(expected) and answer["usage"]["output_tokens"] == 20
    streams = [server.events("/v1/responses", **body) for server in (plain, fast)]
    texts = ["".join(event.get("delta", "") for event in events) for events in streams]
    assert texts == [answer["output"][0]["content"][0]["text"]] * 2


def test_usage_grows_with_the_stream(fast: Running) -> None:
    body = {"prompt": "ABCDEFGABC", "max_tokens": 30, **HOT, "stop": "ZZ"}
    events = fast.events("/v1/completions", **body, stream_options={"continuous_usage_stats": True})[:-1]
    usages = [event["usage"] for event in events]
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        counts = [usage["completion_tokens_details"][name] for usage in usages]
        assert counts == sorted(counts)
    assert all(
        usage["completion_tokens_details"]["accepted_prediction_tokens"] <= usage["completion_tokens"]
        for usage in usages
    )


def test_a_request_says_how_much_is_proposed(fast: Running) -> None:
    body = {"prompt": "ABCDEFGABCDEFG", "max_tokens": 40, "temperature": 0}
    proposed = {}
    for most in (None, 0, 1, 16):
        usage = fast.post("/v1/completions", **body, draft_tokens=most).json()["usage"]
        proposed[most] = sum(usage["completion_tokens_details"].values())
    assert proposed[0] == 0 < proposed[1] < proposed[None] and proposed[16] > 0
    text = fast.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "ABCABCABC"}], draft_tokens=0
    )
    assert text.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    response = fast.post("/v1/responses", input="ABCABCABC", draft_tokens=3, max_output_tokens=5)
    assert response.status_code == 200


@pytest.mark.parametrize("wrong", [-1, 65, 2**70, 1.5, "4", True, [4]])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ABC"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ABC"}]}),
        ("/v1/responses", {"input": "ABC"}),
    ],
)
def test_a_number_that_cannot_be_is_named(
    plain: Running, fast: Running, path: str, body: Any, wrong: Any
) -> None:
    for server in (plain, fast):
        answer = server.post(path, **body, draft_tokens=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "draft_tokens"


def test_tools_and_schemas_are_what_they_are_without(tmp_path: Path) -> None:
    """The script repeats itself before the call, so that a part of it is proposed and comes true."""
    text = 'Hi Hi Hi {"name": "look"} <tool_call>{"name": "look", "arguments": {"name": "look"}}</tool_call>'
    words = [*dict.fromkeys(WORDS), *"<>/"]
    folder = write_tokenizer(tmp_path, HERMES, words, special=0)

    def engine(**options: Any) -> Any:
        executor = Scripted(_script(text), 1, len(words))
        return tiny_engine(folder, executor, max_context=256, end=0, **options)

    fields = {"a": {"const": "hihihihihihi"}}
    schema = {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": False}
    demanded = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    bodies: list[dict[str, Any]] = [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": demanded, "tool_choice": "required"},
    ]
    fixed = {"messages": [{"role": "user", "content": "a"}], "temperature": 0.9, "seed": 2}
    with serving(engine()) as plain, serving(engine(**DRAFT)) as fast:
        for body in bodies:
            if body.keys() & {"response_format", "tool_choice"}:
                pytest.importorskip("llguidance")
            answers = [
                server.post("/v1/chat/completions", **fixed, **body).json() for server in (plain, fast)
            ]
            assert said(answers[1]) == said(answers[0]) and "choices" in answers[1]
            streams = [server.events("/v1/chat/completions", **fixed, **body) for server in (plain, fast)]
            assert added_up(streams[1]) == added_up(streams[0])
            assert answers[1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0, body
        assert answers[1]["choices"][0]["message"]["tool_calls"] and fast.all_pages_free()


def test_clients_that_go_while_tokens_are_proposed_leave_nothing(folder: Path) -> None:
    executor = Repeating()
    with serving(tiny_engine(folder, executor, **DRAFT)) as server:
        body = {"prompt": "ABCDEFGABCDEFG", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 2}
        for after in (2, 7, 20):
            gone = server.service.disconnects
            executor.gate.clear()
            executor.hold_at = len(executor.steps) + after
            with server.client.stream("POST", "/v1/completions", json=body) as answer:
                next(
                    sse(answer.iter_lines())
                )  # and a step, with proposals, is on its way when the client has gone
            wait_until(lambda: server.service.disconnects == gone + 1)  # noqa: B023
            executor.gate.set()
            wait_until(lambda: not server.service.exchanges)
            assert server.all_pages_free()
        executor.hold_at = None
        speculator = server.engine.engine.loop.speculator
        assert speculator is not None and speculator.figures.accepted > 0
        assert not speculator.drafter._indexes and not speculator._open  # type: ignore[attr-defined]
        assert server.post("/v1/completions", prompt="A", max_tokens=3).status_code == 200


def test_figures_of_speculation(folder: Path, plain: Running) -> None:
    assert plain.client.get("/status").json()["speculation"] is None
    assert not [name for name, _ in metrics(plain) if "speculation" in name]
    with serving(tiny_engine(folder, Repeating(), **DRAFT)) as server:
        before = server.client.get("/status").json()["speculation"]
        assert before["acceptance_rate"] is None and before["tokens_per_step"] == 1
        body = {"prompt": "ABCDEFGABCDEFG", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        usage = server.post("/v1/completions", **body).json()["usage"]["completion_tokens_details"]
        accepted, rejected = usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]
        seen = metrics(server)
        proposals = seen["speculation_proposals_total", ""]
        assert seen["speculation_accepted_tokens_total", ""] == accepted > 0
        assert seen["speculation_proposed_tokens_total", ""] == accepted + rejected
        for which, total in (("proposed", accepted + rejected), ("accepted", accepted)):
            places = [seen[f"speculation_{which}_tokens_by_position_total", str(i)] for i in range(1, 5)]
            assert sum(places) == total and places == sorted(places, reverse=True)
        assert ("speculation_proposed_tokens_by_position_total", "5") not in seen
        assert seen["speculation_tokens_per_proposal", ""] == 1 + accepted / proposals > 1
        steps = seen["steps_total", ""]
        assert seen["speculation_tokens_per_step", ""] == 60 / (60 - accepted) and steps < 60
        assert seen["speculation_drafting_seconds_total", ""] > 0
        assert ("speculation_saved_seconds", "") in seen
        assert seen["speculation_drafter_failures_total", ""] == 0
        status = server.client.get("/status").json()["speculation"]
        assert status["drafter"] == "ngram" and status["accepted"] == accepted
        assert status["acceptance_rate"] == round(accepted / (accepted + rejected), 4)
        assert status["tokens_per_step"] == round(60 / (60 - accepted), 4)
        assert len(status["acceptance_by_position"]) == 4 and status["failures"] == 0
        assert seen["inter_token_latency_seconds_count", ""] == 59

        def broken(wanted: Any) -> Any:
            raise ZeroDivisionError

        server.engine.engine.loop.speculator.drafter.propose = broken  # type: ignore[union-attr]
        assert server.post("/v1/completions", **body).json()["usage"]["completion_tokens"] == 60
        assert metrics(server)["speculation_drafter_failures_total", ""] > 0


def test_the_log_tells_of_proposed_tokens(fast: Running) -> None:
    with request_log(fast) as lines:
        answer = fast.post("/v1/completions", prompt="ABCDEFGABCDEFG", max_tokens=20, temperature=0).json()
        wait_until(lambda: lines)
    line = lines[0]
    details = answer["usage"]["completion_tokens_details"]
    assert line["accepted_tokens"] == details["accepted_prediction_tokens"] > 0
    assert line["proposed_tokens"] == sum(details.values())


def test_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("enginewright.runtime.server.run.load", lambda path, **options: given.update(options))
    load_engine(Settings(Path("x"), speculate="ngram", draft_tokens=3, draft_rule="resample"))
    assert [given[name] for name in ("speculate", "draft_tokens", "draft_rule")] == ["ngram", 3, "resample"]
