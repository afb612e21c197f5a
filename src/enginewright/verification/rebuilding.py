"""`engine verify ENGINE --against MODEL --bisect`: the engine's passes run again, to see where it left its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from enginewright.backends import writer_of
from enginewright.backends.artifact import Artifact
from enginewright.calibration import check_calibration, from_file, from_model
from enginewright.passes.capture import capture
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import open_source
from enginewright.recipes.recipe import Recipe
from enginewright.recipes.schema import parse

from .bisection import Bisection, bisect
from .samples import sample_tokens
from .stages import Stages

__all__ = ["bisect_engine"]


def bisect_engine(
    artifact: Artifact,
    model: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Build the Program of an engine again by the recipe in its manifest, and find what makes the engine differ from `model`.

    `calibration` is the file of text that it was calibrated on, which a manifest does not hold; needed where it names one.
    Raises InputError and its kin where the engine cannot be built again.
    """
    target = writer_of(artifact.manifest)
    recipe: Recipe = parse(Recipe, artifact.manifest["recipe"], "")
    if calibration is not None:
        recipe = replace(recipe, calibration=replace(recipe.calibration, source=os.fspath(calibration)))
    check_calibration(recipe)
    report("capturing the model")
    source = open_source(model, adapter)
    program = capture(source, max_context=recipe.max_context)
    history: list[tuple[str, Program]] = [("capture", program.clone())]
    samples = None
    if recipe.calibrates:
        from_text = recipe.calibration.source != "self"
        samples = (
            from_file(source, recipe)
            if from_text
            else from_model(source, program, recipe.calibration, report)
        )
    run_steps(
        program,
        [
            Step(Normalise(), Stage.NORMALISED, required=True),
            *steps(recipe, samples, report, until=Stage[target.stage], gate=target.gate(recipe, source)),
        ],
        check=lambda after, name: history.append((name, after.clone())),
    )
    encode = None if source.tokenizer is None else source.tokenizer.encode
    window = max((group["window"] for group in artifact.manifest["kv_groups"]), default=0)
    sample = sample_tokens(encode, program.facts.vocab_size, program.facts.max_context, window)[-1]
    stages = Stages(program, target, recipe, artifact.manifest)
    return bisect(
        history,
        target,
        recipe,
        artifact.manifest,
        sample,
        engine=stages.engine_logits(Path(artifact.path)),
        report=report,
    )
