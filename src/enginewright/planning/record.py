"""A plan as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from enginewright.planning.memory import RESERVED, lengths, sequences_that_fit
from enginewright.planning.plan import Plan
from enginewright.planning.roofline import steps_shown

__all__ = ["record"]


def record(plan: Plan) -> dict[str, Any]:
    """Everything that the tables tell, in bytes, seconds and operations a second."""
    device = plan.device
    head: dict[str, Any] = {
        "model": plan.model,
        "recipe": plan.recipe.resolved(),
        "backend": plan.backend,
        "device": {
            "name": device.name,
            "memory_bytes": int(device.memory),
            "bandwidth": device.bandwidth,
            "rates": dict(device.rates),
            "source": device.source,
            "measured": device.measured,
        },
        "can_be_built": not plan.refused,
        "refused": [asdict(item) for item in plan.refused],
        "notes": plan.notes,
    }
    found = plan.structure
    if found is None or plan.cache is None:
        return head
    facts = found.facts
    head |= {
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "max_context": facts.max_context,
        "layers": {
            "count": facts.num_layers,
            "kinds": [list(kind) for kind in found.layers.kinds],
            "captured": found.captured,
        },
        "matrices": [
            {"role": role, "format": name, "count": count, "weights": found.weights.get((role, name), 0)}
            for (role, name), count in found.matrices.items()
        ],
        "passes": dict(found.passes),
        "engine": {
            "bytes": found.engine_bytes,
            "exact": found.exact,
            "stored": [
                {"kind": kind, "role": role, "format": name, "bytes": size}
                for (kind, role, name), size in found.stored.items()
            ],
        },
        "kv_cache": {
            "format": plan.cache.format,
            "page_size": plan.cache.page_size,
            "token_bytes": plan.cache.token_bytes,
            "groups": [asdict(group) for group in plan.cache.groups],
        },
        "memory": _memory(plan),
    }
    if plan.build is not None:
        head["build"] = {
            "seconds": plan.build.seconds,
            "peak_memory_bytes": int(plan.build.peak),
            "notes": plan.build.notes,
        }
    return head | {"roofline": _roofline(plan)}


def _memory(plan: Plan) -> dict[str, Any]:
    assert plan.structure is not None and plan.cache is not None
    engine, cache = plan.structure.engine_bytes, plan.cache
    return {
        "bytes": int(plan.memory),
        "reserved_share": RESERVED,
        "devices_needed": plan.devices_needed,
        "fits": [
            {
                "length": length,
                "sequence_bytes": cache.held_bytes(length),
                "sequences": sequences_that_fit(cache, plan.memory, engine, length),
            }
            for length in lengths(plan.structure.facts.max_context)
        ],
    }


def _roofline(plan: Plan) -> dict[str, Any]:
    work, device, context = plan.work, plan.device, plan.context
    assert work is not None
    return {
        "context": context,
        "weight_bytes_a_step": work.weight_bytes(1),
        "kv_bytes_a_sequence": work.cache.read_bytes(context),
        "operations_a_token": work.operations(1, context),
        "turning_batch": work.turning(device, context),
        "decode": [
            {
                "batch": batch,
                "bytes": work.bytes(batch, context),
                "reading_seconds": work.reading(device, batch, context),
                "computing_seconds": work.computing(device, batch, context),
                "tokens_per_second": batch / work.seconds(device, batch, context),
            }
            for batch in steps_shown(plan.largest_batch)
        ],
        "prefill": {"tokens": plan.prompt, "tokens_per_second": work.prefill(device, plan.prompt)},
    }
