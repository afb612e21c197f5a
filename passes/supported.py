"""Which models fit, and for how many tokens: decided from the configuration, before any work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from enginewright.passes.rope_lengths import exact_context
from enginewright.recipes.errors import CaptureError, InputError

__all__ = ["objections", "refuse_unsupported", "resolve_context"]

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
_DEFAULT_CONTEXT = 2048
_LEAST_CONTEXT = 4  # what tracing with a varying length needs
_MOST_CONTEXT = 1 << 20  # taken unasked: every position has a row in the tables of cosines and sines
_ADDRESSABLE = 1 << 24


def refuse_unsupported(config: Any) -> None:
    """Raise CaptureError for kinds of models that are known not to fit one causal pass over tokens."""
    for error in objections(config):
        raise error


def objections(config: Any) -> Iterator[CaptureError]:
    """Every reason why a kind of model does not fit one causal pass over tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type

    def refused(reason: str, found: object, action: str | None = None) -> CaptureError:
        return CaptureError(f"{name} models are not supported: {reason}", found=found, action=action)

    if getattr(config, "is_encoder_decoder", False):
        yield refused("an encoder-decoder reads a second sequence", "is_encoder_decoder in config.json")
    parts = [
        key
        for key in ("text_config", "vision_config", "audio_config")
        if getattr(config, key, None) is not None
    ]
    if parts:
        yield refused(
            "a model of several modalities holds more than a language model",
            ", ".join(parts),
            "save its language model alone as a folder of its own and build from that"
            if "text_config" in parts
            else None,
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield refused("transformers has no causal language model of this type", f"model_type {name!r}")
    else:
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if getattr(architecture, "_is_stateful", False):
            yield refused(
                "some layers carry a recurrent state instead of keys and values", architecture.__name__
            )
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None):
        yield refused(
            "chunked attention restarts its view at fixed positions, which no window expresses",
            f"attention_chunk_size {getattr(config, 'attention_chunk_size', None)}",
        )
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if other:
        yield refused("some layers are neither full nor sliding attention", ", ".join(sorted(other)))
    for name_of_size in _SIZES:
        size = getattr(config, name_of_size, None)
        if isinstance(size, int) and size < 1:
            yield refused("it is empty", f"{name_of_size} {size}", "correct config.json")
    if not getattr(config, "is_causal", True):
        yield refused("its attention is bidirectional", "is_causal false in config.json")


def resolve_context(config: Any, stated: int | None) -> tuple[int, list[str]]:
    """The engine's limit in tokens, and notes. Learned positions cannot be exceeded; RoPE may be, with a note."""
    own = next((int(getattr(config, key)) for key in _CONTEXT_KEYS if getattr(config, key, None)), None)
    for name, length, most in (("max_context", stated, _ADDRESSABLE), ("the model's context", own, None)):
        if length is not None and (length < _LEAST_CONTEXT or (most and length > most)):
            limit = f" and at most {most:,}" if most else ""
            raise InputError(
                f"{name} is too {'small' if length < _LEAST_CONTEXT else 'large'}",
                found=f"{length:,} tokens",
                expected=f"at least {_LEAST_CONTEXT}{limit}",
            )
    if stated is None:
        if own is None:
            return _DEFAULT_CONTEXT, [
                f"the configuration states no context length: {_DEFAULT_CONTEXT} tokens are taken; "
                "set max_context to change it"
            ]
        exact = exact_context(config)
        if exact is not None and exact < own:
            return exact, [
                f"the model's rotary frequencies change beyond {exact} tokens, which is taken as the maximum "
                f"context; set max_context (up to {own}) to use the ones for longer texts at every length"
            ]
        if own > _MOST_CONTEXT:
            return _MOST_CONTEXT, [
                f"of the {own:,} tokens that the configuration states, {_MOST_CONTEXT:,} are taken as the maximum "
                "context; set max_context to change it"
            ]
        return own, []
    if own is not None and stated > own:
        return stated, [f"max_context {stated} is longer than the {own} tokens that the configuration states"]
    return stated, []
