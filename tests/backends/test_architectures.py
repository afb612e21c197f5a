"""Every model family through the whole compiler: the cpu engine gives the logits that transformers gives.

Captured, run through all passes and lowered with the fp32 recipe. The largest difference is at most 1e-4 of the largest
logit, however the prompts are cut into steps; and the engine's own answers are bitwise the same in all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.backends.cpu.lower import lower
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.passes.capture import capture
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.manager import run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import load_recipe
from tests.backends.stepping import Floats, Stepper, alone, in_chunks
from tests.passes.architectures import ARCHITECTURES, folder

executor_module = pytest.importorskip("enginewright.backends.cpu.executor")

TOLERANCE = 1e-4
PROMPTS = {
    name: torch.randint(3, 130, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in (("short", 3), ("middle", 17), ("long", 41))
}


@functools.cache
def expected(arch: str) -> dict[str, Floats]:
    """Eager transformers' logits, each prompt alone."""
    model = ARCHITECTURES[arch]()
    with torch.no_grad():
        return {name: model(torch.tensor([prompt])).logits[0].numpy() for name, prompt in PROMPTS.items()}


@functools.cache
def normalised(arch: str) -> Program:
    program = capture(folder(arch))
    if program.stage < Stage.NORMALISED:
        Normalise().run(program)
        program.stage = Stage.NORMALISED
    return program


@functools.cache
def engine(
    arch: str,
    recipe_name: str,
    page_size: int,
    kv_format: str = "f32",
    layer_formats: tuple[tuple[int, str], ...] = (),
) -> tuple[Program, tempfile.TemporaryDirectory[str]]:
    """An architecture's final Program and its lowered files. Keys and values are kept in f32 unless asked otherwise."""
    recipe = load_recipe(recipe_name, [f"kv_cache.page_size={page_size}", f"kv_cache.format={kv_format}"])
    program = normalised(arch).clone()
    insert = InsertPagedKv(page_size, kv_format, dict(layer_formats))
    run_steps(
        program,
        [
            dataclasses.replace(step, rewrite=insert) if step.rewrite.name == insert.name else step
            for step in steps(recipe)
        ],
    )
    directory = tempfile.TemporaryDirectory()
    lower(program, recipe, Path(directory.name))
    return program, directory


def load(arch: str, recipe: str = "fp32", page_size: int = 16, *cache):  # type: ignore[no-untyped-def]
    directory = Path(engine(arch, recipe, page_size, *cache)[1].name)
    return executor_module.CpuExecutor(
        directory / "program.json", directory / "weights.bin", threads=2, max_tokens=64
    )


def check(found: dict[str, Floats], arch: str) -> None:
    for name, want in expected(arch).items():
        error = np.abs(found[name] - want).max() / np.abs(want).max()
        assert error <= TOLERANCE, f"prompt {name}: {error:.2e} of the largest logit"


LARGE_PAGES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")  # every day; the others' are a slow proof
SIZES = [(arch, 16) for arch in ARCHITECTURES] + [
    pytest.param(arch, 32, marks=() if arch in LARGE_PAGES else pytest.mark.slow) for arch in ARCHITECTURES
]


@pytest.mark.parametrize(("arch", "page_size"), SIZES)
def test_logits_equal_transformers_however_prompts_are_cut(arch: str, page_size: int) -> None:
    executor = load(arch, page_size=page_size)
    try:
        whole = alone(executor, PROMPTS, 64)
        check(whole, arch)
        ways = {
            "one token a step": alone(executor, PROMPTS, 1),
            "seven tokens a step": alone(executor, PROMPTS, 7),
            "all prompts in one step": in_chunks(executor, PROMPTS, 64),
            "all prompts, five tokens a step": in_chunks(executor, PROMPTS, 5),
            "a prefill beside decodes": mixed(executor),
        }
        for way, found in ways.items():
            for name in PROMPTS:
                assert np.array_equal(found[name], whole[name]), (
                    f"{way}: prompt {name} differs from the whole prompt"
                )
    finally:
        executor.close()


def mixed(executor) -> dict[str, Floats]:  # type: ignore[no-untyped-def]
    """The long prompt decodes token by token while the others arrive, in one chunk and in two."""
    stepper = Stepper(executor)
    found: dict[str, list[Floats]] = {name: [] for name in PROMPTS}
    long = PROMPTS["long"]
    others = {3: ("middle", 0, 10), 5: ("short", 0, 3), 6: ("middle", 10, 17)}
    rows = {"long": long[:20]}
    for step in range(len(long) - 20 + 1):
        if step in others:
            name, start, stop = others[step]
            rows = {name: PROMPTS[name][start:stop], **rows}
        for name, logits in stepper.feed(**rows).items():
            found[name].append(logits)
        rows = {"long": long[20 + step : 21 + step]}
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_oss"])
def test_rounded_weights_and_activations_are_those_of_the_reference(arch: str, recipe: str) -> None:
    """Both backends round to the same grids: what is left is the order of sums, and the ties it tips."""
    executor = load(arch, recipe)
    found = alone(executor, PROMPTS, 64)
    assert all(
        np.array_equal(found[name], logits) for name, logits in in_chunks(executor, PROMPTS, 7).items()
    )
    executor.close()
    for name, want in alone(ReferenceExecutor(engine(arch, recipe, 16)[0]), PROMPTS, 64).items():
        error = np.abs(found[name] - want) / np.abs(want).max()
        assert np.median(error) <= TOLERANCE and error.max() <= 1e-2


CACHES = {
    "int8": ("int8", ()),
    "bf16": ("bf16", ()),
    "mixed": ("int8", ((0, "bf16"), (1, "f32"))),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt_oss", "mpt", "deepseek_v3"])
def test_a_rounded_cache_is_that_of_the_reference(arch: str, cache: str) -> None:
    """Both backends keep the same codes and scales. What is left: the cpu's queries and softmax weights are bf16."""
    program = engine(arch, "fp32", 16, *CACHES[cache])[0]
    usual, others = CACHES[cache]
    layers = [layer for group in program.facts.kv_groups for layer in group.layers]
    assert sorted(layer.format for layer in layers) == sorted(
        dict(others).get(i, usual) for i in range(len(layers))
    )
    executor = load(arch, "fp32", 16, *CACHES[cache])
    found = alone(executor, PROMPTS, 64)
    for chunk in (1, 7):
        for name, logits in in_chunks(executor, PROMPTS, chunk).items():
            assert np.array_equal(found[name], logits)
    executor.close()
    for name, want in alone(ReferenceExecutor(program), PROMPTS, 64).items():
        error = np.abs(found[name] - want) / np.abs(want).max()
        # A row whose experts tip at a tie may differ more.
        assert np.median(error) <= 2e-3 and np.sort(error.max(axis=1))[-2] <= 2e-2
        if cache == "int8":  # far less than what the codes' rounding does to the logits
            assert np.median(error) < 0.7 * np.median(
                np.abs(want - expected(arch)[name]) / np.abs(want).max()
            )
