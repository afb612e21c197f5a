"""Rotary embeddings whose frequencies depend on the length of the text, fixed by the engine's stated maximum context.

`dynamic` (NTK) and `longrope` choose their frequencies from the longest position of a call. Keys that are
cached cannot follow such a choice, so one set is taken for every length: the one that the model uses at
`max_context` tokens. Up to the length of pretraining that is the original (short) set, which is also the
model's own answer at every length; above it the scaled (long) set, which is the model's own answer for texts
longer than pretraining. Types that transformers does not know are an error, never `default`.
Sources: dynamic NTK scaling, r/LocalLLaMA 2023; LongRoPE: Ding et al. 2024, §3.
"""

from __future__ import annotations

from typing import Any

import torch

from enginewright.recipes.errors import CaptureError

__all__ = ["check_rope_types", "exact_context", "fix_rope_lengths"]


def _parameter_sets(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rope parameters of a configuration by layer type; by None where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return {layer: value for layer, value in parameters.items() if isinstance(value, dict)}
    return {None: parameters} if parameters else {}


def check_rope_types(config: Any) -> None:
    """Raise CaptureError for a rope type that transformers has no formula for."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {"default", *ROPE_INIT_FUNCTIONS}
    for layer, parameters in _parameter_sets(config).items():
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in known:
            raise CaptureError(
                f"{config.model_type} asks for an unknown type of rotary position embedding"
                + (f" in its {layer} layers" if layer else ""),
                found=f"rope_type {kind!r}",
                expected=f"one of {', '.join(sorted(known))}",
                action="correct rope_parameters (or rope_scaling) in config.json",
            )


def exact_context(config: Any) -> int | None:
    """The longest context at which one set of frequencies is the model's own (None: any)."""
    lengths = [
        _unscaled_length(config, parameters)
        for parameters in _parameter_sets(config).values()
        if parameters.get("rope_type") == "longrope" or "dynamic" in str(parameters.get("rope_type"))
    ]
    return min(lengths, default=None)


def _unscaled_length(config: Any, parameters: dict[str, Any]) -> int:
    """Up to how many tokens transformers takes the original frequencies; `dynamic` has no parameter for it."""
    stated = parameters.get("original_max_position_embeddings")
    return stated if stated and parameters.get("rope_type") == "longrope" else config.max_position_embeddings


def fix_rope_lengths(model: Any, max_context: int) -> list[str]:
    """Give every rotary module the frequencies of `max_context` tokens and make it stop choosing; returns notes.

    Call with real (not meta) buffers.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    notes: list[str] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        sets = _parameter_sets(module.config)
        for layer, kind in by_layer.items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            parameters = sets.get(layer, {})
            original = _unscaled_length(module.config, parameters)
            extra = {"layer_type": layer} if layer is not None else {}
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=max(max_context, 1), **extra
            )
            prefix = "" if layer is None else f"{layer}_"
            module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if isinstance(kinds, dict):
                kinds[layer] = "default"
            else:
                module.rope_type = "default"
            note = (
                f"rope type {kind}: the frequencies of {max_context} tokens serve every length"
                if max_context > original
                else f"rope type {kind}: the original frequencies ({max_context} of {original} tokens)"
            )
            if note not in notes:
                notes.append(note)
    return notes
