"""The tables of docs/backends.md are what the backends say of themselves.

After a backend has learnt something:  python -m tests.backends.test_backends_page   rewrites them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.backends import BACKENDS, get_backend
from enginewright.passes.dialect import OPS
from enginewright.recipes.formats import COMPUTE_FORMATS, KV_FORMATS, WEIGHT_FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backends.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
_NEVER_FINAL = ("attention",)  # what insert_paged_kv has replaced before a backend sees it


def _able() -> dict[str, Mapping[str, Any]]:
    """Backends that lower a final Program, and their capabilities."""
    found = {name: get_backend(name).capabilities for name in BACKENDS}
    return {name: able for name, able in found.items() if "ops" in able}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ops(able: dict[str, Mapping[str, Any]]) -> str:
    rows = []
    for name in OPS:
        if name in _NEVER_FINAL:
            cells = ["not in a final program"] * len(able)
        else:
            cells = ["lowered" if f"ew::{name}" in one["ops"] else "refused" for one in able.values()]
        rows.append([f"`{name}`", *cells])
    return _table(["op of the dialect", *able], rows)


def _aten(able: dict[str, Mapping[str, Any]]) -> str:
    """ATen ops by which backends have a rule for them."""
    names = sorted({op for one in able.values() for op in one["ops"] if op.startswith("aten::")})
    by: dict[tuple[bool, ...], list[str]] = {}
    for name in names:
        by.setdefault(tuple(name in one["ops"] for one in able.values()), []).append(name[6:])
    rows = [
        ["`" + "`, `".join(ops) + "`", *("lowered" if has else "refused" for has in held)]
        for held, ops in sorted(by.items(), reverse=True)
    ]
    return _table(["ATen ops", *able], rows)


def _formats(able: dict[str, Mapping[str, Any]]) -> str:
    rows = []
    for form in WEIGHT_FORMATS:
        cells = []
        for one in able.values():
            held = form in one["weight_formats"]
            beside = one.get("activation_formats", {}).get(form, [])
            cells.append(" ".join(beside) if held else "refused")
        rows.append([f"`{form}`", *cells])
    for key, known in (("kv_formats", KV_FORMATS), ("compute", COMPUTE_FORMATS[1:])):
        for form in known:
            cells = [
                "its own" if one.get(key) == ["auto"] else "yes" if form in one[key] else "refused"
                for one in able.values()
            ]
            rows.append([f"{'cache' if key == 'kv_formats' else 'compute'} `{form}`", *cells])
    return _table(["weights, and activations beside them", *able], _merged(rows))


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows of equal cells as one."""
    by: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        by.setdefault((name.partition("`")[0], *cells), []).append(name)
    return [[", ".join(names), *cells[1:]] for cells, names in by.items()]


def tables() -> str:
    able = _able()
    return "\n".join(part(able) for part in (_ops, _aten, _formats))


def test_the_page_says_what_the_backends_say() -> None:
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    written, end, _ = rest.partition(END)
    assert begin and end, "docs/backends.md has lost the marks around its tables"
    assert written == tables(), "docs/backends.md is stale: python -m tests.backends.test_backends_page"


def test_every_op_of_the_dialect_is_lowered_or_refused_by_every_backend() -> None:
    written = PAGE.read_text()
    for name in OPS:
        assert f"| `{name}` | " in written


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2])
