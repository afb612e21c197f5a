"""The process that `engine serve` is: SmolLM2 behind a socket, signals, configuration, OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.serving import said, sse

pytest.importorskip("torch")
from tests import engines


class Process:
    """A server as an operator starts it."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enginewright", "serve", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._find(r"listening on (http://[0-9.:]+)")

    def _read(self) -> None:
        """Take the log, all the time: a pipe that nobody reads is full one day."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def _find(self, pattern: str) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found = re.search(pattern, "".join(self.lines))
            if found is not None:
                return found[1]
            assert self.process.poll() is None, self.lines
            time.sleep(0.01)
        raise AssertionError(self.lines)

    def ready(self) -> Process:
        self._find("(ready): ")
        return self

    def end(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        return self.process.wait(20)


@contextlib.contextmanager
def started(*options: str, **environment: str) -> Iterator[Process]:
    running = Process(str(engines.built("smollm2", "int4")), "--port", "0", *options, **environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()


@pytest.fixture(scope="module")
def server():
    with started("--served-model-name", "smol", "--max-context", "512") as running:
        yield running.ready()


# ----------------------------------------------------------------------------------------- OpenAI's client


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_client_completes_and_streams(client):
    options = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    assert whole.choices[0].text.startswith(" Paris") and whole.usage.completion_tokens == 8
    parts = list(client.completions.create(stream=True, **options))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [model.id for model in client.models.list()] == ["smol"]


def test_the_client_chats_and_streams_with_usage(client):
    options = {
        "model": "smol",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say hello."}],
        "max_completion_tokens": 12,
        "temperature": 0.7,
        "seed": 3,
        "n": 2,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    usage = None
    for part in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    ):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and texts[0]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert all(entry.logprob <= 0 for entry in whole.choices[0].logprobs.content)


def test_the_client_makes_responses(client):
    options = {"model": "smol", "input": "Say hello.", "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.output_text and whole.status == "completed"
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text == stream.get_final_response().output_text


def test_the_client_sees_errors_as_its_own(client):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="A", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="A")
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(
            model="smol", messages=[{"role": "user", "content": "A"}], tools=[tool]
        )


def test_answers_are_those_of_the_engine(server):
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 5,
        "logprobs": 0,
    }
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=60) for _ in range(6)
        ]
        answers = [answer.result().json()["choices"][0] for answer in asked]
    with engines.load("smollm2", "int4") as engine:
        alone = engine.generate(body["prompt"], 24, temperature=0.8, seed=5)[0]
    for answer in answers:
        assert answer["text"] == alone.text
        assert answer["logprobs"]["token_logprobs"] == alone.logprobs


@pytest.mark.parametrize("drafter", ["ngram", "another engine"])
def test_a_speculating_server_says_the_same_and_tells_clients(server, drafter):
    openai = pytest.importorskip("openai")
    quoted = "Say this three times: the quick brown fox jumps over the lazy dog."
    chat = {"model": "smol", "messages": [{"role": "user", "content": quoted}], "max_completion_tokens": 60}
    schema = {"type": "object", "properties": {"fox": {"enum": ["quick brown fox"]}}, "required": ["fox"]}
    bodies = [
        ("chat/completions", {**chat, "temperature": 0, "logprobs": True, "top_logprobs": 3}),
        ("chat/completions", {**chat, "temperature": 0.8, "seed": 3, "n": 3, "stop": ["lazy dog"]}),
        (
            "chat/completions",
            {
                **chat,
                "temperature": 0.8,
                "seed": 1,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            },
        ),
        ("completions", {"prompt": quoted * 3, "max_tokens": 60, "echo": True, "logprobs": 2, "seed": 9}),
        ("responses", {"input": quoted, "max_output_tokens": 40, "temperature": 0}),
    ]
    how = [drafter]
    if drafter == "another engine":  # the same one, so that it is always right
        how = [str(engines.built("smollm2", "int4")), "--draft-kv-memory", "64MiB"]
    options = ("--served-model-name", "smol", "--max-context", "512", "--draft-tokens", "6")
    with started(*options, "--speculate", *how) as fast:
        fast.ready()
        for path, body in bodies:
            answers = [
                httpx.post(f"{url}/v1/{path}", json=body, timeout=60) for url in (server.url, fast.url)
            ]
            assert answers[0].status_code == answers[1].status_code == 200, answers[1].text
            plain, speculated = (said(answer.json()) for answer in answers)
            for value in (plain, speculated):  # the first server has seen prompts that begin alike
                value["usage"].pop("prompt_tokens_details", value["usage"].pop("input_tokens_details", None))
            assert speculated == plain
        with openai.OpenAI(base_url=fast.url + "/v1", api_key="none", max_retries=0) as client:
            plain = client.chat.completions.create(**chat, temperature=0)
            *_, last = client.chat.completions.create(
                **chat, temperature=0, stream=True, stream_options={"include_usage": True}
            )
            assert last.usage.completion_tokens == plain.usage.completion_tokens
            for usage in (plain.usage, last.usage):
                assert usage.completion_tokens_details.accepted_prediction_tokens > 0
                assert usage.completion_tokens_details.rejected_prediction_tokens >= 0
        seen = httpx.get(fast.url + "/metrics").text
        assert ("enginewright_draft_kv_pages{" in seen) == (drafter == "another engine")
        assert "enginewright_speculation_accepted_tokens_total" in seen
        assert fast.end(signal.SIGTERM) == 0


# ------------------------------------------------------------------------------------------------- signals


def _stream(url: str, tokens: int, got: list[object]) -> None:
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
        for event in sse(answer.iter_lines()):
            got.append(event)


def _wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_sigterm_lets_streams_finish_and_refuses_new_ones():
    with started("--drain", "20", "--max-context", "512") as running, ThreadPoolExecutor(4) as pool:
        running.ready()
        streams: list[list[object]] = [[] for _ in range(3)]
        asked = [pool.submit(_stream, running.url, 100, got) for got in streams]
        _wait_for(lambda: all(streams))
        running.process.send_signal(signal.SIGTERM)
        _wait_for(lambda: httpx.get(running.url + "/ready").json()["phase"] == "draining")
        refused = httpx.post(running.url + "/v1/completions", json={"prompt": "A"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert httpx.get(running.url + "/health").status_code == 200
        for answer in asked:
            answer.result(60)
        assert all(got[-1] == "[DONE]" for got in streams)
        assert running.process.wait(20) == 0


def test_after_the_drain_streams_end_with_an_error():
    with started("--drain", "0.3", "--max-sequences", "2") as running, ThreadPoolExecutor(12) as pool:
        running.ready()
        streams: list[list[object]] = [[] for _ in range(2)]
        asked = [pool.submit(_stream, running.url, 8000, got) for got in streams]
        _wait_for(lambda: all(streams))
        body = {"prompt": "Queued", "max_tokens": 5}
        queued = [
            pool.submit(httpx.post, running.url + "/v1/completions", json=body, timeout=60) for _ in range(4)
        ]
        stalled = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
        data = json.dumps({**body, "max_tokens": 8000, "stream": True}).encode()
        stalled.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        _wait_for(lambda: httpx.get(running.url + "/status").json()["waiting"] == 5)
        began = time.monotonic()
        assert running.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 10
        for answer in asked:
            answer.result(60)
        for got in streams:
            assert isinstance(got[-1], dict) and got[-1]["error"]["code"] == "shutting_down"
        for answer in queued:
            assert answer.result(60).status_code == 503
            assert answer.result().json()["error"]["code"] == "shutting_down"
        stalled.close()


def test_a_second_sigterm_ends_at_once():
    with started("--drain", "600") as running, ThreadPoolExecutor(1) as pool:
        running.ready()
        got: list[object] = []
        asked = pool.submit(_stream, running.url, 8000, got)
        _wait_for(lambda: got)
        assert running.end(signal.SIGTERM, signal.SIGTERM) == 128 + signal.SIGTERM
        with contextlib.suppress(httpx.HTTPError):
            asked.result(60)


def test_sigint_while_it_loads():
    with started("--weights", "copy") as running:
        assert running.end(signal.SIGINT) == 0


# ------------------------------------------------------------------------------------------- configuration


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path: Path):
    config = tmp_path / "serve.yaml"
    config.write_text(
        "served-model-name: file\nmax_sequences: 3\nmax-context: 300\nspeculate: ngram\napi-key: [one, two]\nkv-memory: 64MiB\n"
    )
    environment = {
        "ENGINEWRIGHT_MAX_SEQUENCES": "5",
        "ENGINEWRIGHT_MAX_CONTEXT": "400",
        "ENGINEWRIGHT_DRAFT_TOKENS": "3",
    }
    with started("--config", str(config), "--max-context", "200", **environment) as running:
        running.ready()
        headers = {"Authorization": "Bearer two"}
        assert httpx.get(running.url + "/status").status_code == 401
        status = httpx.get(running.url + "/status", headers=headers).json()
        (model,) = httpx.get(running.url + "/v1/models", headers=headers).json()["data"]
        assert (status["model"], status["max_sequences"], model["max_model_len"]) == ("file", 5, 200)
        assert status["speculation"]["drafter"] == "ngram"
        body = {"prompt": "1 2 3 1 2 3 1 2 3", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        httpx.post(running.url + "/v1/completions", json=body, headers=headers).raise_for_status()
        status = httpx.get(running.url + "/status", headers=headers).json()
        assert (
            status["speculation"]["accepted"] > 0
            and len(status["speculation"]["acceptance_by_position"]) == 3
        )
        assert running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "best"], "policy"),
        (["--speculate", "ngrams"], "did you mean ngram"),
        (["--draft-tokens", "3"], "means nothing without speculation"),
        (["--speculate", "ngram", "--draft-kv-memory", "1GiB"], "has no cache"),
        (["--speculate", "self"], "draft.layers"),
        (["--max-context", "99999999"], "max_context"),
        (["--kv-memory", "lots"], "no size"),
        (["--kv-memory", "1KiB"], "room for nothing"),
        (["--api-key", ""], "API key is empty"),
        (["--config", "CONFIG"], "did you mean max_sequences"),
        (["--port", "99999"], "port"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, options, says):
    config = tmp_path / "serve.yaml"
    config.write_text("max-sequence: 3\n")
    done = _run(*[str(config) if option == "CONFIG" else option for option in options])
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "ENGINEWRIGHT_MAX_SEQUENCES",
            "many",
            "'many' is not a valid integer range. (in ENGINEWRIGHT_MAX_SEQUENCES)",
        ),
        ("ENGINEWRIGHT_KV_MEMORY", "lots", "(in ENGINEWRIGHT_KV_MEMORY)"),
        ("ENGINEWRIGHT_POLICY", "best", "(in ENGINEWRIGHT_POLICY)"),
        ("ENGINEWRIGHT_MAX_SEQUENCE", "5", "did you mean ENGINEWRIGHT_MAX_SEQUENCES?"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("ENGINEWRIGHT_ISA", "portable")
    done = _run("--max-context", "99999999")  # which ends it, where the variable does not
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert "ENGINEWRIGHT_ISA" not in done.stderr


def test_a_value_of_the_file_that_cannot_be_used_is_placed(tmp_path: Path):
    config = tmp_path / "serve.yaml"
    config.write_text("max-sequences: many\n")
    done = _run("--config", str(config))
    assert done.returncode == 2 and "--max-sequences" in done.stderr and "(in --config)" in done.stderr


def test_a_taken_port_is_said(server):
    done = _run("--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 2 and "cannot listen" in done.stderr


def test_no_engine_is_said(tmp_path: Path):
    done = _run(engine=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def _run(*options: str, engine: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself; the last of several ports counts."""
    folder = engine or engines.built("smollm2", "int4")
    command = [sys.executable, "-m", "enginewright", "serve", str(folder)]
    return subprocess.run(
        [*command, "--port", "0", *options], capture_output=True, text=True, timeout=60, check=False
    )
