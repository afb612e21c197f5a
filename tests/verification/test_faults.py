"""Planted faults: the build refuses each, and `--bisect` names the pass, or the op and module, that it was planted in."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import enginewright
from enginewright import build
from enginewright.passes.capture import capture
from enginewright.passes.program import Program
from enginewright.passes.source import open_source
from enginewright.recipes.errors import VerificationError
from enginewright.verification.bisection import Bisection
from tests.passes.architectures import folder
from tests.verification.faults import FAULTS, Fault


@functools.cache
def captured(arch: str) -> Program:
    return capture(open_source(folder(arch)))


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault lies in capture: a model is captured once for all of them."""
    monkeypatch.setattr(build, "capture", lambda source, **options: captured(source.path.name).clone())


def refused(fault: Fault, out: Path) -> Bisection:
    with pytest.raises(VerificationError) as caught:
        enginewright.optimize(folder(fault.arch), fault.recipe, out, overrides=fault.overrides, bisect=True)
    assert not out.exists()
    found = caught.value.bisection
    assert found is not None and found.verdict() in str(caught.value)
    return found


def check(fault: Fault, found: Bisection) -> None:
    assert found.kind == fault.kind, found.text()
    assert fault.where in found.where, found.text()
    if fault.op:
        named = [node for node in found.nodes if fault.op in node.op and fault.module in node.module]
        assert named, found.text()


def cases(ci: bool) -> list[Any]:
    return [pytest.param(fault, id=name) for name, fault in FAULTS.items() if fault.ci == ci]


@pytest.mark.parametrize("fault", cases(ci=True))
def test_a_planted_fault_is_refused_and_named(
    fault: Fault, captured_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(fault.arch)
    fault.plant(monkeypatch)
    check(fault, refused(fault, tmp_path / "engine"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", cases(ci=False))
def test_more_faults(
    fault: Fault, captured_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(fault.arch)
    fault.plant(monkeypatch)
    check(fault, refused(fault, tmp_path / "engine"))
