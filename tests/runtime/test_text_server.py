"""What the server asks of a tokenizer: long texts, single tokens, special tokens that stay visible."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from enginewright.runtime.text import IncrementalDetokenizer, Tokenizer
from tests import models


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request) -> Tokenizer:
    return Tokenizer(getattr(models, request.param)())


def test_a_long_text_is_encoded_as_its_parts_would_be(tokenizer):
    words = "the quick brown fox don't naïve 日本語 👩‍👩‍👧 <|im_end|> <bos> 1234 \n\n".split(" ")
    text = " ".join(random.Random(0).choices(words, k=9000))
    assert len(text) > 20_000
    ids = tokenizer.encode(text)
    assert ids == tokenizer._tokenizer.encode(text).ids
    bare = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == bare


def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "naïve 日本語 👩‍👩‍👧 — x  y\tz <tag>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text


@pytest.mark.parametrize("text", ["", "a", " " * 5000, "a" * 5000, "日本" * 900, "<|im_end|>" * 300])
def test_no_text_has_fewer_tokens_than_is_said(tokenizer, text):
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_a_text_far_beyond_any_context_is_known_without_encoding():
    assert Tokenizer(models.smollm2()).fewest_tokens("word " * 1_000_000) > 8192


def test_chosen_special_tokens_stay_in_the_text():
    tokenizer = Tokenizer(models.smollm2())
    start, end = tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")
    assert start is not None and end is not None
    ids = [start, *tokenizer.encode("héllo"), end, *tokenizer.encode(" x")]
    for shown, expected in (
        (frozenset(), "héllo x"),
        (frozenset({start}), "<|im_start|>héllo x"),
        (frozenset({start, end}), "<|im_start|>héllo<|im_end|> x"),
    ):
        stream = IncrementalDetokenizer(tokenizer, shown=shown)
        assert "".join(stream.push([token]) for token in ids) + stream.finish() == expected


def test_nothing_is_said_of_a_tokenizer_that_may_shrink_a_text(tmp_path: Path):
    folder = Path(models.smollm2())
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    kept = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kept["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(kept), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.fewest_tokens(" " * 10**6) == 0 == len(tokenizer.encode(" " * 100))
