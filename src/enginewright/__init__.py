"""enginewright: turns a Hugging Face causal language model into a verified serving engine, and serves it.

import enginewright

enginewright.optimize("models/smollm2-135m", recipe="int4", out="engines/smollm2-int4")   # needs [optimize]
engine = enginewright.load("engines/smollm2-int4")                                         # numpy and one native module
print(engine.generate("The capital of France is", max_tokens=16)[0].text)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("enginewright")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = ["__version__", "load", "optimize"]


def __getattr__(name: str) -> Any:
    """Import the two entry points when they are asked for: `load` never pulls in torch, `optimize` does."""
    if name == "optimize":
        from enginewright.build import optimize

        return optimize
    if name == "load":
        from enginewright.runtime.engine import load

        return load
    raise AttributeError(f"module 'enginewright' has no attribute {name!r}")
