"""Capture equals eager transformers in float32 on every family, or refuses by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from enginewright.passes.capture import capture
from enginewright.passes.capture_hooks import classify_mask, recognise_gate
from enginewright.passes.checkpoint import HuggingFaceFolder
from enginewright.passes.legality import check
from enginewright.passes.matching import argument
from enginewright.passes.normalise import Normalise
from enginewright.passes.program import Program, Stage
from enginewright.passes.supported import resolve_context
from enginewright.recipes.errors import CaptureError, InputError
from tests.passes.architectures import ARCHITECTURES, FAMILIES, VOCAB, folder, save, write_tokenizer

PROMPT = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1))


def logits(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


def assert_close(got, expected, limit=1e-5):
    error = float((got - expected).abs().max() / expected.abs().max())
    assert error <= limit, f"largest error {error:.2e} of the largest logit"


def attention_nodes(program: Program):
    return [n for n in program.graph.nodes if n.target is torch.ops.ew.attention.default]


def test_the_families_are_all_there():
    assert len(FAMILIES) == 26


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_captured_and_normalised_equal_eager(arch):
    model = ARCHITECTURES[arch]()
    program = capture(folder(arch))
    assert program.stage == Stage.CAPTURED
    assert len(attention_nodes(program)) == model.config.num_hidden_layers
    assert_close(program.run(PROMPT), logits(model, PROMPT))
    Normalise().run(program)
    check(program)
    assert program.stage == Stage.NORMALISED
    assert_close(program.run(PROMPT), logits(model, PROMPT))
    for length in (1, 2, 7):
        assert_close(program.run(PROMPT[:length]), logits(model, PROMPT[:length]))
    for node in program.graph.nodes:
        assert "val" in node.meta or node.op == "output"


def normalised(path, **options) -> Program:
    program = capture(path, **options)
    Normalise().run(program)
    return program


def test_windows_differ_by_layer():
    program = capture(folder("gemma3_text"))
    assert [argument(n, "window") for n in attention_nodes(program)] == [8, 0, 8]
    assert [argument(n, "window") for n in attention_nodes(capture(folder("gemma2")))] == [8, 0]


def test_a_window_longer_than_the_context_is_none():
    assert [argument(n, "window") for n in attention_nodes(capture(folder("mistral"), max_context=8))] == [
        0,
        0,
    ]


def test_scalars_reach_the_graph():
    nodes = attention_nodes(capture(folder("gemma2")))
    assert all(argument(n, "scale") == 20**-0.5 and argument(n, "softcap") == 5.0 for n in nodes)
    assert all(argument(n, "scale") == 0.4 for n in attention_nodes(capture(folder("granite"))))


def test_tied_weights_are_one_node_and_untied_two():
    tied = normalised(folder("qwen2"))
    node = next(n for n in tied.graph.nodes if n.target == "model.embed_tokens.weight")
    targets = {user.target for user in node.users}
    assert targets == {torch.ops.ew.embedding.default, torch.ops.ew.linear.default}
    assert "lm_head.weight" not in tied.weights
    untied = normalised(folder("llama"))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= untied.weights.keys()


def test_modules_are_named_on_nodes():
    program = normalised(folder("llama"))
    modules = {n.meta["module"] for n in program.graph.nodes if n.target is torch.ops.ew.linear.default}
    assert "model.layers.1.mlp.down_proj" in modules and "lm_head" in modules


# Experts.


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_that_get_no_token_and_experts_that_get_all(arch):
    model, program = ARCHITECTURES[arch](), normalised(folder(arch))
    one = PROMPT[:1]  # one token leaves most experts unused
    assert_close(program.run(one), logits(model, one))
    same = PROMPT[:1].repeat(6)  # equal tokens all choose the same experts
    assert_close(program.run(same), logits(model, same))


def test_an_unknown_gate_is_refused():
    class Experts(torch.nn.Module):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.sin(gate) * up

    with pytest.raises(CaptureError, match="gate their hidden values"):
        recognise_gate(Experts())


# Masks.


def test_masks_are_classified_by_evaluating_them():
    assert classify_mask(lambda q, k: k <= q, 100).window == 0
    assert classify_mask(lambda q, k: (k <= q) & (k > q - 8), 100).window == 8
    assert classify_mask(lambda q, k: (k <= q) & (k > q - 8), 8).window == 0


@pytest.mark.parametrize(
    "sees",
    [
        lambda q, k: (k <= q) & (k // 16 == q // 16),
        lambda q, k: torch.ones_like(q + k, dtype=torch.bool),
        lambda q, k: (k <= q) & ((q - k) % 2 == 0),
        lambda q, k: (k <= q) & ((k > q - 8) | (k < 2)),
        lambda q, k: k > q,
    ],
    ids=["chunked", "bidirectional", "strided", "with sinks", "nothing"],
)
def test_other_masks_are_refused(sees):
    with pytest.raises(CaptureError, match="neither causal nor a sliding window"):
        classify_mask(sees, 100)


# ALiBi.


@pytest.mark.parametrize("arch", ["bloom", "mpt", "falcon"])
def test_alibi_slopes_for_six_heads(arch):
    program = capture(folder(arch))
    slopes = program.weight_of(attention_nodes(program)[0].args[4]).load()
    own = torch.tensor([2.0 ** -(2 * i) for i in range(1, 5)] + [2.0**-1, 2.0**-3])
    if arch == "mpt":
        powers = torch.tensor([2.0**-i for i in range(1, 9)])
        own = torch.cat((powers[1::2], powers[::2]))[:6]
    if arch == "falcon":
        own = own / 12**0.5  # its biases are scaled together with the scores
    torch.testing.assert_close(slopes, own, rtol=1e-5, atol=0)
    assert len({str(n.args[4]) for n in attention_nodes(program)}) == 1


def test_a_bias_that_is_not_linear_is_refused(monkeypatch):
    from transformers.models.mpt import modeling_mpt

    original = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *a: -(original(*a) ** 2))
    with pytest.raises(CaptureError, match="not linear in the distance"):
        capture(folder("mpt"))


def test_heads_that_repeat_are_cached_once():
    assert attention_nodes(capture(folder("falcon-grouped")))[0].args[1].meta["val"].shape[1] == 2
    assert attention_nodes(capture(folder("falcon-multiquery")))[0].args[1].meta["val"].shape[1] == 1


# Rotary embeddings.

BASE = {"rope_theta": 1e4}
LONG = {"original_max_position_embeddings": 64, "factor": 4.0}
ROPES = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "dynamic, with a length that it has no use for": {"factor": 2.0, "original_max_position_embeddings": 32},
    "yarn": LONG,
    "yarn, factor 1.0": {**LONG, "attention_factor": 1.0},
    "yarn, factor 1.2": {**LONG, "attention_factor": 1.2},
    "llama3": {**LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**LONG, "short_factor": [1.0] * 6, "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0]},
}


def rope_folder(path: Path, name: str, spelling: str) -> Path:
    kind = name.partition(",")[0]
    save("llama", path, num_hidden_layers=1, max_position_embeddings=64 if kind == "dynamic" else 256)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    if spelling == "new":
        config["rope_parameters"] = {**ROPES.get(name, {}), **BASE, "rope_type": kind}
    else:
        config.update(BASE)
        config["rope_scaling"] = {**ROPES.get(name, {}), "type": kind}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_types(tmp_path, name, spelling):
    path = rope_folder(tmp_path, name, spelling)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    dependent = name.startswith(("dynamic", "longrope"))
    program = normalised(path)
    assert program.facts.max_context == (64 if dependent else 256)
    for length in (8, 64 if dependent else 200):
        ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(2))
        assert_close(program.run(ids), logits(model, ids))
    if dependent:  # a longer context takes the frequencies that the model has at that length
        ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(3))
        program = normalised(path, max_context=200)
        assert_close(program.run(ids), logits(model, ids))
        assert any("frequencies of 200 tokens" in note for note in program.notes)


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_an_unknown_rope_type_is_an_error(tmp_path, spelling):
    with pytest.raises(CaptureError, match="unknown type of rotary"):
        capture(rope_folder(tmp_path, "spiral", spelling))


# Refusals.


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("t5", {}, "second sequence"),
        ("mamba", {}, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
        ("minimax", {}, "linear_attention"),
        ("llama4_text", {}, "chunked attention"),
        ("clip_vision_model", {}, "no causal language model"),
        ("gemma3", {}, "several modalities"),
        ("clip", {}, "several modalities"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, model_type, config, reason):
    AutoConfig.for_model(model_type, **config).save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match=reason) as error:
        capture(HuggingFaceFolder(tmp_path))
    assert model_type in str(error.value)


def test_folders_quantised_in_ways_that_are_not_read_are_refused(tmp_path):
    save("llama", tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(InputError, match="hqq"):
        capture(tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(InputError, match="no such folder or file"):
        capture(tmp_path / "missing")
    with pytest.raises(InputError, match="not a Hugging Face model folder"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(InputError, match="no_such_model"):
        HuggingFaceFolder(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 3},
        {"rope_parameters": "yes"},
        {"rms_norm_eps": "small"},
        {"eos_token_id": "</s>"},
        {"quantization_config": "gptq"},
    ],
)
def test_a_configuration_with_a_value_of_the_wrong_kind(tmp_path, changes):
    config = json.loads((folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError, match=f"{tmp_path}") as error:
        HuggingFaceFolder(tmp_path)
    assert str(*changes.values()) in str(error.value)


def test_code_in_the_model_folder_is_never_offered_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the model's code"))
    custom = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(custom))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputError, match=r"(?s)'own'.*custom code"):
        HuggingFaceFolder(tmp_path)


def test_the_context_is_limited_by_learned_positions():
    with pytest.raises(CaptureError, match="more positions than the model has learned") as error:
        normalised(folder("gpt2"), max_context=300)
    assert "max_context to 256" in str(error.value)
    for length in (1, 3):
        with pytest.raises(InputError, match="too small"):
            capture(folder("gpt2"), max_context=length)
    for length in (4, 5, 40):
        assert normalised(folder("gpt2"), max_context=length).facts.max_context == length


def test_a_context_beyond_any_table_is_not_taken_unasked():
    config = AutoConfig.for_model("llama", max_position_embeddings=10**9)
    context, notes = resolve_context(config, None)
    assert context == 1 << 20 and "1,000,000,000" in notes[0]
    with pytest.raises(InputError, match="too large"):
        resolve_context(config, 10**9)
    config.max_position_embeddings = 3
    with pytest.raises(InputError, match=r"(?s)too small.*3 tokens"):
        resolve_context(config, None)


def test_facts():
    facts = capture(folder("llama")).facts
    model = ARCHITECTURES["llama"]()
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert (facts.model_type, facts.vocab_size, facts.max_context, facts.num_layers) == (
        "llama",
        VOCAB,
        256,
        2,
    )
    assert (facts.eos_token_ids, facts.bos_token_id, facts.hidden_size) == ([2], 1, 40)


# Size.

_LARGE = """
import sys, torch
from transformers import AutoConfig
from enginewright.passes.capture import capture
from enginewright.passes.normalise import Normalise
from enginewright.passes.weights import Computed

class Large:
    path = None
    config = AutoConfig.for_model("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)

    def bind(self, model):
        def never():
            raise AssertionError("a weight was loaded")
        return {n: Computed(n, v.shape, v.dtype, never) for n, v in model.state_dict().items()}, []

program = capture(Large())
Normalise().run(program)
assert program.facts.parameters > 2e9
status = open("/proc/self/status").read()  # its own peak: getrusage counts the parent's before exec, too
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
assert peak < 1e9, f"{peak / 1e9:.2f} GB"
"""


def test_a_large_model_is_captured_without_memory_for_its_weights():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _LARGE], check=True)


def test_the_tiny_tokenizer_round_trips(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("w5 w77")["input_ids"] == [5, 77]
