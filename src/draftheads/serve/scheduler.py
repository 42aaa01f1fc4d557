"""One thread decodes the requests of all clients: it steps the core and delivers the events.

Other threads submit and cancel jobs. They never touch tensors.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Condition, Thread, current_thread
from typing import Any, Literal, TypeVar

from draftheads.cpu.optimise import return_freed_memory
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane, Request, StreamEvent
from draftheads.errors import DeviceLost, GrammarFailed, QueueFull, ShuttingDown, first_line
from draftheads.serve.metrics import gauge, total
from draftheads.utils.counts import counted
from draftheads.utils.transfer import device_works

logger = logging.getLogger(__name__)
_STEP_SECONDS = 5.0  # for the step that is under way when the scheduler is closed
_FINISHES = 32  # last ones, from which the rate of finishing is measured
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits(CoreLimits):
    """What a scheduler may use.

    Raises:
        InvalidSettings: a number below 1.
    """

    kv_bytes: int
    chunk_steps: int | None = 12
    max_waiting: int = 128
    """Requests that wait. One more is refused."""


@dataclass(frozen=True)
class JobFailed:
    """The last event of a job without an answer."""

    reason: Literal["error", "deadline", "shutdown", "device_lost", "grammar_failed"]
    message: str


_SHUTDOWN = JobFailed("shutdown", "the server shut down before the answer was finished")


@dataclass(eq=False)
class Job:
    """One answer that is wanted. The last event has a ``finish_reason``, or it is a :class:`JobFailed`."""

    request: Request
    lane: Lane
    client: str
    """Clients take turns: an API key or an address."""
    on_event: Callable[[StreamEvent | JobFailed], None]
    """Called on the model thread, and must not block."""
    deadline: float | None = None
    """On the scheduler's clock, ``time.monotonic``."""
    cache_salt: str = ""
    """Prompts with the same salt share what was read of a common beginning."""


@dataclass(frozen=True)
class Snapshot:
    """Counts of a scheduler."""

    waiting: int = gauge("requests_waiting", "Answers that wait for a row")
    reading: int = gauge("requests_reading", "Answers whose prompts are being read")
    running: int = gauge("requests_running", "Answers that are decoded")
    kv_bytes: int = gauge("kv_bytes", "Bytes of keys and values of answers")
    prefix_bytes: int = gauge("prefix_bytes", "Bytes of keys and values of cached prefixes")
    steps: int = total("steps", "Steps of the model")
    interruptions: int = total("interruptions", "Answers that waited again, for memory or for another client")
    finished: int = total("answers_finished", "Answers that were finished")
    failed: int = total("answers_failed", "Answers that failed")
    cancelled: int = total("answers_cancelled", "Answers that were cancelled")
    prompt_tokens_read: int = total("prompt_tokens_read", "Prompt tokens that the model read")
    prefix_hits: int = total("prefix_hits", "Prompts that began with a cached prefix")
    prefix_tokens_reused: int = total("prefix_tokens_reused", "Prompt tokens that came from cached prefixes")


class Scheduler:
    """Decodes jobs on a thread of its own.

    Args:
        engines: served name to engine. They share one model, or are its adapters. An entry may be replaced in a
            function that :meth:`call` runs: running requests keep the old engine.
        limits: rows, memory and waiting jobs.
        clock: seconds, for deadlines and rates.

    Attributes:
        lost: the reason why nothing is decoded any more, once the accelerator has failed.
        on_lost: called on the model thread when it has.
        is_stuck: whether the model thread did not end when it had to.
    """

    def __init__(
        self, engines: Mapping[str, Engine], limits: Limits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._clock = clock
        self.core = EngineCore(engines, limits, keeps_answers=True)
        # an RLock: events are delivered while it is held, so that none comes after cancel() returned
        self._changed = Condition()
        self._live: dict[Request, Job] = {}  # accepted and not ended
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._counts = Snapshot()
        self._finishes: deque[float] = deque(maxlen=_FINISHES)
        self._drain_until: float | None = None  # set when closing
        self.lost: DeviceLost | None = None
        self.on_lost: Callable[[], object] = bool
        self.is_stuck = False
        self._thread: Thread | None = None
        self._last_step = self._clock()

    @property
    def engines(self) -> dict[str, Engine]:
        return self.core.engines

    # --- other threads ---

    def start(self) -> None:
        assert self._thread is None, "a scheduler is started once"
        self._thread = Thread(target=self._run, name="draftheads-model", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Accepts a job."""
        self.core.check(job.request, job.lane)
        with self._changed:
            if (closed := self._closed) is not None:
                raise closed
            self._check_queue(job.client)
            self.core.add(job.request, job.lane, client=job.client, cache_salt=job.cache_salt)
            if not self._live:
                self._last_step = self._clock()
            self._live[job.request] = job  # after what may fail; its events wait for the lock
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Ends a job without a further event. Its row leaves before the next step. Ended jobs are ignored."""
        with self._changed:
            if self._live.pop(job.request, None):
                self.core.cancel(job.request)
                self._count("cancelled")
                self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """The counts as of the last step."""
        with self._changed:
            return replace(self._counts, waiting=len(self.core.waiting))

    @property
    def stalled_seconds(self) -> float:
        """Since the end of the last step, while there are jobs."""
        return self._clock() - self._last_step if self._live else 0.0

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the model thread between two steps. Its future fails when the scheduler is closed."""
        future: Future[T] = Future()
        with self._changed:
            if (closed := self._closed) is not None:
                future.set_exception(closed)
            else:
                self._calls.append((function, future))
                self._changed.notify_all()
        return future

    def close(self, *, drain_seconds: float) -> None:
        """Takes no more jobs, finishes those that it has for so many seconds, and stops. The rest fail.

        If a step does not end soon after that, its thread is left behind: ``is_stuck`` is true then.
        """
        with self._changed:
            end = self._clock() + drain_seconds
            self._drain_until = end if self._drain_until is None else min(end, self._drain_until)
            self._changed.notify_all()
        if self._thread is None:
            self._end()
        elif self._thread is not current_thread() and not self.is_stuck:
            self._thread.join(drain_seconds + _STEP_SECONDS)
            if self._thread.is_alive():
                self.is_stuck = True
                logger.critical("the model's thread is stuck in a step: its requests fail")
                self._end(frees=False)

    def _check_queue(self, client: str) -> None:
        waiting = len(self.core.waiting)
        own, free = self.core.waiting.count(client), self.limits.max_waiting - waiting
        if own < free:
            return
        wait = self._retry_after()
        if free:
            what = f"{counted(own, 'request')} of this client wait, and as many places stay free for other clients"
        else:
            what = f"{counted(waiting, 'request')} wait and at most {self.limits.max_waiting} may"
        raise QueueFull(f"{what}: retry after {wait:.0f} s", retry_after=wait)

    def _retry_after(self) -> float:
        """Seconds in which a job is finished, at the rate of the last minute; at least 1."""
        now = self._clock()
        recent = [when for when in self._finishes if when > now - 60.0]
        return max(1.0, (now - recent[0]) / len(recent)) if recent else 1.0

    @property
    def _closed(self) -> DeviceLost | ShuttingDown | None:
        """Why nothing is taken any more."""
        if self.lost is not None or self._drain_until is None:
            return self.lost
        return ShuttingDown("the server is shutting down: send the request to another one")

    # --- the model thread ---

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._iterate()
            except BaseException as error:  # our own fault, or a panic of a library in Rust; the server goes on
                logger.exception("the scheduler failed")
                failure = self._failure_by(error)
                with self._changed:  # no job comes between
                    self._forget()
                    self._fail_all(failure)
        self._end()
        if self.lost is not None:
            self.on_lost()

    def _failure_by(self, error: BaseException) -> JobFailed:
        """The end of jobs after an error, which may be a sign that the accelerator has failed for good."""
        device = next(iter(self.engines.values())).model.device
        if self.lost is None and not device_works(device):
            with self._changed:
                self.lost = DeviceLost(f"{device} of the server has failed: send the request again after its restart")
            logger.critical("%s computes nothing any more: the server has to be restarted", device)
        return self._lost_or(JobFailed("error", f"the answer could not be computed: {first_line(error)}"))

    def _lost_or(self, failure: JobFailed) -> JobFailed:
        """The failure, unless the accelerator has failed, which is the reason then."""
        return failure if self.lost is None else JobFailed("device_lost", str(self.lost))

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False if it is time to end."""
        if self.lost is not None:
            return False
        if not self._has_work():
            return_freed_memory()
        with self._changed:
            while not self._has_work() and self._drain_until is None:
                self._changed.wait()
            self._last_step = self._clock()
            return self._drain_until is None or (self._has_work() and self._clock() < self._drain_until)

    def _has_work(self) -> bool:
        return bool(self._live or self._calls or self.core.has_work)

    def _iterate(self) -> None:
        """Everything between two steps, and one step of every lane."""
        self._run_calls()
        self._end_late_jobs()
        failures: dict[Exception, JobFailed] = {}  # an error may end several requests
        for request, event in self.core.step():
            if isinstance(event, StreamEvent):
                self._deliver(request, event)
                continue
            if isinstance(event, GrammarFailed):  # it is the client's
                failures[event] = JobFailed("grammar_failed", str(event))
            if event not in failures:
                logger.error("an answer could not be computed", exc_info=event)
                failures[event] = self._failure_by(event)
            self._deliver(request, failures[event])
        for engine in self.core.engines.values():
            if engine.check is not None and (problem := engine.check.problem()) is not None:
                logger.warning("%s", problem)
        self._publish()

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - the caller gets it
                    self._failure_by(error)
                    future.set_exception(error)

    def _end_late_jobs(self) -> None:
        now = self._clock()
        with self._changed:
            for job in [job for job in self._live.values() if job.deadline is not None and job.deadline <= now]:
                self.core.cancel(job.request)
                self._deliver(job.request, JobFailed("deadline", "the deadline passed before the answer was finished"))

    def _deliver(self, request: Request, event: StreamEvent | JobFailed) -> None:
        """Hands an event over, unless the job has ended."""
        with self._changed:
            if (job := self._live.get(request)) is None:
                return
            if isinstance(event, JobFailed):
                del self._live[request]
                self._count("failed")
            elif event.finish_reason is not None:
                del self._live[request]
                self._count("finished")
                self._finishes.append(self._clock())
            try:
                job.on_event(event)
            except Exception:
                logger.exception("an event could not be delivered; its job is cancelled")
                self.cancel(job)

    def _count(self, name: str) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + 1})

    def _publish(self) -> None:
        core = self.core
        with self._changed:
            self._counts = replace(
                self._counts,
                reading=len(core.reading),
                running=len(core.running) - len(core.reading),
                kv_bytes=core.kv_bytes,
                prefix_bytes=core.prefixes.num_bytes,
                steps=core.steps,
                interruptions=core.interruptions,
                prompt_tokens_read=core.tokens_read,
                prefix_hits=core.prefixes.hits,
                prefix_tokens_reused=core.prefixes.tokens_reused,
            )

    def _forget(self) -> None:
        if self.lost is None:  # else it cannot even free memory
            self.core.clear()
            self.core.prefixes.limit(0)

    def _fail_all(self, failure: JobFailed) -> None:
        with self._changed:
            for request in list(self._live):
                self._deliver(request, failure)

    def _end(self, *, frees: bool = True) -> None:
        with self._changed:
            self._fail_all(self._lost_or(_SHUTDOWN))
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._closed)
            self._calls.clear()
            if frees:
                self._forget()
                self._publish()
