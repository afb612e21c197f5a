"""Tokens a second as memory and arithmetic bound them: no engine is faster, and none reaches it.

A step of decoding reads every weight that it uses once, and each sequence's keys and values:

    bytes(B) = weights + experts · used(B) + B · kv(context)
    used(B)  = 1 − (1 − chosen / experts)^B       the share of experts that B tokens choose, if they choose evenly
    seconds  = max(bytes(B) / bandwidth, operations(B) / rate)

Sources: Williams et al. 2009, "Roofline"; for serving, Pope et al. 2022, "Efficiently Scaling Transformer Inference", §3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginewright.planning.devices import Device
from enginewright.planning.memory import CHUNK, Cache
from enginewright.planning.structure import Attention, Structure

__all__ = ["Work", "work_of"]

_MOST_BATCH = 1 << 20


@dataclass(frozen=True)
class Work:
    """What a model asks of a device.

    fixed: bytes that every step reads. experts: (bytes, experts, chosen). row: bytes of a token's row of the embedding. products:
    what activations are rounded to -> numbers in the matrices that one token is multiplied by, the head's apart.
    """

    fixed: int
    experts: tuple[tuple[int, int, int], ...]
    row: int
    products: Mapping[str, float]
    head: Mapping[str, float]
    attentions: tuple[Attention, ...]
    cache: Cache
    scores: str  # what attention multiplies

    def weight_bytes(self, batch: float) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        routed = sum(size * (1 - (1 - chosen / count) ** batch) for size, count, chosen in self.experts)
        return self.fixed + routed + batch * self.row

    def bytes(self, batch: int, context: int) -> float:
        return self.weight_bytes(batch) + batch * self.cache.read_bytes(context)

    def operations(self, batch: int, context: int) -> dict[str, float]:
        """Operations of a decoding step, by what the products' factors are."""
        made = {kind: 2.0 * batch * count for kind, count in self.products.items()}
        for kind, count in self.head.items():
            made[kind] = made.get(kind, 0.0) + 2.0 * batch * count
        made[self.scores] = made.get(self.scores, 0.0) + batch * self._scores(context)
        return made

    def _scores(self, context: float) -> float:
        """Operations of one token's attention over so many tokens."""
        return sum(
            2.0
            * a.layers
            * a.heads
            * (a.key_dim + a.value_dim)
            * (min(context, a.window) if a.window else context)
            for a in self.attentions
        )

    def reading(self, device: Device, batch: int, context: int) -> float:
        return self.bytes(batch, context) / device.bandwidth

    def computing(self, device: Device, batch: int, context: int) -> float:
        return sum(count / device.rate(kind) for kind, count in self.operations(batch, context).items())

    def seconds(self, device: Device, batch: int, context: int) -> float:
        """The least time of a decoding step."""
        return max(self.reading(device, batch, context), self.computing(device, batch, context))

    def turning(self, device: Device, context: int) -> int | None:
        """The batch from which arithmetic takes longer than reading; None where it never does."""

        def computes(batch: int) -> bool:
            return self.computing(device, batch, context) >= self.reading(device, batch, context)

        low, high = 1, 1
        while not computes(high):
            low, high = high, 2 * high
            if high > _MOST_BATCH:
                return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if computes(middle) else (middle + 1, high)
        return high

    def prefill(self, device: Device, length: int) -> float:
        """Tokens a second of one prompt of so many tokens, in chunks; only the last token asks for logits."""
        made = {kind: 2.0 * length * count for kind, count in self.products.items()}
        made[self.scores] = made.get(self.scores, 0.0) + length * self._scores(length / 2)
        computing = sum(count / device.rate(kind) for kind, count in made.items())
        reading = -(-length // CHUNK) * self.weight_bytes(min(CHUNK, length)) / device.bandwidth
        return length / max(computing, reading)


def work_of(structure: Structure, cache: Cache, scores: str, roles: Mapping[str, int]) -> Work:
    """The work of a model as its structure says. `roles`: bytes by role."""
    routed = sum(structure.routing.values())
    experts = tuple(
        (roles.get("experts", 0) * layers // max(routed, 1), count, chosen)
        for (count, chosen), layers in structure.routing.items()
    )
    share = sum(size * chosen / count for size, count, chosen in experts) / max(
        sum(size for size, *_ in experts), 1
    )
    products: dict[str, float] = {}
    head: dict[str, float] = {}
    for (role, activation), count in structure.products.items():
        into = head if role == "head" else products
        into[activation] = into.get(activation, 0.0) + count * (share if role == "experts" else 1)
    looked_up = roles.get("embedding", 0)
    fixed = sum(
        size for role, size in roles.items() if role not in ("experts", "embedding", "position tables")
    )
    row = looked_up // max(structure.facts.vocab_size, 1)
    return Work(fixed, experts, row, products, head, tuple(structure.attentions), cache, scores)


def steps_shown(most: int, batches: Sequence[int] = (1, 8, 32)) -> list[int]:
    """The batches worth a line: some small ones, and the largest that fits."""
    return sorted({batch for batch in batches if batch <= max(most, 1)} | {max(most, 1)})
