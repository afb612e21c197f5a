"""What an operator sets, and what a client may send. `engine serve` fills Settings; the limits are constants of the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Limits", "Settings"]


@dataclass(frozen=True)
class Limits:
    """Bounds on everything a client sends; what is beyond them is refused with 400, 413 or 429."""

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0  # from the first byte of a request to its last
    prompts: int = 128  # of one request; each has a choice at least
    choices: int = 128  # prompts x n of one request
    messages: int = 4096
    stop_strings: int = 32
    stop_characters: int = 1024  # of one stop string
    stop_token_ids: int = 256
    logit_bias: int = 1024
    tools: int = 128
    schema_bytes: int = 128 << 10  # of a JSON schema, a regular expression, a grammar, or all tools together
    template_variables_bytes: int = 64 << 10
    write_seconds: float = 120.0  # for a client that reads nothing


@dataclass(frozen=True)
class Settings:
    """One server: where it listens, what it serves, who may ask.

    `kv_memory`, and `draft_kv_memory` of an engine that drafts, in bytes (None: 1 GiB); `max_context` in tokens (None: the
    engine's own); `drain`, `stall` in seconds: the time that requests in flight get after SIGTERM, and the longest a step may
    take before /health says 503.
    """

    engine: Path
    host: str = "127.0.0.1"
    port: int = 8000
    kv_memory: int | None = None
    max_context: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 32
    threads: int | None = None
    policy: str = "fair"
    speculate: str | None = None
    draft_tokens: int | str = "auto"
    draft_rule: str = "same"
    draft_kv_memory: int | None = None
    served_model_name: str | None = None
    weights: str = "mmap"
    provider: str | None = None
    api_keys: tuple[str, ...] = ()
    key_concurrency: int | None = None
    max_queue: int = 1024
    drain: float = 30.0
    stall: float = 60.0
    log_prompts: bool = False
    limits: Limits = field(default_factory=Limits)

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        return self.served_model_name or self.engine.resolve().name
