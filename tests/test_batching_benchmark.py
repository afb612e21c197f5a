"""benchmarks/batching.py: what does not depend on the clock is exactly what it must be, and a whole small run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import enginewright
from benchmarks import batching
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from enginewright.runtime.workload import Lengths
from tests.passes.architectures import folder

Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    path = enginewright.optimize(folder("llama"), "fp32", tmp_path_factory.mktemp("engines") / "llama").path
    return functools.partial(enginewright.load, path, threads=1)


def test_static_batches_wait_for_their_longest_and_compute_what_has_ended(load: Load) -> None:
    figures = batching.compare_batching(load, 12, 4, Lengths(2, 40), rounds=1)
    with load() as engine:
        lengths = [arrival.max_tokens for arrival in batching.requests(engine, 12, Lengths(2, 40))]
    longest = [max(lengths[at : at + 4]) for at in (0, 4, 8)]
    # The step that computes the prompts draws the first token; the last token of all is drawn and not computed.
    assert figures["static"]["steps"] == figures["static-drop"]["steps"] == sum(longest)
    wanted = sum(lengths)
    live = 12 * 32 + wanted - 12
    assert figures["static-drop"]["rows_per_token"] == pytest.approx(live / wanted)
    assert figures["throughput"]["rows_per_token"] == pytest.approx(live / wanted)
    assert figures["static"]["rows_per_token"] == pytest.approx((12 * 32 + 4 * sum(longest) - 12) / wanted)
    assert figures["throughput"]["steps"] < figures["static"]["steps"]
    assert figures["static"]["ratio"] == 1


def test_memory_that_is_reserved_by_page_is_nearly_filled(load: Load) -> None:
    def arrivals(engine: Engine) -> list[batching.Arrival]:
        return batching.requests(engine, 12, Lengths(2, 40))

    memory = batching.compare_memory(load, arrivals)
    assert memory["longest"]["filled"] < memory["power of two"]["filled"] < memory["own length"]["filled"] < 1
    # A sequence wastes less than a page of 16, so of 34 slots and more at least two thirds are filled.
    assert 0.66 < memory["by page"]["filled"] < 1
    filled = batching.fill_memory(load, arrivals, 2048, rounds=1)
    assert filled["longest"]["sequences"] <= 2 < filled["by page"]["sequences"]


def test_what_others_would_reserve() -> None:
    request = Request([1] * 30, SamplingOptions(max_tokens=40))
    request.limit = 70
    assert [batching.reserved(request, how) for how in ("longest", "power of two", "own length")] == [
        1024,
        128,
        70,
    ]
    request.limit = 64
    assert batching.reserved(request, "power of two") == 64


def test_a_whole_small_run(tmp_path: Path) -> None:
    arguments = [
        "--model",
        folder("llama"),
        "--engines",
        tmp_path,
        "--recipe",
        "fp32",
        "--rounds",
        1,
        "--threads",
        1,
        "--small",
    ]
    arguments += ["--json", tmp_path / "found.json", "--plot", tmp_path / "found.png"]
    done = CliRunner().invoke(batching.main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"cache", "batching", "memory", "formats"} <= set(found) and found["small"]
    assert [row["length"] for row in found["cache"]] == [16, 64] and min(
        row["with_ms"] for row in found["cache"]
    ) > 0
    assert found["formats"]["int8"]["weights, MB"] < found["formats"]["bf16"]["weights, MB"]
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    for words in ("continuous", "computed again", "own length", "int8 / bf16"):
        assert words in done.output
