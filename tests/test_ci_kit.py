"""examples/ci: the script builds, verifies, writes a baseline and holds later engines to it; the workflow runs that script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.passes.architectures import folder

KIT = Path(__file__).parent.parent / "examples" / "ci"


def run(where: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The script in a folder of its own, with the commands of this interpreter."""
    commands = where / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("optimize", "engine"):
        command = commands / name
        command.write_text(f"#!{sys.executable}\nfrom enginewright.cli import {name}\n{name}()\n")
        command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "CACHE": str(where / "cache")}
    return subprocess.run(
        [str(KIT / "verify_engine.sh"), *map(str, arguments)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_script_writes_a_baseline_and_holds_engines_to_it(tmp_path: Path) -> None:
    first = run(tmp_path, folder("llama"), "int8")
    assert first.returncode == 0 and "commit it" in first.stderr, first.stderr
    baseline = tmp_path / "engine-baseline.json"
    written = json.loads(baseline.read_text())
    assert written["verdict"] == "passed" and (tmp_path / "build" / "verify.xml").is_file()
    again = run(tmp_path, folder("llama"), "int8")
    assert again.returncode == 0 and "built before" in again.stderr, again.stderr
    written["verification"]["mean_kl"] /= 2
    baseline.write_text(json.dumps(written))
    worse = run(tmp_path, folder("llama"), "int8")
    assert worse.returncode == 1 and "mean_kl against the baseline" in worse.stderr


def test_the_script_asks_for_a_model(tmp_path: Path) -> None:
    asked = run(tmp_path)
    assert asked.returncode == 2 and "which model?" in asked.stderr


def test_the_workflow_is_one_that_runs_the_script() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((KIT / "github-workflow.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert any(command.startswith("./verify_engine.sh") for command in commands)
    assert {"MODEL", "RECIPE", "CACHE"} <= set(job["env"])
