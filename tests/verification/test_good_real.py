"""A good engine of SmolLM2-135M is never refused: twenty verifications, in other processes, hash seeds and thread counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import engines
from tests.models import smollm2

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("run", range(20))
def test_it_passes_every_time(run: int, tmp_path: Path) -> None:
    engine = engines.built("smollm2", ["int4", "int8", "bf16", "int4-kv8"][run % 4])
    threads = str(1 + run % 2)
    command = [sys.executable, "-c", "from enginewright.cli import engine; engine()", "verify", str(engine)]
    done = subprocess.run(
        [*command, "--against", str(smollm2()), "--json", str(tmp_path / "v.json")],
        env={**os.environ, "PYTHONHASHSEED": str(run), "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "v.json").read_text())
    recorded = json.loads((engine / "engine.json").read_text())["verification"]
    assert found["verdict"] == "passed" and found["verification"]["mean_kl"] == recorded["mean_kl"]
