"""Constraints: what is drawn fits, ends when complete and has bounded whitespace; what cannot be compiled is refused."""

from __future__ import annotations

import json
import re
import sys
import threading

import pytest
import tokenizers

from enginewright.recipes.errors import RequestError
from enginewright.runtime import constraints
from enginewright.runtime.constraints import Constraint, ConstraintCompiler
from enginewright.runtime.loop import EngineLoop, LoopLimits
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.server.tools import FORMATS
from enginewright.runtime.text import _BYTE_OF
from tests.runtime.drafters import Relative, draft_with
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, drain

pytest.importorskip("llguidance")

EOS = 256
VOCAB = 300  # more than the tokenizer knows: a model's padding, which must never be drawn
PIECES = ['{"', '":', '",', '"}', "  ", "\n\n", "true", "123"]


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and some pieces of several: ids 0 … 255, the end, then the pieces."""
    ids = dict(_BYTE_OF)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.add_tokens(PIECES)
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer.to_str(), VOCAB, [EOS])


def make_loop(pages=(200, 200), executor=None, **limits):
    executor = executor or FakeExecutor(GROUPS, VOCAB)
    return EngineLoop(executor, GROUPS, pages, LoopLimits(200, **{"max_sequences": 8, **limits}), [EOS])


def answer(loop, compiler, tokenizer, constraint, seeds, **fields):
    """Requests under the constraint, and their texts."""
    grammar = compiler.compile(constraint)
    options = {"max_tokens": 150, "temperature": 1.0, **fields}
    requests = [
        Request([1, 2, seed], SamplingOptions(seed=seed, constraint=constraint, **options), grammar=grammar)
        for seed in seeds
    ]
    for request in requests:
        loop.submit(request)
    drain(loop)
    return requests, [tokenizer.decode(request.output) for request in requests]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "of": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["n"],
        },
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "of", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_object_fits_its_schema_and_ends(compiler, tokenizer, temperature):
    requests, texts = answer(
        make_loop(), compiler, tokenizer, Constraint.json_schema(SCHEMA), range(12), temperature=temperature
    )
    stopped = 0
    for request, text in zip(requests, texts, strict=True):
        assert request.error is None
        assert not re.search(r"\n[ \t]*\n|\n[ \t]{17}", text), "whitespace runs on"
        if request.finish_reason == "length":
            assert len(request.output) == 150
            continue
        stopped += 1
        value = json.loads(text)
        assert set(value) == {"name", "of", "tags"} and len(value["name"]) <= 6
        assert (
            0 <= value["of"]["n"] <= 99 and 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"x", "yy"}
        )
        assert text == text.strip() and request.output[-1] != EOS, "it ends with the value itself"
    assert stopped >= 6


def test_a_cut_value_says_so(compiler, tokenizer):
    for most in (1, 5):
        (request,), _ = answer(
            make_loop(), compiler, tokenizer, Constraint.json_schema(SCHEMA), [3], max_tokens=most
        )
        assert request.finish_reason == "length" and len(request.output) == most


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (Constraint.json_schema(True), lambda text: json.loads(text) is not Ellipsis),
        (Constraint.json_schema({"type": "integer"}), lambda text: re.fullmatch(r"-?\d+", text)),
        (Constraint.regex("(cat|dog)s? [0-9]{2}"), lambda text: re.fullmatch("(cat|dog)s? [0-9]{2}", text)),
        (Constraint.regex("ab*c|é+"), lambda text: re.fullmatch("ab*c|é+", text)),
        (Constraint.lark('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"(\()*x(\))*", text)),
    ],
    ids=["object", "anything", "integer", "regex", "open regex", "lark"],
)
def test_texts_fit(compiler, tokenizer, constraint, fits):
    requests, texts = answer(make_loop(), compiler, tokenizer, constraint, range(8), ignore_eos=True)
    ended = [text for request, text in zip(requests, texts, strict=True) if request.finish_reason == "stop"]
    assert ended and all(request.error is None for request in requests)
    for text in ended:
        assert fits(text), text


def test_a_choice_is_one_of_its_texts(compiler, tokenizer):
    texts = [
        "yes",
        "yesterday",
        'a "quoted" \\n',
        "x|y /*.+?[a]{2}",
        "two\nlines\t",
        "日本 é",
        "// %",
        "start: a",
        "<eos>",
    ]
    requests, said = answer(make_loop(), compiler, tokenizer, Constraint.choice(texts), range(60))
    assert {request.finish_reason for request in requests} == {"stop"}
    assert len(set(said)) > 5 and set(said) <= set(texts)
    for bad in ([], "yes", ["a", ""], ["a", 3]):
        with pytest.raises(RequestError, match="the choice cannot be used"):
            Constraint.choice(bad)


def test_a_constrained_request_has_one_answer(compiler, tokenizer):
    """Alone, in a crowd, preempted, chunked, and when steps are drawn twice because a neighbour fails."""
    fields = {"frequency_penalty": 0.3, "logprobs": 2, "max_tokens": 60}
    constraint = Constraint.json_schema(SCHEMA)
    alone = [
        answer(make_loop(prefix_cache=False), compiler, tokenizer, constraint, [seed], **fields)[0][0]
        for seed in range(6)
    ]
    crowds = [make_loop(), make_loop((30, 30), chunk_size=1), make_loop()]
    draw, calls = crowds[2]._drawer.draw, 0

    def fail_after(*arguments):
        nonlocal calls
        calls += 1
        result = draw(*arguments)
        if len(arguments[0]) > 1 and calls % 3 == 0:
            raise RuntimeError("injected")
        return result

    crowds[2]._drawer.draw = fail_after
    for loop in crowds:
        requests, _ = answer(loop, compiler, tokenizer, constraint, range(6), **fields)
        for request, expected in zip(requests, alone, strict=True):
            assert (request.output, request.finish_reason) == (expected.output, expected.finish_reason)
            assert (request.logprobs, request.top_logprobs) == (expected.logprobs, expected.top_logprobs)
    assert loop is crowds[2] and calls > 3


@pytest.mark.parametrize("likeness", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_a_draft_keeps_to_the_constraint_and_is_taken_back(compiler, tokenizer, likeness, tokens):
    """A second engine draws under the constraint too: where its function is the target's, everything it proposes is right."""
    constraints_ = [Constraint.json_schema(SCHEMA), Constraint.regex("(cat|dog)s? [0-9]{2}")]
    for constraint in constraints_:
        fields = {"frequency_penalty": 0.3, "max_tokens": 60}
        expected, _ = answer(make_loop(), compiler, tokenizer, constraint, range(5), **fields)
        loop = make_loop()
        drafter = draft_with(
            loop, Relative(GROUPS, likeness, vocab_size=VOCAB), (200, 200), tokens, max_context=200
        )
        requests, _ = answer(loop, compiler, tokenizer, constraint, range(5), **fields)
        for request, plain in zip(requests, expected, strict=True):
            assert (request.output, request.finish_reason) == (plain.output, plain.finish_reason)
            assert request.logprobs == plain.logprobs
        figures = loop.speculator.figures
        assert figures.drafted and not figures.failures and not drafter._drafts
        assert likeness < 1.0 or figures.accepted == figures.drafted


REFUSED = {
    "no type": Constraint.json_schema({"type": "objec"}),
    "items is no schema": Constraint.json_schema({"type": "array", "items": 3}),
    "unresolved reference": Constraint.json_schema({"$ref": "#/$defs/missing"}),
    "remote reference": Constraint.json_schema({"$ref": "https://example.com/schema.json"}),
    "unsupported keyword": Constraint.json_schema({"not": {"type": "string"}}),
    "unknown format": Constraint.json_schema({"type": "string", "format": "nonsense"}),
    "nothing fulfils it": Constraint.json_schema(False),
    "empty enum": Constraint.json_schema({"enum": []}),
    "options of its own": Constraint.json_schema({"x-guidance": {"lenient": True}, "not": {}}),
    "deep": Constraint.json_schema('{"type":"array","items":' * 150 + "{}" + "}" * 150),
    "too large": Constraint.json_schema(
        {"allOf": [{"anyOf": [{"type": "string", "minLength": i * j} for j in range(20)]} for i in range(6)]}
    ),
    "open bracket": Constraint.regex("("),
    "look-ahead": Constraint.regex("(?=a)b"),
    "matches nothing": Constraint.regex("[^\\s\\S]"),
    "unknown rule": Constraint.lark("start: missing"),
    "endless rule": Constraint.lark("start: start"),
    "no grammar": Constraint.lark("%import nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_reason(compiler, name):
    with pytest.raises(RequestError) as caught:
        compiler.compile(REFUSED[name])
    assert caught.value.found and "\n" not in str(caught.value.found)


def test_a_large_constraint_is_refused_before_it_is_compiled():
    with pytest.raises(RequestError, match="too long"):
        Constraint.json_schema({"enum": [f"{i:06d}" for i in range(100_000)]})


def test_a_limit_that_is_met_later_ends_the_request_with_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(constraints, "MOST_LEXER_STATES", 60)
    small = ConstraintCompiler(tokenizer.to_str(), VOCAB, [EOS])
    pattern = "(.*[ab].{12}){2}c"  # its states double with every character
    requests, _ = answer(make_loop(), small, tokenizer, Constraint.regex(pattern), range(4), ignore_eos=True)
    for request in requests:
        assert request.finish_reason == "error" and "constraint" in str(request.error)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x+x+)+y", "(a|aa)*(a|aa)*b"])
def test_patterns_that_make_other_matchers_slow_are_served(compiler, tokenizer, pattern):
    requests, texts = answer(
        make_loop(), compiler, tokenizer, Constraint.regex(pattern), range(3), max_tokens=40
    )
    for request, text in zip(requests, texts, strict=True):
        assert request.error is None
        assert request.finish_reason == "length" or re.fullmatch(pattern, text)


def test_a_recursive_schema_is_served(compiler, tokenizer):
    node = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    schema = Constraint.json_schema({"$defs": {"n": node}, "$ref": "#/$defs/n"})
    requests, texts = answer(make_loop(), compiler, tokenizer, schema, range(6))
    for request, text in zip(requests, texts, strict=True):
        assert request.finish_reason == "length" or set(json.loads(text)) <= {"c"}


def test_a_constraint_is_never_dropped(compiler):
    loop = make_loop()
    constraint = Constraint.regex("abc")
    with pytest.raises(RequestError, match="not compiled"):
        loop.submit(Request([1], SamplingOptions(constraint=constraint)))
    # Bias against the only token that may come, and a constraint whose one text is complete.
    banned = Request([1], SamplingOptions(constraint=constraint, logit_bias={ord("a"): -100}, max_tokens=9))
    beside = Request([1], SamplingOptions(max_tokens=9, ignore_eos=True))
    banned.grammar = compiler.compile(constraint)
    for request in (banned, beside):
        loop.submit(request)
    drain(loop)
    assert bytes(banned.output) == b"abc" and len(beside.output) == 9


def test_a_matcher_that_fails_ends_its_request_only(compiler):
    class Broken:
        def deep_copy(self):
            return self

        def unsafe_compute_mask_ptr(self, pointer, size):
            raise RuntimeError("a panic of the library")

        def is_error(self):
            return False

    loop = make_loop()
    constraint = Constraint.regex("abc")
    broken = Request([1], SamplingOptions(constraint=constraint, max_tokens=9))
    broken.grammar = compiler.compile(constraint)
    broken.grammar = type(broken.grammar)(Broken())
    beside = Request([1], SamplingOptions(max_tokens=9, ignore_eos=True))
    for request in (broken, beside):
        loop.submit(request)
    drain(loop)
    assert broken.finish_reason == "error" and "panic" in str(broken.error) and not broken.output
    assert beside.finish_reason == "length" and len(beside.output) == 9


def test_grammars_are_shared_and_forgotten(compiler, tokenizer):
    small = ConstraintCompiler(tokenizer.to_str(), VOCAB, [EOS])
    first = small.compile(Constraint.regex("a"))
    assert small.compile(Constraint.regex("a")) is first
    for count in range(40):
        small.compile(Constraint.regex(f"a{{{count + 1}}}"))
    assert small.compile(Constraint.regex("a")) is not first
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(compiler.compile(Constraint.regex("th+read"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result is results[0] for result in results)


def test_without_the_library_a_constraint_is_refused(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance"):
        ConstraintCompiler(tokenizer.to_str(), VOCAB, [EOS]).compile(Constraint.regex("a"))


REFERRING = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}, "then": {"$ref": "#"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer"}},
}


@pytest.mark.parametrize("form", [form for form in FORMATS if form.grammar([{"name": "go"}])])
@pytest.mark.parametrize("place", [0, 1])
def test_references_in_a_tools_parameters_begin_there(tokenizer, compiler, form, place):
    """Also where two tools bring the same `$id`."""
    functions = [{"name": "wait", "parameters": {"$id": "mine", "type": "object", "maxProperties": 0}}]
    functions.insert(place, {"name": "go", "parameters": {"$id": "mine", **REFERRING}})
    grammar = compiler.compile(Constraint.lark(form.grammar(functions)))

    def fits(arguments) -> bool:
        call = json.dumps({"name": "go", form.arguments: arguments})
        text = f"<tool_call>\n{call}\n</tool_call>" if form.name == "hermes" else call
        matcher = grammar.matcher()
        taken = [matcher.accept(token) for token in tokenizer.encode(text).ids]
        return all(error is None for _, error in taken) and taken[-1][0]

    assert fits({"at": 1}) and fits({"at": 1, "then": {"at": 2, "then": {"at": 3}}})
    assert not fits({"at": "x"}) and not fits({"at": 1, "then": {}})
    assert not fits({"at": 1, "then": {"name": "go", form.arguments: {"at": 1}}})
