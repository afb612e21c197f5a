"""`engine bench --workload` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import enginewright
from enginewright.cli import engine as command
from tests.passes.architectures import folder
from tests.runtime.server.fake_server import Seen, make_app, serving


def bench(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(command, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enginewright.optimize(folder("llama"), "fp32", tmp_path_factory.mktemp("engines") / "llama").path


FEW = ("--requests", 6, "--rate", 200, "--prompt-tokens", "2:20", "--new-tokens", "1:6")


def test_a_table_and_a_picture(built: Path, tmp_path: Path) -> None:
    shown = bench(built, "--workload", "mixed", *FEW, "--plot", tmp_path / "latency.png", "--slo-ttft", 5000)
    assert shown.exit_code == 0, shown.output
    for words in (
        "llama, mixed, 6 requests",
        "6 (0)",
        "first token, ms: p50 / p95 / p99",
        "first ≤ 5000 ms",
        "sequences a step",
    ):
        assert words in shown.output
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_figures_and_every_request(built: Path) -> None:
    shown = bench(built, "--workload", "poisson", *FEW, "--seed", 3, "--json")
    report = json.loads(shown.stdout)
    (run,) = report["runs"]
    assert run["policy"] == "" and run["figures"]["requests"] == 6 and report["workload"]["seed"] == "3"
    assert sum(row["new_tokens"] for row in run["requests"]) == run["figures"]["new_tokens"]
    assert all(1 <= row["new_tokens"] <= 6 and 2 <= row["prompt_tokens"] <= 20 for row in run["requests"])


def test_policies_stand_side_by_side(built: Path, tmp_path: Path) -> None:
    arguments = (
        "--workload",
        "burst",
        *FEW,
        "--burst",
        6,
        "--max-sequences",
        2,
        "--policy",
        "latency, static",
    )
    shown = bench(built, *arguments, "--plot", tmp_path / "policies.svg")
    assert shown.exit_code == 0, shown.output
    assert next(line.split() for line in shown.output.splitlines() if line.startswith("figure")) == [
        "figure",
        "latency",
        "static",
    ]
    assert "latency" in (tmp_path / "policies.svg").read_text()
    runs = json.loads(bench(built, *arguments, "--json").stdout)["runs"]
    assert [run["policy"] for run in runs] == ["latency", "static"]
    assert runs[1]["figures"]["tokens_computed"] > runs[0]["figures"]["tokens_computed"]  # the padding
    unknown = bench(built, "--workload", "burst", "--policy", "latency,fast")
    assert unknown.exit_code == 2 and "no such scheduling policy" in unknown.output


def test_speculation_in_a_workload(built: Path, tmp_path: Path) -> None:
    more = ("--speculate", "ngram", "--draft-tokens", 3)
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 0.0, "prompt": [5, 6, 7] * 10, "max_tokens": 40}] * 3
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--workload", trace)
    figures = json.loads(bench(built, *arguments, *more, "--json").stdout)["runs"][0]["figures"]
    assert figures["drafter"] == "ngram" and figures["new_tokens"] == 120
    assert (
        figures["drafted_tokens"] > 0 and 0 <= figures["acceptance_rate"] <= 1 <= figures["tokens_per_step"]
    )
    assert len(figures["acceptance_by_position"]) == 3
    shown = bench(built, *arguments, *more)
    assert "tokens a sequence gets from a step" in shown.output and "came true" in shown.output
    plain = bench(built, *arguments)
    assert "came true" not in plain.output and plain.exit_code == 0


def test_a_file_and_a_server(built: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at": 3, "prompt_tokens": 4, "max_tokens": 5}\n{"at": 3.2, "prompt": [9], "max_tokens": 4}\n'
    )
    with serving(make_app(Seen(), "sesame")) as address:
        shown = bench(
            built, "--workload", trace, "--speed", 2, "--url", address, "--api-key", "sesame", "--json"
        )
    report = json.loads(shown.stdout)
    assert shown.exit_code == 0 and [row["at_s"] for row in report["runs"][0]["requests"]] == pytest.approx(
        [0, 0.1]
    )
    assert "1 of 2 requests failed" in shown.stderr and "the page pool is on fire" in shown.stderr
    served = bench(built, "--workload", trace, "--requests", 1)
    assert served.exit_code == 0 and "llama, trace.jsonl, 1 request\n" in served.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", 3), "--rate means nothing here"),
        (("--workload", "poisson", "--batch", 4), "--batch means nothing here"),
        (("--workload", "poisson", "--burst", 4), "--burst means nothing here"),
        (("--workload", "poisson", "--speed", 4), "--speed means nothing here"),
        (("--workload", "poisson", "--api-key", "x"), "--api-key means nothing here"),
        (("--workload", "burst", "--url", "http://127.0.0.1:9", "--policy", "fair"), "--policy means nothing here"),
        (("--workload", "burst", "--url", "http://127.0.0.1:9", "--speculate", "ngram"), "--speculate means nothing here"),
        (("--workload", "burst", "--url", "http://127.0.0.1:9", "--draft-tokens", 4), "--draft-tokens means nothing here"),
        (("--workload", "burst", "--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--workload", "nowhere.jsonl",), "cannot be read"),
        (("--workload", "burst", "--plot", "x.gif"), "form is not known"),
        (("--workload", "burst", "--prompt-tokens", "9:8"), "neither a number"),
        (("--prompt-tokens", "8:9"), "one number without --workload"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(built: Path, arguments: tuple[object, ...], words: str) -> None:
    shown = bench(built, *arguments)
    assert shown.exit_code == 2 and words in shown.output and "Traceback" not in shown.output


def test_a_server_that_serves_nothing_is_an_error(built: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt": [9], "max_tokens": 4}\n')
    with serving(make_app(Seen())) as address:
        shown = bench(built, "--workload", trace, "--url", address)
    assert shown.exit_code == 2 and "no request of the workload was served" in shown.output
