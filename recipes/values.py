"""Values of a recipe: each check takes (value, dotted key) and returns the value, or raises InputError."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from enginewright.recipes.errors import InputError, near_matches
from enginewright.recipes.formats import ACTIVATION_FORMATS, GROUPS, WEIGHT_FORMATS

__all__ = [
    "KEEP",
    "activation_format",
    "alpha",
    "bits",
    "by",
    "candidates",
    "count",
    "flag",
    "layers",
    "limit",
    "number",
    "one_of",
    "optional_count",
    "seed",
    "share",
    "text",
    "unusable",
    "weight_format",
]

KEEP = "keep"
"""A `weight` that carries the integers of an already quantised file unchanged."""

_WEIGHTS = (*WEIGHT_FORMATS, KEEP)
_ACTIVATIONS = ("auto", *ACTIVATION_FORMATS)


def unusable(key: str, value: object, expected: str, action: str | None = None) -> InputError:
    shown = "null" if value is None else repr(value)
    return InputError(
        f"recipe key '{key}' has a value that cannot be used", found=shown, expected=expected, action=action
    )


def one_of(*choices: object) -> Callable[[Any, str], Any]:
    def check(value: Any, key: str) -> Any:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        names = [str(choice) for choice in choices]
        near = [name for name in names if name.startswith(f"{value}_")] or near_matches(str(value), names, 1)
        action = f"did you mean {' or '.join(near)}?" if near else None
        raise unusable(key, value, "one of " + ", ".join(names), action)

    return check


def text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise unusable(key, value, "text")
    return value


def optional_count(value: Any, key: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise unusable(key, value, "a whole number above 0, or null")


def layers(value: Any, key: str) -> int | None:
    """A number of layers; 0 means none, as null does."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value or None
    raise unusable(key, value, "a whole number of layers, 0 or more, or null")


def limit(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise unusable(key, value, "a number, 0 or more, or null for no limit")


def share(value: Any, key: str) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1):
        return value if value is None else float(value)
    raise unusable(key, value, "a number from 0 to 1, or null for no limit")


def by(check: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {"check": check}


def weight_format(value: Any, key: str) -> Any:
    if isinstance(value, str) and value.replace("_g-1", "") in _WEIGHTS:
        return value.replace("_g-1", "")  # as others write one group a row
    near = [name for name in _WEIGHTS if name.startswith(f"{value}_")] or near_matches(
        str(value), _WEIGHTS, 3
    )
    raise unusable(
        key,
        value,
        "f32, bf16, fp8, keep, or int8, uint8, int4, int3, int2, alone or with a group of inputs a scale (_g"
        + ", _g".join(map(str, GROUPS))
        + "), and perhaps _zp",
        f"did you mean {' or '.join(near)}?" if near else None,
    )


activation_format = one_of(*_ACTIVATIONS)


def count(value: Any, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise unusable(key, value, "a whole number above 0")


def seed(value: Any, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise unusable(key, value, "a whole number, 0 or more")


def number(low: float, high: float, optional: bool = False) -> Callable[[Any, str], Any]:
    def check(value: Any, key: str) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        raise unusable(key, value, f"a number from {low:g} to {high:g}" + (", or null" if optional else ""))

    return check


def flag(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    raise unusable(key, value, "true or false")


def alpha(value: Any, key: str) -> Any:
    return value if value == "search" else number(0, 1)(value, key)


def bits(value: Any, key: str) -> Any:
    """`4.5`, or `4.5 bits`."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*bits?\s*", value)):
        value = float(found[1])
    return number(1, 16, optional=True)(value, key)


def candidates(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise unusable(key, value, "a list of weight formats")
    found = tuple(weight_format(item, f"{key}.{index}") for index, item in enumerate(value))
    if KEEP in found or len(set(found)) < len(found):
        raise unusable(key, list(value), "different weight formats, without keep")
    return found
