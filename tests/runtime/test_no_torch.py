"""The wall: serving needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"

BLOCK = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors"):
            raise ImportError(f"{name} stands behind the wall")

sys.meta_path.insert(0, Wall())
"""


def behind_the_wall(script: str) -> str:
    """Run `script` in an interpreter that cannot import torch or transformers; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_runtime_imports_without_torch():
    names = sorted(path.stem for path in RUNTIME.glob("*.py") if path.stem != "__init__")
    assert "engine" in names
    imports = "\n".join(f"import enginewright.runtime.{name}" for name in names)
    behind_the_wall(imports + "\nimport enginewright.backends.cpu.executor")


def test_the_server_imports_without_torch():
    pytest.importorskip("fastapi")
    names = sorted(path.stem for path in (RUNTIME / "server").glob("*.py") if path.stem != "__init__")
    assert "app" in names
    behind_the_wall("\n".join(f"import enginewright.runtime.server.{name}" for name in names))


def test_an_engine_generates_without_torch():
    pytest.importorskip("torch")
    engines = pytest.importorskip("tests.engines")
    folder = engines.built("smollm2", "int4")
    said = behind_the_wall(f"""
        import enginewright
        with enginewright.load({str(folder)!r}) as engine:
            print(engine.generate("The capital of France is", max_tokens=6)[0].text)
    """)
    assert "Paris" in said


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_optimize_without_its_packages_says_what_to_install(missing: str):
    said = behind_the_wall(f"""
        import sys
        sys.meta_path.pop(0)
        sys.modules[{missing!r}] = None  # fails to import as a package does that is not installed
        from click.testing import CliRunner
        from enginewright import optimize
        from enginewright.cli import optimize as command
        from enginewright.recipes.errors import InputError
        try:
            optimize("models/x")
        except InputError as error:
            print(error)
        print(CliRunner().invoke(command, ["models/x"]).output)
    """)
    assert said.count(f"building an engine needs the package {missing!r}") == 2, said
    assert said.count("to do: pip install 'torch>=2.9' 'transformers>=5' gguf") == 2


def test_an_engine_is_verified_without_torch_but_for_its_model(tmp_path: Path):
    said = behind_the_wall(f"""
        import sys
        sys.meta_path.pop(0)
        sys.modules["torch"] = None
        from click.testing import CliRunner
        from enginewright.cli import engine
        result = CliRunner().invoke(engine, ["verify", {str(tmp_path)!r}, "--against", "models/x"])
        print(result.exit_code, result.output)
    """)
    assert said.startswith("2") and "--against needs the package 'torch'" in said
    assert "to do: pip install 'torch>=2.9' 'transformers>=5' gguf" in said


def test_a_gguf_file_without_its_package_says_what_to_install(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = behind_the_wall(f"""
        import sys
        sys.meta_path.pop(0)
        sys.modules["gguf"] = None
        import enginewright
        from enginewright.recipes.errors import InputError
        try:
            enginewright.optimize({str(tmp_path / "model.gguf")!r}, out={str(tmp_path / "engine")!r})
        except InputError as error:
            print(error)
    """)
    assert "needs the package 'gguf'" in said and "to do: pip install gguf" in said
