"""The picture of `batching.py`: a panel for each part that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLOURS, canvas, frame, save

_FIRST, _SECOND = COLOURS[:2]


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Draw what `found` holds of the parts into `path` (.png)."""
    parts = [name for name in _PANELS if name in found]
    columns = 2 if len(parts) > 1 else 1
    lines = -(-len(parts) // columns)
    figure = canvas(5.6 * columns, 3.9 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for name, panel in zip(parts, panels, strict=False):
        _PANELS[name](panel, found[name])
        frame(panel)
    for panel in list(panels):
        panel.set_axis_off()
    save(figure, path, found)


def _cache(panel: Any, rows: Any) -> None:
    lengths = [row["length"] for row in rows]
    panel.plot(lengths, [row["without_ms"] for row in rows], "s--", color=_SECOND, label="computed again")
    panel.plot(lengths, [row["with_ms"] for row in rows], "o-", color=_FIRST, label="with KV cache")
    panel.set(xscale="log", yscale="log", xlabel="tokens before it", ylabel="ms", title="One more token")
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=8)


def _bars(panel: Any, names: list[str], values: list[float], form: str, colours: Any = _FIRST) -> None:
    bars = panel.bar(names, values, 0.6, color=colours)
    panel.bar_label(bars, [form.format(value) for value in values], fontsize=8, padding=2)


def _batching(panel: Any, figures: Any) -> None:
    names = {"static": "static", "static-drop": "static,\nfinished dropped", "throughput": "continuous"}
    _bars(
        panel,
        [names[key] for key in figures],
        [entry["tokens_per_second"] for entry in figures.values()],
        "{:,.0f}",
    )
    panel.set(ylabel="tokens/s", title="Output lengths that differ: static against continuous batching")


def _memory(panel: Any, memory: Any) -> None:
    _bars(
        panel,
        ["longest\npossible" if way == "longest" else way for way in memory],
        [100 * entry["filled"] for entry in memory.values()],
        "{:.0f} %",
    )
    panel.set(ylabel="%", ylim=(0, 110), title="Reserved cache slots that hold a token")


def _formats(panel: Any, figures: Any) -> None:
    keys = [key for key in figures["bf16"] if "MB" not in key]
    for place, (name, colour) in enumerate((("bf16", _SECOND), ("int8", _FIRST))):
        at = [number + 0.38 * (place - 0.5) for number in range(len(keys))]
        panel.bar(at, [figures[name][key] for key in keys], 0.36, color=colour, label=name)
    panel.set_xticks(range(len(keys)), [key.replace(", ", ",\n") for key in keys])
    panel.set(ylabel="tokens/s", title="int8 against bf16 weights")
    panel.legend(frameon=False, fontsize=8)


_PANELS: dict[str, Callable[[Any, Any], None]] = {
    "cache": _cache,
    "batching": _batching,
    "memory": _memory,
    "formats": _formats,
}
