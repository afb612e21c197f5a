"""Drawing in the loop: what penalties count, ends held back, seeds of several choices, errors that stay with their request."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime import drawing, sampler
from enginewright.runtime.request import Request, SamplingOptions, derived_seed
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.sampling_oracle import adjusted, probabilities
from tests.runtime.traffic import EOS, GROUPS, alone, make_loop, run


def rows_of(tokens: list[int]) -> np.ndarray:
    """The logits after every token, float32 [T, vocab]."""
    return np.concatenate(run(make_loop(), [Request(list(tokens), keep_logits=True)])[0].logit_rows)


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": -1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {7: 4}},
    ],
    ids=lambda fields: "+".join(fields),
)
@pytest.mark.parametrize("pages", [(64, 64), (14, 14)], ids=["roomy", "preempted"])
def test_penalties_count_a_requests_own_tokens(fields, pages):
    """Greedy tokens against the oracle: in a crowd, after cached prefixes and preemptions, the neighbours longer."""
    options = SamplingOptions(max_tokens=16, ignore_eos=True, **fields)
    prompts = [[5, 9, 5, 9, 5], [5, 9, 5, 9, 5, 9, 9], list(range(24)), [3]]
    loop = make_loop(pages)
    requests = run(loop, [Request(prompt, options) for prompt in [*prompts, *prompts]])
    if pages == (14, 14):
        assert any(request.preemptions for request in requests)
    differs = 0
    for request in requests:
        rows = rows_of(request.tokens)
        for at in range(request.prompt_length, len(request.tokens)):
            prompt, generated = (
                request.tokens[: request.prompt_length],
                request.tokens[request.prompt_length : at],
            )
            expected = adjusted(rows[at - 1], options, prompt, generated)
            assert request.tokens[at] == expected.argmax()
            differs += expected.argmax() != rows[at - 1].argmax()
            wide = rows[at - 1].astype(np.float64)
            logprob = wide[request.tokens[at]] - np.log(np.exp(wide).sum())
            assert request.logprobs[at - request.prompt_length] == pytest.approx(logprob, abs=1e-5)
    assert differs, "the penalties changed nothing: the test shows nothing"


def test_drawn_tokens_may_be_drawn():
    options = SamplingOptions(
        max_tokens=20,
        temperature=1.0,
        top_k=6,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.3,
        ignore_eos=True,
    )
    prompts = [[1, 2, 3], [4, 4], [9]]
    requests = run(
        make_loop(),
        [Request(p, SamplingOptions(**{**vars(options), "seed": s})) for s, p in enumerate(prompts)],
    )
    for request in requests:
        rows = rows_of(request.tokens)
        for at in range(request.prompt_length, len(request.tokens)):
            history = request.tokens[: request.prompt_length], request.tokens[request.prompt_length : at]
            expected, close = probabilities(adjusted(rows[at - 1], options, *history), options)
            assert close or expected[request.tokens[at]] > 0


def test_no_end_before_min_tokens():
    """A request that would end early goes on to its least length, by tokens that neither end it nor need no bias."""
    prompt = [7, 8]
    favoured = {"logit_bias": {EOS: 60.0, 4: 50.0}, "max_tokens": 12}
    assert alone(prompt, SamplingOptions(**favoured)).output == [EOS]
    held = alone(prompt, SamplingOptions(min_tokens=5, **favoured))
    assert held.output == [4] * 5 + [EOS] and held.finish_reason == "stop"
    both = alone(prompt, SamplingOptions(min_tokens=5, stop_token_ids=[4], **favoured))
    assert len(both.output) == 6 and not {4, EOS} & set(both.output[:5]) and both.output[5] == EOS
    ignored = alone(prompt, SamplingOptions(min_tokens=5, ignore_eos=True, **favoured))
    assert ignored.output == [EOS] * 12 and ignored.finish_reason == "length"


def test_choices_are_what_their_seeds_give_alone():
    prompt = list(range(17))
    seeds = [derived_seed(7, choice) for choice in range(6)]
    each = [SamplingOptions(max_tokens=10, temperature=1.0, seed=seed, logprobs=2) for seed in seeds]
    for pages in ((64, 64), (12, 12)):
        together = run(make_loop(pages), [Request(list(prompt), options) for options in each])
        assert len({tuple(request.output) for request in together}) == 6
        for request, options in zip(together, each, strict=True):
            lonely = alone(prompt, options)
            assert (request.output, request.logprobs) == (lonely.output, lonely.logprobs)
            assert request.top_logprobs == lonely.top_logprobs


def test_best_are_kept_where_asked_for():
    plain, none, some = run(
        make_loop(),
        [
            Request([1, 2, 3], SamplingOptions(max_tokens=5, ignore_eos=True, logprobs=n))
            for n in (None, 0, 4)
        ],
    )
    assert plain.top_logprobs == [] and none.top_logprobs == [[]] * 5
    assert [len(best) for best in some.top_logprobs] == [4] * 5
    for token, logprob, best in zip(some.output, some.logprobs, some.top_logprobs, strict=True):
        assert best[0] == (token, logprob), "greedy takes the best"
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert plain.logprobs == none.logprobs == some.logprobs


def test_a_row_that_cannot_be_drawn_from_ends_its_request_only():
    neighbour = SamplingOptions(max_tokens=12, ignore_eos=True, frequency_penalty=1.0)
    expected = alone([3, 4], neighbour)
    for options in (SamplingOptions(), SamplingOptions(temperature=1.0, top_p=0.5, prompt_logprobs=1)):
        loop = make_loop(executor=FakeExecutor(GROUPS, poison_token=29))
        poisoned, beside = run(loop, [Request([1, 29], options), Request([3, 4], neighbour)])
        assert poisoned.finish_reason == "error" and "NaN" in str(poisoned.error) and not poisoned.output
        assert (beside.output, beside.logprobs) == (expected.output, expected.logprobs)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3, 16])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_prompt_that_cannot_be_scored_ends_its_request_only(max_tokens, chunk, place):
    """Wherever in the prompt, or its chunk, the row that is no number stands."""
    scored = SamplingOptions(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=2)
    beside = [
        Request([3, 4, 5, 6, 7], scored),
        Request([3, 4], SamplingOptions(max_tokens=6, ignore_eos=True)),
    ]
    expected = [alone(list(request.tokens), request.options) for request in beside]
    loop = make_loop(executor=FakeExecutor(GROUPS, poison_token=23), chunk_size=chunk)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    prompt[place] = 23
    poisoned, *others = run(loop, [Request(prompt, scored), *beside])
    assert poisoned.finish_reason == "error" and f"position {place}" in str(poisoned.error)
    for other, same in zip(others, expected, strict=True):
        assert (other.output, other.prompt_logprobs) == (same.output, same.prompt_logprobs)


def test_a_step_drawn_twice_draws_the_same(monkeypatch):
    """A neighbour's failure between draw and commit: the step is repeated for each alone, with penalties that remember."""
    options = SamplingOptions(max_tokens=10, temperature=0.9, seed=4, frequency_penalty=1.0, ignore_eos=True)
    expected = [alone([1, 2], options), alone([2, 2, 2], options)]
    loop = make_loop()
    draw, calls = loop._drawer.draw, 0

    def fail_after(*arguments):
        nonlocal calls
        calls += 1
        result = draw(*arguments)
        if len(arguments[0]) > 1 and calls % 2:
            raise RuntimeError("injected")
        return result

    monkeypatch.setattr(loop._drawer, "draw", fail_after)
    requests = run(loop, [Request([1, 2], options), Request([2, 2, 2], options)])
    assert [r.output for r in requests] == [r.output for r in expected]
    assert [r.logprobs for r in requests] == [r.logprobs for r in expected]


def test_numpy_stands_in_for_the_native_rows(monkeypatch):
    if sampler._native is None:
        pytest.skip("the native module is not built")
    options = [
        SamplingOptions(
            max_tokens=9, temperature=t, seed=3, top_p=p, repetition_penalty=1.2, prompt_logprobs=1
        )
        for t, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.7))
    ]
    native = [alone([5, 6, 7, 8], one) for one in options]
    monkeypatch.setattr(sampler, "_native", None)
    assert isinstance(drawing.Drawer(32)._rows, sampler.RowDrawer)
    for one, other in zip(native, [alone([5, 6, 7, 8], each) for each in options], strict=True):
        assert one.output == other.output
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert [e and e[0] for e in one.prompt_logprobs] == pytest.approx(
            [e and e[0] for e in other.prompt_logprobs], abs=1e-5
        )
