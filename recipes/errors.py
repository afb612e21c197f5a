"""The one family of errors, and how each is worded: what was found, what was expected, what to do.

It stands at the bottom of the import arrows, so that every part can raise it. An error's `exit_code` is what the
command lines return.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ArtifactError",
    "CaptureError",
    "EnginewrightError",
    "InputError",
    "LoweringError",
    "RequestError",
    "VerificationError",
    "near_matches",
]


class EnginewrightError(Exception):
    """Something a user can act on.

    `message` says what went wrong; `found`, `expected` and `action` (each optional) become one line each. `str()` gives
    the whole text.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, found: object = None, expected: object = None, action: str | None = None
    ) -> None:
        self.message = message
        self.found = found
        self.expected = expected
        self.action = action
        parts = [("found", found), ("expected", expected), ("to do", action)]
        lines = [f"  {label}: {value}" for label, value in parts if value is not None]
        super().__init__("\n".join([message, *lines]))


class InputError(EnginewrightError):
    """What the user gave cannot be used: a path, an option, a recipe, a file on disk."""


class CaptureError(EnginewrightError):
    """The model cannot be captured exactly; the message names the module and the reason."""


class LoweringError(EnginewrightError):
    """The backend cannot express something that stands in the graph."""


class ArtifactError(EnginewrightError):
    """An engine on disk is damaged, incomplete, or made for another version or target."""


class VerificationError(EnginewrightError):
    """The engine's answers differ from the source model's by more than the recipe allows.

    `bisection`: who is at fault, where that was asked for (a verification.bisection.Bisection).
    """

    exit_code = 1
    bisection: Any = None


class RequestError(EnginewrightError):
    """One request cannot be served; the others go on."""


def near_matches(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of `choices` that look most like `word`, best first (empty when none is close)."""
    return difflib.get_close_matches(word, list(choices), n=count, cutoff=0.6)
