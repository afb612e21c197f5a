"""Real engines that draft for others: the same answers, bit for bit, and accounts of their own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import enginewright
from enginewright.backends.artifact import Artifact
from enginewright.recipes.errors import InputError
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.draft_engine import EngineDrafter
from enginewright.runtime.engine import Engine
from tests import engines

pytest.importorskip("llguidance")

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3, 4,"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": {"temperature": 0.8, "seed": [3, 4, 5, 6], "top_p": 0.9, "logprobs": 2},
    "penalised": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "logit_bias": {28: -100},
        "min_tokens": 20,
    },
    "JSON": {"constraint": Constraint.json_schema(SCHEMA), "temperature": 0.8, "seed": 1},
}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[Any, ...]]]:
    with engines.load("smollm2", "int4", threads=1) as engine:
        return {name: answers(engine, name) for name in OPTIONS}


def answers(engine: Engine, name: str) -> list[tuple[Any, ...]]:
    """What the engine says to all prompts together, bit for bit."""
    return [
        (c.token_ids, np.array(c.logprobs).tobytes(), c.top_logprobs, c.text, c.finish_reason)
        for c in engine.generate(PROMPTS, max_tokens=36, **OPTIONS[name])
    ]


def drafter_of(engine: Engine) -> EngineDrafter:
    assert engine.loop.speculator is not None
    drafter = engine.loop.speculator.drafter
    assert isinstance(drafter, EngineDrafter)
    return drafter


@pytest.mark.parametrize("recipe", ["int4", pytest.param("bf16", marks=pytest.mark.slow)])
def test_an_engine_drafts_for_another(plain, recipe):
    """The engine itself, of whose tokens all are accepted, and its bf16 original, of whose most are."""
    draft = engines.built("smollm2", recipe)
    with engines.load("smollm2", "int4", threads=1, speculate=draft, draft_tokens=4) as engine:
        drafter = drafter_of(engine)
        drafter.executor.fill_pool(float("nan"))  # type: ignore[attr-defined]
        for name in OPTIONS:
            assert answers(engine, name) == plain[name], name
            drafter.check_invariants()
            assert engine.loop.pool.idle and drafter.own_pool.idle and not drafter._drafts
        assert engine.loop.speculator is not None
        figures = engine.loop.speculator.figures
        assert figures.drafted > 300 and not figures.failures
        if recipe == "int4":
            assert figures.acceptance_rate == 1.0
        else:
            assert 0.3 < figures.acceptance_rate < 1.0
        memory, seen = engine.memory(), engine.loop.statistics()
        assert memory["draft_weights"] > 0 and memory["draft_pool"] == drafter.memory()["pool"]
        (pages,) = seen.draft_pages
        assert pages.used == 0 and pages.cached and pages.total == seen.pages[0].total
        executor = drafter.executor
    with pytest.raises(Exception, match="closed"):
        executor.create_pool([1])


def test_a_draft_has_the_cache_that_it_is_given(plain):
    draft = engines.built("smollm2", "int4")
    options = {"threads": 1, "speculate": draft, "draft_tokens": 3, "cache_tokens": 640, "weights": "copy"}
    with engines.load("smollm2", "int4", **options) as engine:
        assert drafter_of(engine).own_pool.capacity == engine.loop.pool.capacity == (40,)
    with engines.load("smollm2", "int4", **options, draft_cache_bytes=2 << 20) as engine:
        drafter = drafter_of(engine)
        page = drafter.executor.kv_groups[0].page_bytes
        assert drafter.own_pool.capacity == ((2 << 20) // page,)
        assert answers(engine, "greedy") == plain["greedy"]  # it has room for one or two of them
        assert engine.loop.speculator is not None and engine.loop.speculator.figures.drafted
        drafter.check_invariants()


def test_another_vocabulary_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    folder = engines.built("smollm2", "int4")
    manifest = json.loads((folder / "engine.json").read_text())
    other = Artifact(tmp_path, {**manifest, "model": {**manifest["model"], "vocab_size": 49153}})
    monkeypatch.setattr("enginewright.runtime.drafters.open_engine", lambda path: other)
    monkeypatch.setattr("enginewright.runtime.engine.get_backend", lambda name: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match=r"(?s)cannot draft.*49153.*49152"):
        enginewright.load(folder, speculate=tmp_path)
