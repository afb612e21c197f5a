"""The command lines as a user meets them: what they build, and what they say to what they cannot use."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import enginewright
from enginewright.backends.artifact import open_engine
from enginewright.cli import engine, optimize
from enginewright.recipes.errors import EnginewrightError
from tests import engines
from tests.passes.architectures import folder, save


def run_optimize(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(optimize, [str(argument) for argument in arguments])


def run_engine(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(engine, [str(argument) for argument in arguments])


def refused(result: Result, *words: str) -> None:
    """Exit 2, one message without a traceback that holds `words`."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, f"{word!r} is missing in:\n{result.output}"


def nothing_left(parent: Path, *expected: str) -> None:
    assert sorted(entry.name for entry in parent.iterdir()) == sorted(expected)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "llama"
    result = run_optimize(folder("llama"), "--recipe", "fp32", "-o", out)
    assert result.exit_code == 0, result.output
    return out


def test_optimize_inspect_generate(built: Path) -> None:
    shown = run_engine("inspect", built, "--check")
    assert shown.exit_code == 0, shown.output
    for word in ("llama", "fp32", "insert_paged_kv", "passed", "weights.bin"):
        assert word in shown.output
    assert re.search(r"runs on +cpu$", shown.output, re.MULTILINE)
    text = run_engine("generate", built, "w5 w6 w7", "--max-tokens", 5, "--ignore-eos")
    assert text.exit_code == 0, text.output
    lines = run_engine(
        "generate", built, "w5 w6 w7", "w8", "--max-tokens", 5, "--ignore-eos", "--json"
    ).output.splitlines()
    objects = [json.loads(line) for line in lines]
    assert [entry["prompt"] for entry in objects] == ["w5 w6 w7", "w8"]
    for entry in objects:
        assert {
            "prompt",
            "prompt_token_ids",
            "token_ids",
            "logprobs",
            "text",
            "finish_reason",
        } <= entry.keys()
        assert len(entry["token_ids"]) == len(entry["logprobs"]) == 5
        assert entry["finish_reason"] == "length"
    assert objects[0]["text"].strip() in text.output


def test_speculation_on_the_command_line(built: Path) -> None:
    prompts = ("w5 w6 w7 w5 w6 w7 w5 w6", "w8")
    arguments = ("generate", built, *prompts, "--max-tokens", 40, "--ignore-eos", "--json", "--threads", 1)
    plain, fast = (
        [json.loads(line) for line in run_engine(*arguments, *more).output.splitlines()]
        for more in ((), ("--speculate", "ngram", "--draft-tokens", 4))
    )
    assert [entry["drafted"] for entry in plain] == [0, 0] and any(entry["drafted"] for entry in fast)
    for one, other in zip(plain, fast, strict=True):
        assert {**other, "drafted": 0, "accepted": 0} == one and other["accepted"] <= other["drafted"]
    text = run_engine(*arguments[:-3], "--speculate", "ngram", "--draft-tokens", "auto")
    assert text.stdout == run_engine(*arguments[:-3]).stdout
    speed = (
        "bench",
        built,
        "--batch",
        2,
        "--prompt-tokens",
        8,
        "--new-tokens",
        40,
        "--repeat",
        1,
        "--threads",
        1,
    )
    shown = run_engine(*speed, "--speculate", "ngram", "--draft-tokens", 2)
    assert "tokens a sequence and step" in shown.output, shown.output
    (row,) = json.loads(run_engine(*speed, "--speculate", "ngram", "--json").stdout)["decode"]
    assert row["drafter"] == "ngram" and row["tokens_per_step"] >= 1 and row["step_ms"] > 0
    (row,) = json.loads(run_engine(*speed, "--json").stdout)["decode"]
    assert row.keys() == {"batch", "tokens_per_second", "step_ms"}


def test_speculation_that_cannot_be_is_refused(built: Path, tmp_path: Path) -> None:
    for command in (("generate", built, "w5"), ("bench", built), ("serve", built)):
        refused(run_engine(*command, "--speculate", "ngarm"), "no such drafter", "did you mean ngram")
        refused(run_engine(*command, "--speculate", tmp_path), "is not an engine")
        refused(run_engine(*command, "--draft-rule", "resample"), "draft_rule means nothing")
        refused(run_engine(*command, "--draft-tokens", 3), "means nothing without speculation")
        refused(run_engine(*command, "--speculate", "ngram", "--draft-tokens", "many"), "neither auto nor")
        refused(run_engine(*command, "--speculate", "ngram", "--draft-tokens", 65), "from 1 to 64")


def test_json_reports_the_build(tmp_path: Path) -> None:
    result = CliRunner(env={"COLUMNS": None}).invoke(
        optimize, [str(folder("qwen2")), "--recipe", "fp32", "-o", str(tmp_path / "e"), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["manifest"]["verification"]["verdict"] == "passed"
    assert {"name", "matches", "seconds", "notes"} <= report["passes"][0].keys()


def test_dump_writes_a_graph_after_every_pass(tmp_path: Path) -> None:
    result = run_optimize(
        folder("llama"), "--recipe", "fp32", "-o", tmp_path / "e", "--dump", tmp_path / "graphs", "--json"
    )
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert len(names) >= 10
    assert any("insert_paged_kv" in name for name in names)


def test_a_dump_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(
        run_optimize(folder("llama"), "-o", tmp_path / "engine", "--dump", tmp_path / "file" / "graphs"),
        "graphs cannot be written",
        "file/graphs",
    )
    nothing_left(tmp_path, "file")


def test_kernels_that_the_machine_lacks_are_refused_by_name(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEWRIGHT_ISA", "abacus")
    refused(run_engine("generate", built, "w5"), "'abacus'", "portable", "ENGINEWRIGHT_ISA")


def test_list_recipes() -> None:
    result = run_optimize("--list-recipes")
    assert result.exit_code == 0
    for name in ("fp32", "bf16", "int8", "int4", "keep"):
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/model"], ["no such folder or file: /no/such/model", "Hugging Face folder"]),
        (["models/no-such-model"], ["no such folder or file: models/no-such-model"]),
        (["{model}x"], ["no such folder or file", "did you mean {model}?"]),
        (["some-org/some-model"], ["no such folder or file: some-org/some-model", "network"]),
        (["{model}", "--recipe", "int5"], ["int5", "int4"]),
        (["{model}", "--set", "linear.wieght=int8"], ["wieght", "weight"]),
        (["{model}", "--set", "linear.weight=int5"], ["int5"]),
        (["{model}", "--set", "linear.weight"], ["KEY=VALUE"]),
        (["{model}", "--backend", "abacus"], ["abacus", "cpu"]),
        (["{learned}", "--set", "max_context=100000"], ["100000", "256"]),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    filled = [argument.format(model=folder("llama"), learned=folder("gpt2")) for argument in arguments]
    words = [word.format(model=folder("llama")) for word in words]
    refused(run_optimize(*filled, "-o", tmp_path / "engine"), *words)
    nothing_left(tmp_path)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    )
    refused(run_optimize(model, "-o", tmp_path / "engine"), "bert")
    nothing_left(tmp_path, "bert")


def test_a_hybrid_is_refused_by_name(tmp_path: Path) -> None:
    model = tmp_path / "mamba"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    refused(run_optimize(model, "-o", tmp_path / "engine"), "mamba")


@pytest.mark.parametrize("damage", ["missing", "truncated", "extra"])
def test_damaged_shards(tmp_path: Path, damage: str) -> None:
    model = tmp_path / "model"
    save("llama", model)
    weights = model / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        shutil.copy(weights, model / "model-00002-of-00002.safetensors")
    result = run_optimize(model, "--recipe", "fp32", "-o", tmp_path / "engine")
    if damage == "extra":  # a stray file beside the right one is reported, and changes nothing
        assert result.exit_code == 0, result.output
        assert "model-00002-of-00002.safetensors" in (tmp_path / "engine" / "build.json").read_text()
    else:
        refused(result, "safetensors")
        nothing_left(tmp_path, "model")


def test_an_existing_output_is_kept(tmp_path: Path, built: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    refused(run_optimize(folder("llama"), "--recipe", "fp32", "-o", precious), "exists")
    refused(run_optimize(folder("llama"), "--recipe", "fp32", "-o", precious, "--force"), "not an engine")
    assert (precious / "thesis.txt").read_text() == "years"
    copy = tmp_path / "engine"
    shutil.copytree(built, copy)
    refused(run_optimize(folder("llama"), "--recipe", "fp32", "-o", copy), "--force")
    assert run_optimize(folder("llama"), "--recipe", "fp32", "-o", copy, "--force").exit_code == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_pass(tmp_path: Path, value: float) -> None:
    model = save("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    arguments = [model, "--recipe", "fp32", "-o", tmp_path / "engine"]
    failed = run_optimize(
        *arguments, "--set", "verify.max_kl=null", "--set", "verify.max_perplexity_ratio=null"
    )
    assert failed.exit_code == 1, failed.output
    assert "source model returned logits that are not finite" in failed.output
    nothing_left(tmp_path, "model")
    built = run_optimize(*arguments, "--allow-unverified")
    assert built.exit_code == 0, built.output
    assert "not finite" in built.output
    verification = open_engine(tmp_path / "engine", check=True).manifest["verification"]
    assert verification["verdict"] == "failed" and verification["mean_kl"] is None
    assert run_engine("inspect", tmp_path / "engine").exit_code == 0


def test_builds_on_several_threads_take_turns(tmp_path: Path) -> None:
    def build(name: str) -> str:
        try:
            enginewright.optimize(folder("llama"), "fp32", tmp_path / name)
        except EnginewrightError as error:
            return str(error)
        return "built"

    with ThreadPoolExecutor(3) as pool:
        said = sorted(pool.map(build, ["one", "one", "two"]))
    assert said[1:] == ["built", "built"] and "one exists already" in said[0]
    nothing_left(tmp_path, "one", "two")


def test_a_failed_verification_publishes_nothing(tmp_path: Path) -> None:
    strict = ["--recipe", "int4", "--set", "verify.max_kl=1e-12", "-o", tmp_path / "engine"]
    result = run_optimize(folder("llama"), *strict)
    assert result.exit_code == 1, result.output
    assert "kl" in result.output and "Traceback" not in result.output
    nothing_left(tmp_path)
    allowed = run_optimize(folder("llama"), *strict, "--allow-unverified")
    assert allowed.exit_code == 0, allowed.output
    assert (
        json.loads((tmp_path / "engine" / "engine.json").read_text())["verification"]["verdict"] == "failed"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_asked_to_end_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    # Under nohup SIGHUP is ignored, and a child would inherit that.
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    code += "from enginewright.cli import optimize; optimize()"
    command = [sys.executable, "-c", code, str(folder("gemma3_text")), "-o", str(tmp_path / "engine")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.iterdir()) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
    nothing_left(tmp_path)


@pytest.mark.parametrize("delay", [0.5, 4.0, 7.0])
def test_ctrl_c_leaves_nothing(tmp_path: Path, delay: float) -> None:
    command = [
        sys.executable,
        "-c",
        "from enginewright.cli import optimize; optimize()",
        str(folder("gemma3_text")),
    ]
    process = subprocess.Popen([*command, "-o", str(tmp_path / "engine")], stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if (tmp_path / "engine").exists():  # it had been published: then it is whole
        assert run_engine("inspect", tmp_path / "engine", "--check").exit_code == 0
        return
    if delay > 1:  # Python itself may still be starting at the first instant
        assert "Traceback" not in errors, errors
    nothing_left(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("this machine does not let a test mount a file system")
    try:
        refused(run_optimize(folder("llama"), "--recipe", "fp32", "-o", small / "engine"), "disk is full")
        nothing_left(small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_generate_draws_and_stops_as_it_is_told() -> None:
    folder = engines.built("smollm2", "int4")
    message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    options = {"temperature": 1.5, "top_p": 0.9, "top_k": 30, "min_p": 0.02, "seed": 3, "max_tokens": 30}
    with enginewright.load(folder) as loaded:
        wanted = loaded.generate([message], chat=True, **options)[0]
        plain = loaded.generate([message], chat=True, temperature=1.5, seed=3, max_tokens=30)[0]
    assert wanted.token_ids != plain.token_ids
    given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    asked = ("generate", folder, "Name a colour.", "--chat", "--system", "Be brief.", *given)
    (line,) = run_engine(*asked, "--json").output.splitlines()
    assert json.loads(line)["token_ids"] == wanted.token_ids
    assert json.loads(line)["prompt_token_ids"] == wanted.prompt_token_ids
    assert run_engine(*asked).output == wanted.text + "\n"
    middle = wanted.text[len(wanted.text) // 2 :][:4]
    cut = run_engine(*asked, "--stop", "no such text", "--stop", middle).output
    assert cut == wanted.text[: wanted.text.index(middle)] + "\n"
    refused(run_engine("generate", folder, "x", "--system", "y"), "--system", "--chat")


def test_generate_tells_what_proposing_was_worth(built: Path) -> None:
    asked = ("generate", built, "w5 w6 w5 w6 w5 w6 w5", "--max-tokens", 60, "--ignore-eos")
    plain, told = run_engine(*asked), run_engine(*asked, "--speculate", "ngram", "--draft-tokens", 4)
    assert told.stdout == plain.stdout and plain.stderr == ""
    assert re.search(
        r"^ngram: [\d,]+ of [\d,]+ proposed tokens came true \(\d+%\): [1-5]\.\d\d tokens", told.stderr
    )


def test_generate_refuses_what_it_cannot_use(tmp_path: Path, built: Path) -> None:
    refused(run_engine("generate", tmp_path / "none", "x"), "none")
    refused(run_engine("generate", folder("llama"), "x"), "not an engine")
    refused(run_engine("generate", built, "w5", "--chat"), "chat template")
    refused(run_engine("generate", built, "w5 " * 300), "256")
    copy = tmp_path / "future"
    shutil.copytree(built, copy)
    manifest = json.loads((copy / "engine.json").read_text())
    (copy / "engine.json").write_text(json.dumps({**manifest, "format_version": 99}))
    refused(run_engine("generate", copy, "w5"), "99", "rebuild")


def test_backends_of_one_recipe_are_not_in_each_other_s_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = folder("llama").name
    assert enginewright.optimize(folder("llama"), "fp32").path == tmp_path / "engines" / f"{name}-fp32"
    pytest.importorskip("onnxruntime")
    for more, ending in (([], "onnx"), (["onnx.flavour=optimum"], "onnx-optimum")):
        built = enginewright.optimize(folder("llama"), "fp32", backend="onnx", overrides=more)
        assert built.path == tmp_path / "engines" / f"{name}-fp32-{ending}"


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, built: Path) -> None:
    again = tmp_path / "again"
    assert run_optimize(folder("llama"), "--recipe", "fp32", "-o", again).exit_code == 0
    assert (again / "engine.json").read_bytes() == (built / "engine.json").read_bytes()
