"""Workloads as they are made and read, played against a tiny engine and over HTTP, and the figures that come of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import enginewright
from enginewright.recipes.errors import InputError
from enginewright.runtime.engine import Engine
from enginewright.runtime.http_client import HttpError
from enginewright.runtime.latency import figures, per_request
from enginewright.runtime.traffic import Run, Sample, Served, play_in_process, play_over_http
from enginewright.runtime.workload import WORKLOADS, Arrival, Lengths, Traffic, make_workload
from tests.passes.architectures import folder

from .server.fake_server import Seen, make_app, serving

LIMITS = {"vocab_size": 131, "max_context": 4096}


def write(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


# ------------------------------------------------------------------------------------------------- made up


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_function_of_its_seed(name: str) -> None:
    traffic = Traffic(requests=200)
    first = make_workload(name, traffic, **LIMITS)
    assert first == make_workload(name, traffic, **LIMITS)
    assert first != make_workload(name, Traffic(requests=200, seed=1), **LIMITS)
    assert len(first) == 200 and first[0].at == 0.0
    assert all(a.at <= b.at for a, b in itertools.pairwise(first))
    assert all(0 <= token < 131 for arrival in first for token in arrival.prompt)
    assert all(len(arrival.prompt) + arrival.max_tokens <= 4096 for arrival in first)


def test_poisson_arrivals_are_independent_and_keep_the_rate() -> None:
    arrivals = make_workload("poisson", Traffic(requests=4000, rate=10.0, prompt=Lengths(1, 1)), **LIMITS)
    gaps = np.diff([arrival.at for arrival in arrivals])
    assert gaps.mean() == pytest.approx(0.1, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as the exponential distribution has it
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.1


def test_bursts_come_at_one_moment_and_keep_the_rate() -> None:
    arrivals = make_workload("burst", Traffic(requests=20, rate=4.0, burst=8), **LIMITS)
    assert [arrival.at for arrival in arrivals] == [0.0] * 8 + [2.0] * 8 + [4.0] * 4


def test_lengths_are_log_uniform_between_their_ends() -> None:
    chance = np.random.default_rng(0)
    drawn = [Lengths(16, 512).draw(chance) for _ in range(20_000)]
    assert min(drawn) == 16 and max(drawn) == 512
    thirds = np.histogram(np.log(drawn), bins=np.log([16, 51, 163, 513]))[0] / len(drawn)
    np.testing.assert_allclose(thirds, 1 / 3, atol=0.02)
    assert {Lengths(7, 7).draw(chance) for _ in range(9)} == {7}
    assert Lengths.parse("12") == Lengths(12, 12) and Lengths.parse("3:40") == Lengths(3, 40)
    for wrong in ("0", "9:8", "x", "1:2:3", ""):
        with pytest.raises(ValueError):
            Lengths.parse(wrong)


def test_mixed_traffic_shares_beginnings() -> None:
    arrivals = make_workload("mixed", Traffic(requests=400), **LIMITS)
    beginnings: dict[tuple[int, ...], int] = {}
    for arrival in arrivals:
        beginnings[tuple(arrival.prompt[:200])] = beginnings.get(tuple(arrival.prompt[:200]), 0) + 1
    shared = sorted(beginnings.values())[-4:]
    assert sum(shared) / 400 == pytest.approx(0.6, abs=0.08) and min(shared) > 30
    assert sum(len(arrival.prompt) >= 512 for arrival in arrivals) / 400 == pytest.approx(0.25, abs=0.08)


def test_made_up_requests_are_cut_to_the_context() -> None:
    small = {"vocab_size": 131, "max_context": 300}
    for arrival in make_workload("mixed", Traffic(requests=50), **small):
        assert len(arrival.prompt) + arrival.max_tokens <= 300
    with pytest.raises(InputError, match="does not fit"):
        make_workload("poisson", Traffic(new=Lengths(300, 300)), **small)


# --------------------------------------------------------------------------------------------------- files


def test_a_recorded_workload(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"at": 7.0, "prompt": [5, 6], "max_tokens": 3, "priority": -1},
        "",
        {"at": 5, "prompt": "w7 w8", "max_tokens": 2},
        {"at": 9, "prompt_tokens": 40, "max_tokens": 1},
    )
    text, ids, made = make_workload(path, Traffic(speed=2.0), **LIMITS)
    assert text == Arrival(0.0, "w7 w8", 2) and ids == Arrival(1.0, (5, 6), 3, -1)
    assert made.at == 2.0 and len(made.prompt) == 40
    assert make_workload(path, Traffic(requests=1), **LIMITS, all_of_file=False) == [text]


def test_a_mooncake_trace_shares_its_blocks(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 1500, "input_length": 1100, "output_length": 9, "hash_ids": [3, 4, 5]},
        {"timestamp": 1000, "input_length": 700, "output_length": 4, "hash_ids": [3, 6]},
    ]
    first, second = make_workload(write(tmp_path, *entries), Traffic(), **LIMITS)
    assert (first.at, second.at, first.max_tokens) == (0.0, 0.5, 4)
    assert len(first.prompt) == 700 and len(second.prompt) == 1100
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:700] != second.prompt[512:700]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ([1], "line 2: list instead of an object"),
        ({"prompt": "a", "max_tokens": 1}, "'at' is missing"),
        ({"at": -1, "prompt": "a", "max_tokens": 1}, "at -1 is not a time"),
        ({"at": 1, "prompt": "a", "max_tokens": 0}, "max_tokens 0 is not a whole number"),
        ({"at": 1, "max_tokens": 4}, "'prompt_tokens' is missing"),
        ({"at": 1, "prompt": ["x"], "max_tokens": 4}, "neither text nor token ids"),
        ({"at": 1, "prompt": "a", "max_tokens": 4, "priority": "high"}, "priority 'high'"),
        ({"at": 1, "prompt_tokens": 4000, "max_tokens": 400}, "does not fit"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: object, words: str) -> None:
    path = write(tmp_path, {"at": 0, "prompt": "a", "max_tokens": 1}, line)
    with pytest.raises(InputError) as caught:
        make_workload(path, Traffic(), **LIMITS)
    assert words in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        make_workload("poison", Traffic(), **LIMITS)
    with pytest.raises(InputError, match="is empty"):
        make_workload(write(tmp_path, ""), Traffic(), **LIMITS)


# ------------------------------------------------------------------------------------------------- figures


def test_the_figures_are_those_of_their_definitions() -> None:
    early = Served(Arrival(0.0, (1,) * 10, 4), 10, 4, [0.5, 0.6, 0.7, 0.9], 0.9)
    late = Served(Arrival(1.0, (1,) * 20, 2), 20, 2, [3.0, 3.1], 3.1)
    alone = Served(Arrival(2.0, (1,), 1), 1, 1, [2.25], 2.25)
    failed = Served(Arrival(0.0, (1,), 9), 1, 3, [9.0, 9.5, 9.9], 9.9, "broken")
    samples = [Sample(0.5, 0.5, 10, 1, 0, 16, 10), Sample(0.9, 0.1, 3, 3, 1, 32, 13)]
    run = Run([early, late, alone, failed], 4.0, samples, {"preemptions": 2})
    got = figures(run, slo_ttft=500, slo_itl=150)
    assert (got["requests"], got["failed"], got["seconds"]) == (4, 1, 3.1)
    assert got["new_tokens"] == 7 and got["new_tokens_per_second"] == pytest.approx(7 / 3.1)
    assert got["tokens_per_second"] == pytest.approx(38 / 3.1)
    assert got["ttft_ms"]["p50"] == pytest.approx(500) and got["ttft_ms"]["max"] == pytest.approx(2000)
    np.testing.assert_allclose(got["itl_ms"]["mean"], 125.0)  # of 100, 100, 200 and 100
    assert got["itl_ms"]["p99"] == pytest.approx(np.percentile([100, 100, 200, 100], 99))
    assert got["tpot_ms"]["max"] == pytest.approx(400 / 3)
    assert got["latency_ms"]["max"] == pytest.approx(2100)
    # Neither the one whose first token was late nor the one that failed; one token alone has no gap to be late with.
    assert got["goodput"]["share"] == 0.5 and got["goodput"]["requests_per_second"] == pytest.approx(2 / 3.1)
    assert figures(run, 500, 130)["goodput"]["share"] == 0.25
    assert got["sequences_per_step"] == 2 and got["busy"] == pytest.approx(0.15) and got["preemptions"] == 2
    rows = per_request(run)
    assert rows[0]["longest_gap_ms"] == pytest.approx(200) and rows[2]["tpot_ms"] is None
    assert rows[3]["error"] == "broken"


def test_nothing_served_has_no_latencies() -> None:
    got = figures(Run([Served(Arrival(0.0, (1,), 1), error="no")], 1.0), 1, 1)
    assert got["failed"] == 1 and got["ttft_ms"] is None and got["new_tokens_per_second"] == 0
    json.dumps(got)


# ------------------------------------------------------------------------------------------------ in-process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enginewright.optimize(folder("llama"), "fp32", tmp_path_factory.mktemp("engines") / "llama").path


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    with enginewright.load(tiny, threads=1, max_sequences=4) as loaded:
        yield loaded


def test_a_workload_is_played_to_its_end(engine: Engine) -> None:
    traffic = Traffic(requests=12, rate=400.0, burst=6, prompt=Lengths(2, 40), new=Lengths(1, 12))
    arrivals = make_workload("burst", traffic, vocab_size=engine.vocab_size, max_context=engine.max_context)
    heard: list[int] = []
    run = play_in_process(engine, arrivals, heard.append)
    assert [served.arrival for served in run.served] == arrivals and heard == list(range(1, 13))
    for served in run.served:
        assert served.error is None and served.prompt_tokens == len(served.arrival.prompt)
        assert len(served.times) == served.new_tokens == served.arrival.max_tokens
        assert served.arrival.at < served.times[0] and served.times == sorted(served.times)
        assert served.times[-1] == served.finished
    computed = sum(served.prompt_tokens + served.new_tokens - 1 for served in run.served)
    assert sum(sample.tokens for sample in run.samples) == computed == run.facts["tokens_computed"]
    assert all(sample.used <= sample.reserved for sample in run.samples) and 0 < run.facts["waste"] < 1
    assert run.facts["preemptions"] == 0 and run.facts["prefix_hit_rate"] == 0
    assert max(sample.sequences for sample in run.samples) == 4 and run.samples[0].waiting
    assert engine.loop.idle
    engine.loop.scheduler.check_invariants()


def test_what_was_counted_is_this_run_s_own(engine: Engine) -> None:
    arrivals = [Arrival(0.0, tuple(range(3, 60)), 2)]
    assert play_in_process(engine, arrivals).facts["prefix_hit_rate"] == 0
    again = play_in_process(engine, arrivals)
    assert again.facts["prefix_hit_rate"] > 0.5 and again.facts["tokens_computed"] < 30


def test_priorities_reach_the_scheduler(tiny: Path) -> None:
    with enginewright.load(tiny, threads=1, max_sequences=1) as engine:
        run = play_in_process(engine, [Arrival(0.0, (5, 6), 3, priority) for priority in (0, 2, 1)])
    first = [served.times[0] for served in run.served]
    assert first[0] < first[2] < first[1]


def test_no_request_is_taken_up_before_its_time(engine: Engine) -> None:
    run = play_in_process(engine, [Arrival(0.0, (5, 6), 1), Arrival(0.3, "w7 w8", 2)])
    assert run.served[1].times[0] >= 0.3 and run.served[1].new_tokens == 2 and run.served[1].prompt_tokens > 1


def test_a_request_that_is_refused_fails_alone(engine: Engine) -> None:
    too_long = Arrival(0.0, (5,) * (engine.max_context + 1), 4)
    heard: list[int] = []
    run = play_in_process(engine, [Arrival(0.0, (5, 6), 3), too_long, Arrival(0.0, (7, 8), 3)], heard.append)
    assert [served.error is None for served in run.served] == [True, False, True]
    assert "the prompt is too long" in str(run.served[1].error) and heard[-1] == 3


# ------------------------------------------------------------------------------------------------ over HTTP


def test_a_workload_over_http(engine: Engine) -> None:
    seen = Seen()
    arrivals = [
        Arrival(0.0, (3, 4, 5), 6),
        Arrival(0.05, (9, 9), 4),
        Arrival(0.05, "the capital", 3, 2),
        Arrival(0.1, (7,), 1),
    ]
    heard: list[int] = []
    with serving(make_app(seen, "sesame")) as address:
        run = play_over_http(f"{address}/v1/", arrivals, "sesame", heard.append)
        with pytest.raises(HttpError, match="refused GET /v1/models"):
            play_over_http(address, arrivals, "sesam")
    ids, broken, text, one = run.served
    assert (ids.prompt_tokens, ids.new_tokens, len(ids.times), ids.error) == (3, 6, 6, None)
    assert broken.error is not None and "the page pool is on fire" in broken.error and len(broken.times) == 2
    assert text.new_tokens == 42 and text.prompt_tokens == 9  # as the usage says
    assert one.new_tokens == 1 and one.times[0] >= 0.1 and one.finished >= one.times[0]
    assert heard == [1, 2, 3, 4]
    bodies = {str(body["prompt"]): body for body in seen.bodies}
    body = bodies["[3, 4, 5]"]
    assert (
        body["model"] == "smollm2"
        and body["ignore_eos"]
        and body["max_tokens"] == 6
        and body["temperature"] == 0
    )
    assert bodies["the capital"]["priority"] == 2 and "priority" not in body
    assert figures(run, 1000, 100)["failed"] == 1


def test_servers_that_are_none() -> None:
    with serving(make_app(Seen())) as address:
        pass
    with pytest.raises(HttpError, match="cannot be reached"):
        play_over_http(address, [])
    for url in ("localhost:80", "ftp://x", "http://", "http://h:99999"):
        with pytest.raises(InputError, match="address cannot be used"):
            play_over_http(url, [])
