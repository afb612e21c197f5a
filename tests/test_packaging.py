"""The package as users get it: sdist, then a wheel from the sdist, in a fresh environment that has only the base dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import engines

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_wheel_from_the_sdist_serves_without_torch(tmp_path: Path) -> None:
    def run(*command: object, cwd: Path = tmp_path) -> str:
        done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "pip", "install", "--quiet", "build")
    # The wheel is built from the sdist.
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    names = run(sys.executable, "-m", "zipfile", "-l", wheel)
    for name in (
        "enginewright/recipes/int4.yaml",
        "enginewright/verification/text.txt",
        "enginewright/py.typed",
    ):
        assert name in names
    for path in (ROOT / "runtime" / "server" / "static").iterdir():
        assert f"enginewright/runtime/server/static/{path.name}" in names
    folders = ("passes/", "runtime/", "recipes/", "backends/")
    assert not any(line.startswith(folders) for line in names.splitlines())
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    installed = run(python, "-m", "pip", "list")
    assert "torch" not in installed and "transformers" not in installed
    engine = engines.built("smollm2", "int4")
    command = tmp_path / "venv" / "bin" / "engine"
    text = run(command, "generate", engine, "The capital of France is", "--max-tokens", 4)
    assert "Paris" in text
    refused = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "optimize"), "model"], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 2 and "pip install 'torch" in refused.stderr


def test_what_users_are_told_to_install_is_what_the_extras_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    places = {
        "optimize": "src/enginewright/__init__.py",
        "serve": "src/enginewright/serving.py",
        "report": "src/enginewright/report.py",
    }
    for extra, place in places.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        packages = re.findall(r'"([\w-]+)', listed)
        (advice,) = re.findall(r"pip install ([^\"(,]*)", (ROOT / place).read_text(encoding="utf-8"))
        assert packages and re.findall(r"[\w-]{3,}", advice) == packages
