"""Targets: names of GPUs, and those that the library refuses."""

from __future__ import annotations

import sys

import pytest

from enginewright.backends import aim, get_backend
from enginewright.backends.tensorrt import api
from enginewright.backends.tensorrt.targets import parse_targets, plan_name, supported, turing
from enginewright.recipes.errors import InputError


def _require_library() -> None:
    pytest.importorskip("tensorrt_rtx")


def test_targets_are_in_order_and_once_each() -> None:
    _require_library()
    assert parse_targets("sm86, SM80,sm86") == ["sm86", "sm80"]
    assert parse_targets(["sm120"]) == ["sm120"]
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(supported())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("sm90", "H100, H200"),
        ("sm100", "its list of architectures has no SM100"),
        ("sm87", "Jetson Orin"),
    ],
)
def test_a_gpu_that_the_library_refuses_is_named_with_the_reason(asked: str, told: str) -> None:
    _require_library()
    with pytest.raises(InputError, match=f"builds no plan for {asked} ahead of time") as caught:
        parse_targets(f"sm80,{asked}")
    assert told in str(caught.value) and "sm89" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("sm_80", "sm80"), ("8.6", "sm86"), ("compute_89", "sm89"), ("sm1200", "sm120"), ("A100", "sm80"), ("l4", "sm89"),
        ("H100", None), ("rtx 4090", None), ("ampere", None),
    ],
)  # fmt: skip
def test_an_unknown_target_is_told_with_one_like_it(asked: str, near: str | None) -> None:
    _require_library()
    with pytest.raises(InputError, match="there is no such target") as caught:
        parse_targets(asked)
    assert caught.value.action == (near and f"did you mean {near}?")


def test_no_target_is_asked_for() -> None:
    _require_library()
    for nothing in (None, "", " , "):
        with pytest.raises(InputError, match="target"):
            aim(get_backend("tensorrt"), nothing)


def test_other_backends_take_no_target() -> None:
    assert aim(get_backend("cpu"), None) is get_backend("cpu")
    with pytest.raises(InputError, match="builds for one kind of machine"):
        aim(get_backend("cpu"), "sm80")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in api.LIBRARIES:
        monkeypatch.setitem(sys.modules, known.module, None)  # an import finds nothing
    api.library.cache_clear()
    try:
        with pytest.raises(InputError, match="needs TensorRT-RTX or TensorRT") as caught:
            aim(get_backend("tensorrt"), "sm80")
    finally:
        monkeypatch.undo()
        api.library.cache_clear()
    assert "pip install 'enginewright[tensorrt]'" in str(caught.value)


def test_files_and_formats_by_target() -> None:
    assert plan_name(["sm80"]) == "plan-sm80.engine"
    assert plan_name(["sm80", "sm86"]) == "plan-sm80-sm86.engine"
    assert turing(["sm75", "sm80", "sm120"]) == ["sm75"]
