"""Text to token ids and back, on the `tokenizers` library and the tokenizer files in the engine.

`tokenizer.json` is taken as it stands: it was saved from the source model's own tokenizer, with everything
that transformers adds to it at load (special tokens, begin-of-sequence rule) already inside.
`tokenizer_config.json` gives the names of the special tokens and how decoding cleans up.

A stream of tokens cannot be decoded token by token: characters span tokens, and some decoders look back.
`IncrementalDetokenizer` gives text as soon as no later token can change it, so that its pieces always add up to
`decode` of all ids.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from enginewright.recipes.errors import ArtifactError, RequestError

from .chat_template import ChatTemplate

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

_INVALID = "\ufffd"
_LONG_TEXT = 20_000  # characters; encoding that many takes about 10 ms
_CLEAN_UP = (  # transformers' clean_up_tokenization, in its order
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Tokenizer:
    """The tokenizer of one engine (or of a model folder saved by transformers).

    `special_tokens` maps bos_token, eos_token, … to their text; `chat_template` is None for a base model.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _read_config(folder / "tokenizer_config.json")
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"cannot read the tokenizer in {folder}", found=str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        self.special_tokens = _special_tokens(config)
        self._cleans_up = bool(config.get("clean_up_tokenization_spaces", False)) and (
            not isinstance(self._tokenizer.model, tokenizers.models.BPE)
            or bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"))
        )
        decoder = self._tokenizer.decoder
        self._decoder = json.loads(decoder.__getstate__()) if decoder is not None else None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {i: token.content for i, token in added.items() if token.special}
        self._ids_of_special = {content: i for i, content in self._special_ids.items()}
        self._pieces: dict[int, str | None] = {}
        self._stream_kind = _choose_stream(self._decoder, self._cleans_up)
        templates = _chat_templates(folder, config)
        self.chat_template = ChatTemplate(templates, self.special_tokens) if templates else None

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included (the model may have more)."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """Return the text of tokenizer.json, as this tokenizer uses it."""
        return self._tokenizer.to_str()

    @property
    def hidden_ids(self) -> frozenset[int]:
        """The special tokens, which decoding leaves out."""
        return frozenset(self._special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` adds what the model puts around a text, such as `<bos>`.

        A long text is encoded without holding Python's lock, so that other threads go on.
        """
        try:
            if len(text) < _LONG_TEXT:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode", found=str(error)) from error

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without encoding it; 0 where nothing is known."""
        return len(text) // self._longest_piece if self._longest_piece else 0

    @functools.cached_property
    def _longest_piece(self) -> int:
        """The most characters that one token can stand for; 0 where text may shrink before it is cut into tokens."""
        inner = self._tokenizer
        added = inner.get_added_tokens_decoder().values()
        if inner.normalizer is not None or self._stream_kind is not _ByteLevelStream:
            return 0
        if any(token.lstrip or token.rstrip for token in added):
            return 0
        return max(len(piece) for piece in inner.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids that the tokenizer does not know add nothing."""
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if self._cleans_up:
            for old, new in _CLEAN_UP:
                text = text.replace(old, new)
        return text

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that `text` spells, if it does."""
        return self._ids_of_special.get(text)

    def render_chat(self, messages: Any, **options: Any) -> str:
        """Return the prompt text of a conversation; options as in `ChatTemplate.render`.

        The text carries its own special tokens: encode it with `add_special_tokens=False`.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template",
                action="send a plain prompt instead, or use a chat model",
            )
        return self.chat_template.render(messages, **options)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` alone stands for: part of a character, perhaps; a special token's own text."""
        piece = self.piece(token, False)
        if piece is None:
            return b""
        if token in self._special_ids or self._stream_kind is _WholeStream:
            return piece.encode()
        if self._stream_kind is _ByteLevelStream:
            try:
                return bytes([_BYTE_OF[character] for character in piece])
            except KeyError:
                return piece.encode()
        byte = _byte(piece[3:5]) if len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">" else None
        for step in (self._decoder or {})["decoders"]:
            if step["type"] == "Replace":
                piece = piece.replace(step["pattern"]["String"], step["content"])
        return bytes([byte]) if byte is not None else piece.encode()

    def piece(self, token: int, skip_special_tokens: bool) -> str | None:
        """Return how the vocabulary spells `token`; None for one that decoding leaves out."""
        try:
            piece = self._pieces[token]
        except KeyError:
            piece = self._pieces[token] = self._tokenizer.id_to_token(token)
        return None if skip_special_tokens and token in self._special_ids else piece


class _Stream(Protocol):
    """Turns tokens into text that later tokens cannot change. `held`: whole characters that it has, and holds back."""

    @property
    def held(self) -> str: ...

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Decodes a stream of tokens: what `push` and `finish` return adds up to `tokenizer.decode` of all tokens.

    Text is held back only while a later token may change it: an unfinished character, or, for byte-fallback
    tokens (`<0xE4>`), the run of bytes, whose decoder turns the whole run into U+FFFD when any part of it is
    not UTF-8. A run that is invalid already is given out at once. Special tokens are left out, but for those in `shown`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        self._hidden = tokenizer.hidden_ids - shown if skip_special_tokens and shown else None
        skips = skip_special_tokens and self._hidden is None
        self._stream: _Stream = tokenizer._stream_kind(tokenizer, skips)

    def push(self, tokens: Sequence[int]) -> str:
        """Add `tokens`; return the text that has become certain."""
        push = self._stream.push
        if self._hidden is not None:
            tokens = [token for token in tokens if token not in self._hidden]
        return "".join([push(token) for token in tokens])

    @property
    def held(self) -> str:
        """Whole characters that are held back: the next token's text comes after them."""
        return self._stream.held

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        return self._stream.finish()


# ------------------------------------------------------------------------------------------------- streams


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte (`bytes_to_unicode` in its encoder.py)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**alphabet, **{chr(256 + place): byte for place, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()


class _ByteLevelStream:
    """`ByteLevel`: pieces spell bytes in GPT-2's alphabet; the bytes are decoded as one string."""

    held = ""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        piece = self._tokenizer.piece(token, self._skip)
        if piece is None:
            return ""
        try:
            data = bytes([_BYTE_OF[character] for character in piece])
        except KeyError:  # an added token outside the alphabet stands for itself
            data = piece.encode()
        return self._decode(data)

    def finish(self) -> str:
        return self._decode(b"", True)


class _ByteFallbackStream:
    """A sequence of Replace, ByteFallback, Fuse and a Strip at the start, as SentencePiece models have it."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        decoders = (tokenizer._decoder or {})["decoders"]
        steps = {step["type"]: step for step in decoders}
        self._replace = [
            (step["pattern"]["String"], step["content"]) for step in decoders if step["type"] == "Replace"
        ]
        self._has_bytes = "ByteFallback" in steps
        strip = steps.get("Strip")
        self._stripped: str
        self._to_strip: int
        self._stripped, self._to_strip = (strip["content"], strip["start"]) if strip else ("", 0)
        self._run = 0  # bytes held back
        self._text = ""  # what they spell so far
        self._invalid = False  # the run can no longer become valid; its bytes are given out one by one
        self._decode = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token: int) -> str:
        piece = self._tokenizer.piece(token, self._skip)
        if piece is None:
            return ""
        for old, new in self._replace:
            if old in piece:
                piece = piece.replace(old, new)
        if self._has_bytes and len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">":
            byte = _byte(piece[3:5])
            if byte is not None:
                return self._strip(self._push_byte(byte))
        return self._strip(self._end_run() + piece) if self._run or self._invalid else self._strip(piece)

    @property
    def held(self) -> str:
        return "" if self._invalid else self._text

    def _push_byte(self, byte: int) -> str:
        if self._invalid:
            return _INVALID
        self._run += 1
        try:
            self._text += self._decode.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._invalid = True
            run, self._run = self._run, 0
            return _INVALID * run
        return ""

    def _end_run(self) -> str:
        try:
            self._decode.decode(b"", True)
            text = "" if self._invalid else self._text
        except UnicodeDecodeError:
            text = _INVALID * self._run
        self._decode.reset()
        self._run, self._text, self._invalid = 0, "", False
        return text

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._stripped):
                self._to_strip = 0
                break
            text = text[len(self._stripped) :]
            self._to_strip -= 1
        return text

    def finish(self) -> str:
        return self._strip(self._end_run())


class _WholeStream:
    """Any other decoder: everything is decoded again at each token.

    Where spaces are cleaned up, the last two words are held back, for the patterns reach no further.
    """

    held = ""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, self._skip)
        if self._tokenizer._cleans_up:
            text = text[: max(text.rfind(" ", 0, max(text.rfind(" "), 0)), 0)]
        return self._give(text.rstrip(_INVALID))

    def finish(self) -> str:
        return self._give(self._tokenizer.decode(self._ids, self._skip))

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given += new
        return new


def _byte(digits: str) -> int | None:
    try:
        return int(digits, 16) if digits.isascii() and digits.isalnum() else None
    except ValueError:
        return None


def _choose_stream(decoder: dict[str, Any] | None, cleans_up: bool) -> type[Any]:
    if decoder is None or cleans_up:
        return _WholeStream
    if decoder["type"] == "ByteLevel":
        return _ByteLevelStream
    if decoder["type"] == "Sequence":
        kinds = [step["type"] for step in decoder["decoders"]]
        body = [kind for kind in kinds if kind != "Replace"]
        known = body in (
            ["ByteFallback", "Fuse"],
            ["ByteFallback", "Fuse", "Strip"],
            ["Fuse"],
            ["Fuse", "Strip"],
        )
        replaces_first = kinds == ["Replace"] * (len(kinds) - len(body)) + body
        literal = all(
            "String" in step["pattern"] for step in decoder["decoders"] if step["type"] == "Replace"
        )
        plain_strip = all(
            step["stop"] == 0 and len(step["content"]) == 1
            for step in decoder["decoders"]
            if step["type"] == "Strip"
        )
        if known and replaces_first and literal and plain_strip:
            return _ByteFallbackStream
    return _WholeStream


# --------------------------------------------------------------------------------------------------- files


def _read_config(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _chat_templates(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    main = folder / "chat_template.jinja"
    if main.is_file():
        default = main.read_text(encoding="utf-8")
        if not more:
            return default
        return {"default": default, **{path.stem: path.read_text(encoding="utf-8") for path in more}}
    inline = config.get("chat_template")
    if isinstance(inline, list):
        return {entry["name"]: entry["template"] for entry in inline}
    return inline
