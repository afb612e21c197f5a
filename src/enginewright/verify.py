"""Verification: the engine's logits, taken through the serving path, against the source model's.

The judge is the captured Program before any pass has touched it, run in fp32 with weights streamed from the checkpoint,
so that a model that does not fit in memory twice is still judged. The engine answers through the runtime: paged cache,
chunked prefill, several sequences a step. Both see the same tokens (teacher forcing).

What is measured, over all positions of all samples:

- `logit_error`: the largest absolute difference of a logit, and the same as a share of the largest reference logit;
- `mean_kl`, `p999_kl`: Kullback-Leibler divergence of the engine's next-token distribution from the judge's, nats;
- `top1_agreement`: share of positions whose most likely token agrees. Where the recipe bounds the logit error, a position
  whose two best reference logits lie closer than twice that bound is a tie: it is excused, and counted in `ties`. (Twice
  the *measured* error would excuse every difference, since a flip needs no more; so a recipe without a bound excuses none);
- `perplexity_ratio`: the engine's perplexity on the sample text over the judge's;
- `crosses_window`: whether a sample was longer than the widest window, so that the window's edge was seen (None: no layer has
  one). A very wide window over a large vocabulary is not crossed, to bound the memory that the logits take;
- `invariant`: logits of every sample alone and in small chunks are bitwise those of all samples together (demanded of a
  backend that promises it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from enginewright.recipes.errors import VerificationError

if TYPE_CHECKING:
    from enginewright.backends.base import Answers
    from enginewright.passes.program import Program
    from enginewright.runtime.engine import Engine

Report = Callable[[str], None]

_SAMPLE_LENGTHS = (
    1,
    2,
    17,
    33,
    96,
    180,
)  # tokens; around the edges of a page, and enough text for a perplexity
_LONG_SAMPLE = 96  # tokens that the last sample runs past the widest window, to cross the window's edge
_DISTINCT = 32  # different tokens that a sample of real text has at least
_LOGIT_BYTES = 768 << 20  # what the longest sample's logits may take, in float32
_BLOCK = 64  # positions compared at a time: bounds the float64 temporaries of a large vocabulary


@dataclass(frozen=True)
class Verification:
    """Figures of one verification; see the module's docstring for their meaning and units."""

    samples: int
    tokens: int
    max_logit_error: float
    relative_logit_error: float
    mean_kl: float
    p999_kl: float
    top1_agreement: float
    ties: int
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    invariant: bool | None
    crosses_window: bool | None
    limits: dict[str, float]
    failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether every figure lies within its limit."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, with the verdict, for the manifest; None for one that is not finite."""
        figures = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }
        return {"verdict": "passed" if self.passed else "failed", **figures}

    def raise_if_failed(self) -> None:
        """Raise VerificationError naming each figure that left its limit."""
        if self.failures:
            raise VerificationError(
                "verification failed: " + "; ".join(self.failures),
                found=f"KL {self.mean_kl:.4g}, top-1 {self.top1_agreement:.2%}, perplexity ratio {self.perplexity_ratio:.4f}",
                expected=", ".join(f"{name} {value:g}" for name, value in self.limits.items()),
                action="use a recipe with more bits, loosen a limit with --set verify.…, or look at the engine with "
                "--allow-unverified",
            )


def sample_tokens(
    encode: Callable[[str], list[int]] | None, vocab_size: int, max_context: int, window: int
) -> list[list[int]]:
    """Return the token sequences that both sides are run on.

    The last sample is longer than `window` (0 = no window), as far as `max_context` and memory allow.
    """
    longest = max(_SAMPLE_LENGTHS[-1], window + _LONG_SAMPLE if window else 0)
    longest = max(min(longest, max_context, _LOGIT_BYTES // (4 * vocab_size)), 1)
    lengths = [min(length, longest) for length in (*_SAMPLE_LENGTHS[:-1], longest)]
    stream = text_tokens(encode, vocab_size, sum(lengths))
    starts = np.cumsum([0, *lengths[:-1]])
    return [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def text_tokens(encode: Callable[[str], list[int]] | None, vocab_size: int, wanted: int) -> list[int]:
    """So many tokens of the text that ships with the package, repeated where it is too short.

    A model without a tokenizer (`encode` is None), or with one that makes hardly any different tokens of it, gets evenly
    spread ids instead.
    """
    stream: list[int] = []
    if encode is not None:
        stream = encode(
            resources.files("enginewright").joinpath("verification.txt").read_text(encoding="utf-8")
        )
    if len(set(stream)) < min(_DISTINCT, vocab_size // 2):
        stream = [(i * 7919 + 11) % vocab_size for i in range(wanted)]
    return (stream * -(-wanted // len(stream)))[:wanted]


def verify(
    engine: Engine | Answers,
    judge: Program,
    limits: dict[str, float],
    *,
    demand_invariance: bool,
    report: Report = lambda line: None,
) -> Verification:
    """Run `engine` and `judge` on the same samples and compare.

    `limits` holds any of `max_logit_error` (relative to the largest reference logit), `max_kl`, `min_top1`,
    `max_perplexity_ratio`. Nothing is raised for a figure out of bounds: see `Verification.raise_if_failed`.
    """
    window = max((group["window"] for group in engine.artifact.manifest["kv_groups"]), default=0)
    encode = engine.tokenizer.encode if engine.tokenizer is not None else None
    samples = sample_tokens(encode, engine.vocab_size, engine.max_context, window)
    figures = _Figures()
    invariant = True if demand_invariance else None
    together = engine.logits(samples)
    for index, (tokens, logits) in enumerate(zip(samples, together, strict=True)):
        report(f"sample {index + 1} of {len(samples)}, {len(tokens)} tokens")
        if demand_invariance:
            alone = engine.logits([tokens], chunk_size=7 if len(tokens) < 64 else 61)[0]
            invariant = bool(invariant) and np.array_equal(alone.view(np.int32), logits.view(np.int32))
        with np.errstate(invalid="ignore"):  # logits that are not finite are counted, not warned of
            figures.add(tokens, _judge_logits(judge, tokens), logits)
    crosses = len(samples[-1]) > window if window else None
    return figures.verdict(len(samples), limits, invariant, crosses)


def _judge_logits(judge: Program, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        logits = judge.run(
            torch.tensor(tokens, dtype=torch.int32), torch.arange(len(tokens), dtype=torch.int32)
        )
    return logits.float().numpy()


class _Figures:
    """Accumulates figures over samples; positions are compared in blocks, in float64."""

    def __init__(self) -> None:
        self.error = 0.0
        self.largest = 0.0
        self.kl: list[np.ndarray] = []
        self.gaps: list[np.ndarray] = []  # of the two best reference logits, where the best token differs
        self.positions = 0
        self.scored = 0
        self.loss = 0.0
        self.reference_loss = 0.0
        self.finite = {"source model": True, "engine": True}

    def add(self, tokens: list[int], reference: np.ndarray, logits: np.ndarray) -> None:
        """Compare [T, vocab] logits of one sample."""
        targets = np.asarray(tokens[1:], dtype=np.int64)
        for start, p, q in _blocks(reference, logits):
            for name, values in (("source model", p), ("engine", q)):
                self.finite[name] = self.finite[name] and bool(np.isfinite(values).all())
            # np.maximum keeps a NaN, max does not.
            self.error = float(np.maximum(self.error, np.abs(p - q).max()))
            self.largest = float(np.maximum(self.largest, np.abs(p).max()))
            differs = p.argmax(-1) != q.argmax(-1)
            if differs.any():
                best = np.partition(p[differs], -2, axis=-1)[:, -2:]
                self.gaps.append(best[:, 1] - best[:, 0])
            log_p, log_q = _log_softmax(p), _log_softmax(q)
            self.kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
            self.positions += len(p)
            wanted = targets[start : start + len(p)]
            rows = np.arange(len(wanted))
            self.reference_loss -= float(log_p[rows, wanted].sum())
            self.loss -= float(log_q[rows, wanted].sum())
            self.scored += len(wanted)

    def verdict(
        self, samples: int, limits: dict[str, float], invariant: bool | None, crosses_window: bool | None
    ) -> Verification:
        """Close the account and hold it against the limits."""
        kl = np.maximum(np.concatenate(self.kl), 0.0)
        gaps = np.concatenate(self.gaps) if self.gaps else np.zeros(0)
        ties = int((gaps < 2 * limits.get("max_logit_error", 0.0) * self.largest).sum())
        relative = self.error / max(self.largest, 1e-30)
        scored = max(self.scored, 1)
        top1 = 1.0 - (len(gaps) - ties) / self.positions
        ratio = math.exp(min((self.loss - self.reference_loss) / scored, 700.0))
        figures = {
            "max_logit_error": relative,
            "max_kl": float(kl.mean()),
            "min_top1": top1,
            "max_perplexity_ratio": ratio,
        }
        failures = [
            f"the {name} returned logits that are not finite"
            for name, all_are in self.finite.items()
            if not all_are
        ]
        for name, limit in limits.items():
            value = figures[name]
            if not (value >= limit if name.startswith("min_") else value <= limit):
                failures.append(f"{name.split('_', 1)[1]} is {value:.4g}, the limit is {limit:g}")
        if invariant is False:
            failures.append("logits depend on how the requests were scheduled")
        return Verification(
            samples=samples,
            tokens=self.positions,
            max_logit_error=self.error,
            relative_logit_error=relative,
            mean_kl=float(kl.mean()),
            p999_kl=float(np.quantile(kl, 0.999)),
            top1_agreement=top1,
            ties=ties,
            reference_perplexity=math.exp(min(self.reference_loss / scored, 700.0)),
            perplexity=math.exp(min(self.loss / scored, 700.0)),
            perplexity_ratio=ratio,
            invariant=invariant,
            crosses_window=crosses_window,
            limits=dict(limits),
            failures=failures,
        )


def _blocks(reference: np.ndarray, logits: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    if reference.shape != logits.shape:
        raise VerificationError(
            "the engine and the source model disagree on the shape of the logits",
            found=logits.shape,
            expected=reference.shape,
        )
    for start in range(0, len(reference), _BLOCK):
        stop = start + _BLOCK
        yield start, reference[start:stop].astype(np.float64), logits[start:stop].astype(np.float64)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
