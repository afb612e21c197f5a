"""Stop strings over a stream of text, whatever pieces it comes in."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher", "overlap"]


class StopMatcher:
    """Finds the first stop string to be complete, and holds back text that may be the beginning of one.

    "First" is by where the match ends, then the longest: the same whatever pieces the text comes in.
    `include` keeps the stop string at the end of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add `text`; return what may be shown. Nothing more comes once `stopped` is true."""
        if not self._stops:
            return text
        if self.stopped or not text:
            return ""
        whole = self._held + text
        found = self._first(whole)
        if found is not None:
            start, end = found
            self.stopped, self._held = True, ""
            return whole[:end] if self._include else whole[:start]
        keep = max(overlap(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """Return what was held back; the stream has ended."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = (start, start + len(stop))
        return best


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
