"""Tool calls read back from text, wherever the pieces are cut."""

from __future__ import annotations

import json

import pytest

from enginewright.runtime.server.tools import FORMATS, Call, ToolParser, recognise

HERMES, LLAMA3, MISTRAL = FORMATS
WEATHER = Call("weather", '{"city": "Zürich"}')
TIME = Call("time", "{}")

CASES = [
    (HERMES, "Just text < here.", ["Just text < here."]),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
        ["Let me see.", WEATHER],
    ),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n',
        [WEATHER, TIME],
    ),
    (HERMES, '<tool_call>\n{"name": "weather"', ['<tool_call>\n{"name": "weather"']),
    (HERMES, "<tool_call>not json</tool_call> and on", ["<tool_call>not json</tool_call> and on"]),
    (HERMES, "a <tool_ b <tool_call", ["a <tool_ b <tool_call"]),
    (HERMES, "<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>\nDone.',
        [TIME, "Done."],
    ),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Zürich"}}', [WEATHER]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}',
        [TIME, TIME],
    ),
    (LLAMA3, '{"a": 1} is an object', ['{"a": 1} is an object']),
    (LLAMA3, "No { calls", ["No { calls"]),
    (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich"}}]', [WEATHER]),
    (
        MISTRAL,
        'Hm. [TOOL_CALLS]weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]time[ARGS]{}',
        ["Hm.", WEATHER, TIME],
    ),
    (MISTRAL, "[TOOL_CALLS] nothing", ["[TOOL_CALLS] nothing"]),
]


def merged(parts: list[str | Call]) -> list[str | Call]:
    whole: list[str | Call] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_a_text_is_read_the_same_however_it_is_cut(form, text, expected):
    for size in (1, 2, 3, 7, len(text)):
        parser = ToolParser(form)
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
        assert merged([*parts, *parser.finish()]) == expected, size
    for cut in range(len(text)):
        parser = ToolParser(form)
        parts = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
        assert merged(parts) == expected, cut


def test_text_before_a_call_is_not_held_back():
    parser = ToolParser(HERMES)
    assert parser.push("Let me ") == ["Let me"]
    assert parser.push("see. ") == [" see."]
    assert parser.push("<tool_call>{") == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ tool_call.arguments | tojson }}", "hermes"),
        ('<|start_header_id|>{"name": x, "parameters": y}', "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call><function=x><parameter=y>", None),
        ("{{ m.content }}", None),
    ],
)
def test_a_family_is_known_by_its_template(template, name):
    found = recognise({"default": template})
    assert (found.name if found is not None else None) == name


@pytest.mark.parametrize("form", FORMATS)
def test_ids_are_new_and_as_the_family_wants_them(form):
    ids = {form.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert form is not MISTRAL or all(len(id_) == 9 and id_.isalnum() for id_ in ids)


def test_a_demanded_call_has_a_grammar():
    function = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for form in (HERMES, LLAMA3):
        grammar = form.grammar([function, {"name": "time"}])
        assert grammar is not None
        schema = json.loads(grammar.split("%json ")[1])
        assert [choice["properties"]["name"]["const"] for choice in schema["anyOf"]] == ["weather", "time"]
    assert MISTRAL.grammar([function]) is None
