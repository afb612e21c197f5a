"""`optimize --report`: its files, its tables, what it refuses; and what `engine inspect` says of a calibrated engine."""

import csv
import importlib.util
import struct
from pathlib import Path

import pytest

import enginewright
from enginewright import report
from tests.passes.architectures import folder
from tests.test_cli import nothing_left, refused, run_engine, run_optimize

SMALL = ("--set", "calibration.samples=6", "--set", "calibration.length=48", "--set", "verify.max_kl=null")
CANDIDATES = "mixed.candidates=[int3_g16, int4_g16, int8]"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def layer(unit: str, kl: float, **changes: object) -> dict[str, object]:
    cost = {"unit": unit, "format": "int4_g64", "activation": "int8_g64", "weights": 1000, "bits": 4.5}
    return {**cost, "bytes": 562.5, "relative_error": 0.07, "kl": kl, "tokens": 512, **changes}


def model_of(layers: int) -> list[dict[str, object]]:
    parts = ("self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj")
    return [layer(f"model.layers.{i}.{part}", 1e-3 / (i + 1)) for i in range(layers) for part in parts]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(engine, report, what was printed) of formats chosen by sensitivity."""
    root = tmp_path_factory.mktemp("mixed")
    given = ("--recipe", "auto", "--set", "mixed.budget=6.5", "--set", CANDIDATES, *SMALL)
    result = run_optimize(folder("llama"), *given, "-o", root / "engine", "--report", root / "report")
    assert result.exit_code == 0, result.output
    return root / "engine", root / "report", result.output


def test_the_files_and_the_tables_agree(mixed: tuple[Path, Path, str]) -> None:
    engine, folder_, printed = mixed
    assert sorted(path.name for path in folder_.iterdir()) == ["layers.csv", "layers.png", "mixed.csv"]
    rows = rows_of(folder_ / "layers.csv")
    assert len(rows) == 2 * 4 + 2 and sorted(int(row["place"]) for row in rows) == list(range(len(rows)))
    kl = [float(row["kl"]) for row in rows]
    assert kl == sorted(kl, reverse=True) and kl[0] > 0
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-4)
    assert "what rounding cost" in printed and f"total of {len(rows)} units" in printed
    assert rows[0]["unit"] in printed and f"{kl[0]:.3g}" in printed
    width, height = png_size(folder_ / "layers.png")
    assert width >= 1000 and height >= 800

    manifest = enginewright.backends.artifact.open_engine(engine).manifest
    table = manifest["calibration"]["quantise"]["mixed"]
    chosen = {row["unit"]: row["format"] for row in rows_of(folder_ / "mixed.csv") if row["chosen"] == "yes"}
    assert chosen == {entry["unit"]: entry["chosen"] for entry in table}
    assert chosen.items() <= {row["unit"]: row["format"] for row in rows}.items()
    assert len(rows_of(folder_ / "mixed.csv")) == 3 * len(table)
    assert "formats chosen by sensitivity" in printed and printed.count("●") == len(table) + 1


def test_inspect_says_what_calibration_did(mixed: tuple[Path, Path, str]) -> None:
    engine, _, _ = mixed
    shown = run_engine("inspect", engine)
    assert shown.exit_code == 0, shown.output
    for word in ("calibration", "self", "6, 288, 0", "bits a weight", "formats chosen"):
        assert word in shown.output
    assert "●" not in shown.output
    detailed = run_engine("inspect", engine, "--layers")
    assert detailed.exit_code == 0, detailed.output
    for word in ("●", "int3_g16", "error of each rounded matrix", "model.layers.1.mlp.down_proj"):
        assert word in detailed.output


def test_a_report_needs_no_calibration(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mixed.csv").write_text("of an earlier build")
    built = enginewright.optimize(folder("llama"), "int8", tmp_path / "engine", report=tmp_path / "report")
    rows = rows_of(tmp_path / "report" / "layers.csv")
    assert [row["unit"] for row in report.by_cost(built.layers)] == [row["unit"] for row in rows]
    assert {row["format"] for row in rows} == {"int8"} and rows[0]["tokens"] == "256"
    assert not (tmp_path / "report" / "mixed.csv").exists()
    shown = run_engine("inspect", tmp_path / "engine", "--layers")
    assert shown.exit_code == 0 and "does not calibrate" in shown.output


def test_a_report_changes_no_byte_of_the_engine(tmp_path: Path) -> None:
    for name, extra in (("plain", ()), ("reported", ("--report", tmp_path / "report"))):
        result = run_optimize(folder("llama"), "--recipe", "int8", "-o", tmp_path / name, *extra)
        assert result.exit_code == 0, result.output
    for file in ("engine.json", "weights.bin", "program.json"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "reported" / file).read_bytes()


def test_an_engine_that_fails_verification_is_reported_too(tmp_path: Path) -> None:
    given = ("--recipe", "int4", "--set", "linear.weight=int4_g16", "--set", "verify.max_kl=1e-12")
    result = run_optimize(folder("llama"), *given, "-o", tmp_path / "engine", "--report", tmp_path / "report")
    assert result.exit_code == 1, result.output
    nothing_left(tmp_path, "report")
    assert len(rows_of(tmp_path / "report" / "layers.csv")) == 10


def test_what_a_report_needs_is_asked_for_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("-o", tmp_path / "engine", "--report", tmp_path / "report")
    refused(run_optimize("/no/such/model", "--recipe", "fp32", *out), "nothing to report", "fp32")
    (tmp_path / "file").write_text("")
    given = ("-o", tmp_path / "engine", "--report", tmp_path / "file" / "report")
    refused(run_optimize("/no/such/model", *given), "report cannot be written", "file/report")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    refused(run_optimize("/no/such/model", *out), "matplotlib", "pip install matplotlib")
    nothing_left(tmp_path, "file")


def test_the_table_shows_the_worst_twelve_and_the_sum_of_all() -> None:
    from enginewright.inspection import layers_table

    layers = model_of(30)
    table = layers_table([*layers, layer("lm_head", 0.0, weights=0, bytes=0.0)])
    assert table.row_count == 12 + 2
    units, sizes, shares = (list(table.columns[index].cells) for index in (0, 3, 6))
    assert units[:4] == [entry["unit"] for entry in layers[:4]]
    assert units[12] == "… and 109 more (layers.csv)" and units[13] == "total of 121 units"
    assert sizes[13] == "67.5 kB" and shares[13] == "100.0%"


@pytest.mark.parametrize("layers", [0, 7, 30])
def test_the_picture_grows_with_the_model(tmp_path: Path, layers: int) -> None:
    units = [layer("model.embed_tokens", 0.0, format="int8", bits=8.1), *model_of(layers)]
    report.draw(tmp_path / "layers.png", units, "a title")
    width, _ = png_size(tmp_path / "layers.png")
    assert width == pytest.approx(130 * max(9.0, 2.2 + 0.13 * len(units)), abs=2)


def test_bars_are_named_by_their_part_and_grouped_by_layer() -> None:
    units = [str(entry["unit"]) for entry in model_of(2)]
    assert [report._short(unit) for unit in units[:4]] == ["q+k+v", "o", "gate+up", "down"]
    assert report._short("transformer.h.3.attn.c_attn") == "c_attn"
    groups = report._groups(["model.embed_tokens", *units, "lm_head"])
    assert groups == [("", 0, 1), ("0", 1, 5), ("1", 5, 9), ("", 9, 10)]
