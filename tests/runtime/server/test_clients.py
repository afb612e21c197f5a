"""Proofs that are too long for every day: other clients unmodified, and 200 streams for minutes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
from tests.runtime.server.test_process import started

pytestmark = pytest.mark.slow
MINUTES = float(os.environ.get("ENGINEWRIGHT_SOAK_MINUTES", "5"))
STREAMS = 200


def test_langchain():
    langchain = pytest.importorskip("langchain_openai")
    with started("--served-model-name", "smol") as running:
        running.ready()
        common = {"model": "smol", "base_url": running.url + "/v1", "api_key": "none", "temperature": 0}
        model = langchain.ChatOpenAI(**common, max_tokens=12, max_retries=0)
        whole = model.invoke("What is the capital of France?")
        assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
        parts = list(model.stream("What is the capital of France?"))
        assert "".join(part.content for part in parts) == whole.content
        assert len(model.batch(["Say one.", "Say two.", "Say three."])) == 3
        bound = langchain.ChatOpenAI(**common, max_tokens=60, max_retries=0).with_structured_output(
            {
                "title": "city",
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}},
                "required": ["name"],
            },
            method="json_schema",
        )
        assert set(bound.invoke("What is the capital of France?")) == {"name"}


def test_guidellm(tmp_path: Path):
    command = shutil.which("guidellm")
    if command is None:
        pytest.skip("guidellm is not installed")
    with started("--served-model-name", "smol") as running:
        running.ready()
        models = os.environ["ENGINEWRIGHT_TEST_MODELS"]
        report = tmp_path / "report.json"
        subprocess.run(
            [command, "run", "--backend", f"kind=openai_http,target={running.url},model=smol",
             "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8",
             "--tokenizer", f"kind=hf_auto,model={models}/smollm2-135m",
             "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
             "--output", f"kind=json,path={report}", "--disable-console"],
            check=True,
            timeout=300,
        )  # fmt: skip
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] >= 8 and not totals["errored"]


async def _streams(url: str, until: float, lost: list[str], counts: list[int]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(number: int) -> None:
            turn = 0
            while time.monotonic() < until:
                turn += 1
                body = {
                    "prompt": f"Story {number}, part {turn}:",
                    "max_tokens": 16 + number % 48,
                    "ignore_eos": True,
                    "stream": True,
                }
                last, tokens = None, 0
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            last, tokens = line, tokens + 1
                if answer.status_code != 200 or last != "data: [DONE]":
                    lost.append(f"{number}.{turn}: {answer.status_code} {last}")
                counts[number] += 1

        await asyncio.gather(*(one(number) for number in range(STREAMS)))


_PROBE = """
import sys, time, http.client
host, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.monotonic()
    probe = http.client.HTTPConnection(host, timeout=60)
    probe.request("GET", "/health")
    assert probe.getresponse().status == 200
    print(time.monotonic() - began)
    time.sleep(0.1)
"""


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_200_streams_for_minutes():
    """None is lost, memory stays flat once the cache is full, every page comes back; the p99 of /health is printed."""
    with started("--kv-memory", "128MiB") as running:
        running.ready()
        lost: list[str] = []
        counts, memory = [0] * STREAMS, []
        seconds = 60 * MINUTES
        host = running.url.removeprefix("http://")
        probe = subprocess.Popen(
            [sys.executable, "-c", _PROBE, host, str(seconds)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4):
            asyncio.run(_streams(running.url, time.monotonic() + seconds / 4, lost, counts))
            memory.append(_resident(running.process.pid))
        waits = sorted(float(line) for line in probe.communicate()[0].split())
        assert probe.returncode == 0
        status = httpx.get(running.url + "/status").json()
        figures = {
            "answers": sum(counts),
            "tokens_per_second": round(
                sum(n * (16 + number % 48) for number, n in enumerate(counts)) / seconds
            ),
            "memory_mb": memory,
            "health_ms": [round(waits[len(waits) * share // 100] * 1e3) for share in (50, 95, 99)],
            "itl_ms": status["itl_ms"],
        }
        print(json.dumps(figures))
        assert not lost and min(counts) > 0
        assert memory[-1] - memory[0] < 60, f"memory grows: {memory} MB"
        assert status["running"] == status["waiting"] == 0
        assert all(group["used"] == 0 for group in status["kv_groups"])
