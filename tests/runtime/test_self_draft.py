"""Self-drafting on the fake executor: what a draft of perfect and of spoilt rows proposes, and what drawing remembers of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers

from enginewright.backends.base import StepInput
from enginewright.recipes.errors import InputError
from enginewright.runtime.constraints import Constraint, ConstraintCompiler
from enginewright.runtime.drafting import Proposal
from enginewright.runtime.loop import EngineLoop
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.self_draft import SelfDrafter
from enginewright.runtime.speculation import Speculator
from enginewright.runtime.text import _BYTE_OF
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.traffic import GROUPS, alone, drain, make_loop, run


class FakeDraft:
    """A draft over a FakeExecutor's pages: its rows, but every `spoil`-th, which is turned about."""

    def __init__(self, executor: FakeExecutor, spoil: int = 0) -> None:
        self.executor, self.spoil = executor, spoil
        self.max_tokens = executor.max_tokens
        self.rows = 0
        self.steps: list[int] = []
        self.spoilt: list[tuple[int, int]] = []  # (token, position) of the rows turned about

    def step(self, step: StepInput) -> np.ndarray:
        before = list(self.executor.steps)
        logits = self.executor.step(step)
        self.executor.steps = before
        self.steps.append(len(step.tokens))
        for row in range(len(logits)):
            self.rows += 1
            if self.spoil and self.rows % self.spoil == 0:
                logits[row] = -logits[row]
                self.spoilt.append((int(step.tokens[row]), int(step.positions[row])))
        return logits


class Watched(SelfDrafter):
    """Remembers what it proposed and what came of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made: list[tuple[Request, int, Proposal]] = []
        self.settled: list[tuple[Request, int, int]] = []

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        made = super().propose(wanted)
        self.made += [(r, len(r.tokens), p) for (r, _), p in zip(wanted, made, strict=True)]
        return made

    def settle(self, request: Request, accepted: int) -> None:
        self.settled.append((request, accepted, len(request.tokens)))
        super().settle(request, accepted)


def drafting(
    tokens: int | None = 4, spoil: int = 0, resample: bool = False, **limits: Any
) -> tuple[EngineLoop, Watched, FakeDraft]:
    loop = make_loop(**limits)
    assert isinstance(loop.executor, FakeExecutor)
    draft = FakeDraft(loop.executor, spoil)
    drafter = Watched(draft, loop.pool, loop.drawer)
    loop.speculator = Speculator(drafter, tokens, resample=resample)
    return loop, drafter, draft


OPTIONS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 7},
    "cut": {"temperature": 1.3, "seed": 8, "top_k": 9, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"temperature": 0.9, "logit_bias": {3: -100.0, 5: 2.0}},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": (2, 9, 17), "temperature": 1.0},
    "logprobs": {"logprobs": 3, "temperature": 0.5},
}


def options(name: str, **more: Any) -> SamplingOptions:
    return SamplingOptions(max_tokens=40, **{"ignore_eos": True, **OPTIONS[name], **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_draft_that_is_the_model_itself_is_always_right(name: str) -> None:
    """So it draws with the request's noise, penalties, bias and held-back ends, at every place."""
    loop, drafter, _ = drafting(tokens=4)
    requests = run(loop, [Request([i, 2, 3], options(name)) for i in range(5)])
    for request in requests:
        lonely = alone(request.tokens[:3], request.options)
        assert request.output == lonely.output and request.logprobs == lonely.logprobs
        assert request.accepted and (request.accepted == request.drafted or request.finish_reason == "stop")
    proposed = {len(proposal.tokens) for _, _, proposal in drafter.made}
    assert max(proposed) == 4 and min(proposed) >= 1
    if name == "greedy":
        assert len(loop.executor.steps) == 1 + -(-39 // 5)


@pytest.mark.parametrize("spoil", [1, 2, 3, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_did_not_come_true_leaves_no_trace(name: str, spoil: int) -> None:
    """Up to the first spoilt row every proposed token comes true, whatever was wrong before."""
    loop, drafter, draft = drafting(tokens=4, spoil=spoil)
    requests = run(loop, [Request([i, 2, 3], options(name, draft_tokens=1 + i)) for i in range(5)])
    for request in requests:
        lonely = alone(request.tokens[:3], request.options)
        assert request.output == lonely.output and request.logprobs == lonely.logprobs
    spoilt = set(draft.spoilt)
    right = 0
    for request, before, proposal in drafter.made:
        came = request.tokens[before:]
        last, position = request.tokens[before - 1], before - 1
        for token, true in zip(proposal.tokens, came, strict=False):
            if (last, position) in spoilt:
                break
            assert token == true, "a row of the model's own gave another token"
            right += 1
            last, position = token, position + 1
    assert spoil == 1 or right > 20
    assert loop.speculator is not None and loop.speculator.figures.failures == 0


def test_requests_are_drafted_for_together() -> None:
    loop, _, draft = drafting(tokens=3)
    requests = run(loop, [Request([i, 2], options("seeded", draft_tokens=i)) for i in range(4)])
    assert [request.drafted > 0 for request in requests] == [False, True, True, True]
    assert draft.steps[:3] == [3, 2, 1], "a request leaves once it has what it asked for"
    assert draft.rows == sum(draft.steps)


def test_a_proposal_ends_with_what_would_end_the_request() -> None:
    free = alone([4, 5], options("greedy")).output
    place = next(i for i in range(3, 12) if free[i] not in free[:i])
    loop, drafter, _ = drafting(tokens=8)
    (request,) = run(loop, [Request([4, 5], options("greedy", stop_token_ids=(free[place],)))])
    assert request.output == free[: place + 1] and request.finish_reason == "stop"
    ends = [p.tokens.index(free[place]) for _, _, p in drafter.made if free[place] in p.tokens]
    assert ends and all(
        p.tokens.index(free[place]) == len(p.tokens) - 1
        for _, _, p in drafter.made
        if free[place] in p.tokens
    )


def test_preemption_and_others_that_share_a_prefix_change_nothing() -> None:
    loop, _, _ = drafting(tokens=4, spoil=3, pages=(18, 18))
    prompt = list(range(1, 12))
    requests = [Request([*prompt, i], options("penalties")) for i in range(5)]
    run(loop, requests)
    assert loop.scheduler.preemptions
    for request in requests:
        if request.finish_reason == "length" and len(request.output) == 40:
            assert request.output == alone(request.tokens[:12], request.options).output
    assert any(len(request.output) == 40 for request in requests)


def test_a_draft_that_fails_leaves_the_request_as_it_was() -> None:
    """The second step of a proposal raises: what was drawn by then is forgotten."""
    loop, _, draft = drafting(tokens=3)
    step, calls = draft.step, 0

    def failing(arrays: StepInput) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls % 4 == 2:
            raise RuntimeError("injected")
        return step(arrays)

    draft.step = failing  # type: ignore[method-assign]
    (request,) = run(loop, [Request([1, 2, 3], options("penalties"))])
    assert request.output == alone([1, 2, 3], request.options).output
    assert loop.speculator is not None and loop.speculator.figures.failures > 3
    assert request.accepted == request.drafted > 0


@pytest.mark.parametrize("spoil", [0, 3])
def test_constraints_bind_proposals_too(spoil: int) -> None:
    pytest.importorskip("llguidance")
    eos, vocab = 256, 300
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    constraint = Constraint("regex", "[a-f]{3}[0-9]{2}([g-z][0-9])*!")
    grammar = ConstraintCompiler(tokenizer.to_str(), vocab, [eos]).compile(constraint)

    def answers(loop: EngineLoop) -> list[Request]:
        fields = {"max_tokens": 40, "temperature": 1.0, "frequency_penalty": 0.3, "constraint": constraint}
        requests = [
            Request([1, 2, 3], SamplingOptions(seed=seed, **fields), grammar=grammar) for seed in range(6)
        ]
        return run(loop, requests)

    plain = answers(make_loop(executor=FakeExecutor(GROUPS, vocab)))
    loop, drafter, _ = drafting(tokens=4, spoil=spoil, executor=FakeExecutor(GROUPS, vocab))
    drafted = answers(loop)
    assert [r.output for r in drafted] == [r.output for r in plain]
    assert sum(r.accepted for r in drafted) > 40
    if not spoil:
        for request, before, proposal in drafter.made:
            came = request.tokens[before:]
            assert proposal.tokens[: len(came)] == came[: len(proposal.tokens)]


def test_proposals_carry_their_rows_where_they_are_wanted() -> None:
    loop, drafter, _ = drafting(tokens=3, resample=True)
    run(loop, [Request([1, 2, 3], options("greedy"))])
    for _, _, proposal in drafter.made:
        assert proposal.logits.shape == (len(proposal.tokens), 32)
        assert proposal.logits.argmax(axis=1).tolist() == proposal.tokens
    loop, drafter, _ = drafting(tokens=3)
    run(loop, [Request([1, 2, 3], options("greedy"))])
    assert all(proposal.logits is None for _, _, proposal in drafter.made)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    loop, drafter, _ = drafting(tokens=2)
    first = Request([1, 2], options("seeded"))
    loop.submit(first)
    for _ in range(4):
        loop.step()
    assert len(drafter._shadows._of) == 1
    loop.finish(first)
    assert not drafter._shadows._of
    drain(loop)


def test_an_engine_without_a_draft_is_refused() -> None:
    with pytest.raises(InputError, match=r"first layers") as caught:
        SelfDrafter.of(make_loop())
    assert "draft.layers" in str(caught.value)
    executor = FakeExecutor(GROUPS)
    executor.draft = lambda: FakeDraft(executor)  # type: ignore[attr-defined]
    loop = make_loop(executor=executor)
    loop.speculator = Speculator(SelfDrafter.of(loop), 3)
    (request,) = run(loop, [Request([1, 2, 3], options("greedy"))])
    assert request.accepted == request.drafted > 20
