"""A dozen planted faults in SmolLM2-135M: refused, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

import enginewright
from enginewright.recipes.errors import VerificationError
from tests.models import smollm2
from tests.verification.faults import FAULTS
from tests.verification.test_faults import check

NAMES = [
    "a rope of interleaved pairs for one of halves",
    "another eps",
    "the residual from the wrong place",
    "another activation",
    "the scales of two groups, swapped",
    "joined scales in another order than their codes",
    "offsets of the next group",
    "nibbles in the other order",
    "gate and up, swapped",
    "a rope table one position on",
    "query heads that read the next key head",
    "a second page read from the first",
    "the logits of the row before",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_a_real_model_is_refused_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    model = smollm2()
    fault.plant(monkeypatch)
    with pytest.raises(VerificationError) as caught:
        enginewright.optimize(model, fault.recipe, tmp_path / "engine", bisect=True)
    assert caught.value.bisection is not None
    check(fault, caught.value.bisection)
