"""The files beside a flavour's model that tell its runtime what it is."""

from __future__ import annotations

import json
from typing import Any

from enginewright.backends.artifact import canonical_json
from enginewright.backends.onnx.lowering import arguments, op_name
from enginewright.passes.program import Program
from enginewright.passes.source import ModelSource
from enginewright.recipes.errors import LoweringError

__all__ = ["genai_config", "model_config"]

_SEARCH = {
    "do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1,
}  # fmt: skip
"""onnxruntime-genai's defaults, which a generation_config.json changes."""


def genai_config(program: Program, source: ModelSource, model: str) -> dict[str, bytes]:
    """genai_config.json for a model file with this flavour's inputs and outputs.

    The model's type is `decoder`, onnxruntime-genai's name of any decoder that tokens, a mask, positions and a cache describe.
    """
    facts = program.facts
    heads, kv_heads, width = _one_shape(program)
    ends = facts.eos_token_ids or [_any_end(source)]
    pad = facts.pad_token_id if facts.pad_token_id is not None else ends[0]
    given = source.generation_config
    search = {key: given[key] if given.get(key) is not None else usual for key, usual in _SEARCH.items()}
    content = {
        "model": {
            "type": "decoder",
            "bos_token_id": facts.bos_token_id if facts.bos_token_id is not None else ends[0],
            "eos_token_id": ends if len(ends) > 1 else ends[0],
            "pad_token_id": pad,
            "vocab_size": facts.vocab_size,
            "context_length": facts.max_context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": model,
                "head_size": width,
                "hidden_size": facts.hidden_size,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "num_hidden_layers": sum(len(group.layers) for group in facts.kv_groups),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            **search,
            "early_stopping": True,
            "min_length": 0,
            "max_length": facts.max_context,
            "past_present_share_buffer": True,
        },
    }
    return {"genai_config.json": canonical_json(content)}


def _one_shape(program: Program) -> tuple[int, int, int]:
    """Query heads, key/value heads and width of a head: genai_config.json names one of each for all layers."""
    shapes: dict[tuple[int, int, int], str] = {}
    for node in program.graph.nodes:
        if op_name(node) == "ew::paged_attention":
            q, k = (arguments(node)[name].meta["val"].shape for name in ("q", "k"))
            shapes.setdefault((int(q[1]), int(k[1]), int(k[2])), node.meta.get("module") or node.name)
    if len(shapes) != 1:
        told = "; ".join(
            f"{heads} heads over {kv} of width {width} in {module}"
            for (heads, kv, width), module in shapes.items()
        )
        raise LoweringError(
            "onnxruntime-genai takes one shape of cache for all layers",
            found=told or "no attention",
            expected="layers with the same heads",
            action="build with --set onnx.flavour=optimum, or plain",
        )
    return next(iter(shapes))


def _any_end(source: ModelSource) -> int:
    """An id for a model that names no end: onnxruntime-genai must have one."""
    vocab: int = source.config.get_text_config().vocab_size
    return vocab - 1


def model_config(source: ModelSource) -> dict[str, bytes]:
    """config.json and generation_config.json of the source model, for transformers' configuration classes.

    What says that the source's weights were packed is left out: the ONNX model has its own.
    """
    file = source.path / "config.json"
    if source.path.is_dir() and file.is_file():
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    else:  # a GGUF file
        config = json.loads(source.config.to_json_string(use_diff=True))
        config.pop("_name_or_path", None)
    config.pop("quantization_config", None)
    config["use_cache"] = True
    found = {"config.json": canonical_json(config)}
    if source.generation_config:
        found["generation_config.json"] = canonical_json(source.generation_config)
    return found
