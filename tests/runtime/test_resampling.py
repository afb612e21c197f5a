"""The accept-or-resample rule: whatever is proposed, tokens follow the target's distribution (chi-square, fixed seeds)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from enginewright.runtime.drafting import Proposal
from enginewright.runtime.drawing import Drawer, logit_rows
from enginewright.runtime.noise import gumbel_noise
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.resampling import accept_or_resample
from enginewright.runtime.sampler import DrawRow, draw_row, probabilities
from enginewright.runtime.speculation import Speculator
from tests.runtime.drafters import Oracle
from tests.runtime.traffic import alone, make_loop, run

VOCAB = 12
OPTIONS = {
    "plain": {"temperature": 1.0},
    "hot with cuts": {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "biased": {"temperature": 1.0, "logit_bias": {3: 2.0, 5: -4.0}, "min_tokens": 9},
    "typical": {"temperature": 0.9, "typical_p": 0.7},
}


def chi_square_quantile(freedom: int) -> float:
    """The value that a chi-square variable exceeds once in a thousand times (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3


def check_distribution(counts: np.ndarray, p: np.ndarray) -> None:
    """Raise AssertionError where counts are not a sample of p, at a thousandth."""
    assert not counts[p == 0].any(), "a token that cannot come"
    expected = p * counts.sum()
    common = expected >= 5
    parts = [*zip(counts[common], expected[common], strict=True)]
    if not common.all():
        parts.append((counts[~common].sum(), expected[~common].sum()))
    statistic = sum((n - e) ** 2 / e for n, e in parts if e > 0)
    assert statistic < chi_square_quantile(max(len(parts) - 1, 1)), statistic


def draws(fields: dict, drafted: bool, count: int) -> None:
    """Verify `count` proposals of two tokens for requests that differ in their seeds: first, second and third tokens."""
    chance = np.random.default_rng(7)
    target = (2 * chance.standard_normal((3, VOCAB))).astype(np.float32)
    near = (target[:2] + chance.standard_normal((2, VOCAB))).astype(np.float32)
    drawer = Drawer(VOCAB, [11])
    state = draw_row(SamplingOptions(**fields), 3, [11], kind=DrawRow)
    state.extend([1, 2, 2], 3)
    first = probabilities(target[0], state, 3)
    given = probabilities(near[0], state, 3)
    seen = np.zeros(VOCAB)
    after: dict[int, np.ndarray] = {}
    accepted = 0
    for seed in range(count):
        request = Request([1, 2, 2], SamplingOptions(seed=seed, max_tokens=20, **fields))
        request.limit, request.computed = 23, 2
        tokens = []
        for place in range(2):
            scores = near[place].astype(np.float64) / request.options.temperature
            if place == 0:
                scores = np.log(np.maximum(given, 1e-300))
            tokens.append(int((scores + gumbel_noise(seed, 3 + place, VOCAB)).argmax()))
        work = [(request, 3)]
        logits = near.copy() if drafted else None
        if drafted:  # the second is drawn from what the options leave after the first
            later = draw_row(request.options, 3, [11], kind=DrawRow)
            later.extend([1, 2, 2, tokens[0]], 3)
            q = probabilities(near[1], later, 4)
            tokens[1] = int((np.log(np.maximum(q, 1e-300)) + gumbel_noise(seed, 4, VOCAB)).argmax())
        rows, counts = logit_rows(work)
        assert rows == [0, 1, 2] and counts == [3]
        (drawn,) = drawer.draw(work, counts, target, {request: tokens}, {request: logits}).drawn
        run_ = [one.token for one in drawn[1]]
        assert all(a == b for a, b in zip(run_[:-1], tokens, strict=False))
        seen[run_[0]] += 1
        accepted += len(run_) - 1
        if len(run_) > 1:
            after.setdefault(run_[0], np.zeros(VOCAB))[run_[1]] += 1
    check_distribution(seen, first)
    assert accepted > 0.1 * count
    for token, found in after.items():
        if found.sum() < 200:
            continue
        later = draw_row(SamplingOptions(**fields), 3, [11], kind=DrawRow)
        later.extend([1, 2, 2, token], 3)
        check_distribution(found, probabilities(target[1], later, 4))


@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "not drawn"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_follow_the_target(name, drafted):
    draws(OPTIONS[name], drafted, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "not drawn"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_follow_the_target_in_many_draws(name, drafted):
    draws(OPTIONS[name], drafted, 100_000)


def test_equal_distributions_accept_everything_and_distant_ones_nothing():
    p = np.array([0.5, 0.3, 0.2, 0.0])
    for seed in range(200):
        for token in range(3):
            assert accept_or_resample(p, p, token, seed, 9) == token
        assert accept_or_resample(p, np.array([0.0, 0.0, 0.0, 1.0]), 3, seed, 9) in (0, 1, 2)


def test_the_rule_is_the_loops():
    """Greedy requests say what they say alone; others follow proposals, and pages and penalties stay in order."""
    loop = make_loop()
    answers: dict[Request, list[int]] = {}
    drafter = Oracle(lambda request: answers[request], 32, errors=0.2)
    loop.speculator = Speculator(drafter, 4, resample=True)
    assert drafter.keep_logits
    options = [
        SamplingOptions(
            max_tokens=24,
            temperature=0.7 * (i % 2),
            seed=i,
            presence_penalty=0.5,
            ignore_eos=True,
            logprobs=2,
        )
        for i in range(6)
    ]
    requests = [Request([i, 4], option) for i, option in enumerate(options)]
    for request in requests:
        answers[request] = alone(request.tokens, request.options).output
    run(loop, requests)
    for request in requests:
        assert request.finish_reason == "length" and len(request.output) == 24
        assert len(request.logprobs) == len(request.top_logprobs) == 24
        if not request.options.temperature:
            assert request.output == answers[request]
    assert any(r.output != answers[r] for r in requests), "the rule was never used"
    assert Proposal().logits is None
