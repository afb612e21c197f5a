"""What clients get: the same answer streamed or not, alone or as one of several choices, with all its parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.server.serving import (
    LETTERS,
    Running,
    Scripted,
    serving,
    tiny_engine,
    write_tokenizer,
)

DRAW = {"temperature": 0.9, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tiny"))
    with serving(tiny_engine(folder, chunk_size=5)) as running:
        yield running


def joined_completion(events: list[Any], index: int = 0) -> tuple[str, list[Any], str | None]:
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    assert len(reasons) == 1 and choices[-1]["finish_reason"] == reasons[0]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return "".join(choice["text"] for choice in choices), logprobs, reasons[0]


@pytest.mark.parametrize("prompt", ["A", "HELLO", "Q" * 40, [1, 2, 3]])
@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_adds_up_to_the_whole(server: Running, prompt, echo):
    body = {"prompt": prompt, "max_tokens": 24, "echo": echo, "logprobs": 0, **DRAW}
    whole = server.post("/v1/completions", **body).json()["choices"][0]
    text, parts, reason = joined_completion(server.events("/v1/completions", **body))
    assert (text, reason) == (whole["text"], whole["finish_reason"])
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part[key]] == whole["logprobs"][key]


def test_an_echo_holds_the_prompt_and_its_logprobs(server: Running):
    body = {
        "prompt": "HELLO",
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("HELLO") and logprobs["tokens"][:5] == list("HELLO")
    assert logprobs["token_logprobs"][0] is None and all(
        value < 0 for value in logprobs["token_logprobs"][1:]
    )
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == 8
    assert all(len(best) == 2 for best in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if token in LETTERS[:26]:
            assert choice["text"][start : start + len(token)] == token
    scored = server.post("/v1/completions", **{**body, "max_tokens": 0}).json()["choices"][0]
    assert scored["text"] == "HELLO"
    assert scored["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:5]


@pytest.mark.parametrize("prompt", ["AB<|end|>CD", "<|end|>A", "A<|end|><|end|>", "ABé<|end|>C", [1, 26, 2]])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_follow_the_echoed_text(server: Running, prompt, stream):
    """Special tokens that the client spelled stand in it, though decoding leaves them out; those given as ids do not."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 0, **DRAW}
    if stream:
        text, parts, _ = joined_completion(server.events("/v1/completions", **body))
        tokens, offsets = (
            [entry for part in parts for entry in part[key]] for key in ("tokens", "text_offset")
        )
    else:
        choice = server.post("/v1/completions", **body).json()["choices"][0]
        text, tokens, offsets = (
            choice["text"],
            choice["logprobs"]["tokens"],
            choice["logprobs"]["text_offset"],
        )
    spelled = prompt.count("<|end|>") if isinstance(prompt, str) else 0
    for token, start in zip(tokens, offsets, strict=True):
        if token in LETTERS[:26] or (token == "<|end|>" and spelled):
            spelled -= token == "<|end|>"
            assert text[start : start + len(token)] == token, (token, start, text)


@pytest.mark.parametrize("fields", [{}, {"stop": ["A", "B"]}, {"n": 2}, {"max_tokens": 0}, {"logprobs": 1}])
@pytest.mark.parametrize("echo", [False, True])
def test_prompt_logprobs_are_the_same_streamed(server: Running, fields, echo):
    """As many as were asked for, whatever else asks for some, and once a choice."""
    body = {"prompt": "HELLO", "max_tokens": 4, "prompt_logprobs": 0, "echo": echo, **DRAW, **fields}
    whole = server.post("/v1/completions", **body).json()["choices"]
    events = server.events("/v1/completions", **body)[:-1]
    streamed = [choice for event in events for choice in event["choices"] if "prompt_logprobs" in choice]
    streamed.sort(key=lambda choice: choice["index"])
    told = [choice["prompt_logprobs"] for choice in streamed]
    assert told == [choice["prompt_logprobs"] for choice in whole]
    assert [len(entry or {}) for entry in told[0]] == [0, 1, 1, 1, 1]


def test_choices_are_what_they_are_alone(server: Running):
    body = {"prompt": ["ABCDEFGHIJKLMNOPQ", "XY"], "max_tokens": 10, "n": 3, **DRAW}
    answer = server.post("/v1/completions", **body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 6
    assert texts == [choice["text"] for choice in server.post("/v1/completions", **body).json()["choices"]]
    events = server.events("/v1/completions", **body)
    assert [joined_completion(events, index)[0] for index in range(6)] == texts
    assert answer["usage"]["prompt_tokens"] == 19 and answer["usage"]["completion_tokens"] == 60
    first = server.post("/v1/completions", **{**body, "prompt": "XY", "n": 1}).json()
    assert first["choices"][0]["text"] == texts[3]
    greedy = server.post("/v1/completions", **{**body, "temperature": 0}).json()["choices"]
    assert len({choice["text"] for choice in greedy[:3]}) == 1


def test_without_a_seed_answers_differ(server: Running):
    body = {"prompt": "A", "max_tokens": 20, "ignore_eos": True}
    assert len({server.post("/v1/completions", **body).json()["choices"][0]["text"] for _ in range(4)}) == 4


@pytest.mark.parametrize("top", [None, 3])
def test_a_streamed_chat_adds_up_to_the_whole(server: Running, top):
    body = {
        "messages": [{"role": "user", "content": "HELLO"}],
        "max_completion_tokens": 20,
        "logprobs": True,
        "top_logprobs": top,
        "n": 2,
        **DRAW,
    }
    whole = server.post("/v1/chat/completions", **body).json()
    events = server.events("/v1/chat/completions", stream_options={"include_usage": True}, **body)
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40
    assert all(event["usage"] is None for event in events[:-2])
    assert len({event["id"] for event in events[:-1]}) == 1
    for choice in whole["choices"]:
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        content = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"] and len(content) == 20
        assert all(len(entry["top_logprobs"]) == (top or 0) for entry in content)
        assert all(bytes(entry["bytes"]).decode(errors="replace") for entry in content)


def test_usage_in_every_event(server: Running):
    body = {"max_tokens": 9, "stream_options": {"continuous_usage_stats": True}, **DRAW}
    for path, more in (
        ("/v1/completions", {"prompt": "HELLO"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "HELLO"}]}),
    ):
        counts = [event["usage"]["completion_tokens"] for event in server.events(path, **body, **more)[:-1]]
        assert counts == sorted(counts) and counts[-1] == 9


def test_content_may_be_parts_or_nothing(server: Running):
    parts = [{"type": "text", "text": "HEL"}, {"type": "text", "text": "LO"}]
    whole = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    texts = {
        server.post("/v1/chat/completions", messages=messages, **whole).json()["choices"][0]["message"][
            "content"
        ]
        for messages in (
            [{"role": "user", "content": "HELLO"}],
            [{"role": "user", "content": parts}],
            [{"role": "assistant", "content": None}, {"role": "developer", "content": "HELLO"}],
        )
    }
    assert len(texts) == 1


def test_stop_strings_do_not_leak(server: Running):
    body = {"prompt": "ABC", "max_tokens": 60, **DRAW}
    text = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    stop = next(text[at : at + 2] for at in range(10, 40) if text[at : at + 2].isalpha())
    cut = text[: text.index(stop)]
    whole = server.post("/v1/completions", stop=[stop], **body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (cut, "stop")
    streamed, _, reason = joined_completion(server.events("/v1/completions", stop=[stop], **body))
    assert (streamed, reason) == (cut, "stop")
    kept = server.post("/v1/completions", stop=stop, include_stop_str_in_output=True, **body).json()
    assert kept["choices"][0]["text"] == cut + stop


def test_a_response_and_its_events(server: Running):
    body = {"input": "HELLO", "max_output_tokens": 12, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    whole = server.post("/v1/responses", **body).json()
    text = whole["output"][0]["content"][0]["text"]
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 12 and whole["usage"]["input_tokens"] == 5
    items = [{"role": "user", "content": [{"type": "input_text", "text": "LLO"}]}]
    assert (
        server.post("/v1/responses", **{**body, "input": items, "instructions": "HE"}).json()["output"][0][
            "content"
        ][0]["text"]
        == text
    )
    events = server.events("/v1/responses", **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"
    assert "".join(event.get("delta", "") for event in events) == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


# ---------------------------------------------------------------------------------------------- tool calls

WORDS = [
    "<|end|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    *'{}[]":,_ \n',
    *"abcdefghijklmnopqrstuvwxyz",
    "H",
    "i",
]
HERMES = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> arguments #}"
MISTRAL = "{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def _script(text: str) -> list[int]:
    ids = []
    while text:
        word = next(word for word in sorted(WORDS, key=len, reverse=True) if text.startswith(word))
        ids.append(WORDS.index(word))
        text = text[len(word) :]
    return [*ids, 0]


@pytest.fixture(params=["hermes", "mistral"])
def calling(request, tmp_path):
    calls = {
        "hermes": 'Hi <tool_call>{"name": "look", "arguments": {"at": "me"}}</tool_call>',
        "mistral": 'Hi [TOOL_CALLS][{"name": "look", "arguments": {"at": "me"}}]',
    }
    template = HERMES if request.param == "hermes" else MISTRAL
    folder = write_tokenizer(tmp_path, template, list(dict.fromkeys(WORDS)), special=0)
    if request.param == "mistral":
        _make_special(folder, "[TOOL_CALLS]")
    engine = tiny_engine(folder, Scripted(_script(calls[request.param]), 1, len(set(WORDS))), end=0)
    with serving(engine) as running:
        yield running


def _make_special(folder, token: str) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tool_calls_are_read_whole_and_streamed(calling: Running):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "tools": TOOLS}
    choice = calling.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hi"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"at": "me"}
    events = calling.events("/v1/chat/completions", **body)
    deltas = [event["choices"][0] for event in events[:-1]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "Hi"
    streamed = [part for delta in deltas for part in delta["delta"].get("tool_calls", [])]
    assert len(streamed) == 1 and streamed[0]["index"] == 0 and streamed[0]["function"] == call["function"]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    plain = calling.post("/v1/chat/completions", **{**body, "tool_choice": "none"}).json()["choices"][0]
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] == "stop"


def test_a_call_and_its_result_go_back_to_the_template(calling: Running):
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "me"}'}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "a"},
    ]
    assert (
        calling.post("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=2).status_code == 200
    )
    call["function"]["arguments"] = "{not json"
    answer = calling.post("/v1/chat/completions", messages=messages, tools=TOOLS)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


def test_an_unknown_choice_of_tool_is_refused(calling: Running):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    for choice in ("some", {"type": "function", "function": {"name": "nothing"}}, 5):
        answer = calling.post("/v1/chat/completions", tool_choice=choice, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
