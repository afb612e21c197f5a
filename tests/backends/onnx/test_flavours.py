"""Folders for onnxruntime-genai and Optimum, held against transformers with onnxruntime alone: padded batches, caches, refusals.

The runtimes themselves load and generate in test_foreign_runtimes.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx

import enginewright
from enginewright.backends import get_backend, writer_of
from enginewright.backends.artifact import open_engine
from enginewright.backends.onnx.flavours.answers import FlavourAnswers, FlavourModel
from enginewright.backends.onnx.flavours.lower import lower
from enginewright.recipes.errors import ArtifactError, InputError, LoweringError, VerificationError
from enginewright.verification.on_disk import verify_engine
from tests.backends.onnx.flavoured import case, model
from tests.backends.onnx.programs import PROMPTS, worst
from tests.passes.architectures import ARCHITECTURES, folder, save

TOLERANCE = 1e-4
#: Plain, windows with norms of heads and tied tables, learned positions.
EVERYDAY = ("llama", "gemma3_text", "gpt2")
#: What GroupQueryAttention cannot say.
UNSAID = {
    "bloom": "ALiBi", "bloom-postnorm": "ALiBi", "mpt": "ALiBi", "falcon": "ALiBi", "deepseek_v3": "keys of 18 features",
}  # fmt: skip
FLAVOURS = pytest.mark.parametrize("flavour", ["genai", "optimum"])
ARCHS = [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


def answers(opened: FlavourModel) -> dict[str, dict[str, np.ndarray]]:
    """PROMPTS, of 3, 17 and 64 tokens, in every way that a runtime may send them."""
    rows = list(PROMPTS.values())
    return {
        "alone, whole": {name: opened.batch([row], decoded=0)[0] for name, row in PROMPTS.items()},
        "alone, in pieces, then decoded": {
            name: opened.batch([row], 4, cut=23)[0] for name, row in PROMPTS.items()
        },
        "a padded batch, then decoded": dict(zip(PROMPTS, opened.batch(rows, 2), strict=True)),
    }


@FLAVOURS
@pytest.mark.parametrize("arch", ARCHS)
def test_a_padded_batch_answers_as_transformers_does(arch: str, flavour: str, tmp_path: Path) -> None:
    if flavour == "genai" and arch in UNSAID:
        pytest.skip("refused, as the next test says")
    found = case(arch, wide=flavour == "genai" or arch in EVERYDAY)
    for way, logits in answers(model(found, flavour, tmp_path)).items():
        assert worst(logits, found.expected) <= TOLERANCE, way


@FLAVOURS
def test_a_batch_may_hold_more_tokens_than_the_context(flavour: str, tmp_path: Path) -> None:
    found = case("llama")
    count = found.program.facts.max_context // len(PROMPTS["long"]) + 1
    for logits in model(found, flavour, tmp_path).batch([PROMPTS["long"]] * count):
        assert worst({"long": logits}, {"long": found.expected["long"]}) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("arch", UNSAID)
def test_what_the_operator_cannot_say_is_refused_by_name(arch: str, tmp_path: Path) -> None:
    found = case(arch, wide=False)
    with pytest.raises(LoweringError, match=UNSAID[arch]) as caught:
        lower(found.program, "genai", tmp_path, found.source)
    assert "attn" in str(caught.value) or "attention" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_head_of_an_odd_width_is_refused_by_name(tmp_path: Path) -> None:
    found = case("llama", wide=False)
    with pytest.raises(
        LoweringError, match=r"heads of width 12 \[model\.layers\.0\.self_attn, model\.layers\.1"
    ):
        lower(found.program, "genai", tmp_path, found.source)


def test_quantised_weights_are_those_of_the_plain_flavour(tmp_path: Path) -> None:
    found = case("llama", True, "int4", "linear.weight=int4_g32", "kv_cache.format=f32")
    both = {}
    for flavour in ("genai", "optimum"):
        (tmp_path / flavour).mkdir()
        both[flavour] = answers(model(found, flavour, tmp_path / flavour))
        kinds = {
            node.op_type
            for node in onnx.load(tmp_path / flavour / "model.onnx", load_external_data=False).graph.node
        }
        assert "MatMulNBits" in kinds
        assert ("GroupQueryAttention" in kinds) == (flavour == "genai")
    assert worst(both["genai"]["alone, whole"], both["optimum"]["a padded batch, then decoded"]) <= TOLERANCE


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    found = case("gemma3_text")
    model(found, "genai", tmp_path)
    table = 4 * 131 * 40
    sizes = [
        weight.dims
        for weight in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer
    ]
    assert [list(dims) for dims in sizes].count([131, 40]) == 1
    assert table < (tmp_path / "model.onnx.data").stat().st_size


# From `optimize` to a folder.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A genai folder by a recipe whose cache is bf16, which the flavour widens."""
    root = tmp_path_factory.mktemp("flavours")
    source = save("gpt2", root / "model", n_embd=64)
    report = enginewright.optimize(
        source,
        "bf16",
        root / "engine",
        backend="onnx",
        overrides=["onnx.flavour=genai", "kv_cache.format=bf16"],
    )
    return report.path


def test_a_folder_is_verified_before_it_is_published(built: Path) -> None:
    manifest = open_engine(built, check=True).manifest
    assert manifest["verification"]["verdict"] == "passed"
    assert manifest["target"] == "onnxruntime-genai" and manifest["onnx"]["flavour"] == "genai"
    assert manifest["recipe"]["kv_cache"]["format"] == "f32"
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"} <= set(manifest["files"])
    assert writer_of(manifest).serves is False and get_backend("onnx").serves is True


def test_a_folder_on_disk_is_verified_against_its_model(built: Path) -> None:
    report = verify_engine(built, against=built.parent / "model")
    assert report.verification is not None and report.verification["verdict"] == "passed"
    assert all(check.passed for check in report.checks)


def test_the_configuration_names_what_the_model_has(built: Path) -> None:
    config = json.loads((built / "genai_config.json").read_bytes())
    decoder = config["model"]["decoder"]
    graph = onnx.load(built / "model.onnx", load_external_data=False).graph
    names = {value.name for value in (*graph.input, *graph.output)}
    told = [*decoder["inputs"].values(), *decoder["outputs"].values()]
    assert names == {name % layer if "%d" in name else name for name in told for layer in (0, 1)}
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (2, 4, 16)
    assert config["model"]["context_length"] == config["search"]["max_length"] == 256
    assert (config["model"]["eos_token_id"], config["model"]["pad_token_id"]) == (2, 0)
    assert config["search"]["past_present_share_buffer"] is True


def test_a_folder_of_another_runtime_does_not_serve(built: Path) -> None:
    with pytest.raises(ArtifactError, match="target onnxruntime-genai: ") as caught:
        enginewright.load(built)
    assert "onnx.flavour=plain" in str(caught.value)


def test_another_backend_refuses_the_flavour(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the cpu backend writes no ONNX models"):
        enginewright.optimize(folder("gpt2"), "fp32", tmp_path / "e", overrides=["onnx.flavour=genai"])


def test_a_cache_of_integers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not hold int8"):
        enginewright.optimize(
            folder("gpt2"),
            "fp32",
            tmp_path / "e",
            backend="onnx",
            overrides=["onnx.flavour=optimum", "kv_cache.format=int8"],
        )


def test_positions_that_do_not_come_from_the_mask_fail_verification(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the column, they are right for a row alone and wrong in a batch."""
    bound = FlavourModel._bound

    def by_column(self: FlavourModel, ids, mask, places, buffers):  # type: ignore[no-untyped-def]
        start = mask.shape[1] - ids.shape[1]
        places = np.broadcast_to(np.arange(start, mask.shape[1]), ids.shape)
        return bound(self, ids, mask, places, buffers)

    rows = list(PROMPTS.values())
    with FlavourAnswers(open_engine(built), "genai") as asked:
        asked.logits(rows)
        monkeypatch.setattr(FlavourModel, "_bound", by_column)
        asked.logits(rows[:1])
        with pytest.raises(VerificationError, match="padded batch"):
            asked.logits(rows)


def test_the_optimum_folder_has_the_models_own_configuration(tmp_path: Path) -> None:
    found = case("llama")
    model(found, "optimum", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    own = json.loads((found.source.path / "config.json").read_bytes())
    assert config == {**own, "use_cache": True}
    assert (tmp_path / "generation_config.json").is_file()
