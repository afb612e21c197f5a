"""What `optimize --backend tensorrt` writes: a plan for each target, or one for all, and the manifest's section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginewright.backends.base import LowerProgress
from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.api import library, new_network
from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.build import Built, build_plan
from enginewright.backends.tensorrt.estimate import Estimate, available_memory, estimate, require_memory
from enginewright.backends.tensorrt.lower import Lowered, Options, define
from enginewright.backends.tensorrt.plan_text import PlanText, read_plan
from enginewright.backends.tensorrt.targets import plan_name
from enginewright.backends.tensorrt.turing import refuse_network
from enginewright.passes.program import Program
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import Recipe

__all__ = ["limits_of", "lower", "options_of", "require_step"]

_MOST_PAGES = 1 << 16
_MOST_ELEMENTS = 2**31 - 1  # of a tensor


def options_of(recipe: Recipe) -> Options:
    return Options(recipe.compute, recipe.kv_cache.page_size)


def require_step(recipe: Recipe) -> None:
    """Raise InputError where the recipe's largest step has more places for queries than a tensor may have elements."""
    sequences, tokens = recipe.tensorrt.sequences, recipe.tensorrt.tokens
    if sequences * tokens > _MOST_ELEMENTS:
        raise InputError(
            "no plan takes such a step: its tensors would be too large",
            found=f"tensorrt.sequences {sequences:,}, tensorrt.tokens {tokens:,}",
            expected=f"a product of at most {_MOST_ELEMENTS:,}; 32 and 512 unless set",
            action="set them to what a step is to hold at most",
        )


def limits_of(program: Program, recipe: Recipe) -> Limits:
    """The largest step that plans are built for. Pools may have 65,535 pages, where a tensor can hold so many."""
    size = recipe.kv_cache.page_size
    pages = []
    for group in program.facts.kv_groups:
        widest = max(layer.kv_heads * max(layer.key_dim, layer.value_dim) for layer in group.layers)
        pages.append(min(_MOST_PAGES, _MOST_ELEMENTS // (widest * size)))
    wanted = recipe.tensorrt
    return Limits(wanted.sequences, wanted.tokens, program.facts.max_context, size, tuple(pages))


def lower(
    program: Program,
    recipe: Recipe,
    directory: Path,
    targets: Sequence[str],
    progress: LowerProgress | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Build the plans of `program` into `directory`; returns the files' names, and the manifest's section "tensorrt".

    Before anything is built, all that cannot be lowered is told (LoweringError), and too little memory (InputError).
    """
    network, builder = new_network()
    lowered = define(program, network, options_of(recipe))
    refuse_network(lowered, targets)
    limits = limits_of(program, recipe)
    needed = estimate(lowered.weight_bytes, program.facts.kv_groups, limits)
    require_memory(needed, available_memory())
    together = [list(targets)] if recipe.tensorrt.one_plan else [[target] for target in targets]
    plans = []
    for index, part in enumerate(together):
        name = plan_name(part)

        def tick(seconds: float, name: str = name, index: int = index) -> None:
            if progress is not None:
                progress(f"{name}, {seconds:,.0f} s", index * needed.weights, len(together) * needed.weights)

        built = build_plan(lowered, builder, part, limits, directory / name, tick)
        text = read_plan(built.path)
        plans.append((part, built, text))
        program.notes.append(_told(built, text, len(program.facts.kv_groups)))
    if progress is not None:
        progress("", len(together) * needed.weights, len(together) * needed.weights)
    return [built.path.name for _, built, _ in plans], _section(lowered, limits, targets, plans, needed)


def _told(built: Built, text: PlanText, groups: int) -> str:
    """A plan in a line, for the build's notes."""
    attentions = [len(graph.attentions()) for graph in text.graphs]
    return (
        f"{built.path.name}: {built.size / 1e6:,.1f} MB in {built.seconds:,.1f} s, {built.peak / 1e9:,.1f} GB of host memory; "
        f"kernels a profile {[len(graph.kernels) for graph in text.graphs]}, of them fused attention {attentions}; "
        f"device memory between kernels {text.scratch / 1e6:,.1f} MB"
    )


def _section(
    lowered: Lowered,
    limits: Limits,
    targets: Sequence[str],
    plans: Sequence[tuple[list[str], Built, PlanText]],
    needed: Estimate,
) -> dict[str, Any]:
    """What a runtime must know to load a plan (`backends/tensorrt/device.py`, `pools.py`), and what says what it is."""
    lib = library()
    return {
        "library": lib.module,
        "version": lib.version,
        "driver": lib.driver,
        "architectures": list(targets),
        "plans": {target: built.path.name for part, built, _ in plans for target in part},
        "limits": {
            "sequences": limits.sequences,
            "tokens": limits.tokens,
            "context": limits.context,
            "page_size": limits.page_size,
            "pages": list(limits.pages),
        },
        "inputs": [_binding(binding) for binding in lowered.inputs],
        "outputs": [_binding(binding) for binding in lowered.outputs],
        "profiles": {
            kind: {size: list(range_) for size, range_ in bindings.sizes(kind, limits).items()}
            for kind in bindings.PROFILES
        },
        "pool": "[pages, kv heads, page size, head dim]; the last page stays zeros; each output aliases its input",
        "compute": lowered.options.compute,
        "memory": {
            "weights": needed.weights,
            "page": needed.page,
            "scratch": {name: text.scratch for part, _, text in plans for name in part},
        },
    }


def _binding(binding: bindings.Binding) -> dict[str, Any]:
    return {"name": binding.name, "shape": list(binding.shape), "type": binding.type}
