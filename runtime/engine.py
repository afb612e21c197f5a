"""The engine as a Python object: load a folder, generate, stream, or score given tokens.

    with load("engines/smollm2-135m-int4") as engine:
        for completion in engine.generate(["The capital of France is", "2 + 2 ="], max_tokens=16):
            print(completion.text)

Everything goes through one `EngineLoop`: prompts given together are batched, and prompts given from several threads
as well.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

import numpy as np

from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.backends.base import Executor
from enginewright.recipes.errors import InputError, RequestError, near_matches

from . import drafters
from .answer import Answer, TextDelta
from .constraints import Constraint, ConstraintCompiler, Grammar
from .draft_engine import EngineDrafter
from .facts import cache_identity, end_tokens, longest_context
from .first_load import require_goldens
from .loop import FINISH_ERROR, FINISH_STOP, EngineLoop, LoopLimits
from .memory import DEFAULT_CACHE_BYTES, longest_sequence, machine_memory, page_bytes, plan_pages
from .memory import cache_tokens as tokens_held
from .pages import GroupSpec
from .policies import get_policy
from .request import Completion, Request, SamplingOptions, check_token_ids, derived_seed
from .text import Tokenizer

__all__ = ["Engine", "TextDelta", "load", "sampling_options"]

Prompts = str | Sequence[Any]

_log = logging.getLogger(__name__)
MOST_CHOICES = 128  # answers to one prompt
SCORED_ROWS = 128  # logit rows of a step when scoring; with a vocabulary of 262,144 a row takes 1 MiB


def load(
    path: str | os.PathLike[str] | Artifact,
    threads: int | None = None,
    weights: str = "mmap",
    *,
    check: bool = False,
    max_sequences: int = 32,
    token_budget: int = 512,
    chunk_size: int | None = None,
    cache_tokens: int | None = None,
    cache_bytes: int | None = None,
    max_context: int | None = None,
    policy: str = "fair",
    prefix_cache: bool = True,
    speculate: str | os.PathLike[str] | None = None,
    draft_tokens: int | str = "auto",
    draft_rule: str = "same",
    draft_cache_bytes: int | None = None,
    provider: str | None = None,
) -> Engine:
    """Load the engine in the folder `path`.

    `threads`: None takes what the machine allows. `weights`: "mmap" shares pages between processes, "copy"
    reads them into this one. `check` hashes every file first. `max_sequences`, `token_budget`, `chunk_size`:
    see `LoopLimits`, as for `policy` and `prefix_cache`; an engine that was built for smaller steps has those. The key/value
    cache takes `cache_tokens` tokens, or `cache_bytes` (1 GiB unless given); no more than max_sequences sequences can use.
    `max_context` bounds the tokens of a sequence further than the engine itself does. `speculate` ("ngram", "self", or the
    folder of a smaller engine) and `draft_tokens` ("auto" or a number) let tokens be proposed and verified (`drafters.py`);
    that changes how fast tokens come, and none of them, unless `draft_rule` is "resample". A drafting engine has a key/value
    cache of its own: as many tokens as the engine's, within `draft_cache_bytes` (1 GiB unless given); it is loaded with the
    same `threads` and `weights`. `provider` is what an onnx engine runs on: cpu (unless given), cuda or tensorrt-rtx.
    """
    if weights not in ("mmap", "copy"):
        raise InputError(
            "weights cannot be loaded that way", found=repr(weights), expected="'mmap' or 'copy'"
        )
    counts = {
        "threads": threads,
        "max_sequences": max_sequences,
        "token_budget": token_budget,
        "chunk_size": chunk_size,
        "cache_tokens": cache_tokens,
        "cache_bytes": cache_bytes,
        "max_context": max_context,
        "draft_cache_bytes": draft_cache_bytes,
    }
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} cannot be used", found=repr(value), expected="a positive integer")
    get_policy(policy)
    if not isinstance(prefix_cache, bool):
        raise InputError("prefix_cache cannot be used", found=repr(prefix_cache), expected="True or False")
    artifact = path if isinstance(path, Artifact) else open_engine(path, check=check)
    if artifact.manifest.get("verification", {}).get("verdict") == "failed":
        _log.warning("the engine at %s failed its verification; see `engine inspect`", artifact.path)
    drafts = drafters.check(artifact, speculate, draft_tokens, draft_rule, draft_cache_bytes)
    token_budget = max(token_budget, max_sequences)
    backend = get_backend(artifact.manifest["backend"])
    if provider is not None and not getattr(backend, "providers", ()):
        raise InputError(
            f"an engine of the {backend.name} backend has no providers",
            found=f"provider={provider!r}",
            expected="a provider only for engines of the onnx backend",
            action="leave provider out",
        )
    executor = backend.load(
        artifact,
        **({} if provider is None else {"provider": provider}),
        threads=threads,
        weights=weights,
        max_tokens=token_budget,
        max_rows=min(token_budget, max(max_sequences, SCORED_ROWS)),
    )
    try:
        require_goldens(artifact, executor)
        return Engine(
            artifact,
            executor,
            max_sequences=max_sequences,
            token_budget=token_budget,
            chunk_size=chunk_size,
            cache_tokens=cache_tokens,
            cache_bytes=cache_bytes,
            max_context=max_context,
            policy=policy,
            prefix_cache=prefix_cache,
            speculate=drafts,
            draft_tokens=draft_tokens,
            draft_rule=draft_rule,
            draft_cache_bytes=draft_cache_bytes,
            threads=threads,
            weights=weights,
        )
    except BaseException:
        executor.close()
        raise


class Engine:
    """A loaded engine. Use it in a `with` block, or call `close`. `threads` and `weights` are for an engine that drafts.

    `max_context`: tokens of a sequence at most. `cache_tokens`: tokens that the key/value cache holds, of all sequences.
    `longest`: tokens of a sequence that the cache can hold, no more than max_context.
    """

    def __init__(
        self,
        artifact: Artifact,
        executor: Executor,
        *,
        max_sequences: int = 32,
        token_budget: int = 512,
        chunk_size: int | None = None,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        max_context: int | None = None,
        policy: str = "fair",
        prefix_cache: bool = True,
        speculate: str | os.PathLike[str] | Artifact | None = None,
        draft_tokens: int | str = "auto",
        draft_rule: str = "same",
        draft_cache_bytes: int | None = None,
        threads: int | None = None,
        weights: str = "mmap",
    ) -> None:
        self.artifact = artifact
        self.executor = executor
        self.vocab_size: int = executor.vocab_size
        longest = longest_context(artifact)
        if max_context is not None and max_context > longest:
            raise InputError(
                "max_context is more than the engine was built for",
                found=max_context,
                expected=f"at most {longest}",
                action="leave it out, or build the engine again with a larger max_context",
            )
        self.max_context: int = max_context or longest
        self.tokenizer = Tokenizer(artifact.path) if "tokenizer.json" in artifact else None
        most = getattr(executor, "max_sequences", max_sequences)
        max_sequences = min(max_sequences, most, executor.max_tokens, executor.max_rows)
        token_budget = min(max(token_budget, max_sequences), executor.max_tokens)
        chunk = min(chunk_size or token_budget, token_budget)
        pages = plan_pages(
            executor.kv_groups,
            max_context=self.max_context,
            max_sequences=max_sequences,
            chunk=chunk,
            tokens=cache_tokens,
            limit_bytes=cache_bytes or DEFAULT_CACHE_BYTES,
            most_pages=getattr(executor, "max_pages", None),
        )
        self.cache_tokens = tokens_held(executor.kv_groups, pages)
        self.longest = longest_sequence(executor.kv_groups, pages, max_context=self.max_context, chunk=chunk)
        taken, memory = page_bytes(executor.kv_groups, pages), machine_memory()
        if memory is not None and taken > memory:
            _log.warning(
                "the key/value cache is larger than the memory: it takes %.1f of %.1f GiB when it fills "
                "(cache_bytes, --kv-memory)",
                taken / 2**30,
                memory / 2**30,
            )
        self.loop = EngineLoop(
            executor,
            [GroupSpec(group.window, group.page_size) for group in executor.kv_groups],
            pages,
            LoopLimits(
                self.max_context,
                max_sequences,
                token_budget,
                chunk_size,
                executor.max_rows,
                policy,
                prefix_cache,
            ),
            end_tokens(artifact),
            cache_identity(artifact, executor),
        )
        self._compiler = (
            ConstraintCompiler(self.tokenizer.to_json(), self.vocab_size, end_tokens(artifact))
            if self.tokenizer is not None
            else None
        )
        if speculate is not None:
            drafters.speculate(
                self.loop,
                speculate,
                draft_tokens,
                draft_rule,
                target=artifact,
                threads=threads,
                weights=weights,
                cache_bytes=draft_cache_bytes,
            )
        self._lock = threading.Lock()  # one step at a time
        self._closed = False

    # ------------------------------------------------------------------------------------------------ life

    def close(self) -> None:
        """Release the executor's memory, after the step that may be running. The engine cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self.loop.speculator is not None:
                    self.loop.speculator.close()
                self.executor.close()

    def memory(self) -> dict[str, int]:
        """Return bytes by purpose, as the executor has them; those of an engine that drafts have `draft_` before their names."""
        own = dict(self.executor.memory())
        drafter = self.loop.speculator.drafter if self.loop.speculator is not None else None
        if isinstance(drafter, EngineDrafter):
            own |= {f"draft_{name}": count for name, count in drafter.memory().items()}
        return own

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompts,
        max_tokens: int | None = None,
        *,
        n: int = 1,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        errors: str = "raise",
        **sampling: Any,
    ) -> list[Completion]:
        """Answer all prompts, together; return `n` Completions a prompt, in order.

        `prompts` is a string, a list of token ids, or a list of strings or of lists of token ids. With
        `chat`, a prompt is a user's message (a string) or a conversation (a list of {role, content}),
        rendered by the model's template with `chat_options` (`ChatTemplate.render`). `sampling` takes the other fields
        of `SamplingOptions` by name: `stop`, `top_p`, `constraint`, … `seed` may be one a prompt; choice i of `n` draws with
        `derived_seed(seed, i)`, and is what a prompt alone gives with that seed.

        A prompt that cannot be served raises RequestError before anything is computed. One that fails later
        ends alone: with errors="raise" its error is raised when the others are done, with errors="return" it
        is in its Completion, as is that of a prompt which could not be served at all.
        """
        options = sampling_options(max_tokens=max_tokens, temperature=temperature, **sampling)
        if errors not in ("raise", "return"):
            raise RequestError(
                "errors cannot be handled that way", found=repr(errors), expected="'raise' or 'return'"
            )
        answers = self._answers(prompts, options, n, seed, chat, chat_options, errors)
        for _ in self._drive(answers):
            pass
        failed = next((answer.request.error for answer in answers if answer.request.error is not None), None)
        if failed is not None and errors == "raise":
            raise failed
        return [answer.completion() for answer in answers]

    def stream(
        self,
        prompts: Prompts,
        max_tokens: int | None = None,
        *,
        n: int = 1,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Iterator[TextDelta]:
        """Answer all prompts and yield their text as it comes; arguments as in `generate`.

        The deltas of a prompt add up to its Completion's text. Closing the iterator aborts what is
        unfinished. A prompt that fails while it is computed ends with finish_reason "error".
        """
        options = sampling_options(max_tokens=max_tokens, temperature=temperature, **sampling)
        return self._drive(self._answers(prompts, options, n, seed, chat, chat_options, "raise"))

    def _answers(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        n: int,
        seed: int | Sequence[int],
        chat: bool,
        chat_options: Mapping[str, Any] | None,
        errors: str,
    ) -> list[Answer]:
        """Submit every prompt; on errors="raise" none stays queued when one cannot be served."""
        listed = _list_prompts(prompts, chat)
        several = isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, str)
        seeds: list[Any] = list(seed) if several else [seed] * len(listed)  # type: ignore[arg-type]
        if len(seeds) != len(listed):
            raise RequestError(
                "there must be one seed, or one a prompt", found=len(seeds), expected=len(listed)
            )
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
            raise RequestError("n cannot be used", found=repr(n), expected=f"1 to {MOST_CHOICES}")
        options = self.stop_at_special_tokens(options)
        grammar = self.compile(options.constraint) if options.constraint is not None else None
        answers: list[Answer] = []
        try:
            for index, (prompt, own_seed) in enumerate(zip(listed, seeds, strict=True)):
                own = replace(options, seed=own_seed)
                text, ids, error = self._encode_or(errors, prompt, chat, chat_options)
                for choice in range(n):
                    request = Request(
                        list(ids), replace(own, seed=derived_seed(own.seed, choice)), grammar=grammar
                    )
                    self._submit(request, errors, error)
                    answers.append(Answer(index, text, request, self.tokenizer, choice=choice))
        except BaseException:
            self._abort(answers)
            raise
        return answers

    def _encode_or(
        self, errors: str, prompt: Any, chat: bool, chat_options: Mapping[str, Any] | None
    ) -> tuple[str | None, list[int], RequestError | None]:
        try:
            return *self.encode(prompt, chat, chat_options), None
        except RequestError as error:
            if errors == "raise":
                raise
            return None, [], error

    def _submit(self, request: Request, errors: str, error: RequestError | None) -> None:
        """Queue the request, or end it with its `error`, or with that of the loop."""
        with self._lock:
            try:
                self._check_open()
                if error is None:
                    self.loop.submit(request)
                    return
            except RequestError as refused:
                if errors == "raise":
                    raise
                error = refused
            request.error = error
            self.loop.finish(request, FINISH_ERROR)

    def encode(
        self, prompt: Any, chat: bool = False, chat_options: Mapping[str, Any] | None = None
    ) -> tuple[str | None, list[int]]:
        """Return the text and the token ids of a prompt as `generate` takes it; safe from any thread."""
        if not chat and not isinstance(prompt, str):
            return None, check_token_ids("prompt", prompt)
        if not chat:
            return prompt, self.encode_text(prompt)
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer", action="give prompts as lists of token ids")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        defaults = {"add_generation_prompt": not (chat_options or {}).get("continue_final_message", False)}
        text = self.tokenizer.render_chat(messages, **{**defaults, **(chat_options or {})})
        return text, self.encode_text(text, add_special_tokens=False)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. One that the context can never hold is refused before it is encoded."""
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer", action="give prompts as lists of token ids")
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= self.max_context:
            raise RequestError(
                "the prompt is too long",
                found=f"{len(text):,} characters, which are {fewest:,} tokens at least",
                expected=f"at most {self.max_context - 1:,} tokens",
                action="shorten the prompt, or build the engine with a larger max_context",
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def stop_at_special_tokens(self, options: SamplingOptions) -> SamplingOptions:
        """A stop string that spells a special token never shows up in the text: stop at the token."""
        if self.tokenizer is None:
            if options.stop:
                raise RequestError("stop strings need a tokenizer", action="use stop_token_ids")
            return options
        found = [self.tokenizer.special_id(text) for text in options.stop]
        ids = tuple(token for token in found if token is not None)
        return replace(options, stop_token_ids=(*options.stop_token_ids, *ids)) if ids else options

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint, for `Request.grammar`; may take a second. Safe from any thread."""
        if self._compiler is None:
            raise RequestError(
                "constraints need a tokenizer", action="build the engine from a model with one"
            )
        return self._compiler.compile(constraint)

    def _drive(self, answers: list[Answer]) -> Iterator[TextDelta]:
        """Step the loop until every answer is complete; yield what is new."""
        by_request = {answer.request: answer for answer in answers}
        try:
            unfinished = dict(by_request)
            while unfinished:
                for answer in list(unfinished.values()):
                    delta = answer.take()
                    if answer.stopped and not answer.request.finished:
                        with self._lock:
                            self.loop.finish(answer.request, FINISH_STOP)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        del unfinished[answer.request]
                    yield delta
                with self._lock:
                    if unfinished:
                        self._check_open()
                        self.loop.step()
        finally:
            self._abort(answers)

    def _abort(self, answers: list[Answer]) -> None:
        with self._lock:
            for answer in answers:
                self.loop.finish(answer.request)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed")

    # --------------------------------------------------------------------------------------------- scoring

    def logits(self, prompts: Sequence[Sequence[int]], chunk_size: int | None = None) -> list[np.ndarray]:
        """Return float32 [len(tokens), vocab] for each list of token ids: row i is what the model says after token i.

        It is computed as generation is (paged cache, chunked prefill, sequences together); `chunk_size`
        bounds the tokens of one sequence in a step. Memory is 4 bytes x tokens x vocabulary, all of it held.
        """
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise RequestError(
                "chunk_size cannot be used", found=repr(chunk_size), expected="a positive integer"
            )
        requests = [Request(list(tokens), keep_logits=True, chunk_size=chunk_size) for tokens in prompts]
        try:
            with self._lock:
                self._check_open()
                for request in requests:
                    self.loop.submit(request)
            while not all(request.finished for request in requests):
                with self._lock:
                    self._check_open()
                    self.loop.step()
        finally:
            with self._lock:
                for request in requests:
                    self.loop.finish(request)
        failed = next((request.error for request in requests if request.error is not None), None)
        if failed is not None:
            raise failed
        return [_joined(request) for request in requests]


def sampling_options(**values: Any) -> SamplingOptions:
    """Options by name; a name that is none is a RequestError. SamplingOptions checks each value."""
    names = [option.name for option in fields(SamplingOptions)]
    for name in values:
        if name not in names:
            likely = near_matches(name, names)
            raise RequestError(
                f"there is no sampling option {name}",
                expected=None if likely else ", ".join(names),
                action=f"did you mean {likely[0]}?" if likely else None,
            )
    return SamplingOptions(**values)


def _joined(request: Request) -> np.ndarray:
    rows = np.concatenate(request.logit_rows) if len(request.logit_rows) > 1 else request.logit_rows[0]
    request.logit_rows.clear()
    return rows


def _list_prompts(prompts: Prompts, chat: bool) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, bytes):
        raise RequestError(
            "prompts cannot be used",
            found=type(prompts).__name__,
            expected="text, token ids, or a list of them",
        )
    listed = list(prompts)
    if not listed:
        return []
    one = isinstance(listed[0], Mapping) if chat else isinstance(listed[0], (int, np.integer))
    return [listed] if one else listed
