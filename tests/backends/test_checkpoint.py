"""The written folder: transformers gives the quantised Program's logits, our own reader gets the same integers, and what
compressed-tensors cannot say is refused by name before anything is written."""

import builtins
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact, open_engine
from enginewright.backends.checkpoint.answers import FolderAnswers
from enginewright.backends.checkpoint.lower import lower
from enginewright.backends.checkpoint.requirements import require_recipe
from enginewright.build import optimize
from enginewright.passes.capture import capture
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.matching import argument, is_call
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import open_source
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import ArtifactError, InputError, LoweringError, VerificationError
from enginewright.recipes.recipe import load_recipe
from tests.passes import quantised as make
from tests.passes.architectures import VOCAB, write_tokenizer

pytest.importorskip("compressed_tensors")

PROMPT = torch.randint(3, VOCAB, (11,), generator=torch.Generator().manual_seed(1)).tolist()
ONE = {"num_hidden_layers": 1}
PLAIN = ("embedding.weight=bf16", "head.weight=bf16", "verify.max_kl=null")


def plain(path: Path, arch: str = "llama", dtype: torch.dtype = torch.float32, **changes) -> Path:
    sizes = {**make.GPT_SIZES, "n_layer": 1} if arch == "gpt2" else make.SIZES
    if arch not in ("gpt2", "gemma3_text"):
        sizes = {**sizes, **ONE}
    make.ARCHITECTURES[arch](**{**sizes, **changes}).to(dtype).save_pretrained(path)
    write_tokenizer(path)
    return path


def quantised(path: Path, recipe: str, *overrides: str) -> Program:
    program = capture(path)
    order = steps(load_recipe(recipe, list(overrides)), until=Stage.QUANTISED)
    run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True), *order])
    return program


def exact_activations(program: Program) -> Program:
    """The same program with float32 activations, as a weight-only folder has them."""
    for node in program.graph.nodes:
        if is_call(node, OPS["quantised_linear"], OPS["quantised_moe"]):
            names = [item.name for item in node.target._schema.arguments]
            node.args = tuple(
                "f32" if name == "activation_format" else value
                for name, value in zip(names, node.args, strict=False)
            )
    return program


def parts(program: Program) -> dict[str, list[torch.Tensor | None]]:
    """Module -> codes, scales, offsets of its matrix."""
    return {
        node.meta["module"]: [
            None if part is None else program.weight_of(part).load()
            for part in (argument(node, name) for name in ("codes", "scales", "offsets"))
        ]
        for node in program.graph.nodes
        if is_call(node, OPS["quantised_linear"], OPS["quantised_embedding"])
    }


def answers(path: Path) -> torch.Tensor:
    with FolderAnswers(open_engine(path)) as folder:
        return torch.from_numpy(folder.logits([PROMPT])[0])


CASES = [
    ("llama", "int4", ("linear.weight=int4_g32_zp", *PLAIN)),
    ("qwen2", "int4", ("linear.weight=int4_g16_zp", *PLAIN)),
    ("gemma3_text", "int4", ("linear.weight=int4_zp", *PLAIN)),
    ("llama", "int8", ("linear.weight=uint8_g32_zp", *PLAIN)),
    ("llama", "int8", ("linear.weight=int8_g32", *PLAIN)),
    ("gemma3_text", "int8", PLAIN),
    ("qwen2", "int8", ("embedding.weight=bf16", "verify.max_kl=null")),
    ("llama", "int8", ("linear.weight=fp8", *PLAIN)),
    (
        "phi3",
        "int8",
        ("linear.weight=int8_g16", "overrides=[{match: '*.0.*down_proj', weight: bf16}]", *PLAIN),
    ),
    ("llama", "int8", ("overrides=[{match: '*o_proj', weight: int8_g32}]", *PLAIN)),
    ("llama", "int4", ("linear.weight=int4_g32_zp", "quantise.symmetric=true", *PLAIN)),
    (
        "qwen2",
        "int8",
        (
            "linear.weight=int4_g16_zp",
            "quantise.symmetric=true",
            "embedding.weight=bf16",
            "verify.max_kl=null",
        ),
    ),
    ("gpt2", "bf16", ()),
    ("mixtral", "bf16", ()),
]


@pytest.mark.parametrize("arch, recipe, overrides", CASES)
def test_transformers_gives_the_programs_logits_and_our_reader_its_integers(
    tmp_path, arch, recipe, overrides
):
    source = plain(tmp_path / "source", arch, torch.bfloat16)
    report = optimize(source, recipe, tmp_path / "out", backend="checkpoint", overrides=overrides)
    assert report.verification["verdict"] == "passed" and report.manifest["backend"] == "checkpoint"
    program = quantised(source, recipe, *overrides)
    made = parts(program)
    wanted = exact_activations(program).run(PROMPT)
    torch.testing.assert_close(answers(report.path), wanted, rtol=0, atol=2e-4)
    if not any(scales is not None for _, scales, _ in made.values()):
        return
    again = parts(quantised(report.path, "keep"))
    assert {name for name in made if made[name][1] is not None} <= set(again)
    for name, (codes, scales, offsets) in made.items():
        if scales is None:
            continue
        assert torch.equal(again[name][0].float(), codes.float()), name
        assert torch.equal(again[name][1], scales)
        assert offsets is None or torch.equal(again[name][2], offsets)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: make.write_packed(path, **ONE),
        lambda path: make.write_w8a8(path, **ONE),
        lambda path: make.write_w8a8(path, "gemma3_text", static=True),
        lambda path: make.write_packed(path, "qwen2", symmetric=False, **ONE),
        lambda path: make.write_packed(path, bits=8, **ONE),
        lambda path: make.write_awq(path, **ONE),
        lambda path: make.write_gptq(path, bits=2, version=2, **ONE),
        lambda path: make.write_bitsandbytes(path, **ONE),
    ],
)
def test_a_quantised_folder_goes_through_unchanged(tmp_path, write):
    written = write(tmp_path / "source")
    report = optimize(
        written.path, "keep", tmp_path / "out", backend="checkpoint", overrides=["verify.max_kl=null"]
    )
    before, after = parts(quantised(written.path, "keep")), parts(quantised(report.path, "keep"))
    for name in written.matrices:
        for one, other in zip(before[name], after[name], strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), name
    groups = json.loads((report.path / "config.json").read_text())["quantization_config"]["config_groups"]
    source = written.config["quantization_config"].get("config_groups")
    if source is not None:
        (group,), (origin,) = groups.values(), source.values()
        assert group["weights"]["symmetric"] == origin["weights"]["symmetric"]
        assert (group["input_activations"] is None) == (origin["input_activations"] is None)
    if "int-quantized" in str(source):
        stored = load_file(report.path / "model.safetensors")
        name = "model.layers.0.mlp.up_proj"
        assert torch.equal(stored[f"{name}.weight"], written.tensors[f"{name}.weight"])


def test_a_recipe_that_rounds_inputs_per_token_is_written_as_w8a8(tmp_path):
    overrides = ("linear.activation=int8", *PLAIN)
    report = optimize(
        plain(tmp_path / "source"), "int8", tmp_path / "out", backend="checkpoint", overrides=overrides
    )
    (group,) = json.loads((report.path / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert group["format"] == "int-quantized" and group["input_activations"]["strategy"] == "token"
    assert report.verification["mean_kl"] < 0.05


def test_the_rounding_of_inputs_is_compressed_tensors_own(tmp_path):
    """W8A8: transformers rounds inputs per token to ±127.5 steps, the Program to ±127: close, and not equal."""
    written = make.write_w8a8(tmp_path / "source", **ONE)
    report = optimize(
        written.path, "keep", tmp_path / "out", backend="checkpoint", overrides=["verify.max_kl=null"]
    )
    logits = answers(report.path)
    rounded = quantised(written.path, "keep")
    exact = exact_activations(quantised(written.path, "keep")).run(PROMPT)
    assert (logits - exact).abs().max() > 1e-3
    assert (logits - rounded.run(PROMPT)).abs().mean() < (logits - exact).abs().mean() * 2


def test_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("enginewright.backends.checkpoint.lower._SHARD_BYTES", 15_000)
    source = plain(tmp_path / "source")
    overrides = ("linear.weight=int4_g32_zp", *PLAIN)
    report = optimize(source, "int4", tmp_path / "out", backend="checkpoint", overrides=overrides)
    assert len(list(report.path.glob("model-*-of-*.safetensors"))) > 3
    wanted = exact_activations(quantised(source, "int4", *overrides)).run(PROMPT)
    torch.testing.assert_close(answers(report.path), wanted, rtol=0, atol=2e-4)


def test_equal_builds_give_equal_folders(tmp_path):
    source = plain(tmp_path / "source")
    builds = [
        optimize(source, "int8", tmp_path / name, backend="checkpoint", overrides=PLAIN).path for name in "ab"
    ]
    for file in sorted(builds[0].iterdir()):
        if file.name != "build.json":
            assert file.read_bytes() == (builds[1] / file.name).read_bytes(), file.name


# What smoothing leaves behind.


def test_a_calibrated_and_smoothed_model(tmp_path):
    source = plain(tmp_path / "source", "gemma3_text")
    words = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(2)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    overrides = (
        "linear.weight=int4_g32_zp", "quantise.symmetric=true", "quantise.method=gptq", "smooth.method=smoothquant",
        "smooth.alpha=0.5", "calibration.samples=8", "calibration.length=32", *PLAIN,
    )  # fmt: skip
    report = optimize(
        source,
        "int4",
        tmp_path / "out",
        backend="checkpoint",
        overrides=overrides,
        calibration=tmp_path / "text.txt",
    )
    before, after = load_file(source / "model.safetensors"), load_file(report.path / "model.safetensors")
    smoothed = next(entry for entry in report.passes if entry["name"] == "smooth")
    norms = [name for name in before if "norm" in name]
    assert smoothed["matches"] and any(not torch.equal(after[name], before[name]) for name in norms)
    rounded = optimize(
        source, "int4", tmp_path / "plain", backend="checkpoint", overrides=(overrides[0], *PLAIN)
    )
    assert report.verification["mean_kl"] < 1.5 * rounded.verification["mean_kl"]


class OnePlus(Weight):
    """(source + 1) · 2, as smoothing makes of a weight that stood for 1 + w."""

    dtype = torch.float32
    offset = 1.0

    def __init__(self, source: Weight) -> None:
        self.name, self.shape, self.source = source.name, source.shape, source

    @property
    def sources(self) -> tuple[Weight, ...]:
        return (self.source,)

    def load(self) -> torch.Tensor:
        return (self.source.load().float() + 1) * 2


class Halved(OnePlus):
    offset = 0.0

    def load(self) -> torch.Tensor:
        return self.source.load().float() / 2


def smoothed(path: Path) -> Program:
    """Gemma with the norms before attention doubled, and what reads them halved."""
    program = capture(path)
    order = steps(load_recipe("int8", list(PLAIN)), until=Stage.QUANTISED)
    run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True), *order[:-1]])
    for node in program.graph.nodes:
        if is_call(node, OPS["rms_norm"], OPS["add_rms_norm"]):
            weight = argument(node, "weight")
            if "input_layernorm" in str(weight.target):
                names = [item.name for item in node.target._schema.arguments]
                at = names.index("weight_offset")
                assert argument(node, "weight_offset") == 1.0
                node.args = (*node.args[:at], 0.0, *node.args[at + 1 :])
                program.weights[str(weight.target)] = OnePlus(program.weight_of(weight))
        elif is_call(node, OPS["linear"]) and str(argument(node, "weight").target).endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        ):
            target = str(argument(node, "weight").target)
            program.weights[target] = Halved(program.weights[target])
    run_steps(program, order[-1:])
    return program


def test_weights_are_the_programs_not_the_sources(tmp_path):
    source = plain(tmp_path / "source", "gemma3_text")
    program = smoothed(source)
    out = tmp_path / "out"
    out.mkdir()
    opened = open_source(source)
    lower(program, out, None, opened)
    facts = {"vocab_size": VOCAB, "max_context": 64, "source": "source"}
    with FolderAnswers(Artifact(out, {"model": facts})) as folder:
        logits = torch.from_numpy(folder.logits([PROMPT])[0])
    torch.testing.assert_close(logits, exact_activations(program).run(PROMPT), rtol=0, atol=2e-4)
    name = "model.layers.0.input_layernorm.weight"
    before, after = load_file(source / "model.safetensors")[name], load_file(out / "model.safetensors")[name]
    torch.testing.assert_close(after, 2 * (before + 1) - 1)


def test_a_multiply_that_smoothing_put_into_the_graph_is_refused(tmp_path):
    source = plain(tmp_path / "source")
    program = quantised(source, "int8", *PLAIN)
    program.weights["model.layers.0.mlp.down_proj.smoothing"] = Halved(program.weights["model.norm.weight"])
    with pytest.raises(
        LoweringError, match=r"(?s)model\.layers\.0\.mlp\.down_proj cannot.*multiplies an activation"
    ):
        lower(program, tmp_path, None, open_source(source))


# Refusals.


@pytest.mark.parametrize(
    "overrides, words",
    [
        ((), ("linear.weight", "float offsets", "linear.weight=int4_g64_zp")),
        (("linear.weight=int3_g32_zp",), ("linear.weight", "3-bit")),
        (("linear.weight=int8", "kv_cache.format=int8"), ("kv_cache.format", "int8")),
        (("linear.weight=int8", "outliers.threshold=6"), ("outliers.threshold",)),
    ],
)
def test_recipes_that_no_folder_can_hold(overrides, words):
    try:
        recipe = load_recipe("int4", list(overrides))
    except InputError:
        pytest.skip("this recipe key is not accepted yet")
    with pytest.raises(InputError) as error:
        require_recipe(recipe)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "arch, changes, overrides, words",
    [
        (
            "llama",
            {"intermediate_size": 72},
            ("linear.weight=int4_g16_zp", *PLAIN),
            ("down_proj", "short last group of 8"),
        ),
        ("gpt2", {}, PLAIN, ("c_attn", "Conv1D")),
        ("llama", {}, ("verify.max_kl=null",), ("embed_tokens in int8", "embedding.weight=bf16")),
        ("mixtral", {}, PLAIN, ("experts", "bf16")),
        (
            "llama",
            {},
            ("linear.weight=int4_g32_zp", "embedding.weight=bf16", "verify.max_kl=null"),
            ("zero points beside", "quantise.symmetric"),
        ),
    ],
)
def test_models_that_the_format_cannot_say(tmp_path, monkeypatch, arch, changes, overrides, words):
    monkeypatch.setattr(
        "enginewright.passes.quant_formats.quantise_rtn", lambda *given: pytest.fail("something was rounded")
    )
    source = plain(tmp_path / "source", arch, **changes)
    with pytest.raises(InputError) as error:
        optimize(source, "int8", tmp_path / "out", backend="checkpoint", overrides=overrides)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "out").exists()


def test_groups_across_the_inputs_are_refused(tmp_path):
    written = make.write_gptq(tmp_path / "source", desc_act=True, **ONE)
    with pytest.raises(InputError, match=r"(?s)q_proj.*desc_act"):
        optimize(written.path, "keep", tmp_path / "out", backend="checkpoint")


def test_without_the_package_the_build_ends_at_its_start(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "compressed_tensors":
            raise ImportError("No module named 'compressed_tensors'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("enginewright.build.capture", lambda *given, **named: pytest.fail("work began"))
    with pytest.raises(InputError, match=r"(?s)compressed-tensors.*pip install"):
        optimize(plain(tmp_path / "source"), "int8", tmp_path / "out", backend="checkpoint", overrides=PLAIN)


def test_a_folder_that_leaves_its_limits_is_not_published(tmp_path):
    source = plain(tmp_path / "source")
    overrides = ("linear.weight=int2_g32_zp", *PLAIN[:2], "verify.max_kl=0.001")
    with pytest.raises(VerificationError, match="kl"):
        optimize(source, "int8", tmp_path / "out", backend="checkpoint", overrides=overrides)
    assert not (tmp_path / "out").exists()


def test_it_is_no_engine_that_runs_here(tmp_path):
    report = optimize(
        plain(tmp_path / "source"), "int8", tmp_path / "out", backend="checkpoint", overrides=PLAIN
    )
    with pytest.raises(ArtifactError, match=r"(?s)Hugging Face folder.*--recipe keep"):
        report.engine()
    assert "int4_g64_zp" in get_backend("checkpoint").capabilities["weight_formats"]
