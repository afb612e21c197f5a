"""A pytest plugin (`-p tests.native_override`): take the native module from `$ENGINEWRIGHT_NATIVE`, an instrumented build."""

from __future__ import annotations

import importlib.util
import os
import sys

import enginewright.backends.cpu as package

NAME = "enginewright.backends.cpu._native"
spec = importlib.util.spec_from_file_location(NAME, os.environ["ENGINEWRIGHT_NATIVE"])
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[NAME] = module
spec.loader.exec_module(module)
package._native = module  # type: ignore[attr-defined]
