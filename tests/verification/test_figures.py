"""Figures of a verification, held against plain formulas, and the bands that a fault at a position shows in."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.recipes.errors import VerificationError
from enginewright.verification.figures import Figures, band_edges
from enginewright.verification.samples import sample_tokens

VOCAB = 40


def test_the_text_is_long_enough_for_a_full_verification_and_does_not_repeat_itself() -> None:
    text = resources.files("enginewright.verification").joinpath("text.txt").read_text(encoding="utf-8")
    lengths = sum(map(len, sample_tokens(None, 50_000, 1 << 20, 0, "full")))
    assert len(text) > 3.5 * lengths  # characters a token, by the tokenizers of English
    pieces = [text[at : at + 60] for at in range(0, len(text) - 60, 20)]
    assert len(set(pieces)) == len(pieces)


def rows(seed: int, count: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, VOCAB)) * scale).astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(0, 1000), st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_figures_are_those_of_plain_formulas(lengths: list[int], seed: int, noise: float) -> None:
    figures = Figures()
    kl, top1, top5, loss, own_loss, error = [], [], [], [], [], 0.0
    for index, length in enumerate(lengths):
        p = rows(seed + index, length)
        q = p + noise * rows(seed + 100 + index, length, 1.0)
        tokens = np.random.default_rng(seed + index).integers(0, VOCAB, length).tolist()
        figures.add(tokens, p, q)
        a, b = log_softmax(p), log_softmax(q)
        kl += (np.exp(a) * (a - b)).sum(-1).tolist()
        top1 += (p.argmax(-1) == q.argmax(-1)).tolist()
        best = [
            set(np.argsort(-row)[:5]) & set(np.argsort(-other)[:5]) for row, other in zip(p, q, strict=True)
        ]
        top5 += [len(both) / 5 for both in best]
        loss += [-a[i, token] for i, token in enumerate(tokens[1:])]
        own_loss += [-b[i, token] for i, token in enumerate(tokens[1:])]
        error = max(error, float(np.abs(p.astype(np.float64) - q).max()))
    found = figures.verdict(len(lengths), {})
    assert found.tokens == sum(lengths) and found.max_logit_error == pytest.approx(error)
    assert found.mean_kl == pytest.approx(np.mean(kl), abs=1e-12)
    assert found.top1_agreement == pytest.approx(np.mean(top1))
    assert found.top5_agreement == pytest.approx(np.mean(top5))
    if loss:
        assert found.perplexity == pytest.approx(np.exp(np.mean(own_loss)))
        assert found.reference_perplexity == pytest.approx(np.exp(np.mean(loss)))
    assert sum(band["positions"] for band in found.bands) == sum(lengths)
    weighed = sum(band["positions"] * band["mean_kl"] for band in found.bands) / sum(lengths)
    assert weighed == pytest.approx(found.mean_kl, abs=1e-9)


@given(st.integers(1, 5000), st.lists(st.integers(0, 6000), max_size=3))
def test_bands_cover_every_position_once_and_begin_at_pages_and_windows(
    longest: int, windows: list[int]
) -> None:
    edges = band_edges(longest, windows)
    assert edges[0] == 0 and edges[-1] == longest and edges == sorted(set(edges))
    assert {edge for edge in (16, 32, *windows) if 0 < edge < longest} <= set(edges)


def faulty_from(position: int, limit: float, noise: float = 0.02) -> list[str]:
    """Failures of an engine that is good below `position`, and wrong at some tokens from there on."""
    figures = Figures()
    for index, length in enumerate((180, 96, 33, 17)):
        p = rows(index, length)
        q = p + noise * rows(index + 50, length, 1.0)
        q[position:] = rows(index + 90, len(q[position:]))
        figures.add([1] * length, p, q)
    return figures.verdict(4, {"max_kl": limit}, windows=[100]).failures


def test_a_fault_that_begins_at_a_position_shows_though_the_mean_is_within_its_limit() -> None:
    assert faulty_from(1000, 5.0) == []
    (failure,) = faulty_from(150, 5.0)
    assert failure.startswith("positions 128 to 179 have a median KL of")
    window = faulty_from(100, 20.0)
    assert any(failure.startswith("positions 100 to 127") for failure in window)


def test_bands_of_an_engine_that_errs_evenly_do_not_stand_out() -> None:
    for noise in (0.0, 1e-6, 0.1, 1.0):
        assert faulty_from(1000, 50.0, noise) == []


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(VerificationError, match="shape"):
        Figures().add([1, 2], rows(0, 2), rows(0, 3))
