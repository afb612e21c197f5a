"""Plans of SmolLM2 and Gemma for four architectures, by three recipes (`make proof`): built without a GPU, within 6 GB.

Times are printed, not asserted. Calibration sees a short text of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

import enginewright
from enginewright.backends.tensorrt.plan_text import read_plan
from tests.models import gemma3, smollm2

pytestmark = pytest.mark.slow

MOST = 6.0  # GB of host memory
TARGETS = ["sm80", "sm86", "sm89", "sm120"]
SENTENCE = (
    "A river carries what the hills have lost. In spring it is brown and quick, and the bridge at the mill "
    "stands in water to its knees; by August a child can cross it dry. Item {n} of the ledger says: {n} sacks, "
    "{m} of them wet, sold to the miller's cousin for less than they were worth. "
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ledger.txt"
    path.write_text("".join(SENTENCE.format(n=n, m=n * n % 7) for n in range(200)))
    return path


@pytest.mark.parametrize("recipe", ["fp16", "int4-awq", "int8-smoothquant"])
@pytest.mark.parametrize("fetch", [smollm2, gemma3])
def test_plans_for_four_architectures(
    fetch: Callable[[], Path], recipe: str, text: Path, tmp_path: Path
) -> None:
    model = fetch()
    calibration = None if recipe == "fp16" else text
    small = ["max_context=1024"]
    if calibration is not None:
        small += ["calibration.samples=4", "calibration.length=256", "smooth.tokens=512"]
    report = enginewright.optimize(
        model,
        recipe,
        tmp_path / "engine",
        backend="tensorrt",
        target=TARGETS,
        overrides=small,
        calibration=calibration,
    )
    section = report.manifest["tensorrt"]
    assert section["architectures"] == TARGETS and sorted(section["plans"]) == sorted(TARGETS)
    build = json.loads((report.path / "build.json").read_text())
    notes = [note for note in build["notes"] if note.startswith("plan-")]
    print(f"\n{model.name}, {recipe}:", *notes, sep="\n  ")
    peaks = [float(re.search(r"([\d.]+) GB of host memory", note)[1]) for note in notes]  # type: ignore[index]
    assert len(peaks) == len(TARGETS) and max(peaks) <= MOST
    for target, file in section["plans"].items():
        plan = read_plan(report.path / file)
        assert plan.architectures == [target]
        for graph in plan.graphs:
            assert {f"key_pool_{g}_0_out" for g in range(len(report.manifest["kv_groups"]))} <= graph.aliased
