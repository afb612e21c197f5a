"""LoRA adapters, written as PEFT writes them: merged exactly, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import enginewright
from enginewright.passes.adapter import Adapter, LowRankSum
from enginewright.passes.capture import build_on_meta, capture
from enginewright.passes.source import open_source
from enginewright.recipes.errors import InputError
from tests.passes.architectures import ARCHITECTURES, folder

TARGETS = {
    "llama": ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"],
    "gpt2": ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"],
    "gpt_neox": ["attention.query_key_value", "mlp.dense_4h_to_h"],
    "mistral": ["self_attn.k_proj", "mlp.gate_proj"],
}
PROMPT = [5, 17, 99, 4, 64, 23, 23, 8]


def write(
    path: Path,
    arch: str = "llama",
    rank: int = 4,
    more: dict[str, torch.Tensor] | None = None,
    **settings: Any,
) -> Path:
    """An adapter of TARGETS[arch] with random matrices."""
    path.mkdir()
    model = ARCHITECTURES[arch]()
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not any(name.endswith(target) for target in TARGETS[arch]):
            continue
        out, into = module.weight.shape
        if type(module).__name__ == "Conv1D":
            out, into = into, out
        own = (settings.get("rank_pattern") or {}).get(name.rpartition(".")[2], rank)
        for part, shape in (("A", (own, into)), ("B", (out, own))):
            values = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    save_file({**tensors, **(more or {})}, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "bias": "none",
        **settings,
    }
    config["target_modules"] = TARGETS[arch]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(arch: str, adapter: Path, scale: float | dict[str, float]) -> torch.nn.Module:
    """Eager transformers' model with the sums in its weights."""
    from safetensors.torch import load_file

    model = ARCHITECTURES[arch]()
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            down = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if down is None:
                continue
            own = scale if isinstance(scale, float) else scale[name.rpartition(".")[2]]
            change = own * tensors[f"base_model.model.{name}.lora_B.weight"] @ down
            module.weight += change.T if type(module).__name__ == "Conv1D" else change
    return model


def close(program: Any, model: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    got = program.run(PROMPT)
    assert np.abs(got.reshape(expected.shape).numpy() - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_a_merged_adapter_gives_the_logits_of_the_merged_model(tmp_path, arch):
    adapter = write(tmp_path / "lora", arch)
    program = capture(open_source(folder(arch), adapter))
    assert any("adapter lora was merged" in note for note in program.notes)
    close(program, merged(arch, adapter, 2.0))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"lora_alpha": 3}, 0.75),
        ({"alpha_pattern": {"q_proj": 2}}, {"q_proj": 0.5, "v_proj": 2.0, "o_proj": 2.0, "down_proj": 2.0}),
        ({"rank_pattern": {"v_proj": 2}}, {"q_proj": 2.0, "v_proj": 4.0, "o_proj": 2.0, "down_proj": 2.0}),
    ],
)
def test_the_scale_is_the_one_of_the_settings(tmp_path, settings, scale):
    adapter = write(tmp_path / "lora", **settings)
    close(capture(open_source(folder("llama"), adapter)), merged("llama", adapter, scale))


def test_rows_are_those_of_the_whole_sum(tmp_path):
    for arch in ("llama", "gpt2"):
        source = open_source(folder(arch), write(tmp_path / arch, arch))
        weights, _ = source.bind(build_on_meta(source.config))
        sums = [weight for weight in weights.values() if isinstance(weight, LowRankSum)]
        assert len(sums) == 2 * len(TARGETS[arch])
        for weight in sums:
            whole = weight.load()
            assert whole.dtype == torch.float32 and tuple(whole.shape) == weight.shape
            assert torch.allclose(weight.load_rows(3, 11), whole[3:11], rtol=0, atol=1e-6)


REFUSED_SETTINGS = [
    ({"peft_type": "IA3"}, "IA3"),
    ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
    ({"use_dora": True}, "DoRA"),
    ({"bias": "lora_only"}, "trained biases"),
    ({"modules_to_save": ["lm_head"]}, "trained whole"),
    ({"lora_bias": True}, "biases in its low-rank"),
    ({"trainable_token_indices": [1]}, "single tokens"),
    ({"layer_replication": [[0, 2]]}, "repeated"),
    ({"target_parameters": ["experts"]}, "no modules"),
]


@pytest.mark.parametrize(("settings", "says"), REFUSED_SETTINGS)
def test_settings_that_are_no_plain_sum_are_refused(tmp_path, settings, says):
    with pytest.raises(InputError, match=rf"(?s)cannot be merged.*{says}"):
        Adapter(write(tmp_path / "lora", **settings))


PREFIX = "base_model.model.model"
REFUSED_TENSORS = [
    ({f"{PREFIX}.embed_tokens.lora_embedding_A": torch.ones(2, 131)}, "lora_embedding_A"),
    ({f"{PREFIX}.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(3)}, "magnitude"),
    ({f"{PREFIX}.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(4, 40)}, "lora_A alone"),
    ({f"{PREFIX}.norm.weight": torch.ones(40)}, "norm.weight"),
    (
        {f"{PREFIX}.layers.9.self_attn.q_proj.lora_{x}.weight": torch.ones(4, 4) for x in "AB"},
        "does not have",
    ),
    (
        {f"{PREFIX}.layers.0.self_attn.k_proj.lora_{x}.weight": torch.ones(4, 4) for x in "AB"},
        r"a product of",
    ),
    (
        {
            f"{PREFIX}.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(2, 40),
            f"{PREFIX}.layers.0.self_attn.k_proj.lora_B.weight": torch.ones(24, 2),
        },
        "rank 2",
    ),
    (
        {
            f"{PREFIX}.embed_tokens.lora_{x}.weight": torch.ones(s)
            for x, s in (("A", (4, 40)), ("B", (131, 4)))
        },
        "Embedding",
    ),
]


@pytest.mark.parametrize(("tensors", "says"), REFUSED_TENSORS)
def test_tensors_that_have_no_place_are_refused(tmp_path, tensors, says):
    source = open_source(folder("llama"), write(tmp_path / "lora", more=tensors))
    with pytest.raises(InputError, match=rf"(?s)cannot be merged.*{says}"):
        source.bind(build_on_meta(source.config))


def test_a_tied_head_is_refused(tmp_path):
    head = {"A": torch.ones(4, 48), "B": torch.ones(131, 4)}
    TARGETS["qwen2"] = ["self_attn.q_proj"]
    adapter = write(
        tmp_path / "lora",
        "qwen2",
        more={f"base_model.model.lm_head.lora_{part}.weight": values for part, values in head.items()},
    )
    source = open_source(folder("qwen2"), adapter)
    with pytest.raises(InputError, match=r"(?s)lm_head, whose weight is model.embed_tokens.weight as well"):
        source.bind(build_on_meta(source.config))


def test_what_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(InputError, match="no adapter"):
        open_source(folder("llama"), tmp_path)
    adapter = write(tmp_path / "lora")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors"):
        open_source(folder("llama"), adapter)


def test_an_engine_of_a_merged_model(tmp_path):
    """Built by the command's own function, verified, and its tokens those of the merged model."""
    pytest.importorskip("enginewright.backends.cpu.executor")
    adapter = write(tmp_path / "lora")
    report = enginewright.optimize(folder("llama"), "fp32", tmp_path / "engine", adapter=adapter)
    assert report.manifest["model"]["adapter"]["name"] == "lora"
    assert len(report.manifest["model"]["adapter"]["sha256"]) == 64
    model = merged("llama", adapter, 2.0)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    with report.engine() as engine:
        (got,) = engine.logits([PROMPT])
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    plain = enginewright.optimize(folder("llama"), "fp32", tmp_path / "plain")
    with plain.engine() as engine:
        (without,) = engine.logits([PROMPT])
    assert np.abs(without - expected).max() > 0.1
