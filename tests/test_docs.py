"""What the documentation shows is run, and its tables are held against the code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import enginewright
from enginewright.runtime.request import SamplingOptions
from tests import engines

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _defaults(text: str, heading: str) -> dict[str, str]:
    """The first two columns of the table under a heading, without the marks of code."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", section, re.MULTILINE))


def test_the_examples_of_the_python_interface_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "smollm2-135m-int4").symlink_to(engines.built("smollm2", "int4"))
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in _blocks(PYTHON) if "optimize(" not in block]
    assert len(blocks) >= 8
    names: dict[str, object] = {"enginewright": enginewright}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "Paris" in said and '"city"' in said and re.search(r"^(yes|no)$", said, re.MULTILINE)
    assert "True" in said  # the same seed, the same answers


def test_the_examples_of_building_name_real_arguments() -> None:
    known = inspect.signature(enginewright.optimize).parameters
    for block in _blocks(PYTHON):
        if "optimize(" in block:
            for pair in re.findall(r"(?:^ +|, )(\w+)=", block, re.MULTILINE):
                assert pair in known


def test_the_table_of_sampling_options_is_whole() -> None:
    told = _defaults(PYTHON, "Sampling options")
    assert told == {option.name: f"`{option.default!r}`" for option in fields(SamplingOptions)}


def test_the_table_of_load_names_real_arguments() -> None:
    known = inspect.signature(enginewright.load).parameters
    for name, told in _defaults(PYTHON, "Load").items():
        default = known[name].default
        if default is not None:
            assert told.strip("`").replace('"', "'") == repr(default), name
