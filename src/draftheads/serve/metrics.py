"""Counts for Prometheus, in a registry of our own. The only file that knows prometheus_client."""

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftheads.decode.request import StreamEvent
from draftheads.serve.recorder import RecorderCounts
from draftheads.serve.scheduler import Snapshot

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_GAUGE, _COUNT = GaugeMetricFamily, CounterMetricFamily
_Metrics = dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str]]
# fields of Snapshot and of RecorderCounts: what a metric is, its name and its text
_OF_SCHEDULER: _Metrics = {
    "waiting": (_GAUGE, "requests_waiting", "Answers that wait for a row"),
    "reading": (_GAUGE, "requests_reading", "Answers whose prompts are being read"),
    "running": (_GAUGE, "requests_running", "Answers that are decoded"),
    "kv_bytes": (_GAUGE, "kv_bytes", "Bytes of keys and values of answers"),
    "prefix_bytes": (_GAUGE, "prefix_bytes", "Bytes of keys and values of cached prefixes"),
    "steps": (_COUNT, "steps", "Steps of the model"),
    "interruptions": (_COUNT, "interruptions", "Answers that waited again, for memory or for another client"),
    "finished": (_COUNT, "answers_finished", "Answers that were finished"),
    "failed": (_COUNT, "answers_failed", "Answers that failed"),
    "cancelled": (_COUNT, "answers_cancelled", "Answers that were cancelled"),
    "prompt_tokens_read": (_COUNT, "prompt_tokens_read", "Prompt tokens that the model read"),
    "prefix_hits": (_COUNT, "prefix_hits", "Prompts that began with a cached prefix"),
    "prefix_tokens_reused": (_COUNT, "prefix_tokens_reused", "Prompt tokens that came from cached prefixes"),
}
_OF_RECORDER: _Metrics = {
    "recorded": (_COUNT, "answers_recorded", "Answers that were recorded"),
    "dropped": (_COUNT, "records_dropped", "Answers that could not be recorded: the disk is slow or full"),
    "num_bytes": (_GAUGE, "record_bytes", "Disk that records take"),
}


class Metrics:
    """All metrics of a server; their names begin with ``draftheads_``.

    Args:
        snapshot: gives the scheduler's counts; None while there is no scheduler.
        recorder_counts: gives those of the recorder, if there is one.
    """

    def __init__(
        self, snapshot: Callable[[], Snapshot | None], recorder_counts: Callable[[], RecorderCounts] | None
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Counts(snapshot, _OF_SCHEDULER))
        if recorder_counts is not None:
            self.registry.register(_Counts(recorder_counts, _OF_RECORDER))
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

    def __init__(self, counts: Callable[[], object], metrics: _Metrics) -> None:
        self._counts = counts
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        if counts is not None:
            for field, (family, name, text) in self._metrics.items():
                yield family(f"draftheads_{name}", text, value=getattr(counts, field))
