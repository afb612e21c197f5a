"""The native module's tests under AddressSanitizer and ThreadSanitizer: one instrumented build each, then the tests on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "tests/backends/cpu/"
DRAWING = "tests/runtime/test_sampler.py::"
TESTS = {
    "address": [
        NATIVE + name
        for name in ("test_executor.py", "test_beside.py", "test_generic_ops.py", "test_linear_kernels.py", "test_row_kernels.py",
                     "test_attention_kernels.py", "test_thread_pool.py")
    ] + [DRAWING + name for name in ("test_every_variant_draws_as_numpy_does",
                                     "test_a_row_does_not_depend_on_its_neighbours")],
    "thread": [NATIVE + "test_thread_pool.py", NATIVE + "test_executor.py", NATIVE + "test_beside.py",
               DRAWING + "test_a_row_does_not_depend_on_its_neighbours"],
}  # fmt: skip
LIBRARY = {"address": "libasan.so", "thread": "libtsan.so"}


def _library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_tests_are_clean(sanitizer: str, tmp_path: Path) -> None:
    tools = ["cmake", "ninja"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "nanobind", *tools], check=True)
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DEW_SANITIZE={sanitizer}"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, env=environment)
    subprocess.run(["cmake", "--build", tmp_path], check=True, env=environment)
    (module,) = tmp_path.glob("_native*.so")
    # The C++ library too: a sanitizer that starts before it cannot find the function that throws.
    preload = [_library(name) for name in (LIBRARY[sanitizer], "libstdc++.so")]
    environment |= {
        "LD_PRELOAD": " ".join(preload),
        "ENGINEWRIGHT_NATIVE": str(module),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory to its end
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.native_override", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *TESTS[sanitizer]], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    print(done.stdout[-400:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
