"""From a final Program to the files that the cpu backend runs: program.json, weights.bin, and a draft's draft.json.

The graph is lowered node by node into a flat list of instructions (instructions.md) by rules that are looked
up by the op's name: lower_dialect.py has the dialect's, lower_generic.py those of ATen. Nothing is loaded
until the list is complete; then the weights stream into their file one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginewright.backends.artifact import canonical_json
from enginewright.backends.base import LowerProgress
from enginewright.backends.cpu.formats import KV_FORMATS, WEIGHT_FORMATS, activations_for
from enginewright.backends.cpu.lowering import RULES, Lowering
from enginewright.backends.cpu.weights_file import WeightsFile
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.recipe import Recipe

__all__ = ["capabilities", "lower"]

PROGRAM_FILE = "program.json"
DRAFT_FILE = "draft.json"
WEIGHTS_FILE = "weights.bin"


def capabilities() -> dict[str, Any]:
    """What this backend can lower, as data: ops (by name), weight formats and the activations that each takes, KV formats
    and page sizes."""
    import enginewright.backends.cpu.lower_dialect
    import enginewright.backends.cpu.lower_generic  # noqa: F401

    return {
        "ops": sorted(RULES),
        "weight_formats": list(WEIGHT_FORMATS),
        "activation_formats": {name: list(activations_for(name)) for name in WEIGHT_FORMATS},
        "kv_formats": list(KV_FORMATS),
        "compute": ["auto"],
        "page_sizes": [16, 32],
    }


def lower(
    program: Program,
    recipe: Recipe,
    directory: Path,
    progress: LowerProgress | None = None,
    draft: Program | None = None,
) -> list[str]:
    """Write program.json and weights.bin for `program` into `directory`; returns the names of the files.

    `recipe` gives the KV cache's page size and usual format; each layer's own comes with the program. A `draft` of the
    program (passes/cut_draft.py) becomes draft.json over the same weights.bin: what both read is stored once.
    `progress(name, written, total)` is called before each weight. Raises LoweringError with the op, its
    module and what is supported.
    """
    programs = {PROGRAM_FILE: program, **({} if draft is None else {DRAFT_FILE: draft})}
    for one in programs.values():
        if one.stage != Stage.FINAL:
            raise LoweringError(
                "only a final program can be lowered", found=one.stage.name, expected=Stage.FINAL.name
            )
    weights = WeightsFile()
    lowered: dict[str, dict[str, Any]] = {}
    for name, one in programs.items():
        lowering = Lowering(one, weights)
        lowered[name] = lowering.builder.finish(lowering.run())
    kv_groups = [
        {
            "window": group.window,
            "format": recipe.kv_cache.format,
            "page_size": recipe.kv_cache.page_size,
            "layers": [
                {
                    "kv_heads": layer.kv_heads,
                    "key_dim": layer.key_dim,
                    "value_dim": layer.value_dim,
                    **({} if layer.format == recipe.kv_cache.format else {"format": layer.format}),
                }
                for layer in group.layers
            ],
        }
        for group in program.facts.kv_groups
    ]
    program.notes.extend(weights.duplicates())
    weights.write(directory / WEIGHTS_FILE, progress)
    head = {"version": 1, "vocab_size": program.facts.vocab_size, "kv_groups": kv_groups}
    for name, lists in lowered.items():
        document = {**head, **_with_own_weights(lists, weights.entries)}
        (directory / name).write_bytes(canonical_json(document))
    return [*lowered, WEIGHTS_FILE]


def _with_own_weights(lists: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A program's lists with those entries of the weights file that it reads, in the file's order."""
    operands = [
        operand for code in lists["instructions"] for operand in (*code["in"], *code["out"]) if operand
    ]
    used = {index for code in lists["instructions"] for index in code["weights"] if index >= 0}
    used |= {operand["weight"] for operand in operands if "weight" in operand}
    places = {index: place for place, index in enumerate(sorted(used))}
    for operand in operands:
        if "weight" in operand:
            operand["weight"] = places[operand["weight"]]
    for code in lists["instructions"]:
        code["weights"] = [places.get(index, index) for index in code["weights"]]
    return {**lists, "weights": [entries[index] for index in places]}
