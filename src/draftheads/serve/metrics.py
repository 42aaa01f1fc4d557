"""Counts for Prometheus, in a registry of our own. The only file that knows prometheus_client."""

from collections.abc import Callable, Iterator
from dataclasses import field, fields
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftheads.decode.request import StreamEvent

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def gauge(name: str, text: str) -> Any:
    """A field of counts that goes up and down: the name of its metric, and what it says."""
    return field(default=0, metadata={"family": GaugeMetricFamily, "metric": f"draftheads_{name}", "text": text})


def total(name: str, text: str) -> Any:
    """The same of a field that only grows."""
    return field(default=0, metadata={"family": CounterMetricFamily, "metric": f"draftheads_{name}", "text": text})


class Metrics:
    """All metrics of a server; their names begin with ``draftheads_``.

    Args:
        counts: each gives a dataclass of counts, whose fields are of :func:`gauge` and :func:`total`; None at first.
    """

    def __init__(self, *counts: Callable[[], Any]) -> None:
        self.registry = CollectorRegistry()
        for each in counts:
            self.registry.register(_Counts(each))
        counter = partial(Counter, namespace="draftheads", registry=self.registry)
        histogram = partial(Histogram, namespace="draftheads", registry=self.registry)
        self._requests = counter("requests", "HTTP requests", ("route", "status"))
        self._tokens = counter("tokens", "Tokens of prompts and answers", ("kind",))
        self._drafted = counter("draft_tokens", "Draft tokens that were verified", ("depth",))
        self._accepted = counter("accepted_tokens", "Draft tokens that were accepted", ("depth",))
        self._nodes = histogram("tree_nodes", "Draft tokens in a step of an answer", buckets=_NODES)
        self._first = histogram("first_token_seconds", "From the request to its first token", buckets=_SECONDS)
        self._between = histogram("between_tokens_seconds", "Time of a step by its new tokens", buckets=_SECONDS)

    def request(self, route: str, status: int) -> None:
        """An HTTP request has ended; 0 is the status of one whose client went."""
        self._requests.labels(route, str(status)).inc()

    def prompt(self, num_tokens: int) -> None:
        self._tokens.labels("prompt").inc(num_tokens)

    def event(self, event: StreamEvent, seconds: float, *, is_first: bool) -> None:
        """An event of an answer, so many seconds after the last one, or after the request."""
        self._tokens.labels("answer").inc(len(event.token_ids))
        if is_first:
            self._first.observe(seconds)
            return
        if event.token_ids:
            self._between.observe(seconds / len(event.token_ids))
        self._nodes.observe(sum(event.drafted_by_depth))
        for depth, count in enumerate(event.drafted_by_depth, 1):
            self._drafted.labels(str(depth)).inc(count)
            if depth <= event.num_drafted:
                self._accepted.labels(str(depth)).inc()

    def text(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self.registry)


class _Counts(Collector):
    """Reads counts when Prometheus asks for them."""

    def __init__(self, counts: Callable[[], Any]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        if counts is not None:
            for each in fields(counts):
                what = each.metadata
                yield what["family"](what["metric"], what["text"], value=getattr(counts, each.name))
