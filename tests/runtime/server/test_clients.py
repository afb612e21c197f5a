"""Proofs that are too long for every day: other clients unmodified, and 200 streams for minutes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
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
        model = langchain.ChatOpenAI(
            model="smol",
            base_url=running.url + "/v1",
            api_key="none",
            temperature=0,
            max_tokens=12,
            max_retries=0,
        )
        whole = model.invoke("What is the capital of France?")
        assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
        parts = list(model.stream("What is the capital of France?"))
        assert "".join(part.content for part in parts) == whole.content
        assert len(model.batch(["Say one.", "Say two.", "Say three."])) == 3
        bound = langchain.ChatOpenAI(
            model="smol",
            base_url=running.url + "/v1",
            api_key="none",
            temperature=0,
            max_tokens=60,
            max_retries=0,
        ).with_structured_output(
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
        subprocess.run(
            [command, "benchmark", "--target", running.url, "--model", "smol", "--profile", "synchronous",
             "--max-seconds", "10", "--data", "prompt_tokens=32,output_tokens=16",
             "--processor", str(Path(os.environ["ENGINEWRIGHT_TEST_MODELS"]) / "smollm2-135m"),
             "--output-path", str(tmp_path / "report.json")],
            check=True,
            timeout=300,
        )  # fmt: skip
        assert (tmp_path / "report.json").stat().st_size


async def _streams(url: str, until: float, lost: list[str], counts: list[int], waits: list[float]) -> None:
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

        async def health() -> None:
            while time.monotonic() < until:
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.25)

        await asyncio.gather(health(), *(one(number) for number in range(STREAMS)))


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_200_streams_for_minutes():
    """None is lost, memory stays flat, every page comes back; the p99 of /health is printed."""
    with started() as running:
        running.ready()
        lost: list[str] = []
        counts, waits, memory = [0] * STREAMS, [], []
        asyncio.run(_streams(running.url, time.monotonic() + 20, lost, counts, []))
        memory.append(_resident(running.process.pid))
        for _ in range(3):
            asyncio.run(_streams(running.url, time.monotonic() + 20 * MINUTES, lost, counts, waits))
            memory.append(_resident(running.process.pid))
        status = httpx.get(running.url + "/status").json()
        waits.sort()
        print(
            json.dumps(
                {
                    "answers": sum(counts),
                    "memory_mb": memory,
                    "health_ms": {
                        "p50": round(waits[len(waits) // 2] * 1e3),
                        "p99": round(waits[len(waits) * 99 // 100] * 1e3),
                    },
                    "itl_ms": status["itl_ms"],
                }
            )
        )
        assert not lost and min(counts) > 0
        assert memory[-1] - memory[0] < 60, f"memory grows: {memory} MB"
        assert status["running"] == status["waiting"] == 0
        assert all(group["used"] == 0 for group in status["kv_groups"])
