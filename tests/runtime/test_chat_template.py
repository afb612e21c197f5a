"""Chat templates rendered as transformers renders them, and refused with the template's own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginewright.recipes.errors import RequestError
from enginewright.runtime.chat_template import ChatTemplate
from enginewright.runtime.text import Tokenizer
from tests import models

transformers = pytest.importorskip("transformers")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Today\'s <weather> & "more" – für 東京',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]

TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": """{%- for message in messages %}
    {# trimmed and stripped #}
    {% if message.role == 'user' %}
  [INST] {{ message.content | trim }} [/INST]
    {% else %}
{{ bos_token }}{{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor -%}
""",
    "tojson": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools | tojson(sort_keys=true, separators=[',', ':']) }}"
    "|{{ messages | tojson(ensure_ascii=true) }}",
    "alternate": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{% if strftime_now is defined %} yes{% endif %}{{ messages[0].content }}",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}",
    "namespace": "{% set ns = namespace(count=0, last='') %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.count }}{{ ns.last }}{% set d = dict(a=1) %}{{ d.a }}{{ d | tojson }}",
    "macro": "{% macro part(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
    "{{ p.text }}+{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ part(m.content) }};{% endfor %}",
    "documents": "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d['text'] }}\n{% endfor %}{% endif %}"
    "{% if tools is not none %}{{ tools[0].function.name }}{% endif %}{{ custom | default('none') }}{{ messages[-1].content }}",
    "reasoning": "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.thinking }}{{ m.content }}{% if 'tool_calls' in m %}calls{% endif %}{% endfor %}",
    "slices": "{{ messages[1:] | map(attribute='content') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | "
    "list | length }}{{ messages[0].content.split(' ')[0].upper() }}{{ messages[0].content[::-1] }}",
}
USER = {"role": "user", "content": "What is  <b>up</b>, 東京? 👩‍👩‍👧\n"}
CHATS = {
    "one": [USER],
    "turns": [USER, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": " and you? "}],
    "system": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "No."},
        USER,
    ],
    "reasons": [USER, {"role": "assistant", "content": "4", "thinking": "2+2", "tool_calls": None}, USER],
}


@pytest.fixture(scope="module")
def theirs():
    return transformers.AutoTokenizer.from_pretrained(models.smollm2())


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_alike(name, chat, theirs):
    ours = ChatTemplate(TEMPLATES[name], theirs.special_tokens_map)
    for options in (
        {},
        {"tools": TOOLS},
        {"documents": DOCUMENTS, "custom": "ä"},
        {"add_generation_prompt": True},
    ):
        variables = {key: value for key, value in options.items() if key == "custom"}
        named = {key: value for key, value in options.items() if key != "custom"}
        try:
            expected = theirs.apply_chat_template(
                CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, **options
            )
        except Exception as error:
            with pytest.raises(RequestError) as caught:
                ours.render(CHATS[chat], variables=variables, **named)
            assert str(error) in str(caught.value)
        else:
            assert ours.render(CHATS[chat], variables=variables, **named) == expected


def test_parts_are_handed_to_templates_that_walk_over_them(theirs):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = theirs.apply_chat_template(parts, chat_template=TEMPLATES["macro"], tokenize=False)
    assert ChatTemplate(TEMPLATES["macro"]).render(parts) == expected == "a+b+;"
    direct = (
        "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(direct).render(parts) == "[a][b]"
    assert ChatTemplate("{{ messages[0]['role'] }}: {{ messages[0]['content'] }}").render(parts) == "user: ab"


def test_the_models_own_template(theirs):
    ours = Tokenizer(models.smollm2())
    for chat in CHATS.values():
        for prompt in (True, False):
            text = ours.render_chat(chat, add_generation_prompt=prompt)
            assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(text, add_special_tokens=False) == ids
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(models.gemma3()).render_chat([USER])


def test_the_last_message_can_be_left_open(theirs):
    chat = [USER, {"role": "assistant", "content": "The answer is "}]
    ours = Tokenizer(models.smollm2())
    expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert ours.render_chat(chat, continue_final_message=True) == expected
    assert chat[1]["content"] == "The answer is "


def test_named_templates(tmp_path):
    named = {
        "default": "D{{ messages[0].content }}",
        "tool_use": "T{{ tools | length }}",
        "rag": "R{{ documents | length }}",
    }
    source = transformers.AutoTokenizer.from_pretrained(models.smollm2())
    source.chat_template = named
    source.save_pretrained(tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    chat = [{"role": "user", "content": "x"}]
    for options in ({}, {"tools": TOOLS}, {"documents": DOCUMENTS}):
        assert ours.render_chat(chat, **options) == theirs.apply_chat_template(
            chat, tokenize=False, **options
        )
    expected = theirs.apply_chat_template(chat, chat_template="rag", documents=DOCUMENTS, tokenize=False)
    assert ours.render_chat(chat, template="rag", documents=DOCUMENTS) == expected == "R2"
    _rewrite_config(tmp_path, chat_template=[{"name": "a", "template": "A"}, {"name": "b", "template": "B"}])
    with pytest.raises(RequestError, match="several chat templates"):
        Tokenizer(tmp_path).render_chat(chat)
    assert Tokenizer(tmp_path).render_chat(chat, template="b") == "B"


def _rewrite_config(folder: Path, **changes: object) -> None:
    for path in (folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*")):
        path.unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))


GEMMA_LIKE = TEMPLATES["alternate"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (GEMMA_LIKE, [USER, USER], "roles must alternate"),
        (TEMPLATES["chatml"], [], "empty"),
        (TEMPLATES["chatml"], "hello", "list"),
        (TEMPLATES["chatml"], [{"content": "x"}], "role"),
        (TEMPLATES["chatml"], ["x"], r"messages\[0\]"),
        (TEMPLATES["chatml"], [{"role": "user", "content": 7}], r"messages\[0\].content"),
        (
            TEMPLATES["chatml"],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image_url",
        ),
        ("{% for x in %}", [USER], "cannot be read"),
        (
            "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
            [USER],
            "unsafe|refused",
        ),
        ("{% set _ = messages.append(1) %}", [USER], "refused"),
        ("{{ namespace(_x=1) }}", [USER], "underscore"),
        ("{{ 1 // 0 }}", [USER], "refused"),
        ("{{ messages[0].content + nothing }}", [USER], "nothing"),
    ],
)
def test_refusals_carry_the_reason(template, messages, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(template).render(messages)


@pytest.mark.parametrize("content", [None, [], [{"type": "text", "text": ""}]])
def test_content_that_is_missing_is_empty(content):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "42"},
    ]
    text = ChatTemplate(TEMPLATES["chatml"]).render(chat)
    assert "<|im_start|>assistant\n<|im_end|>" in text and "<|im_start|>tool\n42<|im_end|>" in text
    assert "None" not in text and "[" not in text


def test_objects_never_reach_a_template():
    class Dangerous:
        def write(self) -> str:
            raise AssertionError("a template called a method")

    text = ChatTemplate("{{ thing }}{{ messages[0].extra }}").render(
        [{**USER, "extra": Dangerous()}], variables={"thing": Dangerous()}
    )
    assert text == "<Dangerous><Dangerous>"
