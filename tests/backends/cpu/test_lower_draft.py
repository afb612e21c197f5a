"""A draft's files: draft.json over the model's weights.bin, in which nothing is stored twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.backends.cpu.lower import lower
from enginewright.passes.cut_draft import cut_draft
from enginewright.passes.manager import run_steps
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.recipe import Recipe, load_recipe
from tests.backends.stepping import Stepper
from tests.passes.architectures import ARCHITECTURES
from tests.passes.families import family, some_tokens
from tests.passes.paged import Pools

FILES = ("program.json", "draft.json", "weights.bin")
TOKENS = some_tokens(40)


def final(arch: str, recipe: Recipe) -> Program:
    program = family(arch).clone()
    run_steps(program, [step for step in steps(recipe) if step.stage > Stage.FUSED])
    return program


def lowered(program: Program, recipe: Recipe, folder: Path, layers: int = 1) -> dict[str, Any]:
    folder.mkdir()
    assert lower(program, recipe, folder, None, cut_draft(program, layers)) == list(FILES)
    return json.loads((folder / "draft.json").read_bytes())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_adds_no_weights_and_gives_its_program(arch: str, tmp_path: Path) -> None:
    recipe = load_recipe("fp32")
    program = final(arch, recipe)
    (tmp_path / "without").mkdir()
    assert lower(program, recipe, tmp_path / "without") == [FILES[0], FILES[2]]
    draft = lowered(program, recipe, tmp_path / "with")
    for name in (FILES[0], FILES[2]):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes()
    whole = json.loads((tmp_path / "with" / "program.json").read_bytes())
    assert draft["kv_groups"] == whole["kv_groups"] and draft["vocab_size"] == whole["vocab_size"]
    assert all(entry in whole["weights"] for entry in draft["weights"])
    used = {index for code in draft["instructions"] for index in code["weights"] if index >= 0}
    used |= {
        operand["weight"]
        for code in draft["instructions"]
        for operand in code["in"]
        if operand and "weight" in operand
    }
    assert used == set(range(len(draft["weights"]))), "no entry that the draft does not read"
    executor = CpuExecutor(
        *(tmp_path / "with" / name for name in (FILES[0], FILES[2])), draft=tmp_path / "with" / "draft.json"
    )
    found = _drafted(executor)
    want = Pools(cut_draft(program, 1), 16).step(TOKENS, 0).numpy()
    assert np.abs(found - want).max() <= 1e-4 * np.abs(want).max()
    executor.close()


def _drafted(executor: CpuExecutor) -> np.ndarray:
    """The draft's logits of TOKENS, from poisoned pools that hold what it has written alone."""
    stepper = Stepper(executor)
    draft = executor.draft()
    assert draft is not None
    stepper.executor = draft
    return np.concatenate([stepper.feed(a=TOKENS[:30])["a"], stepper.feed(a=TOKENS[30:])["a"]])


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("recipe_name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "arch", ["llama", "gemma3_text", "gpt2", "mixtral", "gpt_oss", "bloom", "deepseek_v3"]
)
def test_a_draft_goes_on_from_what_the_engine_has_written(
    arch: str, recipe_name: str, kv_format: str, tmp_path: Path
) -> None:
    """Bit for bit: after the engine's prompt, token by token, as after its own."""
    recipe = load_recipe(recipe_name, [f"kv_cache.format={kv_format}"])
    program = final(arch, recipe)
    layers = program.facts.num_layers - 1
    lowered(program, recipe, tmp_path / "e", layers)
    executor = CpuExecutor(
        *(tmp_path / "e" / name for name in (FILES[0], FILES[2])), draft=tmp_path / "e" / "draft.json"
    )
    want = _drafted(executor)
    assert np.isfinite(want).all()
    stepper = Stepper(executor)
    stepper.feed(a=TOKENS[:11])
    stepper.feed(a=TOKENS[11:30])
    draft = executor.draft()
    for at in range(30, 40):
        stepper.executor = draft
        assert np.array_equal(stepper.feed(a=[TOKENS[at]])["a"][0], want[at])
        if at % 2:  # the engine verifies: it writes the same place again, and its later layers
            stepper.lengths["a"] -= 1
            stepper.executor = executor
            stepper.feed(a=[TOKENS[at]])
        elif at % 4 == 0:  # a token that does not come true, over which the right one is written
            stepper.lengths["a"] -= 1
            stepper.feed(a=[TOKENS[at] ^ 1])
            stepper.lengths["a"] -= 1
            stepper.feed(a=[TOKENS[at]])
    executor.close()


def test_equal_builds_give_equal_drafts(tmp_path: Path) -> None:
    recipe = load_recipe("int4")
    for name in ("one", "two"):
        lowered(final("llama", recipe), recipe, tmp_path / name)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_only_final_drafts_are_lowered(tmp_path: Path) -> None:
    recipe = load_recipe("fp32")
    program = final("llama", recipe)
    draft = cut_draft(program, 1)
    draft.stage = Stage.PAGED
    with pytest.raises(LoweringError, match="only a final program"):
        lower(program, recipe, tmp_path, None, draft)
    assert not list(tmp_path.iterdir())
