"""enginewright: turns a Hugging Face causal language model into a verified serving engine, and serves it.

import enginewright

enginewright.optimize("models/smollm2-135m", recipe="int4")   # needs torch and transformers; writes engines/smollm2-135m-int4
engine = enginewright.load("engines/smollm2-135m-int4")       # numpy and one native module
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


def _refusing(missing: ModuleNotFoundError) -> Any:
    """What stands in for `optimize` where a package is missing: the name can be looked up, a call says what to install."""
    from enginewright.recipes.errors import InputError

    def optimize(*_args: Any, **_options: Any) -> Any:
        raise InputError(
            f"building an engine needs the package {missing.name!r}",
            action="pip install 'torch>=2.9' 'transformers>=5' gguf sentencepiece protobuf (running one needs none of them)",
        ) from missing

    return optimize


def __getattr__(name: str) -> Any:
    """Import the two entry points when they are asked for: `load` never pulls in torch, `optimize` does."""
    if name == "optimize":
        try:
            import transformers  # noqa: F401  (models are opened with it; what is missing is said before that)

            from enginewright.build import optimize
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] == __name__:  # our own native module was not built
                raise
            return _refusing(missing)
        return optimize
    if name == "load":
        from enginewright.runtime.engine import load

        return load
    raise AttributeError(f"module 'enginewright' has no attribute {name!r}")
