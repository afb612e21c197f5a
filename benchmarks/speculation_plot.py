"""The picture of `speculation.py`: for each drafter what it is worth by kind of work, and how deep its proposals come true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLOURS, INK, canvas, frame, save


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Draw what `found` holds (`speculation.py --json`) into `path` (.png): a line of two panels a drafter."""
    drafters = found["drafters"]
    figure = canvas(11, 3.9 * len(drafters))
    panels = figure.subplots(len(drafters), 2, squeeze=False)
    for (left, right), (name, rows) in zip(panels, drafters.items(), strict=True):
        _ratios(left, name, rows)
        _positions(right, name, rows)
        for panel in (left, right):
            frame(panel)
    save(figure, path, found)


def _ratios(panel: Any, drafter: str, rows: Sequence[Mapping[str, Any]]) -> None:
    work = list(dict.fromkeys(row["work"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    width = 0.8 / len(batches)
    for place, batch in enumerate(batches):
        values = {row["work"]: row["ratio"] or 0.0 for row in rows if row["batch"] == batch}
        at = [number + width * (place - (len(batches) - 1) / 2) for number in range(len(work))]
        heights = [values.get(name, 0.0) for name in work]
        bars = panel.bar(at, heights, 0.92 * width, color=COLOURS[place], label=f"batch {batch}")
        panel.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2)
    panel.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
    panel.set_xticks(range(len(work)), work)
    panel.set(ylabel="tokens/s, as a multiple of plain", title=f"{drafter}: what it is worth")
    panel.legend(frameon=False, fontsize=8)


def _positions(panel: Any, drafter: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Of the smallest batch, where most is proposed."""
    batch = min((row["batch"] for row in rows), default=1)
    shown = [row for row in rows if row["batch"] == batch and row["acceptance_by_position"]]
    for row, colour in zip(shown, COLOURS, strict=False):
        shares = [100 * share for share in row["acceptance_by_position"]]
        panel.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=row["work"], markersize=3)
    panel.set(
        xlabel="place in the proposal",
        ylabel="%",
        ylim=(0, 105),
        title=f"{drafter}: proposed tokens that came true, batch {batch}",
    )
    if shown:
        panel.legend(frameon=False, fontsize=8)
