"""Sampling: what each option lets through, by an oracle; the draw's distribution; edges; one answer for every implementation."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from enginewright.runtime import sampler
from enginewright.runtime.noise import gumbel_noise
from enginewright.runtime.request import SamplingOptions
from tests.runtime.sampling_oracle import adjusted, probabilities

NATIVE = sampler._native
KINDS = ["numpy", *(NATIVE.available_isas() if NATIVE is not None else [])]


class Drawer:
    """Draws with numpy, or with one variant of the native kernels."""

    def __init__(self, kind: str, threads: int = 1) -> None:
        self.kind = kind
        self.rows = sampler.RowDrawer() if kind == "numpy" else NATIVE.RowDrawer(threads, kind)

    def state(self, options, prompt=(), generated=(), ends=()):
        native, sampler._native = sampler._native, None if self.kind == "numpy" else NATIVE
        try:
            state = sampler.draw_row(options, len(prompt), ends)
        finally:
            sampler._native = native
        state.extend([*prompt, *generated], len(prompt))
        return state

    def one(self, row, options, position=0, masks=None, **tokens):
        """(token, log-probability, best) of one row."""
        row = np.asarray([row], np.float32)
        states = [self.state(options, **tokens)]
        drawn = self.rows.draw(row, [0], states, [position], masks, [] if masks is None else [0])
        return tuple(part[0] for part in drawn)

    def tokens(self, row, options, count, **tokens):
        """Tokens drawn from the same row at `count` positions."""
        state = self.state(options, **tokens)
        start = len(tokens.get("prompt", ())) + len(tokens.get("generated", ()))
        row = np.asarray([row], np.float32)
        return self.rows.draw(row, [0] * count, [state] * count, range(start, start + count))[0]


@pytest.fixture(params=KINDS)
def drawer(request):
    return Drawer(request.param)


@pytest.fixture(scope="module")
def drawers():
    return [Drawer(kind) for kind in KINDS]


def hot(temperature=1.0, **options):
    return SamplingOptions(temperature=temperature, **options)


# ------------------------------------------------------------------------------------------ what may be drawn

finite = st.floats(-30, 30, width=32)
rows = st.one_of(
    st.lists(finite, min_size=1, max_size=40),
    st.lists(st.sampled_from([-2.0, 0.0, 1.0, 3.5, -math.inf]), min_size=2, max_size=40),  # ties
    st.integers(0, 2**32).map(lambda s: (np.random.default_rng(s).standard_normal(300) * 4).tolist()),
)
cuts = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7, 5.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 50]),
        "top_p": st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.99]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
        "typical_p": st.sampled_from([1.0, 1.0, 0.2, 0.7, 0.95]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows, cuts)
def test_what_may_be_drawn_is_what_the_options_say(drawers, values, fields):
    row = np.asarray(values, np.float32)
    assume(row.max() > -np.inf)
    options = SamplingOptions(**fields)
    expected, close = probabilities(row.astype(np.float64), options)
    assume(not close)
    support = np.flatnonzero(expected)
    numpy = drawers[0]
    assert sampler._cut(row, numpy.state(options)).tolist() == support.tolist()
    drawn = [drawer.tokens(values, options, 12) for drawer in drawers]
    assert set(drawn[0]) <= set(support.tolist())
    assert all(tokens == drawn[0] for tokens in drawn[1:])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(finite, min_size=4, max_size=30),
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(0, 3), max_size=8),
    st.sampled_from([0.0, 1.5, -2.0]),
    st.sampled_from([0.0, 1.5, -0.5]),
    st.sampled_from([1.0, 1.5, 0.5]),
    st.dictionaries(st.integers(0, 3), st.floats(-100, 100), max_size=3),
    st.sampled_from([0, 3]),
)
def test_penalties_count_what_they_should(
    drawers, row, prompt, generated, frequency, presence, repetition, bias, least
):
    """Frequency and presence count generated tokens only, repetition also the prompt's."""
    options = SamplingOptions(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=least,
    )
    tokens = {"prompt": prompt, "generated": generated, "ends": [1, 2]}
    expected = adjusted(np.asarray(row, np.float32), options, **tokens)
    position = len(prompt) + len(generated)
    numpy = drawers[0].state(options, **tokens)
    np.testing.assert_allclose(
        numpy.adjust(np.asarray(row, np.float32), position, None), expected, rtol=1e-6, atol=1e-5
    )
    second = np.partition(expected, -2)[-2]
    for drawer in drawers:
        token, logprob, _ = drawer.one(row, options, position, **tokens)
        if expected.max() - second > 1e-4:
            assert token == expected.argmax()
        wide = np.asarray(row, np.float64)  # the log-probability is the model's own
        assert logprob == pytest.approx(
            wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum()), abs=1e-5
        )


def test_options_cut_as_transformers_cuts():
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(3)
    for trial in range(60):
        row = (rng.standard_normal(500) * 3).astype(np.float32)
        t, k, p, m, y = (
            float(rng.choice(c)) for c in ([0.7, 1, 2], [5, 50, 400], [0.5, 0.9], [0.01, 0.2], [0.3, 0.9])
        )
        options = hot(t, top_k=int(k), top_p=p, min_p=m if trial % 2 else 0, typical_p=y if trial % 3 else 1)
        if probabilities(row.astype(np.float64), options)[1]:
            continue
        scores = torch.tensor(row[None], dtype=torch.float64) / t
        chain = [warpers.TopKLogitsWarper(int(k)), warpers.TopPLogitsWarper(p)]
        chain += [warpers.MinPLogitsWarper(m)] if trial % 2 else []
        chain += [warpers.TypicalLogitsWarper(y)] if trial % 3 else []
        for warper in chain:
            scores = warper(None, scores)
        expected = np.flatnonzero(np.isfinite(scores[0].numpy()))
        assert sampler._cut(row, Drawer("numpy").state(options)).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_variant_draws_as_numpy_does(kind):
    """All options at once on fresh random rows, wide enough for every path; a failing case prints its seed."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    drawer, numpy = Drawer(kind), Drawer("numpy")
    for trial in range(150):
        vocab = int(
            rng.choice([1, 5, 63, 64, 65, 1000, 3001, 20_000], p=[0.05, 0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.05])
        )
        row = (rng.standard_normal(vocab) * rng.choice([0, 0.01, 1, 4, 1e4])).astype(np.float32)
        row = np.round(row * 2) / 2 if trial % 3 == 0 else row
        row[rng.integers(vocab, size=vocab // 4)] = -np.inf
        row[rng.integers(vocab)] = 1.0
        options = SamplingOptions(
            temperature=float(rng.choice([0, 1e-5, 2e-5, 0.5, 1, 1.5, 100, 1e40])),
            seed=int(rng.integers(2**63)),
            top_k=int(rng.choice([0, 0, 1, 20, 900])),
            top_p=float(rng.choice([1, 1, 0, 0.3, 0.9, 0.99999])),
            min_p=float(rng.choice([0, 0, 1e-9, 0.05, 1])),
            typical_p=float(rng.choice([1, 1, 0, 0.4, 0.99])),
            frequency_penalty=float(rng.choice([0, 1.5, -2])),
            presence_penalty=float(rng.choice([0, 1.0])),
            repetition_penalty=float(rng.choice([1, 1.3, 0.5])),
            logit_bias={
                int(i): float(rng.uniform(-100, 100)) for i in set(rng.integers(vocab, size=3).tolist())
            },
            min_tokens=int(rng.choice([0, 9])),
            logprobs=[None, 0, 5, 20][trial % 4],
        )
        tokens = {
            "prompt": rng.integers(vocab, size=4).tolist(),
            "generated": rng.integers(vocab, size=4).tolist(),
        }
        tokens["ends"] = [0, vocab // 2]
        masks = None
        if trial % 4 == 0:
            masks = rng.integers(0, 2**32, size=(1, (vocab + 31) // 32), dtype=np.uint32)
            masks &= rng.integers(0, 2**32, size=masks.shape, dtype=np.uint32)
        drawn = drawer.one(row, options, 8, masks, **tokens)
        expected = numpy.one(row, options, 8, masks, **tokens)
        where = f"seed {seed}, trial {trial}"
        assert drawn[0] == expected[0], where
        assert drawn[1] == pytest.approx(expected[1], abs=1e-5, nan_ok=True), where
        assert [i for i, _ in drawn[2] or []] == [i for i, _ in expected[2] or []], where
        assert [x for _, x in drawn[2] or []] == pytest.approx([x for _, x in expected[2] or []], abs=1e-5), (
            where
        )


# ---------------------------------------------------------------------------------------------------- the draw


def chi_square(counts, expected):
    """The statistic and its degrees of freedom; everything expected less than 5 times counts as one."""
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum(), len(counts) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95, "temperature": 1.5},
        {
            "frequency_penalty": 1.0,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.2,
            "logit_bias": {2: 2.0},
        },
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_frequencies_follow_the_probabilities(drawer, fields):
    rng = np.random.default_rng(5)
    row = (rng.standard_normal(200) * 2).astype(np.float32)
    options = hot(**{"temperature": 1.0, "seed": 3, **fields})
    tokens = {"prompt": [1, 2, 3], "generated": [3, 4, 4]}
    expected, close = probabilities(adjusted(row, options, **tokens), options)
    assert not close
    count = 20_000 if drawer.kind != "numpy" else 3000
    counts = np.bincount(drawer.tokens(row, options, count, **tokens), minlength=200)
    assert not counts[expected == 0].any()
    statistic, degrees = chi_square(counts, expected * count)
    # The 99.99 % quantile, by Wilson and Hilferty's approximation.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_noise_is_standard_gumbel_and_independent():
    noise = np.concatenate(
        [gumbel_noise(seed, position, 4096) for seed in (0, 1, 2**64 - 1) for position in range(20)]
    )
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    ordered = np.sort(noise)
    distance = np.abs(np.exp(-np.exp(-ordered)) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 1.63 / np.sqrt(len(ordered))  # Kolmogorov-Smirnov at 1 %
    rows = np.stack([gumbel_noise(7, position, 500) for position in range(500)])
    limit = 4 / np.sqrt(250_000)
    for shifted in (rows[1:], rows[:, 1:]):
        other = rows[:-1] if len(shifted) < 500 else rows[:, :-1]
        assert abs(np.corrcoef(shifted.ravel(), other.ravel())[0, 1]) < limit


PINNED = ["-0x1.4c77e6291bf80p-4", "-0x1.1681b90b42716p-2", "-0x1.0f73a91711fe9p-2"]


def test_noise_is_the_same_bits_for_ever(drawer):
    """A change here changes every sampled answer of every engine: it must be meant."""
    assert [value.hex() for value in gumbel_noise(0, 0, 3).tolist()] == PINNED
    assert np.array_equal(gumbel_noise(5, 9, 100)[:10], gumbel_noise(5, 9, 10))
    assert drawer.tokens([0.0] * 500, hot(seed=11), 6) == [353, 130, 396, 56, 23, 397]


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 1e4])
def test_ids_that_are_passed_over_could_not_have_won(drawer, scale):
    rng = np.random.default_rng(4)
    for seed in range(150):
        row = (rng.standard_normal(2000) * scale).astype(np.float32)
        row[rng.integers(2000, size=3)] = [-np.inf, row.max(), row.min()]
        temperature = float(rng.choice([2e-5, 0.2, 1.0, 5.0, 1e6]))
        scores = (row.astype(np.float64) - row.max()) / temperature + gumbel_noise(seed, 3, 2000)
        assert drawer.one(row, hot(temperature, seed=seed), 3)[0] == scores.argmax()


# ----------------------------------------------------------------------------------------------------- edges


def test_greedy_takes_the_lowest_id_of_a_tie(drawer):
    assert drawer.one([0.0, 2.0, 1.0, 2.0], SamplingOptions())[0] == 1
    assert drawer.one([-np.inf, -np.inf, 5.0], SamplingOptions())[0] == 2
    tied = [1.0] * 300
    assert drawer.one(tied, SamplingOptions(logit_bias={0: -1.0}))[0] == 1
    assert set(drawer.tokens(tied, hot(top_k=3), 60)) == {0, 1, 2}
    assert set(drawer.tokens(tied, hot(top_p=0.01), 60)) == {0, 1, 2}
    assert set(drawer.tokens(tied, hot(typical_p=0.01), 60)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-10, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(drawer, temperature):
    rng = np.random.default_rng(0)
    row = (rng.standard_normal(1000) * 1e4).astype(np.float32)
    row[17] = row[900] = row.max() + 1
    row[3] = -np.inf
    for seed in range(20):
        assert drawer.one(row, hot(temperature, seed=seed)) == drawer.one(row, SamplingOptions())
        assert drawer.one(row, hot(2e-5, seed=seed))[0] in (17, 900)
        assert drawer.one(row, hot(2e-5, seed=seed, top_p=0.9, typical_p=0.9))[0] in (17, 900)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 3}]
)
def test_a_row_that_is_no_distribution_is_not_sampled(drawer, bad, fields):
    for width in (8, 64, 200):
        rows = np.zeros((3, width), np.float32)
        rows[1, 5] = bad
        rows[:, 7] = -np.inf
        options = [SamplingOptions(seed=seed, **fields) for seed in (1, 2, 3)]
        tokens, logprobs, best = drawer.rows.draw(
            rows, [0, 1, 2], [drawer.state(o) for o in options], [0, 0, 0]
        )
        assert tokens[1] == -1 and math.isnan(logprobs[1]) and not best[1]
        for r in (0, 2):
            assert (tokens[r], logprobs[r]) == drawer.one(rows[r], options[r])[:2]
        assert drawer.one(np.full(width, -np.inf), options[0])[0] == -1
        assert math.isnan(drawer.rows.score(rows, [1], [0], 2)[0][0])


def test_a_row_of_which_nothing_is_left_is_not_sampled(drawer):
    none, row = np.zeros((1, 4), np.uint32), [0.0] * 100
    assert drawer.one(row, SamplingOptions(), masks=none)[0] == -2
    one = none.copy()
    one[0, 3] = 2
    for options in (SamplingOptions(), hot(), hot(top_p=0.1, top_k=4, min_p=0.5, typical_p=0.5)):
        assert drawer.one(row, options, masks=one)[0] == 97
    # End tokens are held back only while something else is left.
    assert drawer.one(row, SamplingOptions(min_tokens=5), masks=one, ends=[97])[0] == 97
    assert drawer.one(row, SamplingOptions(min_tokens=5), ends=[0, 1])[0] == 2
    assert drawer.one(row, SamplingOptions(min_tokens=5), position=5, ends=[0, 1])[0] == 0


def test_biases_and_penalties_at_the_ends_of_float32(drawer):
    top = float(np.finfo(np.float32).max)
    assert drawer.one([top, -top, 0.0], SamplingOptions(logit_bias={0: 100, 1: -100}))[0] == 0
    options = SamplingOptions(repetition_penalty=1e30, logit_bias={2: 100})
    token, logprob, _ = drawer.one([-1e30, 1.0, -np.inf], options, prompt=[0, 1, 2])
    assert token == 1 and logprob == pytest.approx(0.0)


def test_log_probabilities_are_the_models_own(drawer):
    rng = np.random.default_rng(8)
    row = (rng.standard_normal(700) * 5).astype(np.float32)
    row[10] = row[300] = row.max() + 2  # a tie at the top
    row[11] = -np.inf
    wide = row.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(700), -wide))[:20].tolist()
    for options in (
        SamplingOptions(logprobs=20),
        hot(0.3, seed=4, logprobs=20),
        hot(seed=4, logprobs=20, top_k=9, logit_bias={10: -100}, frequency_penalty=2),
    ):
        token, logprob, best = drawer.one(row, options, generated=[10, 10, 300])
        assert logprob == pytest.approx(expected[token], abs=2e-6)
        assert [i for i, _ in best] == order
        assert [value for _, value in best] == pytest.approx(expected[order].tolist(), abs=2e-6)
    assert drawer.one(row, SamplingOptions(logprobs=0))[2] == []
    assert drawer.one(row, SamplingOptions())[2] is None
    assert len(drawer.one([0.0, -np.inf, 1.0], SamplingOptions(logprobs=20))[2]) == 2
    scored = drawer.rows.score(np.stack([row, row]), [1, 0], [5, 300], 2)
    for (logprob, best), token in zip(scored, (5, 300), strict=True):
        assert logprob == pytest.approx(expected[token], abs=2e-6)
        assert [i for i, _ in best] == order[:2]
    assert drawer.one(np.full(4, 1e30, np.float32), SamplingOptions())[1] == pytest.approx(-math.log(4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind):
    """Nor on threads, on what the working memory held, or on what lies around the rows; and no row is written to."""
    rng = np.random.default_rng(1)
    width = 9001
    memory = np.full((34, width), np.nan, np.float32)  # the rows lie between two of NaN
    rows = memory[1:33]
    rows[:] = rng.standard_normal((32, width)) * 3
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.0, "min_p": 0.01, "typical_p": 0.9, "frequency_penalty": 1.0},
    ]
    options = [SamplingOptions(seed=r, **kinds[r % 4]) for r in range(32)]
    history = {"prompt": [1, 2], "generated": [3, 3]}
    before = rows.tobytes()
    together = None
    for threads in (1, 2, 3) if kind != "numpy" else (1,):
        drawer = Drawer(kind, threads)
        for soiled in (np.full((3, 2 * width), 1e30, np.float32), np.full((3, width), np.nan, np.float32)):
            drawer.rows.draw(soiled, [0, 1, 2], [drawer.state(options[2])] * 3, [0, 0, 0])
        drawn = drawer.rows.draw(rows, range(32), [drawer.state(o, **history) for o in options], range(32))
        together = together or drawn
        assert drawn == together
    assert rows.tobytes() == before
    for r in range(32):
        alone = Drawer(kind).one(rows[r], options[r], r, **history)
        assert alone == tuple(part[r] for part in together)
