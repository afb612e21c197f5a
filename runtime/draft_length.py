"""How many tokens to propose for each request: as many as make the tokens of a step come faster, which may be none.

A step of n tokens takes about a + b·n, and drafting k tokens c + d·k, both fitted to what is measured as it comes. A proposed
token that comes true saves a step's worth; one that does not has cost b. So the i-th is worth proposing where its chance beats
what the step makes of the same time:

    chance(i) / b  >  tokens of the step / its time

(the rule of "goodput", Liu et al., "Optimizing speculative decoding for serving large language models using goodput", 2024). The
chance of the i-th is first · next^(i-1): both are running averages of what came true, for each request and each kind of
proposal, and begin from the average of all requests.

A drafter that has to read a request first is asked for it where that pays: where what it would save of the tokens that the
request may still have, but for those that come while it reads, is more than reading takes. How many may come is what its limit
leaves, or what requests usually have, if that is less; one that has had more than usual may have as much again.

Where nothing is worth proposing, a drafter that costs nothing is still compared with the tokens that come; any other is
tried now and then, as long as what such attempts have lost stays under a small share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .request import Request

__all__ = ["Candidate", "CostModel", "DraftLength"]

MARGIN = 1.03  # a gain below this is not worth the noise of its estimate
LOSS_ALLOWED = 0.01  # share of the time that attempts may lose
FIRST_LOSS = (
    0.03  # seconds that they may lose once, before there is any such time; the most that is saved up for them
)
_KEEP = 0.9999  # of time and losses, from step to step: about ten thousand steps count
ATTEMPT = 2  # tokens of an attempt
RECENT = 50  # requests whose lengths are of use
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # steps before an attempt; each that fails doubles it


@dataclass(slots=True)
class Candidate:
    """A request that may have `most` tokens proposed; `kind` tells proposals apart that come true more or less often.

    `unread`: tokens of it that the drafter has to read first, and the calls that this takes at least.
    """

    request: Request
    most: int
    kind: int = 0
    unread: tuple[int, int] = (0, 0)


class _Chance:
    """A running average of a yes or no, over about `window` answers."""

    __slots__ = ("asked", "keep", "true")

    def __init__(self, window: float) -> None:
        self.keep = 1 - 1 / window
        self.true = self.asked = 0.0

    def add(self, true: int, false: int) -> None:
        keep = self.keep ** (true + false)
        self.true = self.true * keep + true
        self.asked = self.asked * keep + true + false

    def about(self, usual: float, weight: float) -> float:
        """Return the average, with `weight` answers as they usually are."""
        return (self.true + weight * usual) / (self.asked + weight)


@dataclass(slots=True)
class _Chances:
    """Of a kind of proposal: that its first token comes true, and that another does after one that has."""

    first: _Chance
    next: _Chance


def _chances(window: float) -> _Chances:
    return _Chances(_Chance(window), _Chance(window))


class CostModel:
    """Fits seconds = fixed + each · count to what is observed, older observations fading.

    `ratio`: each / fixed, before there is enough to tell.
    """

    def __init__(self, ratio: float, keep: float = 0.98) -> None:
        self._ratio, self._keep = ratio, keep
        self._weight = self._count = self._time = self._squares = self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    def observe(self, count: float, seconds: float) -> None:
        """Add an observation; one that is far above what was expected counts as less: something else was going on."""
        if self._weight > 4:
            seconds = min(seconds, 2.5 * self.seconds(count))
        k = self._keep
        self._weight = self._weight * k + 1
        self._count = self._count * k + count
        self._time = self._time * k + seconds
        self._squares = self._squares * k + count * count
        self._products = self._products * k + count * seconds

    def fit(self) -> tuple[float, float]:
        """Return (fixed, each) in seconds, neither negative."""
        if not self._weight:
            return 0.0, 0.0
        count, time = self._count / self._weight, self._time / self._weight
        variance = max(self._squares / self._weight - count * count, 0.0)
        shared = self._products / self._weight - count * time
        usual = time / (1 / self._ratio + count)  # the slope, were fixed : each as expected
        trust = 0.05  # of a variance, for the expected slope
        each = min(max((shared + trust * usual) / (variance + trust), 0.0), time / count if count else time)
        return time - each * count, each

    def seconds(self, count: float) -> float:
        """Return the expected seconds of `count`."""
        fixed, each = self.fit()
        return fixed + each * count


class DraftLength:
    """Chooses draft lengths for one loop, from what it is told of steps and proposals.

    `free`: whether proposing costs nothing. `most`: the longest proposal.
    """

    def __init__(self, free: bool, most: int) -> None:
        self.free, self.most = free, most
        self.steps = CostModel(ratio=0.12)
        self.drafting = CostModel(ratio=4.0)
        self.reading = CostModel(ratio=4.0)
        self._ended, self._usual = 0, 0.0  # requests, and about how many tokens one generates
        self._all: dict[int, _Chances] = {}
        self._own: dict[Request, dict[int, _Chances]] = {}
        self._seconds = 0.0  # of the steps, older ones fading
        self._lost = (
            -FIRST_LOSS
        )  # by what was proposed against plain steps, fading alike; negative where it has won
        self._rest: dict[
            Request, tuple[int, int]
        ] = {}  # steps until the next attempt, and the pause after it

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request.generated:
            self._ended += 1
            self._usual += (request.generated - self._usual) / min(self._ended, RECENT)
        self._own.pop(request, None)
        self._rest.pop(request, None)

    # -------------------------------------------------------------------------------------------- choosing

    def chances(self, request: Request, kind: int = 0) -> tuple[float, float]:
        """Return how likely a first proposed token comes true, and another one after it."""
        everyone = self._all.get(kind)
        first = everyone.first.about(0.6, 2.0) if everyone else 0.6
        following = everyone.next.about(0.7, 2.0) if everyone else 0.7
        own = self._own.get(request, {}).get(kind)
        if own is None:
            return first, following
        return own.first.about(first, 2.0), own.next.about(following, 2.0)

    def choose(self, candidates: Sequence[Candidate], sequences: int, tokens: int) -> list[int]:
        """Return each candidate's draft length, for a step that gives `sequences` tokens and computes `tokens` without drafts."""
        lengths = [0] * len(candidates)
        if not candidates or not self.steps.known:
            return lengths
        fixed, each = self.steps.fit()
        plain = fixed + each * tokens
        start, a_pass = (0.0, 0.0) if self.free else self.drafting.fit()
        odds = [self.chances(c.request, c.kind) for c in candidates]
        gained, cost = 0.0, 0.0
        best = sequences / plain * MARGIN
        chance = [first for first, _ in odds]
        chosen = [0] * len(candidates)
        for level in range(1, self.most + 1):
            rate = (sequences + gained) / (plain + cost)
            worth = [
                i
                for i, c in enumerate(candidates)
                if chosen[i] == level - 1 and level <= c.most and chance[i] > rate * each
            ]
            if not worth:
                break
            for i in worth:
                chosen[i] = level
                gained += chance[i]
                chance[i] *= odds[i][1]
            cost += each * len(worth) + a_pass + (start if level == 1 else 0.0)
            if (sequences + gained) / (plain + cost) > best:
                best = (sequences + gained) / (plain + cost)
                lengths = list(chosen)
        saved = plain / sequences - 1 / best  # of each token
        for i, candidate in enumerate(candidates):
            if lengths[i] and candidate.unread[0] and not self._pays(candidate, saved):
                lengths[i] = 0
        if not any(lengths) and not self.free:
            self._attempt(candidates, lengths, each * ATTEMPT + start + a_pass * ATTEMPT)
        return lengths

    def _pays(self, candidate: Candidate, saved: float) -> bool:
        """Whether to read the request first, where it saves so many seconds of each token after that."""
        request = candidate.request
        left: float = request.limit - len(request.tokens)
        if self._ended:
            left = min(left, max(self._usual, request.generated))
        return self._reading_takes(candidate) < (left - candidate.unread[1]) * saved

    def _reading_takes(self, candidate: Candidate) -> float:
        """Seconds, as far as it is known."""
        tokens, _ = candidate.unread
        return self.reading.seconds(tokens) if tokens else 0.0

    def _attempt(self, candidates: Sequence[Candidate], lengths: list[int], cost: float) -> None:
        """Try a request that has rested for long enough, where the losses so far allow it."""
        allowed = LOSS_ALLOWED * self._seconds - self._lost - cost
        for i, candidate in enumerate(candidates):
            steps, pause = self._rest.get(candidate.request, (FIRST_PAUSE, FIRST_PAUSE))
            if steps <= 0 and candidate.most and self._reading_takes(candidate) < allowed:
                lengths[i] = min(ATTEMPT, candidate.most)
                pause = min(2 * pause, LONGEST_PAUSE)
                self._rest[candidate.request] = (pause, pause)
                allowed = 0.0
            else:
                self._rest[candidate.request] = (steps - 1, pause)

    def ask_again(self, request: Request) -> None:
        """The drafter is not done with reading the request: the attempt goes on in the next step."""
        _, pause = self._rest.get(request, (FIRST_PAUSE, FIRST_PAUSE))
        self._rest[request] = (0, max(pause // 2, FIRST_PAUSE))

    # ------------------------------------------------------------------------------------------- observing

    def observe(self, request: Request, kind: int, accepted: int, rejected: bool) -> None:
        """Of a proposal `accepted` tokens came true, and then, with `rejected`, one did not."""
        own = self._own.setdefault(request, {})
        if accepted:
            self._rest.pop(request, None)
        for chances in (
            own.setdefault(kind, _chances(12.0)),
            self._all.setdefault(kind, _chances(200.0)),
        ):
            if accepted:
                chances.first.add(1, 0)
                if accepted > 1 or rejected:
                    chances.next.add(accepted - 1, int(rejected))
            elif rejected:
                chances.first.add(0, 1)

    def observe_step(
        self,
        tokens: int,
        seconds: float,
        plain_tokens: int,
        sequences: int,
        gained: int,
        drafting: float = 0.0,
    ) -> float:
        """A step of `tokens`, `plain_tokens` of them not proposed, took `seconds`, `drafting` of them the drafter.

        It gave `gained` tokens beside one for each of the `sequences`. Returns the seconds that it saved against plain steps.
        """
        self._seconds = self._seconds * _KEEP + seconds
        self._lost *= _KEEP
        if not self.steps.known or (tokens == plain_tokens and (self.free or not drafting)):
            return 0.0
        if tokens == plain_tokens:  # it has read, and proposed nothing
            saved = -drafting
        else:
            saved = self.steps.seconds(plain_tokens) * (1 + gained / max(sequences, 1)) - seconds
        self._lost = max(self._lost - saved, -FIRST_LOSS)
        return saved
