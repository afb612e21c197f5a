"""Tables for people: what a build did, what an engine is, what a benchmark measured."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from enginewright.recipes.formats import kv_token_bytes
from enginewright.runtime.first_load import STRUCTURE_ONLY

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.build import BuildReport

_NUMBERS = {
    "matches", "size", "window", "layers", "page", "bytes a token", "bits", "relative error", "KL, nats", "share",
}  # fmt: skip
_SHOWN = 12  # units that a build's table shows; layers.csv has all
_PIPED_WIDTH = 160


def size(count: float) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def new_table(title: str, *headers: str) -> Table:
    """A table as all of these are: a title, no lines, numbers to the right."""
    table = Table(*headers, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = any(headers)
    for column in table.columns:
        if column.header in _NUMBERS:
            column.justify = "right"
    return table


def print_tables(tables: list[Table], stderr: bool = False) -> None:
    """Print tables with a blank line between; into a file or a pipe, wide and without blanks at the lines' ends."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    with console.capture() as capture:
        for index, table in enumerate(tables):
            if index:
                console.print()
            console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), err=stderr)


def build_tables(report: BuildReport) -> list[Table]:
    """The result of a build: formats chosen, what rounding cost, sizes, verification. (Passes were printed as they ran.)"""
    mixed = _calibrated(report.manifest, "quantise").get("mixed")
    tables = [mixed_table(mixed)] if mixed else []
    if report.layers:
        tables.append(layers_table(report.layers))
    return [*tables, _size_table(report.manifest), verification_table(report.manifest["verification"])]


def layers_table(layers: list[dict[str, Any]]) -> Table:
    """What rounding cost: the units of largest divergence, and the sum of all."""
    from enginewright.report import by_cost

    rows = by_cost(layers)
    table = new_table(
        f"what rounding cost: each unit alone, over {layers[0]['tokens']:,} tokens",
        *("unit", "format", "bits", "size", "relative error", "KL, nats", "share"),
    )
    for row in rows[:_SHOWN]:
        table.add_row(
            row["unit"],
            row["format"],
            f"{row['bits']:.2f}",
            size(row["bytes"]) if row["weights"] else "shared",
            f"{row['relative_error']:.2%}",
            f"{row['kl']:.3g}",
            f"{row['share']:.1%}",
        )
    if len(rows) > _SHOWN:
        rest = sum(row["share"] for row in rows[_SHOWN:])
        table.add_row(
            f"… and {len(rows) - _SHOWN} more (layers.csv)", "", "", "", "", "", f"{rest:.1%}", style="dim"
        )
    stored, weights = sum(row["bytes"] for row in rows), sum(row["weights"] for row in rows)
    total = sum(row["kl"] for row in rows)
    table.add_row(
        f"total of {len(rows)} units",
        "",
        f"{8 * stored / max(weights, 1):.2f}",
        size(stored),
        "",
        f"{total:.3g}",
        "100.0%",
        style="bold",
    )
    return table


def mixed_table(mixed: list[dict[str, Any]]) -> Table:
    """The divergences that formats were chosen from: a row a unit, a column a candidate, the chosen one marked."""
    names = list(mixed[0]["candidates"])
    headers = []
    for name in names:
        bits = sorted({round(entry["candidates"][name][0], 2) for entry in mixed})
        span = f"{bits[0]:g}" if len(bits) == 1 else f"{bits[0]:g} to {bits[-1]:g}"
        headers.append(f"{name}\n{span} bits")
    table = new_table("formats chosen by sensitivity: KL in nats of each candidate", "unit", *headers)
    for column in table.columns[1:]:
        column.justify = "right"
    totals = dict.fromkeys(names, 0.0)
    chosen_bits = chosen_nats = 0.0
    for entry in mixed:
        cells = []
        for name in names:
            bits, nats = entry["candidates"][name]
            totals[name] += nats
            if name == entry["chosen"]:
                chosen_bits, chosen_nats = chosen_bits + bits * entry["weights"], chosen_nats + nats
                cells.append(f"[bold green]● {nats:.3g}[/]")
            else:
                cells.append(f"{nats:.3g}")
        table.add_row(entry["unit"], *cells)
    weights = sum(entry["weights"] for entry in mixed)
    table.add_row("sum, if all had it", *(f"{totals[name]:.3g}" for name in names), style="dim")
    table.caption = (
        f"● chosen: {chosen_bits / max(weights, 1):.3f} bits a weight, {chosen_nats:.3g} nats in sum"
    )
    table.caption_justify = "left"
    return table


def _calibrated(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """What the manifest keeps of a calibrated pass; empty where there is nothing."""
    found: dict[str, Any] = manifest.get("calibration", {}).get(name, {})
    return found


def calibration_table(manifest: dict[str, Any]) -> Table:
    """What an engine was calibrated on, and what did not go as its recipe says."""
    calibration, rounding = manifest["calibration"], _calibrated(manifest, "quantise")
    smooth, gate = _calibrated(manifest, "smooth"), _calibrated(manifest, "gate_kv")
    table = new_table("calibration", "", "")
    table.add_row("source", f"{calibration['source']} ({calibration['sha256'][:12]})")
    table.add_row(
        "samples, tokens, seed",
        f"{calibration['samples']:,}, {calibration['tokens']:,}, {calibration['seed']}",
    )
    if "bits_a_weight" in rounding:
        table.add_row("linears", f"{rounding['bits_a_weight']:.3f} bits a weight")
    if rounding.get("mixed"):
        counts = Counter(entry["chosen"] for entry in rounding["mixed"])
        table.add_row(
            "formats chosen", ", ".join(f"{count} × {name}" for name, count in counts.most_common())
        )
    if smooth:
        kept = len(smooth["left_at_default"])
        table.add_row("smoothed", f"{smooth['scaled']} points; {kept} keep scale 1")
    if rounding.get("fallbacks"):
        table.add_row("rounded to nearest instead", _listed(rounding["fallbacks"]))
    if rounding.get("experts_with_few_tokens"):
        table.add_row("experts with few tokens", _listed(rounding["experts_with_few_tokens"]))
    if rounding.get("outlier_columns"):
        table.add_row("features kept apart", f"{rounding['outlier_columns']:,}")
    if gate.get("kv_kept_bf16"):
        table.add_row("layers that keep a bf16 cache", ", ".join(map(str, gate["kv_kept_bf16"])))
    return table


def _listed(found: dict[str, Any]) -> str:
    names = list(found)
    return f"{len(names)}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"


def calibrated_tables(manifest: dict[str, Any]) -> list[Table]:
    """What calibration measured of each layer; empty where the manifest has no such figure."""
    rounding = _calibrated(manifest, "quantise")
    tables = [calibration_table(manifest)] if "calibration" in manifest else []
    if rounding.get("mixed"):
        tables.append(mixed_table(rounding["mixed"]))
    if rounding.get("relative_errors"):
        table = new_table(
            "error of each rounded matrix on the calibration's inputs", "matrix", "relative error"
        )
        for name, error in sorted(rounding["relative_errors"].items(), key=lambda item: -item[1]):
            table.add_row(name, f"{error:.2%}")
        tables.append(table)
    errors = _calibrated(manifest, "gate_kv").get("kv_errors")
    if errors:
        table = new_table("error of attention with an int8 cache", "layer", "relative error")
        for name, error in errors.items():
            table.add_row(name, f"{error:.2%}")
        tables.append(table)
    return tables


def engine_tables(artifact: Artifact) -> list[Table]:
    """What an engine is, read from its manifest and build log."""
    manifest, build = artifact.manifest, artifact.build
    model, recipe = manifest["model"], manifest["recipe"]
    other = f" (backend {manifest['backend']})" if manifest["backend"] != manifest["target"] else ""
    facts = new_table("engine", "", "")
    rows = {
        "model": f"{model['source']} ({model['architecture'] or model['model_type']})",
        **({"adapter": model["adapter"]["name"]} if "adapter" in model else {}),
        "parameters": f"{model['parameters'] / 1e6:,.1f} M",
        "layers, width, vocabulary": f"{model['num_layers']}, {model['hidden_size']}, {model['vocab_size']:,}",
        "longest context": f"{model['max_context']:,} tokens",
        "recipe": f"{recipe['name']}: linears {recipe['linear']['weight']}, embedding {recipe['embedding']['weight']}, "
        f"head {recipe['head']['weight']}",
        **({"draft": _draft(manifest)} if "draft.json" in artifact else {}),
        "runs on": manifest["target"] + other,
        "built with": f"enginewright {manifest['enginewright_version']}",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    groups = new_table("KV cache", "group", "window", "layers", "format", "page", "bytes a token")
    for index, group in enumerate(manifest["kv_groups"]):
        token = sum(bytes_a_token(layer, layer.get("format", group["format"])) for layer in group["layers"])
        window = f"{group['window']} tokens" if group["window"] else "all tokens"
        groups.add_row(
            str(index),
            window,
            str(len(group["layers"])),
            _formats(group),
            str(group["page_size"]),
            f"{token:,}",
        )
    tables = [facts, groups]
    if build.get("passes"):
        passes = new_table("passes", "pass", "matches", "notes")
        for entry in build["passes"]:
            passes.add_row(entry["name"], str(entry["matches"]), "; ".join(entry["notes"]))
        tables.append(passes)
    if "calibration" in manifest:
        tables.append(calibration_table(manifest))
    return [*tables, _size_table(manifest), verification_table(manifest["verification"])]


def _draft(manifest: dict[str, Any]) -> str:
    """What the engine drafts with."""
    layers, distilled = manifest["recipe"]["draft"]["layers"], _calibrated(manifest, "draft_head")
    text = f"its first {layers} layer{'s' if layers > 1 else ''} and its head"
    if not distilled:
        return text
    top1 = distilled["top1"]
    return f"{text}, mapped: top-1 agreement {top1['distilled']:.1%}, without the map {top1['shared']:.1%}"


def bytes_a_token(layer: dict[str, Any], kv_format: str) -> int:
    """Bytes of one token's keys and values in one layer."""
    return kv_token_bytes(kv_format, layer["kv_heads"], layer["key_dim"], layer["value_dim"])


def _formats(group: dict[str, Any]) -> str:
    """The layers' formats: "int8", or "int8, bf16 in 2 layers" where some differ from the group's."""
    counts = Counter(layer.get("format", group["format"]) for layer in group["layers"])
    others = [f"{name} in {count} layers" for name, count in counts.items() if name != group["format"]]
    return ", ".join([group["format"], *others])


def _size_table(manifest: dict[str, Any]) -> Table:
    table = new_table("files", "file", "size")
    for name, entry in sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"]):
        table.add_row(name, size(entry["bytes"]))
    table.add_row("total", size(sum(entry["bytes"] for entry in manifest["files"].values())), style="bold")
    return table


def verification_table(verification: dict[str, Any]) -> Table:
    """The figures of a verification beside their limits."""
    verdict = verification["verdict"]
    colour = {"passed": "green", STRUCTURE_ONLY: "yellow"}.get(verdict, "red")
    table = new_table(f"verification: [{colour}]{verdict}[/{colour}]", "figure", "measured", "limit")
    if "tokens" not in verification:
        return table
    limits = verification["limits"]

    def row(name: str, value: str, key: str = "", sign: str = "≤") -> None:
        table.add_row(name, value, f"{sign} {limits[key]:g}" if key in limits else "")

    def figure(name: str, form: str) -> str:
        value = verification[name]
        return "not finite" if value is None else format(value, form)

    row("positions compared", f"{verification['tokens']} in {verification['samples']} samples")
    row("largest logit error", figure("max_logit_error", ".3g"))
    row("  of the largest logit", figure("relative_logit_error", ".3g"), "max_logit_error")
    row("mean KL divergence", figure("mean_kl", ".3g"), "max_kl")
    row("99.9th percentile of KL", figure("p999_kl", ".3g"))
    ties = f" ({verification['ties']} ties excused)" if verification["ties"] else ""
    row("top-1 agreement", f"{verification['top1_agreement']:.2%}{ties}", "min_top1", "≥")
    if verification.get("greedy_agreement") is not None:
        of = f" of {verification['greedy_tokens']} tokens"
        row("greedy agreement", f"{verification['greedy_agreement']:.2%}{of}")
    perplexity = f"{figure('perplexity', '.3f')} / {figure('reference_perplexity', '.3f')}"
    row("perplexity ratio", f"{figure('perplexity_ratio', '.4f')} ({perplexity})", "max_perplexity_ratio")
    if verification["invariant"] is not None:
        row("same bits however scheduled", "yes" if verification["invariant"] else "no")
    if verdict == STRUCTURE_ONLY:
        _add_structure(table, verification)
    for check in verification.get("stages", ()):
        value = "not finite" if check["value"] is None else format(check["value"], ".3g")
        table.add_row(f"{check['stage']}: {check['figure']}", value, f"≤ {check['limit']:.3g}")
    for failure in verification["failures"]:
        table.add_row("[red]failed[/red]", failure, "")
    return table


def _add_structure(table: Table, verification: dict[str, Any]) -> None:
    """What stands in for the answers of an engine that did not run."""
    table.add_row("measured of", "the Program, not the engine: its target could not run here")
    interpreted, golden = verification["interpreted"], verification["golden"]
    if interpreted is not None:
        found = interpreted["relative_logit_error"]
        error = "not finite" if found is None else f"{found:.3g} of the largest logit"
        table.add_row("what was lowered, interpreted", error, f"≤ {golden['tolerance']:g}")
    table.add_row(
        "checked at the first load",
        f"{golden['rows']} rows of {golden['tokens']} tokens",
        f"≤ {golden['tolerance']:g}",
    )


def bench_table(figures: dict[str, Any]) -> Table:
    """The figures of `engine bench`."""
    table = new_table(
        f"{figures['engine']}, {figures['threads']} threads, {figures['isa']}", "figure", "value"
    )
    table.add_row("load", f"{figures['load_seconds']:.3f} s")
    table.add_row("peak memory", size(figures["peak_memory_bytes"]))
    table.add_row("KV cache", f"{figures['kv_bytes_per_token']:,} bytes a token")
    table.add_row("machine's read bandwidth", f"{figures['read_bandwidth_gbs']:.1f} GB/s")
    table.add_row("first token of a one-token prompt", f"{figures['ping_ms']:.1f} ms")
    for entry in figures["prefill"]:
        table.add_row(f"prefill of {entry['tokens']} tokens", f"{entry['tokens_per_second']:,.0f} tokens/s")
    for entry in figures["decode"]:
        rate = f"{entry['tokens_per_second']:,.0f} tokens/s, {entry['step_ms']:.1f} ms a step"
        table.add_row(f"decode, batch {entry['batch']}", rate)
        if "drafter" in entry:
            each = f"{entry['tokens_per_step']:.2f} tokens a sequence and step"
            table.add_row(f"  {entry['drafter']}", f"{each}, {_accepted(entry)}")
    return table


def _accepted(entry: dict[str, Any]) -> str:
    if not entry["drafted_tokens"]:
        return "nothing proposed"
    return f"{entry['acceptance_rate']:.0%} of {entry['drafted_tokens']:,} proposed tokens came true"
