"""From `speculate=` to a drafter: what fits is loaded, what does not is refused with the reason; with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import enginewright
from enginewright.backends.artifact import Artifact
from enginewright.recipes.errors import ArtifactError, EnginewrightError, InputError
from enginewright.runtime import drafters
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.engine import Engine
from enginewright.runtime.vocabulary import check_vocabulary

WORDS = {"a": 0, "b": 1, "ab": 2, "c": 3}


def bpe(
    vocab: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None
) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab or WORDS, [("a", "b")] if merges is None else merges)
    )


def engine(
    folder: Path, tokenizer: tokenizers.Tokenizer | None, vocab_size: int = 8, **model: Any
) -> Artifact:
    """An engine of which only manifest and tokenizer exist."""
    folder.mkdir()
    files: dict[str, Any] = {}
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        files["tokenizer.json"] = {"bytes": 0, "sha256": str(folder)}
    return Artifact(folder, {"model": {"vocab_size": vocab_size, "max_context": 32, **model}, "files": files})


@pytest.fixture
def target(tmp_path: Path) -> Artifact:
    return engine(tmp_path / "target", bpe())


def test_equal_ids_fit_whatever_stands_around_them(target, tmp_path):
    other = bpe()
    other.post_processor = tokenizers.processors.TemplateProcessing("a $A", special_tokens=[("a", 0)])
    other.enable_truncation(5)
    draft = engine(tmp_path / "draft", other, eos_token_ids=[7], max_context=9)
    (draft.path / "chat_template.jinja").write_text("{{ messages }}")
    check_vocabulary(target, draft)
    assert drafters.check(target, draft) is draft
    check_vocabulary(engine(tmp_path / "none", None), engine(tmp_path / "neither", None))


def added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


MISFITS = {
    "fewer tokens": ({"tokenizer": bpe(), "vocab_size": 6}, "a vocabulary of 6 tokens"),
    "swapped": ({"tokenizer": bpe({"a": 1, "b": 0, "ab": 2, "c": 3})}, "token 0 is 'b'"),
    "another word": ({"tokenizer": bpe({"a": 0, "b": 1, "ab": 2, "d": 3})}, "token 3 is 'd'"),
    "an added token": ({"tokenizer": added(bpe())}, "token 4 is '<end>'"),
    "other merges": ({"tokenizer": bpe(merges=[])}, "other merges"),
    "no tokenizer": ({"tokenizer": None}, "it has no tokenizer"),
    "another kind": (
        {"tokenizer": tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0), ("b", -1.0)], 0))},
        "token 2 is None",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_other_ids_are_refused_with_the_first_difference(target, tmp_path, name):
    fields, found = MISFITS[name]
    with pytest.raises(InputError, match="cannot draft for this one") as caught:
        drafters.check(target, engine(tmp_path / "draft", **fields))
    assert found in str(caught.value.found)


@pytest.mark.parametrize(
    ("how", "fields", "message"),
    [
        ("ngrma", {}, "did you mean ngram"),
        ("no/such/folder", {}, "no such drafter"),
        (Path("nowhere"), {}, "or the folder of an engine"),
        ("ngram", {"draft_tokens": 0}, "draft_tokens"),
        ("ngram", {"draft_tokens": True}, "draft_tokens"),
        ("ngram", {"draft_tokens": "4"}, "draft_tokens"),
        ("ngram", {"draft_rule": "maybe"}, "draft_rule"),
        ("ngram", {"cache_bytes": 10}, "draft_cache_bytes"),
        (None, {"cache_bytes": 10}, "draft_cache_bytes"),
    ],
)
def test_what_cannot_be_used_is_refused(target, how, fields, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        drafters.check(target, how, **fields)


def test_a_folder_that_is_no_engine_is_refused(target, tmp_path):
    with pytest.raises(EnginewrightError):
        drafters.check(target, tmp_path)
    with pytest.raises(ArtifactError, match="context"):
        drafters.check(target, engine(tmp_path / "draft", bpe(), max_context=None))
    assert drafters.check(target, "ngram") == "ngram" and drafters.check(target, None) is None


# ------------------------------------------------------------------------------------------------- real engines

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3, 4,"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": {"temperature": 0.8, "seed": [3, 4, 5, 6], "top_p": 0.9, "logprobs": 2},
    "penalised": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "logit_bias": {28: -100},
        "min_tokens": 20,
    },
    "JSON": {"constraint": Constraint.json_schema(SCHEMA), "temperature": 0.8, "seed": 1},
}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[Any, ...]]]:
    engines = pytest.importorskip("tests.engines")
    with engines.load("smollm2", "int4", threads=1) as engine:
        return {name: answers(engine, name) for name in OPTIONS}


def answers(engine: Engine, name: str) -> list[tuple[Any, ...]]:
    """What the engine says to all prompts together, bit for bit."""
    return [
        (c.token_ids, np.array(c.logprobs).tobytes(), c.top_logprobs, c.text, c.finish_reason)
        for c in engine.generate(PROMPTS, max_tokens=36, **OPTIONS[name])
    ]


def drafter_of(engine: Engine) -> EngineDrafter:
    assert engine.loop.speculator is not None
    drafter = engine.loop.speculator.drafter
    assert isinstance(drafter, EngineDrafter)
    return drafter


@pytest.mark.parametrize("recipe", ["int4", "bf16"])
def test_an_engine_drafts_for_another(plain, recipe):
    """The engine itself, of whose tokens all are accepted, and its bf16 original, of whose most are."""
    engines = pytest.importorskip("tests.engines")
    draft = engines.built("smollm2", recipe)
    with engines.load("smollm2", "int4", threads=1, speculate=draft, draft_tokens=4) as engine:
        drafter = drafter_of(engine)
        drafter.executor.fill_pool(float("nan"))  # type: ignore[attr-defined]
        for name in OPTIONS:
            assert answers(engine, name) == plain[name], name
            drafter.check_invariants()
            assert engine.loop.pool.idle and drafter.own_pool.idle and not drafter._drafts
        assert engine.loop.speculator is not None
        figures = engine.loop.speculator.figures
        assert figures.drafted > 300 and not figures.failures
        if recipe == "int4":
            assert figures.acceptance_rate == 1.0
        else:
            assert 0.3 < figures.acceptance_rate < 1.0
        memory, seen = engine.memory(), engine.loop.statistics()
        assert memory["draft_weights"] > 0 and memory["draft_pool"] == drafter.memory()["pool"]
        (pages,) = seen.draft_pages
        assert pages.used == 0 and pages.cached and pages.total == seen.pages[0].total
        executor = drafter.executor
    with pytest.raises(Exception, match="closed"):
        executor.create_pool([1])


def test_a_draft_has_the_cache_that_it_is_given(plain):
    engines = pytest.importorskip("tests.engines")
    draft = engines.built("smollm2", "int4")
    options = {"threads": 1, "speculate": draft, "draft_tokens": 3, "cache_tokens": 640, "weights": "copy"}
    with engines.load("smollm2", "int4", **options) as engine:
        assert drafter_of(engine).own_pool.capacity == engine.loop.pool.capacity == (40,)
    with engines.load("smollm2", "int4", **options, draft_cache_bytes=2 << 20) as engine:
        drafter = drafter_of(engine)
        page = drafter.executor.kv_groups[0].page_bytes
        assert drafter.own_pool.capacity == ((2 << 20) // page,)
        assert answers(engine, "greedy") == plain["greedy"]  # it has room for one or two of them
        assert engine.loop.speculator is not None and engine.loop.speculator.figures.drafted
        drafter.check_invariants()


def test_another_vocabulary_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    engines = pytest.importorskip("tests.engines")
    folder = engines.built("smollm2", "int4")
    manifest = json.loads((folder / "engine.json").read_text())
    other = Artifact(tmp_path, {**manifest, "model": {**manifest["model"], "vocab_size": 49153}})
    monkeypatch.setattr("enginewright.runtime.drafters.open_engine", lambda path: other)
    monkeypatch.setattr("enginewright.runtime.engine.get_backend", lambda name: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match=r"(?s)cannot draft.*49153.*49152"):
        enginewright.load(folder, speculate=tmp_path)
