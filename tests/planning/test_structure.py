"""What is counted on one layer of each kind equals what a whole build makes: to the byte, to the match."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from enginewright.backends import get_backend
from enginewright.backends.requirements import adapt
from enginewright.passes.assignment import assign
from enginewright.passes.capture import capture
from enginewright.passes.layer_kinds import find_layers
from enginewright.passes.manager import PassResult, Step, run_steps
from enginewright.passes.meta_model import build_on_meta
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import open_source
from enginewright.planning.memory import Cache
from enginewright.planning.structure import survey, uncalibrated
from enginewright.recipes.formats import kv_token_bytes
from enginewright.recipes.recipe import load_recipe
from tests.models import smollm2_gguf
from tests.passes.architectures import ARCHITECTURES, save

_FULL, _WINDOWED = "full_attention", "sliding_attention"

#: Architectures whose layers are not all alike, or whose number of layers has another name.
MIXED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": [_WINDOWED] * 5 + [_FULL]},
    "gemma2": {"num_hidden_layers": 5, "layer_types": [_WINDOWED, _FULL, _WINDOWED, _FULL, _WINDOWED]},
    "cohere2": {"num_hidden_layers": 6, "layer_types": [*[_WINDOWED] * 3, _FULL, *[_WINDOWED] * 2]},
    "exaone4": {"num_hidden_layers": 6, "layer_types": [*[_WINDOWED] * 3, _FULL, *[_WINDOWED] * 2]},
    "gpt_oss": {"num_hidden_layers": 5, "layer_types": [_WINDOWED, _FULL, _WINDOWED, _FULL, _WINDOWED]},
    "smollm3": {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "qwen3_moe": {"num_hidden_layers": 5, "mlp_only_layers": [0, 3]},
    "deepseek_v3": {"num_hidden_layers": 5, "first_k_dense_replace": 2},
    **{name: {"n_layer": 5} for name in ("gpt2", "gptj", "bloom", "bloom-postnorm")},
    "mpt": {"n_layers": 5},
}


class _Count:
    """A pass that changes nothing and counts the matrices of each role and format."""

    name = "count"

    def __init__(self, recipe: Any) -> None:
        self.options: dict[str, Any] = {}
        self.recipe = recipe
        self.matrices: Counter[tuple[str, str]] = Counter()

    def run(self, program: Program) -> PassResult:
        assigned, _ = assign(program, self.recipe)
        self.matrices = Counter((matrix.role, matrix.weight) for matrix in assigned.values())
        return PassResult(0)


def _equal_to_a_build(arch: str, changes: dict[str, Any], name: str, folder: Path, *overrides: str) -> None:
    model = save(arch, folder / "model", **changes)
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(model / "config.json", alone)
    _compare(model, alone, name, folder, *overrides)


def _compare(model: Path, alone: Path, name: str, folder: Path, *overrides: str) -> None:
    """A whole build of a model by a recipe beside what is counted on a few layers of what `alone` holds."""
    backend = get_backend("cpu")
    recipe = uncalibrated(adapt(load_recipe(name, list(overrides)), backend))

    program = capture(model)
    count = _Count(recipe)
    order = [Step(Normalise(), Stage.NORMALISED), *steps(recipe, gate=count)]
    built = {entry.name: entry.matches for entry in run_steps(program, order) if entry.name != "count"}
    (folder / "engine").mkdir()
    backend.lower(program, recipe, folder / "engine")

    found = survey(open_source(alone), recipe, backend, program.facts.max_context)
    assert not found.refused and found.exact
    assert found.captured <= 2 * len(found.layers.kinds)
    assert found.facts.parameters == program.facts.parameters
    assert found.engine_bytes == (folder / "engine" / "weights.bin").stat().st_size
    assert found.passes == built
    matrices: Counter[tuple[str, str]] = Counter()
    for (role, weight), number in found.matrices.items():
        matrices["linear" if role == "experts" else role, weight] += number
    assert matrices == count.matrices
    cache = Cache.of(found.attentions, recipe.kv_cache.format, recipe.kv_cache.page_size)
    groups = {
        group.window: sum(
            kv_token_bytes(item.format, item.kv_heads, item.key_dim, item.value_dim) for item in group.layers
        )
        for group in program.facts.kv_groups
    }
    assert {group.window: group.token_bytes for group in cache.groups} == groups


def test_windows_and_full_layers(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 4, "layer_types": [_WINDOWED, _FULL, _WINDOWED, _WINDOWED]}
    _equal_to_a_build("gemma3_text", changes, "int4", tmp_path)


def test_experts_behind_a_dense_layer(tmp_path: Path) -> None:
    _equal_to_a_build("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0]}, "int8", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "int4", "int3-gptq"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str, name: str, tmp_path: Path) -> None:
    _equal_to_a_build(arch, MIXED.get(arch, {"num_hidden_layers": 5}), name, tmp_path)


@pytest.mark.slow
def test_overrides_tell_layers_apart(tmp_path: Path) -> None:
    override = 'overrides+={match: "model.layers.[13].mlp.*", weight: int8}'
    _equal_to_a_build("llama", {"num_hidden_layers": 5}, "int4", tmp_path, override)


@pytest.mark.slow
def test_integers_that_are_kept(tmp_path: Path) -> None:
    model = smollm2_gguf()
    _compare(model, model, "keep", tmp_path)


def test_kinds_of_layers(tmp_path: Path) -> None:
    def kinds(arch: str, *patterns: str, **changes: Any) -> tuple[tuple[int, ...], ...]:
        return find_layers(build_on_meta(ARCHITECTURES[arch](**changes).config), patterns).kinds

    assert kinds("llama", num_hidden_layers=4) == ((0, 1, 2, 3),)
    assert kinds("llama", "model.layers.2.mlp.*", num_hidden_layers=4) == ((0, 1, 3), (2,))
    assert kinds("gemma2", **MIXED["gemma2"]) == ((0, 2, 4), (1, 3))
    assert kinds("deepseek_v3", **MIXED["deepseek_v3"]) == ((0, 1), (2, 3, 4))
    assert kinds("qwen3_moe", **MIXED["qwen3_moe"]) == ((0, 3), (1, 2, 4))
    assert kinds("smollm3", **MIXED["smollm3"]) == ((0, 1, 2, 4, 5), (3,))
    held = {"model.layers.1.mlp.up_proj.weight": "Q4_K", "model.layers.3.mlp.up_proj.weight": "Q4_K"}
    model = build_on_meta(ARCHITECTURES["llama"](num_hidden_layers=4).config)
    assert find_layers(model, told=held.get).kinds == ((0, 2), (1, 3))
    assert kinds("gpt2", n_layer=3) == ((0,), (1,), (2,))  # attention is scaled by the layer's number
