"""One self-contained HTML page of an engine: no script, nothing fetched.

What it is, its passes, the first layer's graph before and after, sizes, the error of each layer, verification, divergence by
position, memory to serve it, and where it comes from. `engine verify --html FILE` writes it of an engine on disk, `optimize
--html FILE` of a build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from enginewright.inspection import bytes_a_token, size

from .charts import bars, shares
from .graphs import draw_layer, first_layer

__all__ = ["damaged_page", "first_layer", "page"]

_LENGTHS = (1024, 4096, 8192, 32768, 131072)
_COUNTS = (1, 8, 32)
_FIGURES = (
    ("mean_kl", "mean KL divergence, nats", ".4g"),
    ("p999_kl", "99.9th percentile of KL, nats", ".4g"),
    ("top1_agreement", "top-1 agreement", ".2%"),
    ("top5_agreement", "top-5 agreement", ".2%"),
    ("greedy_agreement", "greedy tokens that the source would choose", ".2%"),
    ("perplexity", "perplexity", ".4f"),
    ("reference_perplexity", "perplexity of the source model", ".4f"),
    ("perplexity_ratio", "ratio", ".4f"),
    ("max_logit_error", "largest logit error", ".4g"),
    ("tokens", "positions compared", ",d"),
)


def page(
    manifest: Mapping[str, Any],
    build: Mapping[str, Any],
    checks: Sequence[Any] = (),
    verification: Mapping[str, Any] | None = None,
    layers: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page. `checks` (of verification/checks.py) and `verification` are those of a run; without the latter the figures and
    checks of the build are shown.

    `layers`: what rounding cost each unit (fields of passes/cost.py's Cost), where it was measured.
    """
    from enginewright.verification.checks import checks_of

    figures = dict(verification or manifest["verification"])
    recorded = checks_of(figures) if verification is None and "bands" in figures else []
    shown = [asdict(check) for check in (*checks, *recorded)]
    failed = any(check["passed"] is False for check in shown)
    model, recipe = manifest["model"], manifest["recipe"]
    bands = figures.get("bands", [])
    graphs = build.get("graphs", {})
    layer_words, layer_bars = _layers(manifest, layers)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(
        resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=f"{model['source']}, {recipe['name']}",
        verdict="failed" if failed else figures["verdict"],
        subtitle=f"{manifest['backend']} engine, enginewright {manifest['enginewright_version']}",
        facts=_facts(manifest),
        checks=shown,
        figures=[
            (words, format(figures[name], form))
            for name, words, form in _FIGURES
            if figures.get(name) is not None
        ],
        bands=bands,
        band_chart=Markup(
            bars(
                [(f"{band['first']} – {band['last'] - 1}", band["mean_kl"] or 0.0) for band in bands],
                "mean KL divergence by position",
                figures.get("limits", {}).get("max_kl"),
                log=True,
            )
        ),
        layer_words=layer_words,
        layer_chart=Markup(bars(layer_bars, "error by layer")) if layer_bars else "",
        sizes=_sizes(manifest),
        size_chart=Markup(shares([(n, e["bytes"]) for n, e in _files(manifest)], "sizes of the files")),
        memory_counts=_COUNTS,
        memory=_memory(manifest),
        passes=build.get("passes", []),
        graph_before=Markup(draw_layer(graphs["captured"], "the first layer as captured")) if graphs else "",
        graph_after=Markup(draw_layer(graphs["final"], "the first layer as lowered")) if graphs else "",
        graph_words=f"{len(graphs['captured'])} nodes became {len(graphs['final'])}." if graphs else "",
        provenance=_provenance(manifest, build),
    )


def damaged_page(engine: str, checks: Sequence[Any]) -> str:
    """The page of an engine whose manifest cannot be trusted: the checks alone, so that no earlier page is taken for its own."""
    rows = Markup("").join(
        Markup("<tr><td>{}<td>{}<td><pre>{}</pre>").format(
            "✗" if check.passed is False else "", check.name, check.found
        )
        for check in checks
    )
    text = Markup(
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{name}</title>\n<h1>{name}</h1>\n'
        '<p><span class="verdict failed">failed</span></p>\n<table>{rows}</table>\n</html>\n'
    )
    return str(text.format(name=engine, rows=rows))


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, recipe = manifest["model"], manifest["recipe"]
    groups = [
        f"{len(group['layers'])} layers, {group['format']}, "
        + (f"window of {group['window']}" if group["window"] else "all tokens")
        for group in manifest["kv_groups"]
    ]
    return [
        ("model", f"{model['source']} ({model['architecture'] or model['model_type']})"),
        ("parameters", f"{model['parameters'] / 1e6:,.1f} M"),
        (
            "layers, width, vocabulary",
            f"{model['num_layers']}, {model['hidden_size']}, {model['vocab_size']:,}",
        ),
        ("longest context", f"{model['max_context']:,} tokens"),
        ("linears", f"{recipe['linear']['weight']}, activations {recipe['linear']['activation']}"),
        ("embedding, head", f"{recipe['embedding']['weight']}, {recipe['head']['weight']}"),
        ("KV cache", "; ".join(groups)),
        ("runs on", f"{manifest['target']} (backend {manifest['backend']})"),
    ]


def _files(manifest: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])


def _sizes(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    files = _files(manifest)
    total = sum(entry["bytes"] for _, entry in files)
    each = 8 * total / max(manifest["model"]["parameters"], 1)
    return [
        *((name, size(entry["bytes"])) for name, entry in files),
        ("all files", f"{size(total)}, {each:.2f} bits a parameter"),
    ]


def _memory(manifest: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    weights = sum(entry["bytes"] for entry in manifest["files"].values())
    longest = manifest["model"]["max_context"]
    lengths = [length for length in _LENGTHS if length < longest]
    return [
        (length, [size(weights + count * _cache_bytes(manifest, length)) for count in _COUNTS])
        for length in (*lengths, longest)
    ]


def _cache_bytes(manifest: Mapping[str, Any], tokens: int) -> int:
    total = 0
    for group in manifest["kv_groups"]:
        kept = min(tokens, group["window"] + group["page_size"]) if group["window"] else tokens
        pages = -(-kept // group["page_size"]) * group["page_size"]
        total += pages * sum(
            bytes_a_token(layer, layer.get("format", group["format"])) for layer in group["layers"]
        )
    return total


def _layers(
    manifest: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[str, float]]]:
    """What the chart of layers shows, in words, and its bars."""
    if layers:
        return (
            "KL divergence, nats, with that unit alone rounded.",
            [(str(layer["unit"]), float(layer["kl"] or 0.0)) for layer in layers],
        )
    errors = manifest.get("calibration", {}).get("quantise", {}).get("relative_errors", {})
    if errors:
        return "Relative error of each rounded matrix on the calibration's inputs.", list(errors.items())
    matrices = manifest["verification"].get("matrices", {})
    return "Relative error of each matrix as stored against the weight it stands for.", list(matrices.items())


def _provenance(manifest: Mapping[str, Any], build: Mapping[str, Any]) -> list[tuple[str, str]]:
    calibration = manifest.get("calibration", {})
    found = [
        ("engine", manifest.get("manifest_sha256", "not published")),
        ("enginewright", manifest["enginewright_version"]),
        *((name, version) for name, version in build.get("versions", {}).items() if name != "enginewright"),
        *((name, str(value)) for name, value in build.get("host", {}).items()),
    ]
    if build.get("isa"):
        found.append(("figures measured with", build["isa"]))
    if build.get("built_at"):
        found.append(("built at", build["built_at"]))
    for name in ("source", "file_sha256", "samples", "tokens", "seed"):
        if calibration.get(name) is not None:
            found.append((f"calibration {name}", str(calibration[name])))
    seconds = {name: value for name, value in build.get("seconds", {}).items() if value >= 0.05}
    if seconds:
        found.append(("seconds", ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())))
    return found
