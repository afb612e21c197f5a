"""What a person sees of a played workload: the table, policies side by side, and the picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from enginewright.recipes.errors import InputError
from enginewright.runtime.latency import gaps, ttft
from enginewright.runtime.traffic import Run

__all__ = ["check_plot", "plot_workload", "workload_table"]

_ROWS: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
    ("requests (failed)", lambda f: f"{f['requests']} ({f['failed']})"),
    ("seconds", lambda f: f"{f['seconds']:.2f}"),
    ("new tokens/s", lambda f: f"{f['new_tokens_per_second']:,.1f}"),
    ("all tokens/s", lambda f: f"{f['tokens_per_second']:,.1f}"),
    ("requests/s", lambda f: f"{f['requests_per_second']:.2f}"),
]
_SPREADS = (
    ("first token, ms", "ttft_ms"),
    ("between tokens, ms", "itl_ms"),
    ("a token after the first, ms", "tpot_ms"),
    ("whole request, ms", "latency_ms"),
    ("step, ms", "step_ms"),
)


def workload_table(report: Mapping[str, Any]) -> Table:
    """One column a policy. `report`: {title, runs: [{policy, figures}]}."""
    runs = report["runs"]
    names = [run["policy"] or "value" for run in runs]
    table = Table(
        "figure",
        *names,
        title=report["title"],
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.min_width = min(len(report["title"]), 100)  # or the title would be wrapped to the table's width
    for column in table.columns[1:]:
        column.justify = "right"
    shown = [run["figures"] for run in runs]
    for label, cell in _ROWS:
        table.add_row(label, *map(cell, shown))
    goodput = shown[0]["goodput"]
    limits = f"first ≤ {goodput['slo_ttft_ms']:g} ms, others ≤ {goodput['slo_itl_ms']:g} ms"
    table.add_row(
        f"in time ({limits})",
        *(
            f"{f['goodput']['share']:.0%}, {f['goodput']['requests_per_second']:.2f} requests/s"
            for f in shown
        ),
    )
    table.add_section()
    for label, key in _SPREADS:
        spreads = [figures.get(key) for figures in shown]
        if any(spreads):
            cells = (
                " / ".join(f"{spread[part]:,.1f}" for part in ("p50", "p95", "p99")) if spread else "–"
                for spread in spreads
            )
            table.add_row(f"{label}: p50 / p95 / p99", *cells)
    for label, key, form in (
        ("steps", "steps", "{:,}"),
        ("sequences a step", "sequences_per_step", "{:.1f}"),
        ("tokens a sequence gets from a step", "tokens_per_step", "{:.2f}"),
        ("proposed tokens that came true", "acceptance_rate", "{:.0%}"),
        ("preemptions", "preemptions", "{}"),
        ("prompt tokens from the prefix cache", "prefix_hit_rate", "{:.0%}"),
        ("cache slots held for nothing", "waste", "{:.1%}"),
    ):
        values = [figures.get(key) for figures in shown]
        if any(value is not None for value in values):
            table.add_row(label, *("–" if value is None else form.format(value) for value in values))
    return table


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before any work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "the picture needs the package 'matplotlib'",
            action="pip install matplotlib, or leave --plot out",
        )
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError("the picture's form is not known", found=str(path), expected="a .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise InputError("the picture's folder does not exist", found=str(path.absolute().parent))


_COLOURS = ("#1559b0", "#b8560b", "#2f7d4f", "#7a3f98", "#7c6a0a", "#56606b")
_INK = "#33332f"


def plot_workload(
    path: Path, title: str, runs: Sequence[tuple[str, Run]], slo_ttft: float, slo_itl: float
) -> None:
    """Four panels, a colour a policy: how first tokens and gaps are spread; tokens/s and requests present over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(11, 7.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    for (name, run), colour in zip(runs, _COLOURS * len(runs), strict=False):
        good = [served for served in run.served if served.error is None]
        firsts = [1e3 * value for served in good if (value := ttft(served)) is not None]
        _shares(panels[0, 0], firsts, name, colour)
        _shares(panels[0, 1], [1e3 * gap for served in good for gap in gaps(served)], name, colour)
        times, rates = _throughput(run)
        panels[1, 0].plot(times, rates, color=colour, label=name, linewidth=1.4)
        panels[1, 1].step(*_present(run), where="post", color=colour, label=name, linewidth=1.2)
    for panel, limit, label in (
        (panels[0, 0], slo_ttft, "first token, ms"),
        (panels[0, 1], slo_itl, "between tokens, ms"),
    ):
        panel.axvline(limit, color=_INK, linewidth=0.9, linestyle=":")
        panel.set(
            xlabel=f"{label} (dotted: the limit)",
            ylabel="share at most so long",
            ylim=(0, 1.02),
            xscale="log",
        )
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[1, 0].set(xlabel="seconds", ylabel="new tokens/s", ylim=(0, None))
    panels[1, 1].set(xlabel="seconds", ylabel="requests present", ylim=(0, None))
    for panel in panels.flat:
        panel.grid(color="#dcdcd6", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=_INK, labelsize=8)
    if any(name for name, _ in runs):
        panels[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK, fontweight="bold")
    figure.savefig(path, dpi=130)


def _shares(panel: Any, values: Sequence[float], name: str, colour: str) -> None:
    ordered = sorted(max(value, 1e-2) for value in values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    panel.plot(ordered, shares, color=colour, label=name, linewidth=1.6, drawstyle="steps-post")


def _throughput(run: Run, windows: int = 24) -> tuple[list[float], list[float]]:
    """New tokens a second in each of some windows of equal length."""
    times = [at for served in run.served for at in served.times]
    end = max(times, default=1e-3)
    counts = [0] * windows
    for at in times:
        counts[min(windows - 1, int(at / end * windows))] += 1
    width = end / windows
    return [(place + 0.5) * width for place in range(windows)], [count / width for count in counts]


def _present(run: Run) -> tuple[list[float], list[int]]:
    """Requests that are due and not finished, over time."""
    changes = sorted(
        [(served.arrival.at, 1) for served in run.served] + [(served.finished, -1) for served in run.served]
    )
    times, counts, present = [0.0], [0], 0
    for at, change in changes:
        present += change
        times.append(at)
        counts.append(present)
    return times, counts
