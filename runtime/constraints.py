"""What a text must be: a JSON value, a match of a regular expression, a sentence of a grammar.

A `Constraint` is what the client gave. `ConstraintCompiler.compile` makes a `Grammar` of it, in the caller's thread, before the
request reaches the loop; the request's `Matcher` then says before each token which ids may come. The parsing is
llguidance's (https://github.com/guidance-ai/llguidance), which is imported when the first constraint is compiled.

It fails closed. What llguidance cannot compile, does not support, or finds too large is a RequestError with its reason, and
so is a constraint that no text fulfils; a matcher that runs into a limit later ends its request with an error. Limits are
counts (characters, states, parser items), so the same constraint is refused everywhere; one is compiled at a time.

Between the parts of a JSON value stands at most one space, or one newline with up to 16 spaces or tabs, and nothing before or
after it: a weak model cannot fill the rest of its tokens with whitespace. The request ends as soon as its value is
complete; where the text could also go on (a number, a repetition), the model ends it with an end-of-sequence token.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from enginewright.recipes.errors import RequestError

__all__ = ["Constraint", "ConstraintCompiler", "Grammar", "Matcher"]

MOST_CHARACTERS = 128 * 1024  # of a schema, a regular expression or a grammar
MOST_LEXER_STATES = 20_000  # of one grammar, 1 to 2 kB each
KEPT_GRAMMARS = 32  # compiled ones that a compiler remembers

_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,16})",
    "lenient": False,  # an unsupported keyword is an error
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Constraint:
    """A constraint as the client gave it: make one with the functions below. Nothing is compiled yet.

    `kind`: "json_schema", "json_object", "regex", "lark" or "choice". `text`: the schema as JSON, the expression, the grammar,
    the list of texts as JSON.
    """

    kind: str
    text: str = ""

    @classmethod
    def json_schema(cls, schema: Any) -> Constraint:
        """The text is a JSON value that fits `schema`: a dict, a boolean, or the JSON text of one."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError("the JSON schema is not JSON", found=str(error)[:200]) from None
        if not isinstance(schema, (dict, bool)):
            raise RequestError(
                "the JSON schema cannot be used", found=repr(schema)[:80], expected="an object or a boolean"
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("the JSON schema cannot be written as JSON", found=str(error)[:200]) from None
        return cls("json_schema", _bounded("the JSON schema", text))

    @classmethod
    def json_object(cls) -> Constraint:
        """The text is a JSON object, whatever is in it."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """The whole text matches `pattern` (the syntax of Rust's regex crate, without look-around)."""
        return cls("regex", _bounded("the regular expression", pattern))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """The text is a sentence of `grammar`, in llguidance's variant of Lark's notation."""
        return cls("lark", _bounded("the grammar", grammar))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """The text is one of `texts`."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(
                "the choice cannot be used",
                found=repr(texts)[:80],
                expected="a list of texts that are not empty",
            )
        return cls("choice", _bounded("the choice", json.dumps(list(texts), ensure_ascii=False)))


def _bounded(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must be a text that is not empty", found=repr(text)[:80])
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            f"{name} is too long", found=f"{len(text):,} characters", expected=f"at most {MOST_CHARACTERS:,}"
        )
    return text


class ConstraintCompiler:
    """Compiles constraints for one tokenizer. Safe from any thread.

    `tokenizer`: the text of tokenizer.json. `vocab_size`: the model's, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._lock = threading.Lock()
        self._tokenizer_text = tokenizer
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._tokenizer: Any = None
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of `constraint`; RequestError says why there is none."""
        library = _library()
        with self._lock:
            grammar = self._kept.pop(constraint, None)
            if grammar is None:
                grammar = Grammar(self._compile(library, constraint))
            self._kept[constraint] = grammar
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, library: Any, constraint: Constraint) -> Any:
        name = _NAMES[constraint.kind]
        if self._tokenizer is None:
            self._tokenizer = _guarded(
                "the tokenizer cannot be used for constraints",
                lambda: library.LLTokenizer(
                    self._tokenizer_text, n_vocab=self._vocab_size, eos_token=self._eos or None
                ),
            )
        limits = library.LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)

        def build() -> Any:
            text = _grammar_text(library.LLMatcher, constraint)
            matcher = library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            if not matcher.is_error():
                # The first step's mask, on a copy: what fails only once it is used, and what nothing fulfils.
                trial = matcher.deep_copy()
                if not any(trial.compute_bitmask()):
                    raise ValueError("no text fulfils it")
                if trial.is_error():
                    matcher = trial
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            return matcher

        return _guarded(f"{name} cannot be used", build)


class Grammar:
    """A compiled constraint. Several requests may share it."""

    def __init__(self, start: Any) -> None:
        self._start = start  # an LLMatcher before the first token; only copies of it go on

    def matcher(self) -> Matcher:
        """Return a matcher at the start of a text."""
        return Matcher(self._start.deep_copy())


class Matcher:
    """Where one text stands in its grammar. Follows the request's tokens, back as well as forth."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._taken = 0  # generated tokens that it has been given

    def follow(self, tokens: Sequence[int], prompt_length: int) -> RequestError | None:
        """Stand after all generated tokens: a token that was drawn but never committed is taken back."""
        ahead = self._taken - (len(tokens) - prompt_length)
        if not ahead:
            return None
        if ahead > 0:
            return self._tell(lambda: self._matcher.rollback(ahead), -ahead)
        return self._tell(lambda: self._matcher.consume_tokens(list(tokens[ahead:])), -ahead)

    def fill(self, mask: np.ndarray) -> RequestError | None:
        """Set the bits of the ids that may come next in `mask`, uint32 [words]."""

        def compute() -> bool:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return bool(mask.any())

        return self._tell(compute, 0)

    def accept(self, token: int) -> tuple[bool, RequestError | None]:
        """Take the next token; return whether the text is complete with it."""
        error = self._tell(lambda: self._matcher.consume_token(token), 1)
        return error is None and self._matcher.is_stopped(), error

    def _tell(self, action: Callable[[], bool], tokens: int) -> RequestError | None:
        try:
            fine = _guarded("the constraint could not be followed", action)
            if fine and not self._matcher.is_error():
                self._taken += tokens
                return None
            reason = self._matcher.get_error() or "nothing may follow"
        except RequestError as error:
            return error
        return RequestError("the constraint could not be followed", found=_line(reason))


_NAMES = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the regular expression",
    "lark": "the grammar",
    "choice": "the choice",
}


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            "constraints need llguidance, which is not installed", action="pip install llguidance"
        ) from None


def _grammar_text(matcher: Any, constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form."""
    text: str
    if constraint.kind == "regex":
        text = matcher.grammar_from_regex(constraint.text)
    elif constraint.kind == "lark":
        text = matcher.grammar_from_lark(constraint.text)
    elif constraint.kind == "choice":
        literals = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.text))
        text = matcher.grammar_from_lark(f"start: {' | '.join(literals)}")
    else:
        schema = json.loads(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
        if schema is False:
            raise ValueError("no value fulfils it")
        schema = {} if schema is True else schema
        if "x-guidance" in schema:
            raise ValueError("x-guidance is not supported")
        text = matcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    return text


def _guarded(message: str, action: Callable[[], Result]) -> Result:
    """Return what `action` does; any failure, a panic of the library included, is a RequestError."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RequestError(message, found=_line(str(error))) from error


def _line(text: str) -> str:
    """Return a library's message on one line, without the text around it that it quotes."""
    line = " ".join(text.split("\n<state>")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."
