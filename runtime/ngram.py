"""Drafting without a model: what followed the last tokens where they stood before, in the prompt or in the output.

(Prompt lookup decoding: Saxena, 2023; related to LLMA, Yang et al., "Inference with reference", 2023.) It pays where the answer
quotes: edits, summaries, structured output. An index leads from every run of three tokens to the places after it, so that
the cost does not grow with the text; of a few candidates that one is taken whose past agrees the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafting import Proposal
from .request import Request

__all__ = ["NgramDrafter"]

SHORTEST = 3  # tokens that must agree
CANDIDATES = 8  # latest places of a run that are looked at
LONGEST = 32  # agreeing tokens that are counted


class _Index:
    """Places after each run of `SHORTEST` tokens of one growing list, the latest last."""

    __slots__ = ("places", "read")

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], list[int]] = {}
        self.read = SHORTEST  # runs that end before this place are in

    def extend(self, tokens: Sequence[int]) -> None:
        """Enter the runs that something follows."""
        places = self.places
        for end in range(self.read, len(tokens)):
            found = places.setdefault(tuple(tokens[end - SHORTEST : end]), [])
            found.append(end)
            if len(found) > CANDIDATES:
                del found[0]
        self.read = max(len(tokens), SHORTEST)

    def best(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place after an earlier run that ends as `tokens` do, and how many tokens agree; (0, 0) without one."""
        best = (0, 0)
        last = len(tokens) - 1
        for place in reversed(self.places.get(tuple(tokens[-SHORTEST:]), ())):
            most = min(place, LONGEST)
            length = SHORTEST
            while length < most and tokens[place - 1 - length] == tokens[last - length]:
                length += 1
            if length > best[1]:
                best = (place, length)
                if length == LONGEST:
                    break
        return best


class NgramDrafter:
    """Proposes what followed the last few tokens earlier in the same request. See `Drafter`."""

    name = "ngram"
    free = True
    keep_logits = False  # it draws nothing

    def __init__(self) -> None:
        self._indexes: dict[Request, _Index] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        return [self._propose(request, most) for request, most in wanted]

    def _propose(self, request: Request, most: int) -> Proposal:
        tokens = request.tokens
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _Index()
        index.extend(tokens)
        place, length = index.best(tokens)
        if not length:
            return Proposal()
        found = tokens[place : place + most]
        while len(found) < most:  # the text has come to its own end: what repeats goes on repeating
            found += tokens[place : place + most - len(found)]
        return Proposal(found, kind=length.bit_length())  # 3 · 4 to 7 · 8 to 15 · 16 to 31 · 32 tokens agree

    def settle(self, request: Request, accepted: int) -> None:
        """The index holds tokens that stand, and nothing else."""

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)

    def close(self) -> None:
        self._indexes.clear()
