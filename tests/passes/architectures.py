"""Tiny models with random weights, one a family, for tests that must hold on every architecture.

Sizes are odd where the family allows it, and weights are large (matrices N(0, 0.2), norms around 1, biases
random), so that a dropped scalar, a transposed matrix or a wrong window shows in the logits.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

__all__ = ["ARCHITECTURES", "FAMILIES", "build", "folder", "randomise", "save"]

transformers_logging.disable_progress_bar()

VOCAB = 131
# fmt: off
_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_CONTEXT = {"max_position_embeddings": 256}
_SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 72}
#: hidden 40, head size 12 (not hidden / heads), feed-forward 72, context 256.
BASE: dict[str, Any] = {
    **_TOKENS, **_CONTEXT, **_SHAPE, "hidden_size": 40, "head_dim": 12, "tie_word_embeddings": False,
}
#: the same where a head is hidden / heads.
EVEN = {**BASE, "hidden_size": 48}
GPT: dict[str, Any] = {**_TOKENS, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 100}
SLIDING = {"sliding_window": 8}
_FALCON = {**_TOKENS, **_CONTEXT, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48}
_FULL, _WINDOWED = "full_attention", "sliding_attention"

#: name -> (model type, configuration). The part of a name before a dash is the family.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**BASE, **SLIDING}),
    "qwen2": ("qwen2", {**EVEN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", BASE),
    "gemma2": ("gemma2", {
        **BASE, **SLIDING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
    }),
    "gemma3_text": ("gemma3_text", {
        **BASE, **SLIDING, "num_hidden_layers": 3, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "layer_types": [_WINDOWED, _FULL, _WINDOWED],
    }),
    "gpt2": ("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("opt", {**EVEN, "ffn_dim": 100, "word_embed_proj_dim": 24, "do_layer_norm_before": True}),
    "opt-postnorm": ("opt", {
        **EVEN, "ffn_dim": 100, "word_embed_proj_dim": 48, "do_layer_norm_before": False,
    }),
    "phi": ("phi", {**EVEN, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3": ("phi3", {**EVEN, **SLIDING, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {**EVEN, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {**EVEN, "rotary_pct": 0.25, "use_parallel_residual": False}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 6}),
    "stablelm": ("stablelm", {
        **EVEN, "use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5,
    }),
    "stablelm-parallel": ("stablelm", {**EVEN, "use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", EVEN),
    "cohere2": ("cohere2", {
        **BASE, **SLIDING, "logit_scale": 0.3, "num_hidden_layers": 4, "layer_types": [_WINDOWED, _FULL] * 2,
    }),
    "granite": ("granite", {
        **EVEN, "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
        "logits_scaling": 1.7,
    }),
    "smollm3": ("smollm3", {**EVEN, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "starcoder2": ("starcoder2", {**EVEN, **SLIDING, "use_bias": True}),
    "exaone4": ("exaone4", {
        **EVEN, **SLIDING, "num_hidden_layers": 4, "layer_types": [_WINDOWED] * 3 + [_FULL],
    }),
    "mixtral": ("mixtral", {**BASE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {
        **BASE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    }),
    "gpt_oss": ("gpt_oss", {
        **BASE, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": [_WINDOWED, _FULL],
    }),
    "deepseek_v3": ("deepseek_v3", {
        **BASE, "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 20,
        "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    }),
    "bloom": ("bloom", {**_TOKENS, "hidden_size": 72, "n_layer": 2, "n_head": 6, "seq_length": 256}),
    "bloom-postnorm": ("bloom", {
        **_TOKENS, "hidden_size": 48, "n_layer": 2, "n_head": 4, "seq_length": 256,
        "apply_residual_connection_post_layernorm": True,
    }),
    "mpt": ("mpt", {
        **_TOKENS, "d_model": 72, "n_layers": 2, "n_heads": 6, "expansion_ratio": 2, "max_seq_len": 256,
        "attn_config": {"alibi": True, "softmax_scale": 0.3, "clip_qkv": 2.0},
    }),
    "falcon": ("falcon", {
        **_FALCON, "hidden_size": 72, "num_attention_heads": 6, "alibi": True, "multi_query": False,
        "parallel_attn": False, "bias": True,
    }),
    "falcon-multiquery": ("falcon", {
        **_FALCON, "alibi": False, "multi_query": True, "parallel_attn": True, "bias": False,
    }),
    "falcon-grouped": ("falcon", {
        **_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": False,
    }),
}
# fmt: on


def randomise(model: PreTrainedModel, seed: int = 0, matrix_std: float = 0.2) -> PreTrainedModel:
    """Fill every parameter and persistent buffer with seeded noise that leaves no term of the model invisible."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm_weight = tensor.dim() == 1 and name.endswith("weight")
            tensor.copy_(1 + 0.2 * noise if is_norm_weight else matrix_std * noise)
        persistent = set(model.state_dict())
        for name, buffer in model.named_buffers():
            if name in persistent and buffer.is_floating_point():
                buffer.copy_(matrix_std * torch.randn(buffer.shape, generator=generator))
    return model


def build(model_type: str, seed: int = 0, matrix_std: float = 0.2, **config: Any) -> PreTrainedModel:
    """An eager float32 model in evaluation mode of a configuration, with random weights."""
    configuration = AutoConfig.for_model(model_type, **config)
    torch.manual_seed(seed)
    # Falcon's eager attention adds its ALiBi biases twice (in the mask and to the scores); its default adds them once.
    attention = "sdpa" if model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(
        configuration, attn_implementation=attention, dtype=torch.float32
    )
    return randomise(model.eval(), seed, matrix_std)


def _factory(name: str) -> Callable[..., PreTrainedModel]:
    model_type, config = _CONFIGS[name]
    return lambda **changes: build(model_type, **{**config, **changes})


#: name -> factory(**configuration changes) -> model.
ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {name: _factory(name) for name in _CONFIGS}
FAMILIES = sorted({name.partition("-")[0] for name in ARCHITECTURES})


def save(arch: str, directory: Path, **changes: Any) -> Path:
    """Write an architecture's model as a Hugging Face folder (config, safetensors, a tiny tokenizer); returns the folder."""
    model = ARCHITECTURES[arch](**changes)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A word-level tokenizer over the whole tiny vocabulary: token i is the word `wi`; 0, 1, 2 are <pad>, <bos>, <eos>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(directory)


@functools.cache
def folder(arch: str) -> Path:
    """The architecture's saved folder, written once a process."""
    root = tempfile.TemporaryDirectory(prefix="enginewright-tests-")
    _KEEP.append(root)
    return save(arch, Path(root.name) / arch)


_KEEP: list[tempfile.TemporaryDirectory] = []
