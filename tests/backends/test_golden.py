"""Golden outputs and the verdict `structure-only`, on the cpu backend told that it cannot run where it builds."""

from __future__ import annotations

import json
import pwd
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import enginewright
from enginewright.backends.artifact import open_engine
from enginewright.backends.cpu import CpuBackend
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.backends.golden import Golden, golden_sample, read_golden, write_golden
from enginewright.backends.golden_check import check_golden
from enginewright.cli import engine as command
from enginewright.recipes.errors import ArtifactError, VerificationError
from enginewright.recipes.recipe import load_recipe
from enginewright.runtime import first_load
from enginewright.verification.goldens import Kept, tolerance
from enginewright.verification.on_disk import verify_engine
from tests.passes import architectures

VOCAB = 50
SAMPLES = [[7], [3, 1], list(range(5, 40)), [9, 8, 7, 6, 5, 4, 3, 2, 1] * 4]


def answers(sequences: Any, chunk: int | None = None) -> list[np.ndarray]:
    """A model that says something of its own after every token."""
    return [
        np.stack(
            [
                np.random.default_rng([place, *tokens[: place + 1]]).normal(0, 3, VOCAB)
                for place in range(len(tokens))
            ]
        ).astype(np.float32)
        for tokens in sequences
    ]


def golden_of(samples: list[list[int]], **changes: Any) -> Golden:
    logits = answers(samples)
    scored = [
        np.log(np.exp(row.astype(float)).sum()) - row[token]
        for tokens, rows in zip(samples, logits, strict=True)
        for row, token in zip(rows, tokens[1:], strict=False)
    ]
    made = Golden(
        tuple(golden_sample(tokens, rows) for tokens, rows in zip(samples, logits, strict=True)),
        largest=float(max(np.abs(rows).max() for rows in logits)),
        tolerance=0.01,
        source_perplexity=float(np.exp(np.mean(scored))),
        max_perplexity_ratio=1.02,
    )
    return replace(made, **changes)


def test_goldens_are_read_as_they_were_written(tmp_path: Path) -> None:
    golden = golden_of(SAMPLES)
    path = tmp_path / write_golden(golden, tmp_path)
    assert read_golden(path) == golden and golden.counts == {"samples": 4, "tokens": 74, "rows": 21}
    first = path.read_bytes()
    write_golden(golden, tmp_path)
    assert path.read_bytes() == first and len(first) < 4000
    report = check_golden(golden, answers, VOCAB)
    assert report.passed and report.top1 == 1.0 and report.logit_error < 1e-5 and report.rows == 3 * 21
    assert abs(report.perplexity_ratio - 1) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(format=2),
        lambda value: value.update(samples=[]),
        lambda value: value.update(largest=0.0),
        lambda value: value.update(tolerance=None),
        lambda value: value.update(rounding={"mean": 0.1, "worst": -1.0}),
        lambda value: value["samples"][0].update(rows=[[1, [2], [3.0], 4.0]]),
        lambda value: value["samples"][0].update(rows=[[0, [2], [3.0, 1.0], 4.0]]),
        lambda value: value["samples"][0].update(rows=[]),
        lambda value: value["samples"][0].pop("tokens"),
    ],
)
def test_damaged_goldens_are_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / write_golden(golden_of(SAMPLES), tmp_path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match="golden outputs cannot be read"):
        read_golden(path)


def wrong(sample: int, row: int, off: float, chunk: int | None = None, place: int | None = None) -> Any:
    """`answers` with one logit changed: the best of a row, or the one at `place`; only with this `chunk`, if one is given."""

    def logits(sequences: Any, asked: int | None) -> list[np.ndarray]:
        found = answers(sequences)
        for tokens, rows in zip(sequences, found, strict=True):
            if tokens == SAMPLES[sample] and chunk in (None, asked):
                rows[row, rows[row].argmax() if place is None else place] += off
        return found

    return logits


@pytest.mark.parametrize(
    ("logits", "says"),
    [
        (wrong(2, 34, 0.5), "together in chunks: logits are off by"),
        (wrong(3, 0, -8.0, chunk=1), "together token by token: the best token differs in 1 of 21 rows"),
        (wrong(0, 0, float("nan")), "each alone: logits are not finite"),
        (
            wrong(2, 1, float("inf"), chunk=1),
            "token by token: logits are not finite",
        ),  # a row of which nothing is kept
        (wrong(1, 1, 30.0, place=49), "the best token differs"),  # a token that is not among the kept ones
        (wrong(2, 2, 900.0, place=44), "the perplexity ratio is"),
    ],
)
def test_answers_that_are_off_are_named_with_the_way_and_the_figures(logits: Any, says: str) -> None:
    report = check_golden(golden_of(SAMPLES), logits, VOCAB)
    assert not report.passed and says in "; ".join(report.failures)


def test_what_lies_within_the_tolerance_passes_and_ties_are_excused() -> None:
    golden = golden_of(SAMPLES)
    near = 0.9 * golden.tolerance * golden.largest
    assert check_golden(golden, wrong(2, 34, near), VOCAB).passed
    rows = [answers([tokens])[0] for tokens in SAMPLES]
    best = rows[0][0].argmax()
    rows[0][0, (best + 1) % VOCAB] = rows[0][0, best] - near  # the second best, close enough to overtake
    tied = replace(golden, samples=(golden_sample(SAMPLES[0], rows[0]), *golden.samples[1:]))

    def overtaken(sequences: Any, chunk: int | None) -> list[np.ndarray]:
        found = answers(sequences)
        for tokens, logits in zip(sequences, found, strict=True):
            if tokens == SAMPLES[0]:
                logits[0, (best + 1) % VOCAB] = rows[0][0, best] + 0.05 * near
        return found

    report = check_golden(tied, overtaken, VOCAB)
    assert report.top1 == 1.0 and not any("best token" in failure for failure in report.failures)


def test_one_row_in_twenty_may_be_off_by_three_tolerances() -> None:
    far = 2.5 * 0.01 * golden_of(SAMPLES).largest
    golden = golden_of(SAMPLES)  # of 21 rows
    report = check_golden(golden, wrong(2, 34, far), VOCAB)
    assert report.passed and 2 * golden.tolerance < report.logit_error < 3 * golden.tolerance
    assert not check_golden(golden, wrong(2, 34, 1.3 * far), VOCAB).passed

    def twice(sequences: Any, chunk: int | None) -> list[np.ndarray]:
        return [rows + np.float32(far) * (len(rows) > 30) for rows in answers(sequences)]

    assert "rows are beyond it" in "; ".join(check_golden(golden, twice, VOCAB).failures)


def noisy(scale: float, seed: int) -> Any:
    """`answers` as a run gives them whose roundings fell otherwise: every logit moved by its own noise."""

    def logits(sequences: Any, chunk: int | None = None) -> list[np.ndarray]:
        rng = np.random.default_rng([seed, chunk or 0])
        return [rows + rng.normal(0, scale, rows.shape).astype(np.float32) for rows in answers(sequences)]

    return logits


def test_integers_may_round_otherwise_but_not_by_more_than_rounding_costs() -> None:
    kept = Kept()
    for tokens, source, own in zip(SAMPLES, noisy(0.3, 1)(SAMPLES), answers(SAMPLES), strict=True):
        kept.add(tokens, source, own)
    own = kept.rounding
    assert own is not None and 0.01 < own.mean < 0.2 < 20 * own.mean and own.mean < own.worst
    strict = replace(golden_of(SAMPLES), max_perplexity_ratio=None)
    golden = replace(strict, rounding=own)
    again = noisy(0.3, 2)  # as far from the Program as the source is, in other places
    assert not check_golden(strict, again, VOCAB).passed
    report = check_golden(golden, again, VOCAB)
    assert report.passed and report.logit_error > 3 * golden.tolerance
    assert 0.5 * own.mean < report.divergence < 2 * own.mean
    lost = wrong(2, 17, -2.0, chunk=1)  # one row that is garbage: the mean alone would let it pass
    assert check_golden(replace(golden, rounding=replace(own, worst=99.0)), lost, VOCAB).passed
    for fault in (lost, noisy(0.9, 2), wrong(3, 0, -20.0, chunk=1), wrong(0, 0, float("nan"))):
        assert not check_golden(golden, fault, VOCAB).passed


def test_another_model_s_goldens_are_refused() -> None:
    with pytest.raises(ArtifactError, match="another model's"):
        check_golden(golden_of(SAMPLES), answers, 20)


def test_the_tolerance_follows_what_is_rounded() -> None:
    def of(name: str, *changes: str) -> float:
        return tolerance(load_recipe(name, list(changes)))

    assert of("fp16") < of("fp16", "compute=bf16") < of("int8", "compute=bf16", "linear.activation=int8")
    assert of("int4", "compute=f16", "linear.activation=f16", "head.activation=f16") == of("fp16")


# --------------------------------------------------------------------------------------------- a whole engine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A windowed model's engine from a machine that cannot run it; what was lowered is interpreted by the cpu executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "runs_here", lambda self, manifest: "no such processor")
        patch.setattr(CpuBackend, "rehearse", _rehearse)
        out = tmp_path_factory.mktemp("engines") / "elsewhere"
        yield enginewright.optimize(architectures.folder("gemma2"), "bf16", out).path


def _rehearse(self: CpuBackend, program: Any, recipe: Any, engine: Any) -> CpuExecutor:
    return CpuExecutor(engine.file("program.json"), engine.file("weights.bin"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_engine_that_did_not_run_says_so_and_takes_its_goldens_along(built: Path) -> None:
    artifact = open_engine(built, check=True)
    verification = artifact.manifest["verification"]
    assert verification["verdict"] == "structure-only" and artifact.build["not_run"] == "no such processor"
    assert (
        verification["mean_kl"] < 0.01 and verification["failures"] == []
    )  # the Program's, within the recipe's limits
    assert (
        verification["interpreted"]["relative_logit_error"] < 0.01
        and verification["interpreted"]["rows"] > 90
    )
    assert verification["golden"]["tokens"] == verification["tokens"]
    assert artifact.file("golden.json").stat().st_size < 12_000
    told = CliRunner(env={"COLUMNS": None}).invoke(command, ["inspect", str(built)]).output
    assert "verification: structure-only" in told and "its target could not run here" in told
    assert "checked at the first load" in told and "what was lowered, interpreted" in told


def test_where_it_cannot_run_it_is_verified_by_its_build(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "runs_here", lambda self, manifest: "no such processor")
    model = architectures.folder("gemma2")
    report = verify_engine(built, model)
    checks = {check.name: check for check in report.checks}
    own, source = checks["the engine's own answers"], checks["the model that it was built from"]
    assert report.passed and source.passed and own.passed is None and "no such processor" in own.found
    assert report.verification is not None
    assert report.verification["mean_kl"] == open_engine(built).manifest["verification"]["mean_kl"]
    (tmp_path / "baseline.json").write_text(json.dumps(report.to_dict()))
    assert verify_engine(built, model, baseline=tmp_path / "baseline.json").passed
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= -1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert not verify_engine(built, other).passed  # the same shapes, another model


def test_the_first_load_asks_and_later_ones_do_not(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = first_load.check_golden
    monkeypatch.setattr(first_load, "check_golden", lambda *arguments: asked.append(1) or real(*arguments))
    before = {path: path.read_bytes() for path in built.iterdir()}
    for count in (1, 1):
        with enginewright.load(built) as engine:
            assert engine.generate([[5, 3, 11]], max_tokens=4)[0].token_ids
            assert engine.loop.statistics().tokens_computed < 10  # what was asked at first is not counted
        assert len(asked) == count
    assert {path: path.read_bytes() for path in built.iterdir()} == before
    (record,) = (cache / "first-loads").iterdir()
    outcome = json.loads(record.read_text())
    assert outcome["passed"] is True and outcome["device"] == "cpu" and outcome["logit_error"] < 0.04
    monkeypatch.setattr(CpuExecutor, "device", "another processor, driver 2", raising=False)
    enginewright.load(built).close()
    assert len(asked) == 2
    record.write_text("half a rec")
    monkeypatch.delattr(CpuExecutor, "device")
    enginewright.load(built).close()
    assert len(asked) == 3


def test_an_engine_that_fails_refuses_to_serve_every_time(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose decode forgets the window: prefill is right, so only the second way of asking sees it."""
    closed: list[int] = []
    step, close = CpuExecutor.step, CpuExecutor.close

    def worse(self: CpuExecutor, given: Any) -> np.ndarray:
        logits = step(self, given)
        alone = len(given.tokens) == len(given.context_lens)
        return (
            logits + 5 * (given.context_lens[0] > 20) * (np.arange(logits.shape[1]) % 2) if alone else logits
        )

    monkeypatch.setattr(CpuExecutor, "step", worse)
    monkeypatch.setattr(CpuExecutor, "close", lambda self: closed.append(1) or close(self))
    for time in (1, 2):
        with pytest.raises(
            VerificationError, match=r"does not answer as it must on cpu(?s:.*)token by token"
        ) as raised:
            enginewright.load(built)
        assert "together in chunks" not in str(raised.value) and "perplexity ratio" in str(raised.value)
        assert len(closed) == time
    (record,) = (cache / "first-loads").iterdir()
    assert json.loads(record.read_text())["passed"] is False
    monkeypatch.undo()
    monkeypatch.setenv("ENGINEWRIGHT_CACHE", str(cache))
    enginewright.load(built).close()
    assert json.loads(record.read_text())["passed"] is True


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINEWRIGHT_CACHE", str(tmp_path / "file" / "inside"))
    enginewright.load(built).close()


def test_a_user_without_a_home_can_load(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("ENGINEWRIGHT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    enginewright.load(built).close()


def test_a_lowering_that_means_something_else_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = CpuExecutor.step
    monkeypatch.setattr(CpuBackend, "runs_here", lambda self, manifest: "no such processor")
    monkeypatch.setattr(CpuBackend, "rehearse", _rehearse)
    monkeypatch.setattr(CpuExecutor, "step", lambda self, given: step(self, given) * np.float32(1.1))
    with pytest.raises(VerificationError, match="what was lowered, interpreted: logits are off by"):
        enginewright.optimize(architectures.folder("qwen3"), "bf16", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
    report = enginewright.optimize(
        architectures.folder("qwen3"), "bf16", tmp_path / "engine", allow_unverified=True
    )
    assert report.verification["verdict"] == "failed"


def test_an_engine_without_its_goldens_is_refused(built: Path, tmp_path: Path) -> None:
    artifact = open_engine(built)
    del artifact.manifest["files"]["golden.json"]
    with pytest.raises(ArtifactError, match="holds no golden outputs"):
        enginewright.load(artifact)
