"""Token ids, decoding and streaming against transformers, on the two real tokenisers and others."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from enginewright.runtime.stop import StopMatcher
from enginewright.runtime.text import IncrementalDetokenizer, Tokenizer
from tests import models

transformers = pytest.importorskip("transformers")

STRINGS = 10_000

_SCRIPTS = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x10000, 0x1FFFF), (0xE000, 0xF8FF), (0x300, 0x36F),
]  # fmt: skip
_WORDS = [
    "the",
    "of",
    "and",
    "model",
    "don't",
    "they've",
    "I'm",
    "naïve",
    "Straße",
    "façade",
    "日本語",
    "こんにちは",
    "한국어",
    "Привет",
    "мир",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "ไทย",
    "👩\u200d👩\u200d👧",
    "👨\u200d💻",
    "🇩🇪",
    "❤️",
    "👍🏽",
    "é",
    "é",
    "def",
    "f(x):",
    "return",
    "x**2",
    "#",
    "ok",
    "!=",
    "<=",
    ">>>",
    "{'a':",
    "[1,2]}",
    "3.14159",
    "1e-9",
    "0xFF",
    "2026-11-29",
    "http://x.y/z?q=1&r=2",
    "a_b",
    "CamelCase",
]
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<pad>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<0x0A>",
    "<0xE4>",
    "▁",
    "▁▁",
    "Ġ",
]
_SPACES = [
    "  ",
    "   ",
    "\t",
    "\n\n",
    " \n ",
    "\r\n",
    "\u00a0",
    "\u2003",
    "\u200b",
    " " * 17,
    "\n" * 9,
    "\t\t    ",
]
_CONTROL = [
    "\x00",
    "\x01",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "\u2028",
    "\ufeff",
    "\ufffd",
    "\ufffe",
    "\u202e",
]


def generated_strings(count: int, seed: int = 0) -> list[str]:
    """Scripts, emoji, joiners, code, special tokens inside, runs of whitespace, control characters, byte noise."""
    rng = random.Random(seed)

    def characters() -> str:
        low, high = rng.choice(_SCRIPTS)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8)))

    def noise() -> str:
        return rng.randbytes(rng.randint(1, 12)).decode("utf-8", rng.choice(["replace", "ignore"]))

    makers = [
        characters,
        characters,
        noise,
        lambda: rng.choice(_WORDS),
        lambda: rng.choice(_WORDS) + " ",
        lambda: " " + rng.choice(_WORDS),
        lambda: rng.choice(_SPECIAL),
        lambda: rng.choice(_SPACES),
        lambda: rng.choice(_CONTROL),
    ]
    edges = ["", " ", "\n", "a", " a", "a ", "\ufffd", "👩‍👩‍👧", "▁▁x", "<|im_end|>", "<bos><bos>"]
    return edges + [
        "".join(rng.choice(makers)() for _ in range(rng.randint(1, 8))) for _ in range(count - len(edges))
    ]


def _folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if name == "gguf":
        source = models.smollm2_gguf()
        folder = tmp_path_factory.mktemp("gguf")
        loaded = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    else:
        source = getattr(models, name)()
        folder = tmp_path_factory.mktemp(name)
        loaded = transformers.AutoTokenizer.from_pretrained(source)
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "gguf"])
def pair(request, tmp_path_factory):
    """(transformers' tokenizer, ours), from a folder saved as a build saves it."""
    folder = _folder(request.param, tmp_path_factory)
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)


def test_ids_and_text_equal_transformers(pair):
    theirs, ours = pair
    texts = generated_strings(STRINGS)
    expected = theirs(texts)["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert ours.encode(text) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), ids
    for text in texts[:500]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_stream_equals_decode_for_texts(pair):
    _, ours = pair
    for text in generated_strings(2000, seed=1):
        assert _streamed(ours, ours.encode(text)) == ours.decode(ours.encode(text)), repr(text)


def test_stream_equals_decode_for_any_ids(pair):
    _, ours = pair
    rng = random.Random(2)
    bytes_like = [i for i in range(ours.vocab_size) if (ours.piece(i, False) or "").startswith("<0x")]
    pools = [range(ours.vocab_size + 40), range(300), bytes_like or range(300), bytes_like[100:] or range(20)]
    for case in range(3000):
        pool = pools[case % len(pools)]
        ids = [rng.choice(pool if rng.random() < 0.8 else pools[0]) for _ in range(rng.randint(1, 12))]
        for skip in (True, False):
            assert _streamed(ours, ids, skip) == ours.decode(ids, skip), (ids, skip)


def _streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    stream = IncrementalDetokenizer(tokenizer, skip)
    return "".join([stream.push([i]) for i in ids]) + stream.finish()


@functools.cache
def real(name: str) -> Tokenizer:
    return Tokenizer(getattr(models, name)())


def test_characters_across_tokens_are_held_back_whole():
    ours = real("smollm2")
    stream = IncrementalDetokenizer(ours)
    text = "👩‍👩‍👧 日本語 ñ — x"
    deltas = [stream.push([i]) for i in ours.encode(text)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    cut = ours.encode("👩")[:-1]
    stream = IncrementalDetokenizer(ours)
    assert stream.push(cut) == "" and stream.finish() == "\ufffd" == ours.decode(cut)


def test_a_chain_of_invalid_bytes_does_not_stall():
    ours = real("gemma3")
    invalid = ours._tokenizer.token_to_id("<0xFF>")
    stream = IncrementalDetokenizer(ours)
    assert [stream.push([invalid]) for _ in range(20)] == ["\ufffd"] * 20
    lead, middle, end = (ours._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é字".encode()[2:5])
    a = ours.encode("a", add_special_tokens=False)
    stream = IncrementalDetokenizer(ours)
    assert stream.push([lead, middle]) == ""
    assert stream.push([end]) == ""  # a later invalid byte would still spoil the run
    assert stream.push(a) == "字a"


@pytest.mark.parametrize("kind", ["wordpiece", "metaspace", "llama"])
def test_other_decoders_stream_alike(kind, tmp_path):
    import tokenizers
    from tokenizers import decoders
    from tokenizers import models as tokenizer_models

    words = [
        "[UNK]",
        "▁a",
        "▁b",
        "c",
        ".",
        "##d",
        "'",
        "n't",
        "x",
        "!",
        "▁",
        "<0xE5>",
        "<0xAD>",
        "<0x97>",
        "<0xFF>",
        "s",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizer_models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = {
        "wordpiece": decoders.WordPiece(cleanup=False),
        "metaspace": decoders.Metaspace(),
        "llama": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    }[kind]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "clean_up_tokenization_spaces": kind == "wordpiece",
        "tokenizer_class": "TokenizersBackend",
        "unk_token": "[UNK]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    ours = Tokenizer(tmp_path / "saved")
    rng = random.Random(3)
    for _ in range(1500):
        ids = [rng.randrange(len(words)) for _ in range(rng.randint(1, 9))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids
        assert _streamed(ours, ids) == ours.decode(ids), ids


# -------------------------------------------------------------------------------------------- stop strings


def _stopped(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include)
    shown = "".join([matcher.push(piece) for piece in pieces])
    return shown + matcher.finish(), matcher.stopped


@pytest.mark.parametrize(
    ("stops", "shown", "included"),
    [
        (["FGH"], "ABCDE", "ABCDEFGH"),
        (["L"], "ABCDEFGHIJK", "ABCDEFGHIJKL"),
        (["DEFGHIJ"], "ABC", "ABCDEFGHIJ"),
        (["DEFGHIJ", "FGH"], "ABCDE", "ABCDEFGH"),  # complete first
        (["CDE", "DE"], "AB", "ABCDE"),  # complete together: the longer
        (["KLM"], "ABCDEFGHIJKL", "ABCDEFGHIJKL"),  # begins, never completes: released at the end
        ([], "ABCDEFGHIJKL", "ABCDEFGHIJKL"),
    ],
)
def test_stop_strings_across_tokens(stops, shown, included):
    text = "ABCDEFGHIJKL"
    for pieces in (["ABC", "DEF", "GHI", "JKL"], list(text), [text], ["A", "BCDEFG", "HIJKL"]):
        assert _stopped(stops, pieces)[0] == shown
        assert _stopped(stops, pieces, include=True)[0] == included


def test_nothing_of_a_stop_string_is_shown_before_it_completes():
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("abS", "T", "O", "xS", "TOP!")] == ["ab", "", "", "STOx", ""]
    assert matcher.stopped and matcher.finish() == ""
    assert _stopped(["\u200d"], ["👩\u200d👧"]) == ("👩", True)
