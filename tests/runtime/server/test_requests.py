"""What clients may send: every field is used or refused by name, and nothing that is sent hurts a neighbour."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from enginewright.runtime.pages import GroupSpec
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.server.serving import (
    Paced,
    Running,
    request_log,
    serving,
    tiny_engine,
    wait_until,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tiny"))
    with serving(tiny_engine(folder, Paced()), served_model_name="tiny") as running:
        yield running


def error(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"]
    assert answer.headers["x-request-id"]
    return body


VOCAB = 32
BAD_COMPLETIONS = [
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.0}),
    ("max_tokens", {"max_tokens": 1e18}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "warm"}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**64}),
    ("n", {"n": 0}),
    ("n", {"n": 100_000}),
    ("best_of", {"best_of": 3}),
    ("suffix", {"suffix": "end"}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["A"] * 10_000}),
    ("stop", {"stop": ["A" * 5000]}),
    ("stop", {"stop": [1]}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
    ("stop_token_ids[0]", {"stop_token_ids": ["x"]}),
    ("logit_bias", {"logit_bias": {str(VOCAB): 1}}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias[0]", {"logit_bias": {"-1": 1}}),
    ("logit_bias[0]", {"logit_bias": {str(2**64): 1}}),
    ("logit_bias.3", {"logit_bias": {"3": "much"}}),
    ("logit_bias[3]", {"logit_bias": {"3": 1000}}),
    ("logprobs", {"logprobs": 1000}),
    ("logprobs", {"logprobs": -1, "echo": True}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": -1, "logprobs": 1, "echo": True}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [VOCAB]}),
    ("prompt", {"prompt": [2**64]}),
    ("prompt[0]", {"prompt": [["12"]]}),
    ("prompt[1]", {"prompt": ["A", 5]}),
    ("prompt", {"prompt": {"text": "A"}}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": ["A"] * 129}),
    ("n", {"prompt": ["A"] * 128, "n": 2}),
    ("prompt", {"prompt": ["A"] * 100_000}),
    ("prompt", {"prompt": "A" * 500}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 2}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.surprise", {"stream": True, "stream_options": {"surprise": 1}}),
    ("temprature", {"temprature": 1}),
    ("priority", {"priority": 10**6}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": 5}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_COMPLETIONS)
def test_a_field_that_cannot_be_used_is_named(server: Running, param, fields):
    assert error(server.post("/v1/completions", **{"prompt": "ABC", **fields}))["param"] == param


BAD_CHATS = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages[0].role", {"messages": [{"content": "A"}]}),
    ("messages[0].role", {"messages": [{"role": "x<|im_end|>", "content": "A"}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tools[0]", {"tools": [{"type": "retrieval"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ),
    ("functions", {"functions": []}),
    ("modalities[0]", {"modalities": ["audio"]}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHATS)
def test_a_chat_field_that_cannot_be_used_is_named(server: Running, param, fields):
    body = {"messages": [{"role": "user", "content": "ABC"}], **fields}
    assert error(server.post("/v1/chat/completions", **body))["param"] == param


BAD_RESPONSES = [
    ("input", {"input": 5}),
    ("input[0]", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("previous_response_id", {"previous_response_id": "resp-1"}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("max_output_tokens", {"max_output_tokens": -3}),
    ("reasoning", {"reasoning": {"effort": "high"}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_RESPONSES)
def test_a_responses_field_that_cannot_be_used_is_named(server: Running, param, fields):
    assert error(server.post("/v1/responses", **{"input": "ABC", **fields}))["param"] == param


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 2**31 - 1}, {"max_tokens": 10**18}, {"max_tokens": None}, {"user": "me"}]
)
def test_what_is_large_or_idle_is_served(server: Running, fields):
    answer = server.post("/v1/completions", prompt="ABC", temperature=0, ignore_eos=True, **fields)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == (
        16 if fields.get("max_tokens", 1) is None or "user" in fields else 125
    )


def test_no_new_tokens_is_an_answer(server: Running):
    body = server.post("/v1/completions", prompt="ABC", max_tokens=0).json()
    assert body["choices"][0]["text"] == "" and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 5000]
)
def test_what_is_no_json_is_refused(server: Running, raw):
    error(server.client.post("/v1/completions", content=raw))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "where", ['"metadata": %s', '"metadata": {"a": [%s]}', '"user": %s', '"temperature": %s']
)
def test_a_number_that_is_none_is_refused(server: Running, where, value):
    raw = '{"input": "A", "max_output_tokens": 1, ' + where % value + "}"
    assert error(server.client.post("/v1/responses", content=raw))["code"] == "invalid_json"
    quoted = raw.replace(where % value, f'"metadata": {{"a": "{value}"}}')
    assert server.client.post("/v1/responses", content=quoted).json()["metadata"] == {"a": value}


def test_a_prompt_at_the_limit(server: Running):
    assert error(server.post("/v1/completions", prompt=[1] * 128))["code"] == "context_length_exceeded"
    for length in (126, 127):
        body = server.post("/v1/completions", prompt=[1] * length, max_tokens=5, ignore_eos=True).json()
        assert body["usage"]["completion_tokens"] == 128 - length
        assert body["choices"][0]["finish_reason"] == "length"
    assert server.all_pages_free()


def test_oversized_bodies_are_refused(server: Running):
    assert (
        error(server.client.post("/v1/completions", content=b"x" * (9 << 20)), 413)["code"]
        == "body_too_large"
    )

    def endless():
        for _ in range(40):
            yield b" " * (1 << 20)

    assert error(server.client.post("/v1/completions", content=endless()), 413)["code"] == "body_too_large"
    assert server.post("/v1/completions", prompt="ABC", max_tokens=1).status_code == 200


def test_a_neighbour_does_not_notice_what_is_refused(server: Running):
    body = {
        "prompt": "HELLO",
        "max_tokens": 80,
        "temperature": 0.8,
        "seed": 5,
        "ignore_eos": True,
        "logprobs": 0,
    }
    quiet = server.post("/v1/completions", **body).json()
    server.engine.engine.executor.seconds = 0.005
    got: list[dict] = []
    beside = threading.Thread(target=lambda: got.append(server.post("/v1/completions", **body).json()))
    beside.start()
    for param, fields in BAD_COMPLETIONS:
        assert error(server.post("/v1/completions", **{"prompt": "ABC", **fields}))["param"] == param
    beside.join()
    server.engine.engine.executor.seconds = 0
    assert got[0]["choices"] == quiet["choices"]
    assert server.all_pages_free()


def test_models_are_checked_and_listed(server: Running):
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert error(server.client.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"
    assert error(server.post("/v1/completions", prompt="A", model="gpt-5"), 404)["param"] == "model"


def test_unknown_paths_and_methods(server: Running):
    error(server.client.get("/v1/nothing"), 404)
    error(server.client.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/status", "/v1/models", "/v1/models/tiny"]
)
def test_what_can_be_looked_at_has_a_head(server: Running, path):
    whole, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("sent", ["abc-1", "A" * 128])
def test_a_plain_request_id_is_given_back(server: Running, sent):
    assert server.client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["A" * 10_000, "a b", "a\tb", "<b>", "é"])
def test_another_request_id_is_replaced(server: Running, sent):
    got = server.client.get("/health", headers={"X-Request-Id": sent.encode()}).headers["x-request-id"]
    assert got.startswith("req-") and got != sent


def test_two_requests_with_one_id_get_their_own_answers(server: Running):
    headers = {"X-Request-Id": "same"}
    bodies = [
        {"prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": seed, "ignore_eos": True}
        for seed, prompt in enumerate(["ABC", "XYZQ"])
    ]
    expected = [server.post("/v1/completions", **body).json()["choices"][0]["text"] for body in bodies]
    server.engine.engine.executor.seconds = 0.003
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = server.client.post("/v1/completions", json=bodies[number], headers=headers)
        assert answer.headers["x-request-id"] == "same"
        texts[number] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.engine.engine.executor.seconds = 0
    assert [texts[0], texts[1]] == expected


def test_tokenize_and_back(server: Running):
    body = server.post("/tokenize", prompt="ABabC", return_token_strs=True).json()
    assert body["tokens"] and body["count"] == len(body["tokens"]) and body["max_model_len"] == 128
    assert len(body["token_strs"]) == body["count"]
    assert server.post("/detokenize", tokens=[0, 1, 26]).json()["prompt"] == "AB<|end|>"
    assert server.post("/detokenize", tokens=[0, 26], skip_special_tokens=True).json()["prompt"] == "A"
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "AB"}]).json()
    assert chat["tokens"] == [0, 1]
    assert error(server.post("/detokenize", tokens=[VOCAB]))["param"] == "tokens[0]"
    assert error(server.post("/detokenize", tokens=[-1]))["param"] == "tokens[0]"
    assert error(server.post("/tokenize"))["param"] == "prompt"


SECRET = "QQQ"
QUOTED = [
    ("/v1/completions", {"prompt": SECRET, "max_tokens": -2}),
    ("/v1/completions", {"prompt": "A", "logit_bias": {SECRET: 1}}),
    ("/v1/completions", {"prompt": "A", "structured_outputs": {"regex": SECRET + "("}}),
    ("/v1/completions", {"prompt": "A", SECRET: 1}),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": "A"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [SECRET, {"text": [SECRET]}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
    ("/v1/responses", {"input": [{"role": SECRET, "content": "A"}]}),
    ("/tokenize", {"messages": [{"role": SECRET, "content": "A"}]}),
]


def test_the_log_says_numbers_and_no_prompt(server: Running):
    with request_log(server) as lines:
        server.post("/v1/completions", prompt=SECRET, max_tokens=2, ignore_eos=True)
        for path, body in QUOTED:
            server.post(path, **body)
        wait_until(lambda: len(lines) > len(QUOTED))
    (good,) = [line for line in lines if line["status"] == 200]
    bad = [line for line in lines if line is not good]
    assert {line["status"] for line in bad} == {400}
    assert all(line["error"] for line in bad)
    assert good["prompt_tokens"] == 3 and good["generated_tokens"] == 2 and good["finish"] == ["length"]
    assert SECRET not in json.dumps([good, bad])


@pytest.mark.parametrize("groups", [[GroupSpec(0, 4)], [GroupSpec(0, 4), GroupSpec(6, 4)], [GroupSpec(6, 4)]])
@pytest.mark.parametrize("pages", [3, 4, 9])
def test_the_context_that_is_told_is_what_the_cache_can_hold(tmp_path, caplog, groups, pages):
    executor = FakeExecutor(groups, VOCAB)
    engine = tiny_engine(write_tokenizer(tmp_path), executor, cache_tokens=4 * pages, chunk_size=2)
    with caplog.at_level(logging.INFO), serving(engine) as server:
        (model,) = server.client.get("/v1/models").json()["data"]
        told = model["max_model_len"]
        assert server.post("/tokenize", prompt="A").json()["max_model_len"] == told
        whole = not any(
            group.window == 0 for group in groups
        )  # a window needs 3 pages, however long the text
        assert told == (128 if whole else 4 * pages)
        most = min(told, 127)
        fits = server.post("/v1/completions", prompt=[1] * most, max_tokens=1, ignore_eos=True)
        assert fits.json()["usage"]["completion_tokens"] == 1
        assert (
            error(server.post("/v1/completions", prompt=[1] * (told + 1)))["code"]
            == "context_length_exceeded"
        )
    says = [record.getMessage() for record in caplog.records if "cache holds" in record.getMessage()]
    assert len(says) == 1 and f"cache holds {4 * pages} tokens" in says[0]
    assert ("less than one context of 128" in says[0]) == (not whole)


def test_a_cache_beyond_the_memory_is_warned_of(tmp_path, monkeypatch, caplog):
    folder = write_tokenizer(tmp_path)
    monkeypatch.setattr("enginewright.runtime.engine.machine_memory", lambda: 1 << 10)
    tiny_engine(folder, cache_tokens=16).close()
    assert not caplog.records
    tiny_engine(folder).close()
    assert "larger than the memory" in caplog.text
