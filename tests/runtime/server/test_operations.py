"""What an operator relies on: health, readiness, metrics, keys, limits under load."""

from __future__ import annotations

import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright.recipes.errors import ArtifactError
from tests.runtime.server.serving import Paced, serving, tiny_engine, wait_until, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path)


def metrics(server) -> dict[tuple[str, str], float]:
    text = server.client.get("/metrics").text
    return {
        (sample.name.removeprefix("enginewright_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_loading_is_alive_and_not_ready(folder):
    go = threading.Event()

    def slowly():
        go.wait()
        return tiny_engine(folder)

    with serving(slowly, wait=False) as server:
        assert server.client.get("/health").json() == {"status": "ok", "phase": "loading"}
        assert server.client.get("/ready").status_code == 503
        answer = server.post("/v1/completions", prompt="A")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert metrics(server)["up", ""] == 0
        assert server.client.get("/status").json()["phase"] == "loading"
        go.set()
        wait_until(lambda: server.client.get("/ready").status_code == 200)
        assert server.post("/v1/completions", prompt="A", max_tokens=1).status_code == 200


def test_an_engine_that_cannot_be_loaded_ends_the_server():
    def never():
        raise ArtifactError("the engine is broken")

    with serving(never, wait=False) as server:
        wait_until(lambda: server.server.failure is not None)
    assert isinstance(server.server.failure, ArtifactError) and server.server.should_exit


def test_a_dead_engine_fails_health(folder):
    with serving(tiny_engine(folder)) as server:
        assert server.client.get("/health").status_code == 200

        def broken():
            raise MemoryError("gone")

        server.engine.engine.loop.step = broken
        answer = server.post("/v1/completions", prompt="A")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        wait_until(lambda: not server.engine.alive)
        sick = server.client.get("/health")
        assert sick.status_code == 503 and "thread has ended" in sick.json()["reason"]
        assert server.client.get("/ready").status_code == 503
        assert server.post("/v1/completions", prompt="A").status_code == 503
        assert metrics(server)["up", ""] == 0


def test_an_engine_that_hangs_fails_health_and_recovers(folder):
    executor = Paced()
    with serving(tiny_engine(folder, executor), stall=0.2) as server:
        time.sleep(0.3)
        assert server.client.get("/health").status_code == 200, "idle is healthy"
        executor.gate.clear()
        with ThreadPoolExecutor() as pool:
            hanging = pool.submit(server.post, "/v1/completions", prompt="A", max_tokens=2)
            wait_until(lambda: server.client.get("/health").status_code == 503)
            assert "no step" in server.client.get("/health").json()["reason"]
            assert server.client.get("/status").status_code == 200, "observers do not hang with it"
            assert metrics(server)["up", ""] == 0
            executor.gate.set()
            assert hanging.result().status_code == 200
        assert server.client.get("/health").status_code == 200


def test_a_server_whose_engine_hangs_ends_all_the_same(folder):
    executor = Paced()
    with serving(tiny_engine(folder, executor)) as server, ThreadPoolExecutor() as pool:
        executor.gate.clear()
        hanging = pool.submit(server.post, "/v1/completions", prompt="A", max_tokens=2)
        wait_until(lambda: server.engine.unfinished == 1)
        server.server.stop()
        assert hanging.result().status_code == 503
        wait_until(lambda: not server.server.servers[0].is_serving())
    executor.gate.set()


def test_metrics_count_what_happened(folder):
    with serving(tiny_engine(folder)) as server:
        body = {"prompt": "ABCDEFGHIJKLMNOP", "max_tokens": 10, "ignore_eos": True}
        for _ in range(2):
            server.post("/v1/completions", **body)
        server.post("/v1/completions", prompt="A", n=0)
        seen = metrics(server)
        assert seen["up", ""] == 1
        assert seen["prompt_tokens_total", ""] == 32 and seen["generated_tokens_total", ""] == 20
        assert seen["requests_finished_total", "length"] == 2 and seen["cancellations_total", ""] == 0
        assert seen["time_to_first_token_seconds_count", ""] == 2
        assert seen["inter_token_latency_seconds_count", ""] == 18
        assert seen["prefix_cache_hit_tokens_total", ""] > 0
        assert (
            seen["requests_running", ""] == seen["requests_waiting", ""] == seen["preemptions_total", ""] == 0
        )
        states = [seen["kv_pages", f"0,{state}"] for state in ("used", "cached", "free")]
        assert states[0] == 0 and states[1] > 0 and sum(states) == server.engine.engine.loop.pool.capacity[0]
        wait_until(lambda: metrics(server).get(("http_responses_total", "/v1/completions,400")) == 1)
        assert metrics(server)["http_responses_total", "/v1/completions,200"] == 2


def test_status_shows_the_engine_at_work(folder):
    executor = Paced(0.02)
    with serving(tiny_engine(folder, executor, max_sequences=2), max_sequences=2) as server:
        with ThreadPoolExecutor() as pool:
            bodies = [
                {"prompt": "SECRET", "max_tokens": 30, "seed": seed, "ignore_eos": True} for seed in range(3)
            ]
            asked = [pool.submit(server.post, "/v1/completions", **body) for body in bodies]
            wait_until(lambda: server.client.get("/status").json()["running"] == 2)
            text = server.client.get("/status").text
            seen = httpx.Response(200, text=text).json()
            assert "SECRET" not in text
            assert seen["max_sequences"] == 2 and 0 < seen["batch_fill"] <= 1 and 0 < seen["token_fill"] <= 1
            assert {"running", "waiting"} >= {request["state"] for request in seen["requests"]}
            assert len(seen["requests"]) == 3 and all(
                request["prompt_tokens"] == 6 for request in seen["requests"]
            )
            (pages, window) = seen["kv_groups"]
            states = base64.b64decode(pages["map"])
            assert len(states) == pages["total"] and sum(state >= 2 for state in states) == pages["used"] > 0
            assert window["page_size"] == 4
            assert all(answer.result().status_code == 200 for answer in asked)
        seen = server.client.get("/status").json()
        assert seen["running"] == 0 and seen["batch_fill"] == 0 and seen["requests"] == []
        assert seen["ttft_ms"]["p50"] > 0 and seen["itl_ms"]["p95"] >= seen["itl_ms"]["p50"]
        assert seen["tokens_per_second"] > 0


def test_keys_are_asked_for_where_work_is_done(folder):
    with serving(tiny_engine(folder), api_keys=("alpha", "beta-ö")) as server:
        for path in ("/health", "/ready", "/metrics"):
            assert server.client.get(path).status_code == 200
        for key in (None, "gamma", "alpha2", "Alpha", "alpha beta-ö"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            answer = server.client.post("/v1/completions", json={"prompt": "A"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert server.client.get("/status", headers=headers).status_code == 401
        assert server.client.get("/v1/models", headers={"Authorization": "Basic alpha"}).status_code == 401
        for key in ("alpha", "beta-ö"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            body = {"prompt": "A", "max_tokens": 1}
            assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_a_key_has_its_own_share(folder):
    executor = Paced()
    with serving(tiny_engine(folder, executor), api_keys=("alpha", "beta"), key_concurrency=2) as server:
        executor.gate.clear()

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return server.client.post(
                "/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers=headers
            )

        with ThreadPoolExecutor() as pool:
            first = [pool.submit(ask, "alpha") for _ in range(2)]
            wait_until(lambda: len(server.service.exchanges) == 2)
            third = ask("alpha")
            assert third.status_code == 429 and third.headers["retry-after"]
            other = pool.submit(ask, "beta")
            wait_until(lambda: len(server.service.exchanges) == 3)
            executor.gate.set()
            assert [answer.result().status_code for answer in [*first, other]] == [200, 200, 200]
        wait_until(lambda: ask("alpha").status_code == 200)


def test_a_full_queue_says_so(folder):
    executor = Paced()
    with serving(tiny_engine(folder, executor), max_queue=2) as server:
        executor.gate.clear()
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": "A", "max_tokens": 1}
            asked = [pool.submit(server.post, "/v1/completions", **body) for _ in range(6)]
            wait_until(lambda: server.engine.unfinished == 6)
            full = server.post("/v1/completions", **body)
            assert full.status_code == 429 and full.json()["error"]["code"] == "overloaded"
            executor.gate.set()
            assert all(answer.result().status_code == 200 for answer in asked)


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_queue_would_ever_take_is_not_to_be_tried_again(folder, stream):
    with serving(tiny_engine(folder), max_queue=2) as server:
        body = {"prompt": ["A", "B"], "max_tokens": 1, "stream": stream}
        assert server.post("/v1/completions", **body, n=3).status_code == 200
        never = server.post("/v1/completions", **body, n=4)
        assert never.status_code == 400 and "at most 6" in never.json()["error"]["message"]
        assert server.all_pages_free()


@pytest.mark.parametrize(
    "load", ["a 5 MB prompt", "one word of 5 MB", "30 MB", "many token ids", "600 requests"]
)
def test_health_answers_while_the_server_is_loaded(folder, load):
    """That it answers, and what was asked for is answered as well; how quickly is printed, not asserted."""
    bodies = {
        "a 5 MB prompt": ({"prompt": "AB " * 1_700_000}, 400),
        "one word of 5 MB": ({"prompt": "ab" * 2_500_000}, 400),
        "30 MB": ({"prompt": "A" * (30 << 20)}, 413),
        "many token ids": ({"prompt": [1] * 2_000_000}, 400),
        "600 requests": ({"prompt": "A", "max_tokens": 2, "ignore_eos": True}, 200),
    }
    body, status = bodies[load]
    waits: list[float] = []
    with serving(tiny_engine(folder)) as server:
        done = threading.Event()

        def watch() -> None:
            with httpx.Client(base_url=server.url) as client:
                while not done.is_set():
                    began = time.monotonic()
                    assert client.get("/health").status_code == 200
                    waits.append(time.monotonic() - began)
                    time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(32) as pool:
            times = 600 if load == "600 requests" else 2
            asked = [pool.submit(server.post, "/v1/completions", **body) for _ in range(times)]
            assert {answer.result().status_code for answer in asked} == {status}
        done.set()
        watcher.join()
        assert waits and server.all_pages_free()
    waits.sort()
    print(
        f"{load}: /health p50 {waits[len(waits) // 2] * 1e3:.0f} ms, p99 {waits[len(waits) * 99 // 100] * 1e3:.0f} ms"
    )
