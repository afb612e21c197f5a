"""Bar charts as SVG, small enough to stand in a page without any script."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

__all__ = ["bars", "shares"]

_HEIGHT, _LEFT, _BOTTOM, _TOP = 190, 58, 46, 12
_NOTHING = 1e-30
_SPAN = 1e9  # between the ends of a logarithmic axis, at most


def bars(
    values: Sequence[tuple[str, float]], title: str, limit: float | None = None, log: bool = False
) -> str:
    """Bars of (label, value ≥ 0) on one axis, with a line at `limit`. `log`: a logarithmic axis, where zeros have no bar."""
    known = [value for _, value in values if math.isfinite(value) and (value > _NOTHING or not log)]
    if not known:
        return '<p class="quiet">nothing to draw</p>'
    top = max([*known, *([limit] if limit else [])]) or 1.0
    low = max(min(known) / 2, top / _SPAN) if log else 0.0
    width = max(9, min(46, 760 // max(len(values), 1)))
    whole = _LEFT + width * len(values) + 12
    inner = _HEIGHT - _BOTTOM - _TOP

    def height(value: float) -> float:
        if not math.isfinite(value) or value <= max(low, _NOTHING):
            return 0.0
        share = math.log(value / low) / math.log(top / low) if log and top > low else value / top
        return max(share, 0.0) * inner

    parts = [
        f'<svg viewBox="0 0 {whole} {_HEIGHT}" width="{whole}" role="img" aria-label="{html.escape(title)}">'
    ]
    base = _HEIGHT - _BOTTOM
    for tick in _ticks(low, top, log):
        y = base - height(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{whole - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 3:.1f}">{tick:.2g}</text>')
    every = max(1, math.ceil(len(values) * 13 / max(width * len(values), 1)))
    for index, (label, value) in enumerate(values):
        x, tall = _LEFT + index * width, height(value)
        told = html.escape(f"{label}: {value:.4g}")
        over = " over" if limit is not None and not value <= limit else ""
        parts.append(
            f'<rect class="bar{over}" x="{x + 1}" y="{base - tall:.1f}" width="{width - 2}" height="{tall:.1f}">'
            f"<title>{told}</title></rect>"
        )
        if index % every == 0:
            at = f"{x + width / 2:.1f},{base + 10}"
            parts.append(
                f'<text class="label" transform="translate({at}) rotate(38)">{html.escape(label[:14])}</text>'
            )
    if limit is not None and limit <= top:
        y = base - height(limit)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{whole - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, top: float, log: bool) -> list[float]:
    if log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(top))
        return [10.0**power for power in range(first, last + 1)] or [top]
    step = 10 ** math.floor(math.log10(top))
    step = step / 5 if top / step < 2 else step / 2 if top / step < 5 else step
    return [step * index for index in range(int(top / step) + 1)]


def shares(values: Sequence[tuple[str, float]], title: str) -> str:
    """One bar, divided: the share of each (label, value) in the sum."""
    total = sum(value for _, value in values) or 1.0
    parts = [f'<svg viewBox="0 0 760 26" width="760" role="img" aria-label="{html.escape(title)}">']
    at = 0.0
    for index, (label, value) in enumerate(values):
        wide = 760 * value / total
        told = html.escape(f"{label}: {value / total:.1%}")
        parts.append(
            f'<rect class="share share{index % 6}" x="{at:.1f}" y="2" width="{wide:.1f}" height="22">'
        )
        parts.append(f"<title>{told}</title></rect>")
        if wide > 7 * len(label):
            parts.append(f'<text class="onbar" x="{at + wide / 2:.1f}" y="17">{html.escape(label)}</text>')
        at += wide
    return "".join([*parts, "</svg>"])
