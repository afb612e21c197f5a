"""GET /metrics, for Prometheus. Nothing is counted here: a scrape reads the plain counters that the engine keeps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..figures import Figures, Histogram
from ..statistics import LoopStatistics, PageCounts, Speculation
from .observing import counts
from .service import Service

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "enginewright_"


class _Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def exposition(service: Service) -> bytes:
    """Return the metrics in Prometheus' text format."""
    seen = await counts(service)
    metrics = list(_server_metrics(service))
    if service.loaded is not None:
        metrics += _figure_metrics(service.loaded.figures)
    if seen is not None:
        metrics += _loop_metrics(seen)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(metrics))
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _server_metrics(service: Service) -> Iterator[Metric]:
    yield _gauge("up", "1 while the engine is loaded, serves and makes progress", _is_up(service))
    yield _gauge(
        "http_requests_in_flight", "Generating requests whose answer is not complete", len(service.exchanges)
    )
    yield _counter("disconnects", "Requests whose client has gone before the end", service.disconnects)
    answers = CounterMetricFamily(
        _PREFIX + "http_responses", "Answers, by route and status", labels=["path", "status"]
    )
    for (path, status), count in sorted(service.responses.items()):
        answers.add_metric([path, str(status)], count)
    yield answers


def _is_up(service: Service) -> float:
    return float(service.phase == "ready" and service.health() is None)


def _figure_metrics(figures: Figures) -> Iterator[Metric]:
    yield _histogram("time_to_first_token_seconds", "From submission to the first token", figures.first_token)
    yield _histogram("inter_token_latency_seconds", "Between a request's tokens", figures.next_token)
    rate = figures.tokens_per_second(time.monotonic())
    yield _gauge("generated_tokens_per_second", "Tokens generated in the last five seconds, a second", rate)
    yield _counter("prompt_tokens", "Tokens of accepted prompts", figures.prompt_tokens)
    yield _counter("generated_tokens", "Tokens generated", figures.generated_tokens)
    ended = CounterMetricFamily(_PREFIX + "requests_finished", "Ended requests, by reason", labels=["reason"])
    for reason in ("stop", "length", "abort", "error"):
        ended.add_metric([reason], figures.finished[reason])
    yield ended
    yield _counter(
        "cancellations", "Requests that were cancelled or whose client has gone", figures.finished["abort"]
    )


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    below = [*accumulate(histogram.counts)]
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    return HistogramMetricFamily(
        _PREFIX + name, text, buckets=list(zip(bounds, below, strict=True)), sum_value=histogram.sum
    )


def _loop_metrics(seen: LoopStatistics) -> Iterator[Metric]:
    yield _gauge("requests_running", "Requests that are computed", seen.running)
    yield _gauge("requests_waiting", "Requests in the queue", seen.waiting)
    yield _counter("steps", "Steps of the engine", seen.steps)
    yield _counter(
        "tokens_computed",
        "Tokens computed, those of prompts and repeated ones included",
        seen.tokens_computed,
    )
    yield _counter(
        "preemptions", "Requests that gave their pages back to be computed again", seen.preemptions
    )
    yield _counter(
        "prefix_cache_queried_tokens",
        "Prompt tokens looked for in the prefix cache",
        seen.prefix_queried_tokens,
    )
    yield _counter("prefix_cache_hit_tokens", "Prompt tokens found there", seen.prefix_hit_tokens)
    yield _gauge("batch_fill", "Sequences of the last step, as a share of the most", seen.batch_fill)
    yield _gauge("token_fill", "Tokens of the last step, as a share of its budget", seen.token_fill)
    yield _gauge("reserved_token_slots", "Token slots of pages in use", seen.reserved_slots)
    yield _gauge("used_token_slots", "Those of them that hold a token that is read", seen.used_slots)
    yield _pages("kv_pages", "Pages of a KV group, by state", seen.pages)
    if seen.speculation is not None:
        yield _gauge(
            "speculation_tokens_per_step",
            "Tokens that a request gets from a step that draws for it, on average",
            seen.tokens_per_step,
        )
        yield from _speculation_metrics(seen.speculation)
    if seen.draft_pages:
        yield _pages("draft_kv_pages", "Pages of the drafting engine's KV group, by state", seen.draft_pages)


def _pages(name: str, text: str, groups: Sequence[PageCounts]) -> Metric:
    pages = GaugeMetricFamily(_PREFIX + name, text, labels=["group", "state"])
    for group, counted in enumerate(groups):
        for state in ("used", "cached", "free"):
            pages.add_metric([str(group), state], getattr(counted, state))
    return pages


def _speculation_metrics(seen: Speculation) -> Iterator[Metric]:
    yield _counter("speculation_proposals", "Proposals that steps have verified", seen.proposals)
    yield _counter("speculation_proposed_tokens", "Tokens in them", seen.drafted)
    yield _counter("speculation_accepted_tokens", "Of these, tokens that came true", seen.accepted)
    for which, text in enumerate(("Proposed", "Accepted")):
        positions = CounterMetricFamily(
            f"{_PREFIX}speculation_{text.lower()}_tokens_by_position",
            f"{text} tokens, by place in their proposal",
            labels=["position"],
        )
        for place, counted in enumerate(seen.by_position, 1):
            positions.add_metric([str(place)], counted[which])
        yield positions
    yield _gauge(
        "speculation_tokens_per_proposal",
        "Tokens that a request gets from a step with a proposal, on average",
        seen.tokens_per_proposal,
    )
    yield _counter("speculation_drafting_seconds", "Time of the drafter", seen.drafting_seconds)
    yield _gauge(
        "speculation_saved_seconds", "Estimated time that speculation has saved, or lost", seen.saved_seconds
    )
    yield _counter("speculation_drafter_failures", "Times that the drafter failed", seen.failures)
