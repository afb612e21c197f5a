"""`optimize --plan`: from a configuration alone to bytes and tokens a second, and to everything that stands in the way."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from enginewright.backends.cpu import lowering
from enginewright.cli import optimize
from enginewright.inspection import print_tables
from enginewright.passes.normalising import rewriter
from enginewright.planning import machine
from enginewright.planning.devices import DEVICES, Device, find_device
from enginewright.planning.memory import Cache, sequences_that_fit
from enginewright.planning.plan import plan
from enginewright.planning.structure import Attention
from enginewright.planning.tables import plan_tables
from enginewright.recipes.errors import InputError
from tests.planning.configurations import LLAMA_70B, LONG_70B, SMALL, write


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(optimize, [str(argument) for argument in arguments])


def test_the_well_known_figures_of_a_llama_of_70_billion(tmp_path: Path) -> None:
    model = write(tmp_path / "llama-70b", LLAMA_70B)
    (model / "model.safetensors").write_bytes(b"not read")
    file = tmp_path / "plan.json"
    result = run(model, "--recipe", "fp16", "--plan", "--device", "a100 80gb", "--json", file)
    assert result.exit_code == 0 and not result.output, result.output
    told = json.loads(file.read_text())
    assert told["can_be_built"] and told["backend"] is None and not told["device"]["measured"]
    assert told["parameters"] == 68_976_648_192
    assert told["engine"]["bytes"] == pytest.approx(140e9, rel=0.02)  # 2 × 70e9
    assert told["layers"]["captured"] == 2 and [len(kind) for kind in told["layers"]["kinds"]] == [80]
    one = told["roofline"]["decode"][0]
    assert one["batch"] == 1 and one["reading_seconds"] > one["computing_seconds"]
    assert one["reading_seconds"] * 2039 / 2000 == pytest.approx(0.070, rel=0.02)  # at 2 TB/s
    assert told["kv_cache"]["token_bytes"] == 80 * 8 * 128 * 2 * 2 == 327_680
    assert told["memory"]["devices_needed"] == 2
    assert [entry["batch"] for entry in told["roofline"]["decode"]] == [1, 8, 9]


def test_keys_and_values_without_grouped_heads() -> None:
    for heads, expected in ((64, 2_621_440), (8, 327_680)):
        cache = Cache.of([Attention(0, 64, heads, 128, 128, layers=80)], "f16", 16)
        assert cache.token_bytes == expected
        assert cache.held_bytes(1000) == 1008 * expected  # whole pages
    assert sequences_that_fit(cache, 80e9, 40_000_000_000, 4096) == 32e9 // (4096 * 327_680)


def test_windows_bound_what_is_held_and_read() -> None:
    attentions = [Attention(1024, 4, 1, 256, 256, layers=5), Attention(0, 4, 1, 256, 256, layers=1)]
    cache = Cache.of(attentions, "bf16", 16)
    assert [group.token_bytes for group in cache.groups] == [1024, 5120]
    assert cache.read_bytes(500) == 500 * 6144
    assert cache.read_bytes(10_000) == 10_000 * 1024 + 1024 * 5120
    assert cache.held_bytes(100_000) < 100_000 * 1024 + (1024 + 512 + 32) * 5120


def _fast_machine(products: Any, megabytes: int = 1, seconds: float = 0.0) -> Device:
    return Device(
        "this machine", 32e9, 40e9, {"int8": 2e12, "bf16": 1e12, "f32": 5e11}, "made up", measured=True
    )


def test_a_plan_on_this_machine_in_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.planning.plan.this_machine", _fast_machine)
    monkeypatch.chdir(tmp_path)
    model = write(tmp_path / "small", SMALL)
    result = run(model, "--plan", "--context", 200, "--set", "draft.layers=2")
    assert result.exit_code == 0, result.output
    for words in (
        "can be built               yes", "7 of 1 kind", "200 tokens", "weights.bin, to the byte", "insert_paged_kv",
        "this machine's, measured just now", "for keys and values", "turns compute-bound",
    ):  # fmt: skip
        assert words in result.output, f"{words!r} is missing in:\n{result.output}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["small"]
    assert [entry.name for entry in model.iterdir()] == ["config.json"]


def test_every_operation_that_is_not_known_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.planning.plan.this_machine", _fast_machine)
    model = write(tmp_path / "small", SMALL)
    for name in ("silu", "rsqrt"):
        monkeypatch.delitem(rewriter.RULES, name)
    result = run(model, "--plan", "--json")
    assert result.exit_code == 2
    refused = json.loads(result.stdout)["refused"]
    assert [item["module"].rpartition(".")[2] for item in refused] == [
        "input_layernorm", "post_attention_layernorm", "act_fn", "norm",
    ]  # fmt: skip
    assert [item["layers"] for item in refused] == [7, 7, 7, 1]
    assert [item["message"].partition(" ")[0] for item in refused] == ["rsqrt", "rsqrt", "silu", "rsqrt"]


def test_every_operation_that_a_backend_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewright.planning.plan.this_machine", _fast_machine)
    for name in ("ew::add_rms_norm", "ew::gated_activation"):
        monkeypatch.delitem(lowering.RULES, name)
    refused = plan(write(tmp_path / "small", SMALL)).refused
    named = {
        name
        for item in refused
        for name in ("ew::add_rms_norm", "ew::gated_activation")
        if name in item.message
    }
    assert named == {"ew::add_rms_norm", "ew::gated_activation"}
    assert all(item.module and item.expected for item in refused)


def test_all_that_a_backend_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("enginewright.planning.plan.this_machine", _fast_machine)
    made = plan(write(tmp_path / "small", SMALL, num_hidden_layers=1), "fp16")
    assert [item.found for item in made.refused] == [
        "compute: f16", "kv_cache.format: f16", "embedding.weight: f16", "linear.weight: f16", "head.weight: f16",
    ]  # fmt: skip
    assert made.structure is not None and made.structure.engine_bytes > 0  # told all the same
    print_tables(plan_tables(made))
    said = capsys.readouterr().out
    assert "can be built               no" in said and "set linear.weight to one of them" in said


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, ["recurrent state", "neither full nor sliding"]),
        ({"layer_types": ["chunked_attention"] * 3 + ["linear_attention"] * 4}, ["chunked", "neither full nor sliding"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["rotary position embedding"]),
    ],
)  # fmt: skip
def test_kinds_of_models_that_do_not_fit(changes: dict[str, Any], reasons: list[str], tmp_path: Path) -> None:
    made = plan(write(tmp_path / "small", SMALL, **changes), device="L4")
    assert made.structure is None and len(made.refused) == len(reasons)
    for item, reason in zip(made.refused, reasons, strict=True):
        assert reason in item.message


def test_devices_by_name() -> None:
    assert (
        find_device("a100-80gb").name
        == find_device("A100 80 GB").name
        == find_device("a100_80").name
        == "A100-80GB"
    )
    assert find_device("RTX 4090").memory == 24e9
    with pytest.raises(InputError, match="H100-SXM or H100-PCIe"):
        find_device("h100")
    with pytest.raises(InputError, match="did you mean L40S"):
        find_device("L40X")
    assert len({device.name for device in DEVICES}) == len(DEVICES) >= 12
    for device in DEVICES:
        assert (
            device.source
            and device.bandwidth > 0
            and device.rate("int8_g64") >= device.rate("f16") >= device.rate("f32")
        )
    assert find_device("A100-80GB").rate("fp8") == 312e12  # no units for fp8: in bf16


def test_this_machine_is_measured() -> None:
    found = machine.this_machine([("int4_g64", "int8_g64")], megabytes=16, seconds=0.01)
    assert found.measured and found.bandwidth > 1e8
    assert set(found.rates) == {"int8", "bf16", "f32"} and min(found.rates.values()) > 1e8


def test_this_machine_is_measured_for_another_backend(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    made = plan(write(tmp_path / "small", SMALL), "int4", backend="onnx")
    assert made.device.measured and made.work is not None, made.refused


def test_options_that_mean_nothing(tmp_path: Path) -> None:
    model = write(tmp_path / "small", SMALL)
    for arguments, words in (
        (("--device", "L4"), "--device means nothing here"),
        (("--context", "99"), "--context means nothing here"),
        (("--plan", "--force"), "--force means nothing here"),
        (("--plan", "--device", "L4", "--recipe", "int5"), "unknown recipe"),
    ):
        result = run(model, *arguments)
        assert result.exit_code == 2 and words in result.output, result.output


@pytest.mark.slow
def test_time_and_memory_of_a_plan(tmp_path: Path) -> None:
    model = write(tmp_path / "llama-70b", LONG_70B)
    program = "import sys; from enginewright.cli import optimize; optimize()"
    for recipe in ("int4", "int4-gptq"):
        command = [
            sys.executable,
            "-c",
            program,
            str(model),
            "--recipe",
            recipe,
            "--plan",
            "--device",
            "A100-80GB",
            "--json",
        ]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["memory"]["devices_needed"] == 1 and told["engine"]["bytes"] < 42e9  # int4 fits one card
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"{recipe}: {seconds:.1f} s, peak {peak / 1e9:.2f} GB")
        assert peak <= 1e9


@pytest.mark.parametrize("size", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_an_empty_model_is_refused(tmp_path: Path, size: str) -> None:
    model = write(tmp_path / "model", {**LLAMA_70B, size: 0})
    result = run(model, "--plan", "--device", "A100-80GB")
    assert result.exit_code == 2 and size in result.output, result.output
