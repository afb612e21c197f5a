"""A model of 1.5 billion parameters builds with little memory beyond its own size, and runs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# 1.53e9 parameters: heads of 128, sixteen for queries and four for keys and values.
LAYERS, HIDDEN, FFN, VOCAB = 31, 2048, 5632, 32000


def write_model(folder: Path) -> int:
    """A Llama folder of random bf16 weights in shards of one layer; returns its bytes."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    total = 0

    def shard(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        tensors = {}
        for key, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            tensors[key] = (noise * 0.02 if len(shape) == 2 else 1 + 0.1 * noise).to(torch.bfloat16)
            total += tensors[key].numel() * 2
            index[key] = name
        save_file(tensors, folder / name)

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shard(f"layer-{layer}.safetensors", {
            prefix + "self_attn.q_proj.weight": (2048, HIDDEN), prefix + "self_attn.k_proj.weight": (512, HIDDEN),
            prefix + "self_attn.v_proj.weight": (512, HIDDEN), prefix + "self_attn.o_proj.weight": (HIDDEN, 2048),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN), prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN), prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
        })  # fmt: skip
    ends = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    shard("ends.safetensors", ends)
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return total


@pytest.mark.slow
def test_peak_memory_of_a_large_build(tmp_path: Path) -> None:
    size = write_model(tmp_path / "model")
    program = (
        "import sys, json, resource, enginewright\n"
        "report = enginewright.optimize(sys.argv[1], 'int4', sys.argv[2], overrides=['verify.max_kl=null'])\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'peak': peak, 'seconds': report.seconds, 'verification': report.verification}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path / "engine")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{size / 1e9:.2f} GB of bf16 weights, peak {figures['peak'] / 1e9:.2f} GB, {figures['seconds']:.0f} s"
    )
    print(figures["verification"])
    assert figures["peak"] <= size + 2e9
    run = subprocess.run(
        [sys.executable, "-c", "import sys, enginewright\n"
         "engine = enginewright.load(sys.argv[1])\n"
         "print(engine.generate([[1, 5, 9, 700]], max_tokens=8, ignore_eos=True)[0].token_ids)", str(tmp_path / "engine")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    print(run.stdout, "peak of children", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, "GB")
