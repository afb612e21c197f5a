"""Binding a checkpoint: the index decides, faults are named, and no layout of files changes the result."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from enginewright.passes.capture import capture
from enginewright.passes.checkpoint import HuggingFaceFolder
from enginewright.passes.weights import CheckpointTensor, Computed, Stacked
from enginewright.recipes.errors import InputError
from tests.passes.architectures import ARCHITECTURES, VOCAB, folder

PROMPT = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def single(tmp_path) -> Path:
    return Path(shutil.copytree(folder("llama"), tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    path = tmp_path / "sharded"
    ARCHITECTURES["llama"]().save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def index_of(path: Path) -> dict:
    return json.loads((path / "model.safetensors.index.json").read_text())


def same_as_clean(path: Path, arch: str = "llama") -> list[str]:
    """Assert that the folder gives the clean model's logits; returns the notes."""
    program = capture(path)
    model = ARCHITECTURES[arch]()
    with torch.no_grad():
        torch.testing.assert_close(program.run(PROMPT), model(PROMPT[None]).logits[0], rtol=0, atol=1e-5)
    return program.notes


def test_one_file_and_shards_give_the_same(single, sharded):
    assert same_as_clean(single) == []
    assert same_as_clean(sharded) == []


def test_nothing_is_read_before_it_is_asked_for(single, monkeypatch):
    def never(*args):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("enginewright.passes.weight_files.SafetensorsFile.read", never)
    program = capture(single)
    assert isinstance(program.weights["lm_head.weight"], CheckpointTensor)


# Extra files.


def scaled(path: Path) -> None:
    """A checkpoint of other values under the names of the right one."""
    save_file({k: v * 3 for k, v in load_file(folder("llama") / "model.safetensors").items()}, path)


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"])
def test_a_stray_file_beside_the_shards(sharded, name):
    if name.endswith(".bin"):
        torch.save({"lm_head.weight": torch.zeros(2)}, sharded / name)
    else:
        scaled(sharded / name)
    assert any(name in note and "not opened" in note for note in same_as_clean(sharded))


def test_a_leftover_bin_beside_the_single_file(single):
    torch.save({"lm_head.weight": torch.zeros(2)}, single / "pytorch_model.bin")
    assert any("pytorch_model.bin" in note for note in same_as_clean(single))


def test_a_stray_shard_without_index_is_not_opened(single):
    scaled(single / "model-00001-of-00002.safetensors")
    assert any("model-00001-of-00002.safetensors" in note for note in same_as_clean(single))


def test_a_shard_that_holds_tensors_assigned_elsewhere(sharded):
    mapping = index_of(sharded)["weight_map"]
    first, other = sorted(set(mapping.values()))[:2]
    foreign = next(key for key, shard in mapping.items() if shard == other)
    tensors = load_file(sharded / first)
    tensors[foreign] = torch.zeros(3)
    save_file(tensors, sharded / first)
    notes = same_as_clean(sharded)
    assert any(first in note and foreign in note and other in note for note in notes)


# Faults.


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        capture(path)
    for word in words:
        assert word in str(error.value)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    refused(single, "holds no weights", "model.safetensors")


def test_a_missing_shard(sharded):
    shard = sorted(set(index_of(sharded)["weight_map"].values()))[1]
    (sharded / shard).unlink()
    refused(sharded, shard, "missing files")


def test_a_truncated_file(single):
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(single, "truncated", "model.safetensors", "expected", str(len(content)))
    path.write_bytes(content[:20])
    refused(single, "truncated")
    path.write_bytes(b"")
    refused(single, "model.safetensors")


def with_header(path: Path, change: Callable[[dict], dict | list | None]) -> None:
    """Rewrite the header: changed in place, or what `change` returns."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda header, first, other: [],
        lambda header, first, other: header.update({first: None}),
        lambda header, first, other: header.update({first: {"dtype": "F32"}}),
        lambda header, first, other: header.update(spare=header[first]),
        lambda header, first, other: header[first].update(dtype="F8_E4M3"),
        lambda header, first, other: header[first].update(shape=7),
        lambda header, first, other: header[first].update(data_offsets=[-8, 8]),
        lambda header, first, other: header[first].update(data_offsets=header[other]["data_offsets"]),
    ],
)
def test_a_header_that_does_not_describe_its_file(single, damage):
    with_header(
        single / "model.safetensors",
        lambda header: damage(header, *[key for key in header if key != "__metadata__"][:2]),
    )
    refused(single, "model.safetensors cannot be read", "copy or download")


@pytest.mark.parametrize("dtype", ["F7", ["F32"], None])
def test_a_type_that_nothing_reads(single, dtype):
    with_header(single / "model.safetensors", lambda header: header["lm_head.weight"].update(dtype=dtype))
    refused(single, "lm_head.weight", "type that is not supported")


def test_bytes_after_the_last_tensor(single):
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refused(single, "model.safetensors cannot be read")


def test_an_index_that_names_a_tensor_no_shard_holds(sharded):
    index = index_of(sharded)
    key = "model.layers.0.input_layernorm.weight"
    shard = index["weight_map"].pop(key)
    other = next(s for s in sorted(set(index["weight_map"].values())) if s != shard)
    index["weight_map"][key] = other
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, key, other, f"it stands in {shard}")


def test_an_index_whose_files_are_no_names(sharded):
    index = index_of(sharded)
    index["weight_map"]["lm_head.weight"] = 3
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "lm_head.weight", "file names")


def test_a_damaged_index(sharded):
    (sharded / "model.safetensors.index.json").write_text("{")
    refused(sharded, "model.safetensors.index.json", "JSON")


def rewritten(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor(single):
    rewritten(single, **{"model.layers.1.mlp.up_proj.weight": None})
    refused(single, "model.layers.1.mlp.up_proj.weight", "[72, 40]", "LlamaForCausalLM")


def test_a_tensor_of_another_shape(single):
    rewritten(single, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(40, 72)})
    refused(single, "model.layers.1.mlp.up_proj.weight", "model.safetensors", "[40, 72]", "[72, 40]")


def test_integers_where_the_model_has_floats(single):
    rewritten(single, **{"lm_head.weight": torch.ones(VOCAB, 40, dtype=torch.int32)})
    refused(single, "lm_head.weight", "model.safetensors", "int32", "float")


def test_tensors_that_are_not_the_models_are_noted(single):
    rewritten(single, **{"vision.weight": torch.zeros(3), "model.rotary_emb.inv_freq": torch.zeros(6)})
    notes = same_as_clean(single)
    assert len(notes) == 1 and "vision.weight" in notes[0] and "inv_freq" not in notes[0]


# Other layouts.


def test_pickled_weights(single):
    tensors = load_file(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    torch.save(tensors, single / "pytorch_model.bin")
    assert same_as_clean(single) == []


def test_pickles_that_would_run_code_are_refused(single):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    (single / "model.safetensors").unlink()
    torch.save({"a": Evil()}, single / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "safetensors")


def test_a_checkpoint_of_the_base_model_gets_its_prefix(single):
    tensors = {k.removeprefix("model."): v for k, v in load_file(single / "model.safetensors").items()}
    save_file(tensors, single / "model.safetensors")
    assert same_as_clean(single) == []


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_stored_one_by_one_are_stacked_lazily(arch):
    path = folder(arch)
    stored = load_file(path / "model.safetensors")
    assert any(".experts.3." in key for key in stored), "this checkpoint no longer stores experts one by one"
    program = capture(path)
    fused = [w for name, w in program.weights.items() if name.endswith("experts.gate_up_proj")]
    assert fused
    for weight in fused:
        assert not isinstance(weight, Computed)
        assert torch.equal(weight.load()[2:4], weight.load_rows(2, 4))
    assert any(isinstance(w, Stacked) for w in program.weights.values())
    same_as_clean(path, arch)


# Ties.


def tied(tmp_path, head: torch.Tensor | None) -> Path:
    path = Path(shutil.copytree(folder("qwen2"), tmp_path / "tied"))
    if head is not None:
        rewritten(path, **{"lm_head.weight": head})
    return path


def test_a_tied_head_is_the_embedding(tmp_path):
    program = capture(tied(tmp_path, None))
    assert "lm_head.weight" not in program.weights
    same_as_clean(tied(tmp_path / "again", None), "qwen2")


def test_a_tied_head_that_is_stored_as_well(tmp_path):
    embedding = load_file(folder("qwen2") / "model.safetensors")["model.embed_tokens.weight"]
    program = capture(tied(tmp_path, embedding.clone()))
    assert "lm_head.weight" not in program.weights and program.notes == []


def test_a_head_that_differs_although_the_configuration_ties_it_is_kept_apart(tmp_path):
    embedding = load_file(folder("qwen2") / "model.safetensors")["model.embed_tokens.weight"]
    path = tied(tmp_path, embedding * 2)
    program = capture(path)
    assert torch.equal(program.weights["lm_head.weight"].load(), embedding * 2)
    assert any("kept apart" in note for note in program.notes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(program.run(PROMPT), model(PROMPT[None]).logits[0], rtol=0, atol=1e-5)


def test_an_untied_head_is_never_tied(single):
    source = HuggingFaceFolder(single)
    program = capture(source)
    assert program.weights["lm_head.weight"] is not program.weights["model.embed_tokens.weight"]
    rewritten(single, **{"lm_head.weight": None})
    refused(single, "lm_head.weight")


def test_half_precision_is_stored_as_it_is_and_computed_in_float32(tmp_path):
    ARCHITECTURES["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    program = capture(tmp_path)
    assert program.weights["lm_head.weight"].dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(program.run(PROMPT), model(PROMPT[None]).logits[0], rtol=0, atol=1e-5)
