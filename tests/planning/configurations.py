"""Configurations alone: folders with a config.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Llama 2 70B as published: 68.98e9 parameters, 64 heads for queries and 8 for keys and values.
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Llama 3.3 70B's sizes: a larger vocabulary and a context of 131,072 tokens.
LONG_70B: dict[str, Any] = {
    **LLAMA_70B,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dtype": "bfloat16",
}

SMALL: dict[str, Any] = {
    **LLAMA_70B,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}


def write(folder: Path, configuration: dict[str, Any], **changes: Any) -> Path:
    """A folder that holds nothing but this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**configuration, **changes}))
    return folder
