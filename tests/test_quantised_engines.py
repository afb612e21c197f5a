"""Engines of ready-made quantised folders: the checkpoint's integers stand unchanged in weights.bin, and the engine verifies."""

import json
from pathlib import Path

import numpy as np
import pytest

from enginewright.backends.cpu.pack import Layout, Rows, unpack_tiles
from enginewright.build import optimize
from tests.passes import quantised as make

ONE = {"num_hidden_layers": 1}
CASES = {
    "awq": lambda path: make.write_awq(path, **ONE),
    "gptq-3-order": lambda path: make.write_gptq(path, bits=3, desc_act=True, **ONE),
    "gptq-8-channel": lambda path: make.write_gptq(path, bits=8, group=0, **ONE),
    "packed-asymmetric": lambda path: make.write_packed(path, symmetric=False, **ONE),
    "packed-8": lambda path: make.write_packed(path, bits=8, **ONE),
    "w8a8": lambda path: make.write_w8a8(path, **ONE),
    "w8a8-static": lambda path: make.write_w8a8(path, static=True, **ONE),
    "fp8": lambda path: make.write_w8a8(path, fp8=True, **ONE),
    "bitsandbytes": lambda path: make.write_bitsandbytes(path, **ONE),
}


def stored(engine: Path, name: str) -> tuple[Rows, dict]:
    """The unpacked matrix whose name holds `name`, and its entry in program.json."""
    entries = json.loads((engine / "program.json").read_text())["weights"]
    entry = next(e for e in entries if e["kind"] == "linear" and name in e["name"])
    layout = Layout(entry["format"], entry["n"], entry["k"])
    size = layout.tiles * layout.tile_bytes
    data = np.fromfile(engine / "weights.bin", np.uint8, size, offset=entry["offset"])
    return unpack_tiles(layout, data), entry


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoints_integers_stand_in_the_engine(tmp_path, case):
    written = CASES[case](tmp_path / "model")
    report = optimize(written.path, "keep", tmp_path / "engine", overrides=["verify.max_kl=0.1"])
    assert report.verification["verdict"] == "passed" and report.verification["invariant"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        matrix = written.matrices[f"model.layers.0.{name}"]
        rows, entry = stored(report.path, name)
        codes = matrix.codes - (128 if case == "packed-8" else 0)
        codes = codes if matrix.order is None else codes[:, matrix.order]
        if case == "fp8":
            codes = written.tensors[f"model.layers.0.{name}.weight"].view(make.torch.uint8).numpy()
        np.testing.assert_array_equal(rows.values, codes)
        np.testing.assert_array_equal(rows.scales, matrix.scales.astype(np.float32))
        if rows.offsets is not None:
            np.testing.assert_array_equal(rows.offsets, matrix.zeros)
        activation = {"w8a8": "int8", "w8a8-static": "int8_static"}.get(case)
        assert entry.get("activation") == activation
        assert entry.get("activation_scale") == (make.INPUT_SCALE if case == "w8a8-static" else None)
