"""`optimize --plan`: what a build would make, take and give, from a model's configuration alone. Nothing is written.

No weight is read, and none need be there; only `keep`, which carries a checkpoint's own integers, looks at the files' headers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from enginewright.backends import aim, flavoured, get_backend
from enginewright.backends.base import Backend
from enginewright.backends.requirements import refusals
from enginewright.calibration import check_calibration
from enginewright.passes.cut_draft import check_layers
from enginewright.passes.rope_lengths import check_rope_types
from enginewright.passes.source import ModelSource, open_source
from enginewright.passes.supported import objections, resolve_context
from enginewright.planning.build_cost import BuildCost, cost_of_build
from enginewright.planning.devices import Device, find_device
from enginewright.planning.machine import this_machine
from enginewright.planning.memory import RESERVED, Cache, sequences_that_fit
from enginewright.planning.roofline import Work, work_of
from enginewright.planning.structure import Refusal, Structure, survey
from enginewright.progress import Progress
from enginewright.recipes.errors import EnginewrightError, InputError
from enginewright.recipes.formats import parse_weight
from enginewright.recipes.recipe import Recipe, load_recipe

__all__ = ["Plan", "plan"]

_CONTEXT = 2048  # tokens at which speeds are told, where the engine's context allows it
_PROMPT = 2048
_ON_THIS_CPU = ("cpu", "checkpoint")


@dataclass
class Plan:
    """A plan. `structure` is None where the model was refused before it could be looked at; `refused` says why."""

    model: str
    recipe: Recipe
    backend: str | None
    device: Device
    memory: float
    notes: list[str]
    refused: list[Refusal]
    structure: Structure | None = None
    cache: Cache | None = None
    work: Work | None = None
    build: BuildCost | None = None

    @property
    def context(self) -> int:
        """Tokens at which speeds are told."""
        assert self.structure is not None
        return min(_CONTEXT, self.structure.facts.max_context)

    @property
    def prompt(self) -> int:
        assert self.structure is not None
        return min(_PROMPT, self.structure.facts.max_context)

    @property
    def roles(self) -> dict[str, int]:
        """Stored bytes by role."""
        assert self.structure is not None
        found: dict[str, int] = {}
        for (_, role, _), size in self.structure.stored.items():
            found[role] = found.get(role, 0) + size
        return found

    @property
    def devices_needed(self) -> int:
        """How many devices hold the weights: arithmetic, since engines run on one."""
        assert self.structure is not None
        room = self.memory * (1 - RESERVED)
        return max(1, -int(-self.structure.engine_bytes // room)) if room else 1

    @property
    def largest_batch(self) -> int:
        """Sequences of `context` tokens that fit, on as many devices as the weights need; at least 1."""
        assert self.structure is not None and self.cache is not None
        memory = self.memory * self.devices_needed
        return max(1, sequences_that_fit(self.cache, memory, self.structure.engine_bytes, self.context))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        from enginewright.planning.record import record

        return record(self)


def plan(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] = "int4",
    *,
    backend: str | None = None,
    target: str | None = None,
    overrides: Iterable[str] = (),
    calibration: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    device: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """What `optimize` would make of `model` by `recipe`, and what it could give.

    `backend`: whose capabilities and files count; by default cpu, and with a `device` none: then the formats' own bytes are
    planned, with activations in f16 beside integer weights where the recipe leaves it open. `device`: a name of devices.py
    (default: this machine, measured for a second or two). `memory`: bytes that may be used (default: the device's).
    `context`: the engine's limit.

    Raises InputError for what cannot be read; what cannot be built stands in `refused`.
    """
    progress = progress or Progress()
    named = None if device is None else find_device(device)
    changes = [*overrides, *([f"max_context={context}"] if context is not None else [])]
    resolved = load_recipe(str(recipe), changes)
    if calibration is not None:
        resolved = replace(resolved, calibration=replace(resolved.calibration, source=os.fspath(calibration)))
    check_calibration(resolved)
    nothing = backend is None and target is None and named is not None
    aimed = None if nothing else flavoured(aim(get_backend(backend or "cpu"), target), resolved)
    resolved, refused = _adapted(resolved, aimed)
    if named is None:
        with progress.stage("measure") as record:
            named = this_machine(_products(resolved))
            record.detail = f"{named.bandwidth / 1e9:.0f} GB/s, {named.source.partition(': ')[2]}"
    with progress.stage("open") as record:
        source = open_source(model, adapter, weights=False)
        record.detail = source.name
    made = Plan(
        source.name,
        resolved,
        None if aimed is None else aimed.name,
        named,
        float(memory if memory is not None else named.memory),
        [],
        list(refused),
    )
    limit, made.notes = resolve_context(source.config, resolved.max_context)
    if device is None and made.backend not in (None, *_ON_THIS_CPU):
        made.notes.append(
            "speeds are this machine's processor's; --device NAME plans for what the engine is for"
        )
    of_model = [Refusal.of(error) for error in _of_model(source)]
    if of_model:
        made.refused += of_model
        return made
    with progress.stage("plan") as record:
        try:
            # A backend that cannot hold the formats is not asked what it would write.
            found = survey(source, resolved, None if refused else aimed, limit, progress.update)
        except EnginewrightError as error:
            made.refused.append(Refusal.of(error))
            return made
        made.structure = found
        record.detail = f"{found.captured} layers for {found.facts.num_layers}"
    if found.refused:
        made.refused += found.refused
    else:
        _complete(made, found)
    return made


def _adapted(recipe: Recipe, target: Backend | None) -> tuple[Recipe, list[Refusal]]:
    """The recipe as the backend builds it, or for a device alone, and why the backend cannot hold it."""
    if target is None:
        return (replace(recipe, compute="f16") if recipe.compute == "auto" else recipe), []
    adapted, errors = refusals(recipe, target)
    refused = [Refusal.of(error) for error in errors]
    if recipe.draft.layers is not None and not target.drafts:
        refused.append(
            Refusal(
                f"the {target.name} backend writes no drafts",
                f"draft.layers={recipe.draft.layers}",
                "draft.layers null or 0",
                "leave draft.layers out, or build with --backend cpu",
            )
        )
    return adapted, refused


def _products(recipe: Recipe) -> list[tuple[str, str]]:
    """Pairs of formats whose products are to be measured: those that this processor's kernels compute, whatever the backend."""
    here = get_backend("cpu").capabilities["activation_formats"]
    found = []
    asked: list[Any] = [recipe.linear, recipe.head, *recipe.overrides]
    for item in asked:
        if item.weight != "keep" and parse_weight(item.weight).name != "f16":
            activation = recipe.activation_of(item.weight, item.activation)
            if activation != "int8_static" and activation in here.get(item.weight, ()):
                found.append((item.weight, activation))
    return found


def _of_model(source: ModelSource) -> list[EnginewrightError]:
    """What is known of a kind of model before anything is built."""
    found: list[EnginewrightError] = list(objections(source.config))
    try:
        check_rope_types(source.config)
    except EnginewrightError as error:
        found.append(error)
    return found


def _complete(made: Plan, found: Structure) -> None:
    """The cache, the work and the build of a model that nothing refuses."""
    recipe = made.recipe
    if recipe.draft.layers is not None:
        try:
            check_layers(recipe.draft.layers, found.facts.num_layers)
        except InputError as error:
            made.refused.append(Refusal.of(error))
            return
        if recipe.draft.head == "distilled":
            width = found.facts.hidden_size
            found.stored["matrix", "draft", "bf16"] = 2 * width * width + 4 * width
    made.notes += found.notes
    kv_format = recipe.kv_cache.format
    page_size = recipe.kv_cache.tokens_a_page(found.facts.max_context)
    made.cache = Cache.of(found.attentions, kv_format, page_size)
    scores = "f32" if kv_format == "f32" else "f16" if kv_format == "f16" else "bf16"
    made.work = work_of(found, made.cache, scores, made.roles)
    made.build = cost_of_build(found, recipe)
    made.notes += _bounds(recipe)


def _bounds(recipe: Recipe) -> list[str]:
    """Where calibration would decide what is stored: what the figures then are."""
    notes = []
    if recipe.mixed.wanted:
        wanted = (
            f"{recipe.mixed.budget:g} bits a weight"
            if recipe.mixed.budget is not None
            else "the least that keeps max_kl"
        )
        notes.append(
            f"formats are chosen by calibration ({wanted}): bytes are those of linear.weight={recipe.linear.weight}"
        )
    if recipe.outliers.threshold is not None:
        notes.append(
            f"calibration chooses the features that stay in bf16: up to {recipe.outliers.most:.2%} of a matrix's inputs, "
            "2 bytes each, are not counted"
        )
    if recipe.kv_cache.max_error is not None:
        notes.append(
            "calibration chooses the layers that keep a bf16 cache: the cache's bytes are those of int8 everywhere"
        )
    return notes
