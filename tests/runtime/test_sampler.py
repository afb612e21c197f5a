"""Sampling: greedy ties, the noise's distribution and reproducibility, temperatures at the edge, rows that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime import sampler
from enginewright.runtime.sampler import draw, gumbel_noise, logsumexp_rows


@pytest.fixture(autouse=True, params=["native", "numpy"])
def row_passes(request, monkeypatch):
    """Everything holds with the native row passes and with numpy's."""
    if request.param == "numpy":
        monkeypatch.setattr(sampler, "_native", None)
    elif sampler._native is None:
        pytest.skip("the native module is not built")


def one(row, temperature=0.0, seed=0, position=0):
    return draw(np.asarray([row], np.float32), [temperature], [seed], [position])[0]


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert one([0.0, 2.0, 1.0, 2.0])[0] == 1
    assert one([-np.inf, -np.inf, 5.0])[0] == 2


def test_log_probability_is_that_of_the_token_at_temperature_one():
    row = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    for temperature in (0.0, 0.3, 2.0):
        for seed in range(20):
            token, logprob = one(row, temperature, seed)
            assert logprob == pytest.approx(expected[token], abs=1e-6)
    assert logsumexp_rows(np.full((1, 4), 1e30, np.float32))[0] == pytest.approx(1e30)


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


def test_noise_is_the_same_bits_for_ever():
    """A change here changes every sampled answer of every engine: it must be meant."""
    assert [value.hex() for value in gumbel_noise(0, 0, 3).tolist()] == PINNED
    assert np.array_equal(gumbel_noise(5, 9, 100)[:10], gumbel_noise(5, 9, 10))


def test_frequencies_follow_the_softmax():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.tile(np.log(probabilities).astype(np.float32), (3000, 1))
    for temperature in (1.0, 0.5):
        drawn = draw(logits, [temperature] * 3000, [3] * 3000, range(3000))
        counts = np.bincount([token for token, _ in drawn], minlength=4)
        expected = probabilities ** (1 / temperature) / (probabilities ** (1 / temperature)).sum() * 3000
        assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, 0.1 %


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 1e4])
def test_ids_that_are_passed_over_could_not_have_won(scale):
    rng = np.random.default_rng(4)
    for seed in range(150):
        row = (rng.standard_normal(2000) * scale).astype(np.float32)
        row[rng.integers(2000, size=3)] = [-np.inf, row.max(), row.min()]
        temperature = float(rng.choice([2e-5, 0.2, 1.0, 5.0, 1e6]))
        scores = (row.astype(np.float64) - row.max()) / temperature + gumbel_noise(seed, 3, 2000)
        assert one(row, temperature, seed, 3)[0] == scores.argmax()


@pytest.mark.parametrize("temperature", [1e-5, 1e-10, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(temperature):
    rng = np.random.default_rng(0)
    row = (rng.standard_normal(1000) * 1e4).astype(np.float32)
    row[17] = row[900] = row.max() + 1
    row[3] = -np.inf
    for seed in range(20):
        assert one(row, temperature, seed) == one(row)
        assert one(row, 2e-5, seed)[0] in (17, 900)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_is_not_sampled(bad, temperature):
    rows = np.zeros((3, 8), np.float32)
    rows[1, 5] = bad
    drawn = draw(rows, [temperature] * 3, [1, 2, 3], [0, 0, 0])
    assert drawn[1][0] == -1
    assert drawn[0] == one(rows[0], temperature, 1) and drawn[2] == one(rows[2], temperature, 3)
    assert one(np.full(8, -np.inf), temperature)[0] == -1


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((32, 1001)).astype(np.float32)
    temperatures = [0.0, 0.8] * 16
    together = draw(rows, temperatures, range(32), range(32))
    assert together == [one(rows[r], temperatures[r], r, r) for r in range(32)]
