"""The report of a build: what rounding cost each unit, as a table and a picture.

`optimize --report DIR` writes layers.csv and layers.png, and mixed.csv where formats were chosen by sensitivity. The figures come
from passes/cost.py. matplotlib (the extra `report`) is asked for before any work, and imported only here.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import Recipe

__all__ = ["by_cost", "check_report", "draw", "write_report"]

TOKENS = 512
"""Tokens that the divergences are measured on."""

_COLUMNS = (
    "place",
    "unit",
    "format",
    "activation",
    "weights",
    "bits",
    "megabytes",
    "relative_error",
    "kl",
    "share",
    "tokens",
)


def check_report(directory: Path, recipe: Recipe) -> None:
    """Refuse a report that could not be written, or would be empty, before any work. The folder is made."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "the report's picture needs the package 'matplotlib'",
            action="pip install matplotlib, or leave --report out",
        )
    formats = [recipe.linear.weight, recipe.embedding.weight, recipe.head.weight, recipe.router.weight]
    if not recipe.mixed.wanted and {*formats, *(item.weight for item in recipe.overrides)} == {"f32"}:
        raise InputError(
            "there is nothing to report: the recipe rounds no matrix",
            found=f"recipe {recipe.name}: every matrix is f32",
            action="leave --report out, or choose another recipe",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / "layers.csv.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            "the report cannot be written",
            found=f"{directory}: {error.strerror}",
            expected="a folder that can be written to, or a new name",
        ) from error


def by_cost(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The units by divergence, largest first, each with its `place` in the model and its `share` of the sum."""
    total = sum(layer["kl"] for layer in layers) or 1.0
    rows = [{"place": place, **layer, "share": layer["kl"] / total} for place, layer in enumerate(layers)]
    return sorted(rows, key=lambda row: (-row["kl"], row["place"]))


def write_report(
    directory: Path, layers: Sequence[Mapping[str, Any]], mixed: Sequence[Mapping[str, Any]], title: str
) -> None:
    """Write the files. `layers` are the units' costs in the model's order, `mixed` the manifest's candidates (or empty)."""
    with (directory / "layers.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for row in by_cost(layers):
            cells = {**row, "megabytes": round(row["bytes"] / 1e6, 6), "bits": round(row["bits"], 6)}
            cells |= {name: float(f"{row[name]:.6g}") for name in ("relative_error", "kl", "share")}
            table.writerow([cells[name] for name in _COLUMNS])
    draw(directory / "layers.png", layers, title)
    if mixed:
        _write_mixed(directory / "mixed.csv", mixed)
    else:
        (directory / "mixed.csv").unlink(missing_ok=True)  # an earlier build's


def _write_mixed(path: Path, mixed: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["unit", "weights", "format", "bits", "kl", "chosen"])
        for entry in mixed:
            for name, (bits, nats) in entry["candidates"].items():
                chosen = "yes" if name == entry["chosen"] else ""
                table.writerow([entry["unit"], entry["weights"], name, bits, nats, chosen])


# The picture.

_BAND = "#f1f1ee"
_INK = "#33332f"
_COLOURS = (  # of so many bits a weight; most recipes lie between 3 and 6
    (2.0, "#7a1414"),
    (3.0, "#b93a0e"),
    (3.75, "#e2772a"),
    (4.25, "#efb73e"),
    (4.5, "#c9bb4a"),
    (5.0, "#86b069"),
    (6.0, "#4d9d8c"),
    (8.0, "#3579a8"),
    (16.0, "#20396b"),
)


def draw(path: Path, layers: Sequence[Mapping[str, Any]], title: str) -> None:
    """Three panels over the units in the model's order: divergence (log scale), relative error, size; coloured by bits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(layers)
    width = min(max(9.0, 2.2 + 0.13 * count), 40.0)
    figure = Figure(figsize=(width, 8.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1.4))
    groups = _groups([layer["unit"] for layer in layers])
    colours = _colours(layers)
    paint = [colours[layer["format"]] for layer in layers]
    places = list(range(count))

    _log_bars(panels[0], [layer["kl"] for layer in layers], paint)
    panels[0].set_ylabel("KL divergence, nats\n(this unit alone)")
    panels[1].bar(places, [100 * layer["relative_error"] for layer in layers], 0.82, color=paint)
    panels[1].set_ylabel("relative error\nof its output, %")
    _log_bars(panels[2], [layer["bytes"] / 1e6 for layer in layers], paint)
    panels[2].set_ylabel("size, MB")

    for panel in panels:
        for number, (_, start, stop) in enumerate(groups):
            if number % 2:
                panel.axvspan(start - 0.5, stop - 0.5, color=_BAND, zorder=0, linewidth=0)
        panel.grid(axis="y", color="#dcdcd6", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=_INK, labelsize=8)
        panel.yaxis.label.set(color=_INK, fontsize=9)
        panel.set_xlim(-0.6, count - 0.4)
    names = [_short(layer["unit"]) for layer in layers]
    room = (width - 1.2) * 72 / max(count, 1)  # points a bar
    panels[2].set_xticks(places, names, rotation=90, fontsize=min(8.0, max(4.0, 0.8 * room)))
    panels[2].tick_params(axis="x", length=2)
    _name_groups(panels[0], groups, room)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK, fontweight="bold")
    legend = sorted(
        {(layer["format"], round(layer["bits"], 2)) for layer in layers}, key=lambda item: item[1]
    )
    handles = [_patch(colours[name], f"{name}, {bits:g} bits") for name, bits in legend]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(len(handles), 6), frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=130)


def _log_bars(panel: Any, values: Sequence[float], colours: Sequence[Any]) -> None:
    """Bars on a log scale; what is zero has none."""
    floor = min((value for value in values if value > 0), default=1e-6) / 2
    panel.set_yscale("log")
    panel.bar(
        range(len(values)), [max(value - floor, 0.0) for value in values], 0.82, bottom=floor, color=colours
    )
    panel.set_ylim(floor, max(*values, 2 * floor) * 1.6)
    panel.tick_params(which="minor", left=False)


def _patch(colour: Any, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _colours(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A colour for each format, from few bits (warm) to many (cool): the same in every picture."""
    from matplotlib.colors import LinearSegmentedColormap

    low, high = log2(_COLOURS[0][0]), log2(_COLOURS[-1][0])
    stops = [((log2(bits) - low) / (high - low), colour) for bits, colour in _COLOURS]
    scale = LinearSegmentedColormap.from_list("bits", stops, N=1024)
    bits: dict[str, float] = {}
    for layer in layers:
        bits.setdefault(layer["format"], layer["bits"])
    return {
        name: scale(min(max((log2(value) - low) / (high - low), 0.0), 1.0)) for name, value in bits.items()
    }


def _groups(units: Sequence[str]) -> list[tuple[str, int, int]]:
    """(layer's number or '', first, end) of runs of units of one layer."""
    groups: list[tuple[str, int, int]] = []
    for place, unit in enumerate(units):
        found = re.search(r"(?:^|\.)(\d+)\.", unit)
        name = found[1] if found else ""
        if groups and name and groups[-1][0] == name:
            groups[-1] = (name, groups[-1][1], place + 1)
        else:
            groups.append((name, place, place + 1))
    return groups


def _name_groups(panel: Any, groups: Sequence[tuple[str, int, int]], room: float) -> None:
    """The layers' numbers above the first panel."""
    for name, start, stop in groups:
        if name:
            size = min(9.0, max(4.5, 0.6 * room * (stop - start)))
            panel.annotate(
                name,
                ((start + stop - 1) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=size,
                color=_INK,
            )
    first = next((start for name, start, _ in groups if name), None)
    if first is not None:
        panel.set_title("layer", loc="left", fontsize=8, color=_INK, pad=14)


def _short(unit: str) -> str:
    """`q+k+v` of `model.layers.0.self_attn.q_proj+k_proj+v_proj`."""
    stem, _, last = unit.rpartition(".")
    if last.isdigit():  # a second matrix of one module
        last = stem.rpartition(".")[2]
    return "+".join(re.sub(r"_(proj|weight)$", "", part.rpartition(".")[2]) for part in last.split("+"))
