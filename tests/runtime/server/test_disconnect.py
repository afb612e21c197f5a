"""Clients that go away, and clients that read slowly: pages come back at once, no text is lost, memory stays bounded."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time

import httpx
import pytest

from enginewright.runtime.server.settings import Limits
from tests.runtime.server.serving import (
    Paced,
    Running,
    serving,
    sse,
    tiny_engine,
    wait_until,
    write_tokenizer,
)

STAGES = ["body", "queued", "prefill", "last chunk", "decode"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tiny"))
    engine = tiny_engine(folder, Paced(0.004), max_sequences=2, chunk_size=8, token_budget=8)
    with serving(engine, max_sequences=2) as running:
        yield running


def send(server: Running, body: dict, part: float = 1.0) -> socket.socket:
    """Send a request (or a part of it) by hand and return its connection."""
    data = json.dumps(body).encode()
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection.sendall((head + data)[: int(len(head) + part * len(data))])
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_goes_leaves_nothing(server: Running, stage, stream):
    letters = random.Random(f"{stage} {stream}").choices(
        "ABCDEFGH", k=64
    )  # nothing of it is in the prefix cache
    body = {"prompt": "".join(letters), "max_tokens": 60, "ignore_eos": True, "stream": stream, "n": 2}
    before, aborted = server.service.disconnects, server.engine.figures.finished["abort"]
    if stage == "queued":
        others = [send(server, {**body, "n": 2, "max_tokens": 8}) for _ in range(2)]
        wait_until(lambda: server.engine.unfinished >= 2)
    connection = send(server, body, 0.5 if stage == "body" else 1.0)
    if stage == "body":
        time.sleep(0.05)
    else:
        mine = 2 if stage != "queued" else 6
        wait_until(lambda: server.engine.unfinished >= mine)
        requests = [request for _, request, _ in server.call(lambda: server.engine.in_flight(10))][-2:]
        reached = {
            "queued": lambda: requests[1].computed == 0,
            "prefill": lambda: 0 < requests[0].computed < 64,
            "last chunk": lambda: requests[0].computed >= 56,
            "decode": lambda: len(requests[0].tokens) > 66,
        }[stage]
        wait_until(reached)
    connection.close()
    wait_until(lambda: server.service.disconnects == before + 1)
    if stage == "queued":
        for other in others:
            other.close()
    wait_until(lambda: not server.service.exchanges)
    assert server.all_pages_free()
    assert stage == "body" or server.engine.figures.finished["abort"] >= aborted + 1
    assert server.client.get("/health").status_code == 200


def test_many_clients_that_go_at_any_time(server: Running):
    rng = random.Random(4)
    kept = {"prompt": "KEEP", "max_tokens": 60, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    expected = server.post("/v1/completions", **kept).json()["choices"][0]["text"]
    got: list[str] = []
    keeper = threading.Thread(
        target=lambda: got.append(server.post("/v1/completions", **kept).json()["choices"][0]["text"])
    )
    keeper.start()
    for _ in range(60):
        body = {
            "prompt": "B" * rng.randint(1, 60),
            "max_tokens": 60,
            "n": rng.randint(1, 3),
            "stream": rng.random() < 0.5,
        }
        connection = send(server, body, rng.choice([0.3, 1.0, 1.0]))
        time.sleep(rng.random() * 0.02)
        connection.close()
    keeper.join()
    assert got == [expected]
    wait_until(lambda: not server.service.exchanges)
    assert server.all_pages_free()


def test_a_slow_reader_gets_every_character(tmp_path):
    """The client's window and the server's buffers are full while the answer is made; then it reads on."""
    folder = write_tokenizer(tmp_path)
    body = {"prompt": "SLOW", "max_tokens": 300, "temperature": 0.9, "seed": 9, "ignore_eos": True, "n": 4}
    chat = {"logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": "SLOW"}]}
    del body["prompt"]
    with serving(tiny_engine(folder, Paced(), max_context=400)) as server:
        narrow(server)
        expected = server.post("/v1/chat/completions", **body, **chat).json()["choices"]
        data = json.dumps({**body, **chat, "stream": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_until(
            lambda: server.engine.figures.finished["length"] == 8, 60
        )  # all is made while nothing is read
        assert server.all_pages_free() and len(server.service.exchanges) == 1
        raw = b""
        while part := connection.recv(65536):
            raw += part
        connection.close()
    head_, _, body_ = raw.partition(b"\r\n\r\n")
    assert b"200 OK" in head_
    events = list(sse(iter(_unchunked(body_).decode().split("\n"))))
    assert events[-1] == "[DONE]"
    for choice in expected:
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        content = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert len(mine) < 250, "unread pieces are merged"


def narrow(server: Running) -> None:
    """Give the connections that come small buffers."""
    for listener in server.server.servers:
        for at in listener.sockets:
            with socket.socket(fileno=os.dup(at.fileno())) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def _unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


def test_a_client_that_reads_nothing_is_given_up(tmp_path):
    folder = write_tokenizer(tmp_path)
    limits = Limits(write_seconds=0.4)
    body = {"prompt": "SLOW", "max_tokens": 300, "ignore_eos": True, "n": 4, "logprobs": 20, "stream": True}
    with serving(tiny_engine(folder, Paced(), max_context=400), limits=limits) as server:
        narrow(server)
        data = json.dumps(body).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        wait_until(lambda: server.service.exchanges)
        wait_until(lambda: not server.service.exchanges, 60)
        assert server.all_pages_free()
        connection.close()


def test_a_body_that_does_not_come_is_given_up(tmp_path):
    with serving(tiny_engine(write_tokenizer(tmp_path)), limits=Limits(body_seconds=0.2)) as server:
        connection = send(server, {"prompt": "ABC"}, 0.5)
        assert b"408" in connection.recv(1000)
        connection.close()
        assert httpx.get(server.url + "/health").status_code == 200
