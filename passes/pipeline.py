"""The whole order of passes, on one screen.

A Program comes in normalised and leaves ready to be lowered. Fusions that look at weights' shapes alone come
before quantisation; joins of matrices come after it, because they hold only where formats agree. A backend that wants the
model's own matrices (`until` QUANTISED) gets none that were reordered, nor any join.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from enginewright.passes.calibration import Samples
from enginewright.passes.cost import Ledger
from enginewright.passes.cut_draft import CanDraft
from enginewright.passes.fold_scalars import FoldScalars
from enginewright.passes.fuse_activation import FuseActivation
from enginewright.passes.fuse_add_norm import FuseAddNorm
from enginewright.passes.fuse_bias import FuseBias
from enginewright.passes.fuse_gated import FuseGated
from enginewright.passes.fuse_layer_norm import FuseLayerNorm
from enginewright.passes.fuse_rms_norm import FuseRmsNorm
from enginewright.passes.fuse_rope import FuseRope
from enginewright.passes.fuse_siblings import FuseSiblings
from enginewright.passes.gate_kv import GateKv
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.manager import Pass, PassRecord, Progress, Step, run_steps
from enginewright.passes.merge_duplicates import MergeDuplicates
from enginewright.passes.order_rows import OrderRows
from enginewright.passes.program import Program, Stage
from enginewright.passes.quantise import Quantise
from enginewright.passes.select_rows import SelectRows
from enginewright.passes.slice_before_rope import SliceBeforeRope
from enginewright.passes.smooth import Smooth
from enginewright.recipes.recipe import Recipe

__all__ = ["run_pipeline", "steps"]


def steps(
    recipe: Recipe,
    samples: Samples | None = None,
    report: Callable[[str], None] = lambda text: None,
    *,
    until: Stage = Stage.FINAL,
    gate: Pass | None = None,
    ledger: Ledger | None = None,
) -> list[Step]:
    """The passes that a recipe asks for, in order, up to a stage: FINAL or QUANTISED.

    `samples` are needed where `recipe.passes_calibrate` names something; `report` is told how far a calibration is. `gate` runs
    before matrices change; `ledger` receives what every matrix is stored as.
    """
    whole = until == Stage.FINAL
    calibrated = samples if recipe.passes_calibrate else None
    kv_formats: dict[int, str] = {}  # layers that gate_kv keeps out of the recipe's format
    order: list[tuple[bool, Pass | None, Stage]] = [
        (True, MergeDuplicates(), Stage.NORMALISED),
        (True, FoldScalars(), Stage.FUSED),
        (True, FuseBias(), Stage.FUSED),
        (True, FuseRope(), Stage.FUSED),
        (True, FuseLayerNorm(), Stage.FUSED),
        (True, FuseRmsNorm(), Stage.FUSED),
        (True, FuseActivation(), Stage.FUSED),
        (True, FuseAddNorm(), Stage.FUSED),
        (gate is not None, gate, Stage.FUSED),
        (recipe.draft.layers is not None, CanDraft(recipe.draft.layers or 0), Stage.FUSED),
        (whole, SliceBeforeRope(), Stage.FUSED),
        (whole, OrderRows(), Stage.FUSED),
        (recipe.smooth.method != "none", Smooth(recipe, samples, report), Stage.FUSED),
        (True, Quantise(recipe, calibrated, report, ledger), Stage.QUANTISED),
        (recipe.kv_cache.max_error is not None, GateKv(recipe, samples, kv_formats, report), Stage.QUANTISED),
        (whole, FuseSiblings(), Stage.QUANTISED),
        (whole, FuseGated(), Stage.QUANTISED),
        (whole, InsertPagedKv(recipe.kv_cache.page_size, recipe.kv_cache.format, kv_formats), Stage.PAGED),
        (whole, SelectRows(), Stage.FINAL),
    ]
    return [
        Step(rewrite, stage, required=isinstance(rewrite, (InsertPagedKv, SelectRows)))
        for wanted, rewrite, stage in order
        if wanted and rewrite is not None
    ]


def run_pipeline(
    program: Program,
    recipe: Recipe,
    samples: Samples | None = None,
    *,
    dump: Path | None = None,
    progress: Progress | None = None,
    check: Callable[[Program, str], None] | None = None,
) -> list[PassRecord]:
    """Run every step on a normalised `program`, in place; see `run_steps` for the options and errors."""
    return run_steps(program, steps(recipe, samples), dump=dump, progress=progress, check=check)
