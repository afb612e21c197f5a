"""What the benchmarks' pictures have in common: the paper, the frame of a panel, the title that says where it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "INK", "canvas", "frame", "save"]

COLOURS = ("#1559b0", "#b8560b", "#2f7d4f", "#7a3f98", "#7c6a0a")
INK = "#33332f"


def canvas(width: float, height: float) -> Any:
    """Return an empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def frame(panel: Any) -> None:
    """Draw a panel's grid, axes and title as all panels have them."""
    panel.grid(axis="y", color="#dcdcd6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=8)
    panel.title.set(fontsize=9.5, color=INK)


def save(figure: Any, path: Path, found: Mapping[str, Any]) -> None:
    """Write the figure, under the name of the engine and what it ran on."""
    title = f"{found['engine']}, {found['threads']} threads, {found['isa']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=130)
