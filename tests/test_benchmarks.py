"""The tools under benchmarks/: texts that stay apart, figures that are right, and a whole measurement of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import overhead, quality, texts
from benchmarks.divergence import bootstrap, divergence, losses
from tests import engines
from tests.passes.architectures import VOCAB, folder


def write_pages(root: Path) -> None:
    pages = root / "python3-doc" / "html" / "_sources" / "library"
    pages.mkdir(parents=True)
    for number in range(170):
        (pages / f"{number:03d}.rst.txt").write_text(f"page {number}")


def test_no_text_is_both_measured_and_calibrated_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_DOCS", tmp_path)
    assert texts.calibration_text() is None
    assert any("python3-doc" in note for note in texts.evaluation_texts()[1])
    write_pages(tmp_path)
    calibrating = texts.calibration_text()
    assert calibrating is not None
    measured = texts.evaluation_texts()[0]["python docs"].splitlines()
    assert measured == [f"page {number}" for number in range(40, 60)]
    assert calibrating.splitlines() == [f"page {number}" for number in range(100, 160)]


def test_chunks_are_windows_of_one_text_each_with_its_first_tokens() -> None:
    def encode(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    text = " ".join("x" * (number % 5 + 1) for number in range(600))
    ids = encode(text)
    assert texts.chunks(encode, text, 256, chunk=64) == [ids[at : at + 64] for at in range(0, 256, 64)]
    assert texts.chunks(encode, text, 32, first=[9]) == [[9, *ids[:32]]]
    with pytest.raises(ValueError, match="601 are wanted"):
        texts.chunks(encode, text, 601)


def test_divergences_and_losses_are_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(150, 37, generator=generator) for _ in range(2))
    tokens = torch.randint(0, 37, (150,), generator=generator)
    kl = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True)
    np.testing.assert_allclose(divergence(p.numpy(), q.numpy()), kl.sum(-1).numpy(), rtol=1e-4)
    loss = torch.nn.functional.cross_entropy(q[:-1], tokens[1:], reduction="none")
    np.testing.assert_allclose(losses(q.numpy(), tokens.tolist()), loss.numpy(), rtol=1e-5)


def test_the_bootstrap_sees_a_difference_and_does_not_invent_one() -> None:
    chance = np.random.default_rng(1)
    a = chance.exponential(1.0, 2048)
    smaller = bootstrap(a, a * 0.9, 64)
    assert smaller["difference"] == pytest.approx(-0.1 * a.mean()) and smaller["b_is_smaller"] == 1
    assert smaller["low"] < smaller["difference"] < smaller["high"] < 0
    other = bootstrap(a, chance.permutation(a), 64)
    assert other["low"] < 0 < other["high"] and 0.02 < other["b_is_smaller"] < 0.98
    # Tokens that depend on their neighbours are worth fewer: blocks say so.
    steps = np.repeat(chance.normal(size=32), 64)
    alone, together = (bootstrap(np.zeros(2048), steps, block) for block in (1, 64))
    assert together["high"] - together["low"] > 4 * (alone["high"] - alone["low"])
    with pytest.raises(ValueError, match="no block"):
        bootstrap(a[:8], a[:8], 64)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> quality.Work:
    generator = torch.Generator().manual_seed(5)

    def piece() -> list[int]:
        return [1, *torch.randint(3, VOCAB, (48,), generator=generator).tolist()]

    chunks = {"one": [piece(), piece()], "two": [piece()]}
    return quality.Work(str(folder("llama")), chunks, 1, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def base(work: quality.Work) -> dict[str, np.ndarray]:
    return quality.reference(work)


def test_the_reference_is_transformers_model(work: quality.Work, base: dict[str, np.ndarray]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([work.chunks["one"][1]])).logits[0]
    assert divergence(logits.numpy(), np.load(work.logits_file("one", 1))).max() < 1e-6
    loss = torch.nn.functional.cross_entropy(logits[1:-1], torch.tensor(work.chunks["one"][1][2:]))
    assert base["one"][47:].mean() == pytest.approx(float(loss), rel=1e-4)
    assert len(base["one"]) == 2 * 47 and len(base["two"]) == 47


def test_weights_alone_leave_out_head_and_activations(
    work: quality.Work, base: dict[str, np.ndarray]
) -> None:
    outcome = quality.measure(work, "int8", ["linear.weight=f32"], None)
    weights, engine = outcome.figures["weights"], outcome.figures["engine"]
    assert max(figures.kl.max() for figures in weights.values()) < 1e-9
    assert min(figures.kl.mean() for figures in engine.values()) > 1e-5
    assert len(weights["one"].kl) == 2 * 48 and len(weights["two"].loss) == 47
    assert outcome.peak_bytes > 100e6 and outcome.seconds > 0 and outcome.engine_bytes > 10_000


def test_tables_and_json_tell_what_was_measured(work: quality.Work, base: dict[str, np.ndarray]) -> None:
    outcome = quality.measure(work, "int4", ["linear.weight=int4_g16", "verify.max_kl=null"], None)
    weights = outcome.figures["weights"]["one"]
    assert outcome.figures["engine"]["one"].kl.mean() > weights.kl.mean() > 1e-4
    # Rows of 40, 48 and 72 inputs have 3, 3 and 5 groups of 32 bits.
    bits = 4 + 32 * (240 * 3 + 40 * 3 + 40 * 5) / (240 * 40 + 40 * 48 + 40 * 72)
    assert outcome.bits_a_weight == pytest.approx(bits)
    better = quality.Outcome(
        "better",
        figures={
            kind: {text: quality.Figures(found.kl / 2, found.loss) for text, found in figures.items()}
            for kind, figures in outcome.figures.items()
        },
    )
    lost = quality.Outcome("lost", failure="there is no such format")
    lines = quality.quality_table([outcome, better, lost], base).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + 1 + 2 + 2 + 1
    assert f"{weights.kl.mean():.4f}" in lines[3] and f"{weights.perplexity:.3f}" in lines[3]
    assert "no such format" in lines[-1]
    compared = quality.comparison_table([outcome, better], [("int4", "better")], 16).splitlines()
    assert len(compared) == 2 + 2 * 3 and all("100.0%" in line for line in compared[2:])
    told = json.loads(quality.to_json([outcome], base, {"model": "m"}))
    figures = told["recipes"][0]["figures"]["weights"]["one"]
    assert figures["kl"] == pytest.approx(np.mean(figures["kl_of_tokens"]), rel=1e-3)
    assert told["reference_perplexity"]["two"] == pytest.approx(float(np.exp(base["two"].mean())))


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_DOCS", tmp_path)
    write_pages(tmp_path)
    run = CliRunner().invoke(quality.main, ["--write-calibration", str(tmp_path / "text.txt")])
    assert run.exit_code == 0 and (tmp_path / "text.txt").read_text().startswith("page 100\n")
    for arguments, word in (
        ([], "--model is needed"),
        (["--model", str(folder("llama")), "--recipes", "int5"], "int5"),
        (["--model", str(folder("llama")), "--recipes", "int4", "--compare", "int4", "int8"], "int8"),
        (["--model", "/no/such/model", "--recipes", "int4"], "/no/such/model"),
    ):
        run = CliRunner().invoke(quality.main, arguments)
        assert run.exit_code == 2 and word in run.output, run.output


def test_what_python_costs_in_a_full_server(tmp_path: Path) -> None:
    figures = tmp_path / "overhead.json"
    arguments = ["--engine", str(engines.built("smollm2", "int4")), "--streams", "3", "--tokens", "20"]
    done = CliRunner().invoke(overhead.main, [*arguments, "--threads", "1", "--json", str(figures)])
    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    assert found["steps"] >= 10 and found["period"] >= found["native"] > 0
    assert found["loop_cpu"] > 0 and found["events_cpu"] > 0 and "3 streams" in done.output
