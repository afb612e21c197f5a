"""Whether two engines mean the same by a token id: without that, one cannot draft for the other."""

from __future__ import annotations

import json
from typing import Any

from enginewright.backends.artifact import Artifact
from enginewright.recipes.errors import InputError

from .facts import model_facts
from .text import Tokenizer

__all__ = ["check_vocabulary"]

TOKENIZER = "tokenizer.json"
_ACTION = "draft with an engine of the same model family, or with ngram"


def check_vocabulary(target: Artifact, draft: Artifact) -> None:
    """Raise InputError, with the first difference, unless `draft` has the ids of `target`.

    Both have as many ids, and each stands for the same piece of text. End-of-sequence tokens, chat templates and what is put
    around a text may differ: it is the target that reads and ends texts.
    """
    sizes = [model_facts(artifact).get("vocab_size") for artifact in (target, draft)]
    if sizes[0] != sizes[1]:
        raise _misfit(draft, f"a vocabulary of {sizes[1]} tokens", f"{sizes[0]}, as the target has")
    has = [TOKENIZER in artifact for artifact in (target, draft)]
    if not all(has):
        if any(has):
            lacks = "the target has no tokenizer" if has[1] else "it has no tokenizer"
            raise _misfit(draft, lacks, "tokenizers on both sides, to compare them")
        return
    sums = [artifact.manifest["files"][TOKENIZER].get("sha256") for artifact in (target, draft)]
    if sums[0] is not None and sums[0] == sums[1]:
        return
    ours, theirs = (_meaning(artifact) for artifact in (target, draft))
    for name in ("pieces", "added tokens"):
        mine, other = ours[name], theirs[name]
        for token in sorted(mine.keys() | other.keys()):
            if mine.get(token) != other.get(token):
                raise _misfit(
                    draft, f"token {token} is {other.get(token)!r}", f"{mine.get(token)!r}, as in the target"
                )
    if ours["merges"] != theirs["merges"]:
        raise _misfit(draft, "other merges of pieces", "those of the target")


def _meaning(artifact: Artifact) -> dict[str, Any]:
    """Return what decides ids: the piece of each, the added tokens, and how pieces are merged."""
    content = json.loads(Tokenizer(artifact.path).to_json())
    model = content["model"]
    vocab = model["vocab"]
    pieces = (
        {token: piece for piece, token in vocab.items()}
        if isinstance(vocab, dict)
        else {token: entry[0] for token, entry in enumerate(vocab)}  # Unigram: with its score
    )
    added = {entry["id"]: entry["content"] for entry in content.get("added_tokens", ())}
    return {"pieces": pieces, "added tokens": added, "merges": model.get("merges")}


def _misfit(draft: Artifact, found: str, expected: str) -> InputError:
    return InputError(
        f"the engine at {draft.path} cannot draft for this one: their token ids differ",
        found=found,
        expected=expected,
        action=_ACTION,
    )
