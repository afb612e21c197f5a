"""A plan for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from enginewright.inspection import new_table, size
from enginewright.planning.memory import RESERVED, lengths, sequences_that_fit
from enginewright.planning.plan import Plan
from enginewright.planning.roofline import steps_shown
from enginewright.planning.structure import Structure

__all__ = ["plan_tables"]

_PLURAL = {"linear": "linears", "router": "routers"}


def plan_tables(plan: Plan) -> list[Table]:
    """What cannot be, or what will be: model, bytes, cache, what fits, passes, build, speed."""
    found = plan.structure
    tables = [_facts(plan)]
    if plan.refused:
        tables.append(_refused(plan))
    if found is None or plan.cache is None:
        return tables
    return [
        *tables,
        _stored(plan, found),
        _cache(plan),
        *_fits(plan, found),
        _passes(found),
        _build(plan),
        *_speed(plan),
    ]


def _facts(plan: Plan) -> Table:
    found, recipe, device = plan.structure, plan.recipe, plan.device
    told = new_table("plan: nothing is written, and no weight is read", "", "")
    verdict = "[red]no: see below[/red]" if plan.refused else "[green]yes[/green]"
    told.add_row("can be built", verdict)
    architecture = f" ({found.facts.architecture})" if found is not None else ""
    told.add_row("model", escape(plan.model) + architecture)
    if found is not None:
        facts, kinds = found.facts, len(found.layers.kinds)
        told.add_row("parameters", f"{facts.parameters / 1e6:,.1f} M")
        alike = (
            f"{facts.num_layers} of {kinds} kind{'s' if kinds != 1 else ''}"
            if kinds
            else str(facts.num_layers)
        )
        told.add_row("layers, width, vocabulary", f"{alike}, {facts.hidden_size:,}, {facts.vocab_size:,}")
        told.add_row("longest context", f"{facts.max_context:,} tokens")
    formats = (
        f"linears {recipe.linear.weight}, embedding {recipe.embedding.weight}, head {recipe.head.weight}"
    )
    told.add_row(
        "recipe",
        f"{recipe.name}: {formats}, routers {recipe.router.weight}, KV cache {recipe.kv_cache.format}",
    )
    activation = recipe.activation_of(recipe.linear.weight, recipe.linear.activation)
    told.add_row("activations", f"{activation} beside linears, {recipe.compute} between products")
    told.add_row("backend", plan.backend or "none: the formats' own bytes, whatever engine will hold them")
    rates = ", ".join(f"{kind} {rate / 1e12:,.4g}" for kind, rate in device.rates.items())
    told.add_row(
        "device",
        f"{device.name}: {size(device.memory)}, {device.bandwidth / 1e9:,.0f} GB/s; {rates} T operations/s",
    )
    told.add_row("  its figures", device.source)
    for note in plan.notes:
        told.add_row("note", escape(note))
    return told


def _refused(plan: Plan) -> Table:
    told = new_table("why it cannot be built", "module", "reason", "to do")
    for item in plan.refused:
        module = item.module + (f" and {item.layers - 1} layers like it" if item.layers > 1 else "")
        reason = item.message + (f" (found: {item.found})" if item.found else "")
        action = item.action or (
            f"expected: {item.expected}" if item.expected else "choose another model or recipe"
        )
        told.add_row(escape(module) or "(the whole)", escape(reason), escape(action))
    return told


def _stored(plan: Plan, found: Structure) -> Table:
    told = new_table("what is stored", "role", "format", "matrices", "numbers", "bytes", "share")
    for column in told.columns[2:]:
        column.justify = "right"
    total = max(found.engine_bytes, 1)
    for (_, role, name), stored in sorted(found.stored.items(), key=lambda item: -item[1]):
        matrices, numbers = found.matrices.get((role, name)), found.weights.get((role, name))
        label = _PLURAL.get(role, role)
        if role == "head" and numbers is None:  # what is tied was counted where it is looked up
            label, numbers = "embedding and head, tied", found.weights.get(("embedding", name))
        told.add_row(
            label,
            name,
            f"{matrices:,}" if matrices else "",
            f"{numbers / 1e6:,.1f} M" if numbers else "",
            size(stored),
            f"{stored / total:.1%}",
        )
    how = "weights.bin, to the byte" if found.exact else "as the formats have it, unpadded"
    matrices = sum(found.matrices.values())
    told.add_row(f"total ({how})", "", f"{matrices:,}", "", size(total), "100.0%", style="bold")
    return told


def _cache(plan: Plan) -> Table:
    cache = plan.cache
    assert cache is not None
    told = new_table(
        f"KV cache: {cache.format}, pages of {cache.page_size}", "window", "layers", "bytes a token"
    )
    for group in cache.groups:
        window = f"{group.window:,} tokens" if group.window else "all tokens"
        told.add_row(window, str(group.layers), f"{group.token_bytes:,}")
    if len(cache.groups) > 1:
        told.add_row(
            "together", str(sum(g.layers for g in cache.groups)), f"{cache.token_bytes:,}", style="bold"
        )
    return told


def _fits(plan: Plan, found: Structure) -> list[Table]:
    cache, engine = plan.cache, found.engine_bytes
    assert cache is not None
    left = plan.memory * (1 - RESERVED) - engine
    told = new_table("memory", "", "", "")
    told.columns[1].justify = "right"
    told.add_row("memory", size(plan.memory), "" if plan.memory != plan.device.memory else plan.device.name)
    told.add_row(
        "left free",
        f"− {size(plan.memory * RESERVED)}",
        f"{RESERVED:.0%}: activations, the framework, what allocation wastes",
    )
    told.add_row("weights", f"− {size(engine)}", "")
    if left <= 0:
        room = f"{size(engine)} / {size(plan.memory * (1 - RESERVED))}, rounded up"
        told.add_row(
            "devices needed",
            str(plan.devices_needed),
            f"{room}: arithmetic only, an engine runs on one",
            style="bold",
        )
        return [told]
    told.add_row("for keys and values", size(left), "", style="bold")
    fits = new_table("what fits", "sequences of", "each takes", "sequences")
    fits.columns[1].justify = fits.columns[2].justify = "right"
    for length in lengths(found.facts.max_context):
        count = sequences_that_fit(cache, plan.memory, engine, length)
        fits.add_row(f"{length:,} tokens", size(cache.held_bytes(length)), f"{count:,}")
    return [told, fits]


def _passes(found: Structure) -> Table:
    told = new_table("passes", "pass", "matches")
    for name, matches in found.passes.items():
        told.add_row(name, f"{matches:,}")
    return told


def _build(plan: Plan) -> Table:
    told = new_table("the build", "", "")
    build = plan.build
    assert build is not None
    for part, seconds in build.seconds.items():
        told.add_row(part, _time(seconds))
    if len(build.seconds) > 1:
        told.add_row("together", _time(build.total), style="bold")
    told.add_row("peak memory", size(build.peak))
    told.add_row("", "on two cores as in docs/performance.md, within a factor of two")
    for note in build.notes:
        told.add_row("note", note)
    return told


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _speed(plan: Plan) -> list[Table]:
    """The arithmetic of one sequence step by step, then batches."""
    work, device, context = plan.work, plan.device, plan.context
    assert work is not None and plan.structure is not None
    kind = (
        "this machine's, measured just now"
        if device.measured
        else f"{device.name}'s as its vendor states them, not measured"
    )
    steps = new_table(f"the roofline ({kind}): no engine is faster", "", "", "")
    weights, kept = work.weight_bytes(1), work.cache.read_bytes(context)
    operations = sum(work.operations(1, context).values())
    seconds = work.reading(device, 1, context)
    left_out = "of the embedding only a token's row, of position tables nothing" + (
        "; chosen experts alone" if work.experts else ""
    )
    steps.add_row("weights that a step reads", size(weights), left_out)
    steps.add_row(
        f"keys and values of {context:,} tokens",
        size(kept),
        "each layer's, of a window no more than the window",
    )
    steps.add_row(
        "reading, one sequence",
        f"{seconds * 1e3:,.2f} ms",
        f"({size(weights)} + {size(kept)}) / {device.bandwidth / 1e9:,.0f} GB/s",
    )
    steps.add_row(
        "computing, one sequence",
        f"{work.computing(device, 1, context) * 1e3:,.3f} ms",
        f"{operations / 1e9:,.1f} G operations: 2 for each number in a matrix, and attention's",
    )
    turning = work.turning(device, context)
    steps.add_row(
        "turns compute-bound",
        f"batch {turning:,}" if turning is not None else "never",
        "where computing takes longer than reading"
        if turning is not None
        else "a sequence's keys and values take longer to read than to multiply",
    )
    rate = work.prefill(device, plan.prompt)
    steps.add_row(
        "prefill", f"{rate:,.0f} tokens/s", f"a prompt of {plan.prompt:,} tokens: operations / rate"
    )
    if plan.devices_needed > 1:
        steps.add_row(
            "devices",
            str(plan.devices_needed),
            "one does not hold it: figures are of one that did; over several they divide at best",
        )
    headers = ("batch", "weights read", "KV read", "reading", "computing", "bound by", "tokens/s")
    shown = new_table(f"decoding at a context of {context:,} tokens", *headers)
    for column in shown.columns:
        column.justify = "right"
    for batch in steps_shown(plan.largest_batch):
        reading, computing = work.reading(device, batch, context), work.computing(device, batch, context)
        shown.add_row(
            f"{batch:,}",
            size(work.weight_bytes(batch)),
            size(batch * kept),
            f"{reading * 1e3:,.2f} ms",
            f"{computing * 1e3:,.2f} ms",
            "memory" if reading >= computing else "arithmetic",
            f"{batch / max(reading, computing):,.0f}",
        )
    return [steps, shown]
