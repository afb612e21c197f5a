"""The fp32 engine against eager transformers, on the real models: whole prompts, chunks, and teacher-forced decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tests import engines

BOUND = 2e-3


def assert_same(reference: np.ndarray, logits: np.ndarray) -> None:
    """Within BOUND everywhere; the same best token, except where the reference's two best lie within twice the error."""
    error = np.abs(reference - logits).max()
    assert error <= BOUND, f"largest error {error}"
    differs = reference.argmax(-1) != logits.argmax(-1)
    if differs.any():
        best = np.partition(reference[differs], -2, axis=-1)[:, -2:]
        assert ((best[:, 1] - best[:, 0]) < 2 * BOUND).all()


def compare(model: str, lengths: list[int], chunks: list[int | None], decoded: int) -> None:
    with engines.load(model, "fp32") as engine:
        tokens = engines.text_tokens(engine, max(lengths) + decoded)
        reference = engines.eager_logits(model, tokens)
        for length in lengths:
            whole = engine.logits([tokens[:length]])[0]
            assert_same(reference[:length], whole)
            for chunk in chunks:
                pieces = engine.logits([tokens[:length]], chunk_size=chunk)[0]
                assert np.array_equal(pieces.view(np.int32), whole.view(np.int32)), (
                    f"{length} tokens in chunks of {chunk}"
                )
        steps = engine.logits([tokens[: 16 + decoded]], chunk_size=1)[0]
        assert_same(reference[: 16 + decoded], steps)


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_fp32_engine_equals_eager(model: str) -> None:
    compare(model, [1, 2, 15, 16, 17, 600], [64], decoded=24)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_fp32_engine_equals_eager_in_full(model: str) -> None:
    compare(model, [1, 2, 15, 16, 17, 600, 2000], [1, 7, 64], decoded=100)
