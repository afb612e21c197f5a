"""Where a program runs: one folder a backend, all behind the contract of base.py."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from enginewright.recipes.errors import InputError, near_matches

if TYPE_CHECKING:
    from enginewright.backends.base import Backend

__all__ = ["BACKENDS", "get_backend"]

#: Names and the modules that hold each one's `BACKEND`. A module is imported when its backend is asked for.
BACKENDS = {
    "cpu": "enginewright.backends.cpu",
    "checkpoint": "enginewright.backends.checkpoint",
}


def get_backend(name: str) -> Backend:
    """Return the backend called `name`. Raises InputError for an unknown name."""
    if name not in BACKENDS:
        close = near_matches(name, BACKENDS)
        raise InputError(
            "there is no such backend",
            found=repr(name),
            expected=", ".join(BACKENDS),
            action=f"did you mean {close[0]}?" if close else None,
        )
    backend: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return backend
