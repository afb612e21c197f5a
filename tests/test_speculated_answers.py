"""One answer with speculation: real engines, every drafter, drafts from perfect to random; bit for bit what comes without."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import enginewright
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.engine import Engine
from enginewright.runtime.request import Request, SamplingOptions
from tests import engines, models

_ROOT = tempfile.TemporaryDirectory(prefix="enginewright-drafts-")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "good": {"type": "boolean"}},
    "required": ["name", "size", "good"],
    "additionalProperties": False,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "frequency": {"frequency_penalty": 0.8, "temperature": 0.8},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {28: -100.0, 30: 3.0}},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False},
    "cuts": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
    "schema": {"constraint": Constraint.json_schema(SCHEMA), "ignore_eos": False},
    "best": {"logprobs": 3, "temperature": 0.8},
}
DRAFTERS = ["ngram", "itself", "4 layers", "random", "self"]


def prompts(count: int) -> list[str]:
    """Plain questions, texts to repeat, code to go on with."""
    kinds = [
        "<|im_start|>user\nName {0} animals and say where they live.<|im_end|>\n<|im_start|>assistant\n",
        "Repeat: the red house number {0} stands by the old mill; the red house number {0} stands by the old",
        "def add_{0}(a, b):\n    return a + b + {0}\n\n\ndef subtract_{0}(a, b):\n    return a - b - {0}\n\n\ndef ",
        "Item {0}: apples. Item {0}: pears. Item {0}: apples. Item {0}:",
    ]
    return [kinds[i % 4].format(i + 2) for i in range(count)]


def _twin(name: str, layers: int, change: Any = None) -> Path:
    """A folder with SmolLM2's tokenizer and its first layers, or with another model altogether."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source, folder = models.smollm2(), Path(_ROOT.name) / name
    folder.mkdir()
    for file in source.glob("*"):
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = layers
    if change is None:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config.update(change)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


@functools.cache
def draft(name: str) -> str:
    """What `speculate` is told for one of DRAFTERS, for the engine of `target`."""
    if name in ("ngram", "self"):
        return name
    if name == "itself":
        return str(engines.built("smollm2", "int4"))
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    folder = _twin("first-layers", 4) if name == "4 layers" else _twin("random", 2, small)
    return str(enginewright.optimize(folder, "int8", Path(_ROOT.name) / f"{name}-engine").path)


def target(name: str, page_size: int = 16) -> Path:
    changes = (f"kv_cache.page_size={page_size}",) if page_size != 16 else ()
    return engines.built("smollm2", "int4", *changes, *(("draft.layers=8",) if name == "self" else ()))


def answers(engine: Engine, texts: list[str], fields: dict[str, Any], count: int, batch: int) -> list[Any]:
    """Everything that an answer says, bit for bit; every fourth request of a batch has nothing proposed."""
    found = []
    fields = {"ignore_eos": True, **fields}
    constraint = fields.get("constraint")
    grammar = engine.compile(constraint) if constraint is not None else None
    for start in range(0, len(texts), batch):
        requests = [
            Request(
                engine.encode_text(text),
                SamplingOptions(
                    max_tokens=count, seed=start + i, draft_tokens=0 if i % 4 == 3 else None, **fields
                ),
                grammar=grammar,
            )
            for i, text in enumerate(texts[start : start + batch])
        ]
        for request in requests:
            engine.loop.submit(request)
        while not all(request.finished for request in requests):
            engine.loop.step()
            engine.loop.scheduler.check_invariants()
        assert engine.loop.pool.idle
        for request in requests:
            assert request.error is None, request.error
            bits = np.array(request.logprobs).view(np.int64).tolist()
            found.append((request.output, bits, request.top_logprobs, request.finish_reason))
    return found


@functools.cache
def plain(option: str, count: int, many: int, page_size: int) -> list[Any]:
    with enginewright.load(target("", page_size), cache_tokens=4096) as engine:
        return answers(engine, prompts(many), OPTIONS[option], count, 1)


def compare(
    name: str, tokens: int | str, batch: int, options: list[str], count: int, many: int, page_size: int = 16
) -> Engine:
    with enginewright.load(
        target(name, page_size),
        speculate=draft(name),
        draft_tokens=tokens,
        cache_tokens=(80 + count) * max(1, batch // 2),
    ) as engine:
        for option in options:
            got = answers(engine, prompts(many), OPTIONS[option], count, batch)
            assert got == plain(option, count, many, page_size), (name, tokens, batch, option)
        assert engine.loop.speculator is not None and not engine.loop.speculator.figures.failures
        return engine


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_nothing(name: str) -> None:
    engine = compare(name, 4, 1, ["greedy", "seeded", "frequency"], 32, 4)
    compare(name, "auto", 4, list(OPTIONS), 32, 4)
    assert engine.loop.speculator is not None
    figures = engine.loop.speculator.figures
    if name == "itself":  # all but what lies behind the last token
        assert figures.by_position[0][0] == figures.by_position[0][1]
        assert figures.acceptance_rate == 1.0
    if name == "random":
        assert figures.acceptance_rate < 0.1


def _everything() -> Iterator[tuple[str, int | str, int, int]]:
    for name in DRAFTERS:
        for tokens in (1, 2, 4, 8, "auto"):
            for batch in (1, 8):
                yield name, tokens, batch, 16
        yield name, 4, 8, 32


@pytest.mark.slow
@pytest.mark.parametrize("name, tokens, batch, page_size", list(_everything()))
def test_speculation_changes_nothing_at_all(name: str, tokens: int | str, batch: int, page_size: int) -> None:
    compare(name, tokens, batch, ["greedy", "seeded"], 200, 40, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_nothing_whatever_the_options(name: str) -> None:
    compare(name, 4, 8, list(OPTIONS), 200, 40)


def test_the_schema_is_met(tmp_path: Path) -> None:
    with enginewright.load(target(""), speculate="ngram", draft_tokens=4) as engine:
        for output, *_ in answers(engine, prompts(4), OPTIONS["schema"], 100, 4):
            assert engine.tokenizer is not None
            assert set(json.loads(engine.tokenizer.decode(output))) == {"name", "size", "good"}
