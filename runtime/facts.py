"""What serving takes from an engine's manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginewright.backends.artifact import Artifact
from enginewright.backends.base import Executor
from enginewright.recipes.errors import ArtifactError

__all__ = ["cache_identity", "end_tokens", "longest_context", "model_facts"]

MOST_CONTEXT = 1 << 24  # page tables of longer contexts would not fit in memory


def model_facts(artifact: Artifact) -> Mapping[str, Any]:
    """Return the manifest's `model`; nothing where it is damaged."""
    model = artifact.manifest.get("model")
    return model if isinstance(model, dict) else {}


def longest_context(artifact: Artifact) -> int:
    """Return how many tokens a sequence may have. Raises ArtifactError where the manifest does not say it."""
    longest = model_facts(artifact).get("max_context")
    if type(longest) is not int or not 1 <= longest <= MOST_CONTEXT:
        raise ArtifactError(
            f"the engine at {artifact.path} does not say how many tokens its context holds",
            found=f"model.max_context {longest!r}",
            expected=f"a whole number from 1 to {MOST_CONTEXT:,}",
            action="build the engine again with `optimize`",
        )
    return longest


def end_tokens(artifact: Artifact) -> Sequence[int]:
    """Return the ids of the model's end-of-sequence tokens."""
    ids: Sequence[int] = model_facts(artifact).get("eos_token_ids", ())
    return ids


def cache_identity(artifact: Artifact, executor: Executor) -> bytes:
    """What decides keys and values beside the tokens: the engine's own hash, and how its pools hold them."""
    return f"{artifact.manifest.get('manifest_sha256')} {list(executor.kv_groups)}".encode()
