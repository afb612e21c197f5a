"""Which engine may draft for which: what does not fit is refused with the reason, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from enginewright.backends.artifact import Artifact
from enginewright.recipes.errors import ArtifactError, EnginewrightError, InputError
from enginewright.runtime import drafters
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
        (Path("nowhere"), {}, "or the folder of another engine"),
        (7, {}, "speculate cannot be used"),
        ("ngram", {"cache_bytes": 10}, "no cache of its own"),
        (None, {"cache_bytes": 10}, "draft_cache_bytes means nothing"),
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
