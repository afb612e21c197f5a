"""Answers that must be something: SmolLM2 through the server, and constraints that cannot be."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from enginewright.runtime.server.tools import recognise
from tests.runtime.server.serving import Running, serving

pytest.importorskip("llguidance")
pytest.importorskip("torch")
from tests import engines

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "zip": {"type": "integer"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    engine = engines.load("smollm2", "int4", threads=1)
    with serving(engine, max_sequences=32) as running:
        yield running


def chat(server: Running, **fields):
    body = {
        "messages": [{"role": "user", "content": "Describe a person."}],
        "temperature": 1,
        "seed": 4,
        **fields,
    }
    return server.post("/v1/chat/completions", **body)


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "address"} and set(value["address"]) == {"city", "zip"}
    assert isinstance(value["name"], str) and isinstance(value["address"]["zip"], int)
    assert not re.search(r"\s{19}", text)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("budget", [5, 400])
def test_a_value_closes_or_says_that_it_was_cut(server: Running, temperature, budget):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answers = chat(server, response_format=wanted, max_tokens=budget, temperature=temperature, n=4).json()[
        "choices"
    ]
    for choice in answers:
        if choice["finish_reason"] == "stop":
            check(choice["message"]["content"])
        else:
            assert (choice["finish_reason"] == "length" and budget == 5) or temperature == 1
            with pytest.raises(ValueError, match=r".*"):
                json.loads(choice["message"]["content"])
    assert budget == 5 or any(choice["finish_reason"] == "stop" for choice in answers)


def test_streamed_it_is_the_same(server: Running):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    whole = chat(server, response_format=wanted, max_tokens=300, temperature=0).json()["choices"][0]
    events = server.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format=wanted,
        max_tokens=300,
        temperature=0,
    )
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == whole["message"]["content"] and whole["finish_reason"] == "stop"
    response = server.post(
        "/v1/responses",
        input="Describe a person.",
        text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        temperature=0,
    ).json()
    check(response["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "(red|green|blue), [0-9]{2}"}, r"(red|green|blue), \d\d"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"choice": ["red", "dark blue"]}, "red|dark blue"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        ({"json": {"enum": ["a", "b"]}}, '"[ab]"'),
    ],
)
def test_other_constraints(server: Running, wanted, pattern):
    choice = chat(server, structured_outputs=wanted, max_tokens=200, temperature=0).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])
    else:
        assert wanted == {"json_object": True} and choice["finish_reason"] == "length"


def test_guided_choice_is_an_older_name(server: Running):
    (choice,) = chat(server, guided_choice=["north", "south"], temperature=0).json()["choices"]
    assert choice["message"]["content"] in ("north", "south") and choice["finish_reason"] == "stop"
    refused = chat(server, guided_choice=["a"], structured_outputs={"choice": ["a"]}).json()["error"]
    assert refused["param"] == "guided_choice" and "exclude" in refused["message"]
    unknown = chat(server, structured_outputs={"whitespace_pattern": "x"}).json()["error"]
    assert unknown["param"] == "structured_outputs.whitespace_pattern"
    assert "known: json, json_object, regex, grammar, choice" in unknown["message"]


def _schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BAD = [
    ("response_format.json_schema.schema", _schema({"type": "objec"})),
    ("response_format.json_schema.schema", _schema({"type": "array", "items": 3})),
    ("response_format.json_schema.schema", _schema({"$ref": "#/nowhere"})),
    (
        "response_format.json_schema.schema",
        _schema({"type": "object", "patternPropertie": {}, "not": {"type": "string"}}),
    ),
    ("response_format.json_schema.schema", _schema({"enum": ["word" * 10 + str(i) for i in range(20_000)]})),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("response_format", {**_schema({}), "structured_outputs": {"regex": "a"}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a(?=b)"}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a" * 200_000}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: nothing"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": 5}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD)
def test_a_constraint_that_cannot_be_is_refused_and_named(server: Running, param, fields):
    began = time.monotonic()
    answer = chat(server, max_tokens=20, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and answer.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200
    print(f"{param}: {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(a+)+$"}},
        _schema(
            {
                "$defs": {"t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}},
                "$ref": "#/$defs/t",
            }
        ),
    ],
)
def test_what_is_only_unusual_is_served_or_refused(server: Running, fields):
    answer = chat(server, max_tokens=30, **fields)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200 and "structured_outputs" in fields:
        assert set(answer.json()["choices"][0]["message"]["content"]) <= {"a"}


def test_a_neighbour_does_not_wait_for_a_constraint(server: Running):
    body = {"prompt": "The capital of France is", "max_tokens": 30, "temperature": 0.7, "seed": 2}
    alone = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(chat, server, max_tokens=5, **fields) for _, fields in BAD[:8]]
        beside = pool.submit(server.post, "/v1/completions", **body)
        assert beside.result().json()["choices"][0]["text"] == alone
        assert {answer.result().status_code for answer in bad} == {400}
    assert server.all_pages_free()


def test_a_demanded_tool_call_is_made(server: Running):
    """SmolLM2's template knows no tools; given one that does, its answer is held to the form."""
    tokenizer = server.engine.engine.tokenizer
    assert tokenizer is not None and tokenizer.chat_template is not None
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": SCHEMA["properties"]["address"]},
    }
    other = {"type": "function", "function": {"name": "time"}}
    refused = chat(server, tools=[tool])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    known = server.service.tool_format
    server.service.tool_format = recognise({"default": "<tool_call> arguments"})
    try:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            tools = [other, tool] if choice != "required" else [tool]
            answer = chat(server, tools=tools, tool_choice=choice, temperature=0, max_tokens=200).json()[
                "choices"
            ][0]
            assert answer["finish_reason"] == "tool_calls", answer
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert set(json.loads(call["function"]["arguments"])) == {"city", "zip"}
    finally:
        server.service.tool_format = known
