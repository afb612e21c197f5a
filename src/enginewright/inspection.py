"""Tables for people: what a build did, what an engine is, what a benchmark measured."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from enginewright.backends.artifact import Artifact
    from enginewright.build import BuildReport

_NUMBERS = {"matches", "size", "window", "layers", "page", "bytes a token"}
_PIPED_WIDTH = 160


def size(count: float) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _table(title: str, *headers: str) -> Table:
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
    """The result of a build: sizes and verification. (What each pass did was printed as it went.)"""
    return [_size_table(report.manifest), verification_table(report.manifest["verification"])]


def engine_tables(artifact: Artifact) -> list[Table]:
    """What an engine is, read from its manifest and build log."""
    manifest, build = artifact.manifest, artifact.build
    model, recipe = manifest["model"], manifest["recipe"]
    facts = _table("engine", "", "")
    rows = {
        "model": f"{model['source']} ({model['architecture'] or model['model_type']})",
        "parameters": f"{model['parameters'] / 1e6:,.1f} M",
        "layers, width, vocabulary": f"{model['num_layers']}, {model['hidden_size']}, {model['vocab_size']:,}",
        "longest context": f"{model['max_context']:,} tokens",
        "recipe": f"{recipe['name']}: linears {recipe['linear']['weight']}, embedding {recipe['embedding']['weight']}, "
        f"head {recipe['head']['weight']}",
        "backend, target": f"{manifest['backend']}, {manifest['target']}",
        "built with": f"enginewright {manifest['enginewright_version']}",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    groups = _table("KV cache", "group", "window", "layers", "format", "page", "bytes a token")
    for index, group in enumerate(manifest["kv_groups"]):
        token = sum(_bytes_a_token(layer, layer.get("format", group["format"])) for layer in group["layers"])
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
        passes = _table("passes", "pass", "matches", "notes")
        for entry in build["passes"]:
            passes.add_row(entry["name"], str(entry["matches"]), "; ".join(entry["notes"]))
        tables.append(passes)
    return [*tables, _size_table(manifest), verification_table(manifest["verification"])]


def _bytes_a_token(layer: dict[str, Any], kv_format: str) -> int:
    """Bytes of one token's keys and values in one layer; an int8 cache has two f32 scales a head besides."""
    width, scales = {"f32": (4, 0), "bf16": (2, 0), "int8": (1, 8)}[kv_format]
    return layer["kv_heads"] * (width * (layer["key_dim"] + layer["value_dim"]) + scales)


def _formats(group: dict[str, Any]) -> str:
    """The layers' formats: "int8", or "int8, bf16 in 2 layers" where some differ from the group's."""
    counts = Counter(layer.get("format", group["format"]) for layer in group["layers"])
    others = [f"{name} in {count} layers" for name, count in counts.items() if name != group["format"]]
    return ", ".join([group["format"], *others])


def _size_table(manifest: dict[str, Any]) -> Table:
    table = _table("files", "file", "size")
    for name, entry in sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"]):
        table.add_row(name, size(entry["bytes"]))
    table.add_row("total", size(sum(entry["bytes"] for entry in manifest["files"].values())), style="bold")
    return table


def verification_table(verification: dict[str, Any]) -> Table:
    """The figures of a verification beside their limits."""
    verdict = verification["verdict"]
    colour = "green" if verdict == "passed" else "red"
    table = _table(f"verification: [{colour}]{verdict}[/{colour}]", "figure", "measured", "limit")
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
    perplexity = f"{figure('perplexity', '.3f')} / {figure('reference_perplexity', '.3f')}"
    row("perplexity ratio", f"{figure('perplexity_ratio', '.4f')} ({perplexity})", "max_perplexity_ratio")
    if verification["invariant"] is not None:
        row("same bits however scheduled", "yes" if verification["invariant"] else "no")
    for failure in verification["failures"]:
        table.add_row("[red]failed[/red]", failure, "")
    return table


def bench_table(figures: dict[str, Any]) -> Table:
    """The figures of `engine bench`."""
    table = _table(f"{figures['engine']}, {figures['threads']} threads, {figures['isa']}", "figure", "value")
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
    return table
