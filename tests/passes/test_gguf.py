"""GGUF files written from known integers: they arrive unchanged, and every value equals gguf's own dequantisation."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from enginewright.passes.gguf import GgufFile, GgufSource
from enginewright.passes.kept import KeptWeight, held
from enginewright.passes.quant_formats import dequantise
from enginewright.passes.weights import concatenated, permuted, reshaped, sliced, transposed
from enginewright.recipes.errors import InputError

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40
NIBBLES = ("Q4_0", "Q4_1")


def integers(shape, kind, seed):
    """A stored tensor of random integers: raw bytes, codes [N, K], scales and offsets [N, K / 32]."""
    random = np.random.default_rng(seed)
    rows, groups = shape[0], shape[1] // 32
    scales = random.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    if kind == "Q8_0":
        codes = random.integers(-127, 128, (rows, groups, 32)).astype(np.int8)
        raw = np.concatenate([scales[..., None].view(np.uint8), codes.view(np.uint8)], -1)
        return raw.reshape(rows, -1), codes.reshape(shape), scales, None
    codes = random.integers(0, 16, (rows, groups, 32)).astype(np.uint8)
    offsets = -8 * scales if kind == "Q4_0" else random.uniform(-0.2, 0, (rows, groups)).astype(np.float16)
    head = [scales[..., None].view(np.uint8)]
    head += [] if kind == "Q4_0" else [offsets[..., None].view(np.uint8)]
    raw = np.concatenate([*head, codes[..., :16] | codes[..., 16:] << 4], -1)
    return raw.reshape(rows, -1), codes.reshape(shape), scales, offsets


def shapes():
    attention = {
        "q": HIDDEN,
        "k": HIDDEN * KV_HEADS // HEADS,
        "v": HIDDEN * KV_HEADS // HEADS,
        "output": HIDDEN,
    }
    named = {f"blk.0.attn_{name}.weight": (rows, HIDDEN) for name, rows in attention.items()}
    named |= {"blk.0.ffn_gate.weight": (FFN, HIDDEN), "blk.0.ffn_up.weight": (FFN, HIDDEN)}
    return named | {"blk.0.ffn_down.weight": (HIDDEN, FFN), "token_embd.weight": (VOCAB, HIDDEN)}


def write(path, kind="Q4_1", *, extra=(), leave_out=(), fields=()):
    """A one-layer llama; returns what each matrix was made of."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    for method, *values in fields:
        getattr(writer, method)(*values)
    made = {}
    for seed, (name, shape) in enumerate(shapes().items()):
        if name in leave_out:
            continue
        made[name] = integers(shape, kind, seed)
        writer.add_tensor(name, made[name][0], raw_dtype=Kind[kind])
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32))
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def meta_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def bind(path):
    source = GgufSource(path)
    return source.bind(meta_model(source.config))


def moved_rows(name, codes):
    """llama.cpp interleaves the two halves of each head of q and k; undo it."""
    heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
    if heads is None:
        return codes
    half = len(codes) // heads // 2
    return codes.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(len(codes), -1)


HF_NAMES = {
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_integers_arrive_unchanged(tmp_path, kind):
    made = write(tmp_path / "m.gguf", kind)
    weights, notes = bind(tmp_path / "m.gguf")
    assert not notes
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    for name, (raw, codes, scales, offsets) in made.items():
        weight = weights[HF_NAMES[name]]
        found = held(weight)
        assert (found.found, found.kept, found.exact) == (kind, True, True)
        assert found.format == ("int8_g32" if kind == "Q8_0" else "int4_g32")
        kept = KeptWeight(weight, found.format).quantise()
        np.testing.assert_array_equal(kept.codes.numpy(), moved_rows(name, codes))
        np.testing.assert_array_equal(kept.scales.numpy(), moved_rows(name, scales))
        if offsets is not None:
            np.testing.assert_array_equal(kept.offsets.numpy(), moved_rows(name, offsets))
        values = moved_rows(name, gguf.quants.dequantize(raw, Kind[kind]))
        np.testing.assert_array_equal(weight.load().numpy(), values)
        np.testing.assert_array_equal(weight.load_rows(3, 11).numpy(), values[3:11])
        torch.testing.assert_close(dequantise(kept), torch.from_numpy(values.copy()), rtol=1e-5, atol=1e-6)


def test_values_equal_transformers(tmp_path):
    write(tmp_path / "m.gguf", "Q4_0")
    weights, _ = bind(tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    assert weights.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(weights[name].load(), value), name


def test_rows_move_with_their_scales(tmp_path):
    write(tmp_path / "m.gguf", "Q4_1")
    weights, _ = bind(tmp_path / "m.gguf")
    q, k = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    moved = {
        "concatenated": concatenated([q, k]),
        "sliced": sliced(q, 0, 5, 30),
        "stepped": sliced(q, 0, 1, 64, 2),
        "there and back": transposed(permuted(q, (1, 0))),
        "stacked": reshaped(q, (4, 16, 64)),
        "permuted": permuted(reshaped(q, (4, 16, 64)), (1, 0, 2)),
        "twice transposed": sliced(permuted(reshaped(q, (2, 32, 64)), (1, 0, 2)), 1, 0, 1),
    }
    for case, weight in moved.items():
        assert held(weight).kept, case
        kept = KeptWeight(weight, "int4_g32").quantise()
        torch.testing.assert_close(dequantise(kept), weight.load(), rtol=1e-5, atol=1e-6, msg=case)


def test_what_moves_inputs_loses_the_integers(tmp_path):
    write(tmp_path / "m.gguf", "Q4_1")
    q = bind(tmp_path / "m.gguf")[0]["model.layers.0.self_attn.q_proj.weight"]
    for weight in (transposed(q), sliced(q, 1, 0, 32), reshaped(q, (32, 128))):
        found = held(weight)
        assert (found.format, found.kept) == ("int4_g32", False)


@pytest.mark.parametrize("kind, nearest", [("Q5_0", "int8_g32"), ("Q5_1", "int8_g32"), ("F16", "bf16")])
def test_other_types_go_to_the_nearest_format(tmp_path, kind, nearest):
    values = np.random.default_rng(0).normal(0, 0.1, (HIDDEN, FFN)).astype(np.float32)
    raw = gguf.quants.quantize(values, Kind[kind])
    writer_extra = [("blk.0.ffn_down.weight", raw)]
    if kind == "F16":
        write(tmp_path / "m.gguf", leave_out=("blk.0.ffn_down.weight",), extra=writer_extra)
    else:
        _write_with(tmp_path / "m.gguf", raw, Kind[kind])
    weight = bind(tmp_path / "m.gguf")[0]["model.layers.0.mlp.down_proj.weight"]
    found = held(weight)
    assert (found.found, found.format, found.kept) == (kind, nearest, False)
    np.testing.assert_array_equal(weight.load().numpy(), gguf.quants.dequantize(raw, Kind[kind]))


def _write_with(path, raw, kind):
    original = gguf.GGUFWriter.add_tensor

    def add(self, name, tensor, raw_shape=None, raw_dtype=None, **more):
        if name == "blk.0.ffn_down.weight":
            tensor, raw_dtype = raw, kind
        return original(self, name, tensor, raw_shape, raw_dtype, **more)

    gguf.GGUFWriter.add_tensor = add
    try:
        write(path)
    finally:
        gguf.GGUFWriter.add_tensor = original


def test_k_quants_of_four_bits_keep_their_codes():
    """Two blocks of 256 with scales of six bits: codes as gguf reads them, values equal but for float16 scales."""
    from enginewright.passes.gguf import _unpack_q4_k

    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (6, 2 * 144), dtype=np.uint8)
    halves = random.uniform(0.0001, 0.001, (6, 2, 2)).astype(np.float16)
    raw.reshape(6, 2, 144)[:, :, :4] = halves.view(np.uint8)
    codes, scales, offsets = _unpack_q4_k(raw)
    assert codes.shape == (6, 512) and scales.shape == offsets.shape == (6, 16)
    values = codes.reshape(6, 16, 32) * scales[..., None] + offsets[..., None]
    wanted = gguf.quants.dequantize(raw, Kind.Q4_K).reshape(6, 16, 32)
    np.testing.assert_allclose(values, wanted, atol=2e-3 * np.abs(wanted).max())


def test_llama3_frequencies_are_restored(tmp_path):
    count = HIDDEN // HEADS // 2
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(count) / count)
    smooth = (8192 / wavelengths - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    factors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 8, between)).astype(np.float32)
    write(tmp_path / "m.gguf", extra=[("rope_freqs.weight", factors)])
    source = GgufSource(tmp_path / "m.gguf")
    assert source.config.rope_parameters["rope_type"] == "llama3"
    assert source.config.rope_parameters["factor"] == pytest.approx(8)
    write(tmp_path / "odd.gguf", extra=[("rope_freqs.weight", factors * 1.5)])
    with pytest.raises(InputError, match=r"rope_freqs\.weight"):
        GgufSource(tmp_path / "odd.gguf")


def test_scaled_rope_is_restored(tmp_path):
    fields = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)]
    write(tmp_path / "m.gguf", fields=fields)
    source = GgufSource(tmp_path / "m.gguf")
    assert source.config.rope_parameters["rope_type"] == "linear"
    assert source.config.rope_parameters["factor"] == 4.0
    assert any("linear" in note for note in source.notes)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 400, -300, -1])
def test_a_truncated_file_is_one_clear_error(tmp_path, keep):
    write(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:keep])
    with pytest.raises(InputError, match=r"cut\.gguf"):
        GgufSource(tmp_path / "cut.gguf")


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 something else entirely")
    with pytest.raises(InputError, match="not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")
    write(tmp_path / "m.gguf", leave_out=("blk.0.ffn_up.weight",))
    with pytest.raises(InputError, match=r"up_proj"):
        bind(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "notanarchitecture")
    writer.add_tensor("a.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"(?s)odd\.gguf.*notanarchitecture"):
        GgufSource(tmp_path / "odd.gguf")
