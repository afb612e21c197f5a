"""The whole order of passes, on one screen.

A Program comes in normalised and leaves ready to be lowered. Fusions that look at weights' shapes alone come
before quantisation; joins of matrices come after it, because they hold only where formats agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from enginewright.passes.fold_scalars import FoldScalars
from enginewright.passes.fuse_activation import FuseActivation
from enginewright.passes.fuse_add_norm import FuseAddNorm
from enginewright.passes.fuse_bias import FuseBias
from enginewright.passes.fuse_gated import FuseGated
from enginewright.passes.fuse_layer_norm import FuseLayerNorm
from enginewright.passes.fuse_rms_norm import FuseRmsNorm
from enginewright.passes.fuse_rope import FuseRope
from enginewright.passes.fuse_siblings import FuseSiblings
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.manager import PassRecord, Progress, Step, run_steps
from enginewright.passes.merge_duplicates import MergeDuplicates
from enginewright.passes.order_rows import OrderRows
from enginewright.passes.program import Program, Stage
from enginewright.passes.quantise import Quantise
from enginewright.passes.select_rows import SelectRows
from enginewright.passes.slice_before_rope import SliceBeforeRope
from enginewright.recipes.recipe import Recipe

__all__ = ["run_pipeline", "steps"]


def steps(recipe: Recipe) -> list[Step]:
    """The passes that a recipe asks for, in order."""
    return [
        Step(MergeDuplicates(), Stage.NORMALISED),
        Step(FoldScalars(), Stage.FUSED),
        Step(FuseBias(), Stage.FUSED),
        Step(FuseRope(), Stage.FUSED),
        Step(FuseLayerNorm(), Stage.FUSED),
        Step(FuseRmsNorm(), Stage.FUSED),
        Step(FuseActivation(), Stage.FUSED),
        Step(FuseAddNorm(), Stage.FUSED),
        Step(SliceBeforeRope(), Stage.FUSED),
        Step(OrderRows(), Stage.FUSED),
        Step(Quantise(recipe), Stage.QUANTISED),
        Step(FuseSiblings(), Stage.QUANTISED),
        Step(FuseGated(), Stage.QUANTISED),
        Step(InsertPagedKv(recipe.kv_cache.page_size, recipe.kv_cache.format), Stage.PAGED, required=True),
        Step(SelectRows(), Stage.FINAL, required=True),
    ]


def run_pipeline(
    program: Program,
    recipe: Recipe,
    *,
    dump: Path | None = None,
    progress: Progress | None = None,
    check: Callable[[Program, str], None] | None = None,
) -> list[PassRecord]:
    """Run every step on a normalised `program`, in place; see `run_steps` for the options and errors."""
    return run_steps(program, steps(recipe), dump=dump, progress=progress, check=check)
