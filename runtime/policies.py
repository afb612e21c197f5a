"""Whom the scheduler prefers: each policy is a row of figures, and `scheduler.py` is the one reader of them.

- `fair`, for many users: by arrival, where a level of priority outweighs a bounded wait. A long prompt leaves half of a step's
  room to the prompts after it, and who has generated for long makes room for who waits.
- `latency`, for quick first tokens and even streams: short prompts first, until a wait outweighs them; prompts take at most a
  quarter of a step that streams run in.
- `throughput`, for the fullest batch: by arrival, whole steps for prompts; small requests may pass one that finds no pages.
- `static`, for comparison: a batch is formed when the last has ended, and rows that end are computed on as padding until then.
- `static-drop`, for comparison: the same, but rows that end are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.recipes.errors import InputError

__all__ = ["POLICIES", "Policy", "get_policy"]

STRICT = 1 << 40  # steps: no wait outweighs it


@dataclass(frozen=True)
class Policy:
    """What decides who is served.

    `ageing`: steps of waiting that outweigh one level of priority. `prompt_cost`: steps of waiting that outweigh one
    whole step of prompt tokens. `beside_decodes`: the share of the token budget that prompts may take in a step that decodes.
    `largest_share`: the share of the tokens left that one prompt may take while others could use them. `overtaking`:
    requests that may pass one that finds no pages, at most (0: none). `quantum`: tokens that a request generates
    before it makes room for one that waits (0: it never does). `batches`: nobody enters until all running have
    ended. `padding`: who has ended is computed on until then.
    """

    name: str
    ageing: int = STRICT
    prompt_cost: int = 0
    beside_decodes: float = 1.0
    largest_share: float = 1.0
    overtaking: int = 0
    quantum: int = 0
    batches: bool = False
    padding: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fair", ageing=256, largest_share=0.5, quantum=512),
        Policy("latency", prompt_cost=16, beside_decodes=0.25, overtaking=8),
        Policy("throughput", overtaking=64),
        Policy("static", batches=True, padding=True),
        Policy("static-drop", batches=True),
    )
}


def get_policy(name: str) -> Policy:
    """Return the policy of that name, or raise InputError."""
    if name not in POLICIES:
        raise InputError(
            "there is no such scheduling policy", found=repr(name), expected=", ".join(map(repr, POLICIES))
        )
    return POLICIES[name]
