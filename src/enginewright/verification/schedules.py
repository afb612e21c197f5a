"""Whether an engine's answers depend on how they are scheduled: the same requests, served in every way that a server has.

The answers of requests served alone, whole, without a cache, are held against those of the same requests in each other way:
together, in small chunks, after a prefix hit, preempted, with proposed tokens, on one thread. On a backend that is `exact` tokens
and log-probabilities must be equal, bit for bit. A way that did not come about (nothing was preempted, nothing was proposed) says
so, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from enginewright.runtime.engine import Engine, load
from enginewright.runtime.request import Request, SamplingOptions

__all__ = ["Way", "compare_schedules", "executor_alone"]

_LENGTHS = (5, 40, 44, 47, 95)  # tokens of the prompts
_TOKENS = 24  # of each answer
_CHUNK = 7

Answers = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Way:
    """One way to serve the same requests. `happened`: whether it came about; `found`: the first difference."""

    name: str
    same: bool
    happened: bool
    found: str = ""


def compare_schedules(
    engine: Engine, stream: Sequence[int], report: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Serve requests made of `stream`'s tokens in every way, on the executor of `engine`, and return each `Way` as plain values.

    The engine's own loop cannot be used afterwards: its cache has been given to others.
    """
    requests = _Requests(stream, engine.max_context)
    served = _Served(engine, requests)
    report("requests alone")
    alone = served.run(max_sequences=1)
    ways: dict[str, Callable[[], tuple[Answers, bool]]] = {
        "other requests beside": lambda: (served.run(), True),
        "chunked prefill": lambda: (served.run(chunk_size=_CHUNK), True),
        "a prefix hit": served.run_twice,
        "preemption": served.run_short_of_pages,
        "proposed tokens": lambda: served.run_speculating("ngram"),
    }
    if "draft.json" in engine.artifact:
        ways["tokens that the draft proposes"] = lambda: served.run_speculating("self")
    if getattr(engine.executor, "threads", 1) != 1:
        ways["one thread"] = served.run_on_one_thread
    found = []
    for name, run in ways.items():
        report(name)
        answers, happened = run()
        difference = _difference(alone, answers)
        found.append(asdict(Way(name, difference == "", happened, difference)))
    return found


def executor_alone(engine: Engine, tokens: Sequence[int]) -> dict[str, Any]:
    """Whether the runtime gave what the executor gives by itself: steps that are made here, over pages of our own.

    `tokens` are one text. However requests are scheduled says nothing of what the runtime
    does to all of them alike. The engine's own loop cannot be used afterwards.
    """
    from .pieces import in_chunks

    (logits,) = engine.logits([tokens])
    found = in_chunks(engine.executor, tokens, range(len(tokens)))
    same = np.array_equal(found.view(np.int32), logits.view(np.int32))
    where = ""
    if not same:
        row = int(np.flatnonzero((found.view(np.int32) != logits.view(np.int32)).any(-1))[0])
        where = f"the logits after token {row} of {len(tokens)} are others"
    return asdict(Way("steps without the runtime", same, True, where))


class _Requests:
    """Prompts from a text, one of which repeats itself; every second one is answered at a temperature."""

    def __init__(self, stream: Sequence[int], max_context: int) -> None:
        most = max(max_context - _TOKENS, 1)
        self.tokens = min(_TOKENS, max(max_context - 1, 1))
        self.prompts, start = [], 0
        for length in _LENGTHS:
            self.prompts.append(list(stream[start : start + min(length, most)]))
            start += length
        again = list(stream[start : start + 8])
        self.prompts.append((again * 6)[: min(46, most)])

    def make(self) -> list[Request]:
        return [
            Request(
                list(prompt),
                SamplingOptions(
                    max_tokens=self.tokens, temperature=0.8 * (index % 2), seed=index, ignore_eos=True
                ),
            )
            for index, prompt in enumerate(self.prompts)
        ]


class _Served:
    """Runs the requests on one executor, in an engine made for each way."""

    def __init__(self, engine: Engine, requests: _Requests) -> None:
        self.engine, self.requests = engine, requests
        self.held = sum(map(len, requests.prompts)) + len(requests.prompts) * (requests.tokens + 64)

    def made(self, **options: Any) -> Engine:
        """An engine on the executor; it is not closed, since the executor is not its own."""
        usual = {"max_sequences": 8, "prefix_cache": False, "cache_tokens": self.held}
        budget = min(512, self.engine.executor.max_tokens)
        return Engine(self.engine.artifact, self.engine.executor, token_budget=budget, **{**usual, **options})

    def run(self, **options: Any) -> Answers:
        return self.answers(self.made(**options))

    def answers(self, engine: Engine) -> Answers:
        requests = self.requests.make()
        for request in requests:
            engine.loop.submit(request)
        while not engine.loop.idle:
            engine.loop.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [(list(request.output), list(request.logprobs)) for request in requests]

    def run_twice(self) -> tuple[Answers, bool]:
        engine = self.made(prefix_cache=True)
        self.answers(engine)
        before = engine.loop.statistics().prefix_hit_tokens
        again = self.answers(engine)
        return again, engine.loop.statistics().prefix_hit_tokens > before

    def run_short_of_pages(self) -> tuple[Answers, bool]:
        """With pages for the prompts, and hardly any for the answers."""
        pages = [group.page_size for group in self.engine.executor.kv_groups]
        page = max(pages, default=16)
        tokens = sum(-(-len(prompt) // page) * page for prompt in self.requests.prompts) + page
        engine = self.made(cache_tokens=tokens)
        found = self.answers(engine)
        return found, engine.loop.statistics().preemptions > 0

    def run_speculating(self, drafter: str) -> tuple[Answers, bool]:
        engine = self.made(speculate=drafter, draft_tokens=4)
        found = self.answers(engine)
        speculator = engine.loop.speculator
        assert speculator is not None
        return found, speculator.figures.drafted > 0

    def run_on_one_thread(self) -> tuple[Answers, bool]:
        with load(self.engine.artifact, threads=1, max_sequences=8, cache_tokens=self.held) as engine:
            return self.answers(engine), True


def _difference(alone: Answers, other: Answers) -> str:
    """The first difference in words; empty where there is none."""
    for index, ((tokens, logprobs), (others, other_logprobs)) in enumerate(zip(alone, other, strict=True)):
        for place, (a, b) in enumerate(zip(tokens, others, strict=False)):
            if a != b:
                return f"request {index}, token {place} is {b} instead of {a}"
        counts = (len(tokens), len(logprobs)), (len(others), len(other_logprobs))
        if counts[0] != counts[1]:
            return f"request {index} has (tokens, log-probabilities) {counts[1]} instead of {counts[0]}"
        if not np.array_equal(np.asarray(logprobs), np.asarray(other_logprobs)):
            place = int(np.flatnonzero(np.asarray(logprobs) != np.asarray(other_logprobs))[0])
            return (
                f"request {index}, the log-probability of token {place} is {other_logprobs[place]!r} instead of "
                f"{logprobs[place]!r}"
            )
    return ""
