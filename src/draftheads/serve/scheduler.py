"""One thread decodes the requests of all clients: it admits them, steps every lane in turn and delivers the events.

Other threads submit and cancel jobs. They never touch tensors.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Condition, Thread, current_thread
from typing import Any, TypeVar

from draftheads.counts import counted
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent
from draftheads.errors import InvalidSettings, QueueFull, ShuttingDown, TooLarge, first_line, no_such
from draftheads.models.fast import return_freed_memory
from draftheads.models.kv_target import bytes_per_slot
from draftheads.serve.fair_queue import FairQueue
from draftheads.serve.jobs import Job, JobFailed, Lane, Limits, Snapshot

__all__ = ["Job", "JobFailed", "Lane", "Limits", "Scheduler", "Snapshot"]

logger = logging.getLogger(__name__)
_FINISHES = 32  # last ones, from which the rate of finishing is measured
T = TypeVar("T")


class _RunningLane:
    """A batch and the jobs of its rows."""

    def __init__(self, lane: Lane, engine: Engine, batch: Batch) -> None:
        self.lane, self.engine, self.batch = lane, engine, batch
        self.jobs: dict[Request, Job] = {}


class Scheduler:
    """Decodes jobs on a thread of its own.

    Args:
        engines: served name to engine. They share one model. An entry may be replaced in a function that
            :meth:`call` runs: running requests keep the old engine.
        limits: rows, memory and waiting jobs.
        clock: seconds, for deadlines and rates.

    Raises:
        InvalidSettings: no engine, or engines of several models.
    """

    def __init__(
        self, engines: Mapping[str, Engine], limits: Limits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if len({id(engine.model) for engine in engines.values()}) != 1:
            names = ", ".join(engines) or "no engine"
            raise InvalidSettings(f"engines of a scheduler share one loaded model; found {names}")
        self.engines = dict(engines)
        self.limits = limits
        self._clock = clock
        self._bytes_per_slot = bytes_per_slot(next(iter(engines.values())).model)
        # an RLock: events are delivered while it is held, so that none comes after cancel() returned
        self._changed = Condition()
        self._queue = FairQueue()
        self._live: set[Job] = set()  # accepted and not ended
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._counts = Snapshot()
        self._finishes: deque[float] = deque(maxlen=_FINISHES)
        self._drain_until: float | None = None  # set when closing
        self._thread: Thread | None = None
        self._lanes: list[_RunningLane] = []  # the model thread's own

    # --- other threads ---

    def start(self) -> None:
        """Starts the model thread."""
        assert self._thread is None, "a scheduler is started once"
        self._thread = Thread(target=self._run, name="draftheads-model", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Accepts a job.

        Raises:
            InvalidSettings: no engine of that name, or an impossible ``draft_nodes``.
            TooLarge: its keys and values may not fit, even alone.
            QueueFull: too many jobs wait.
            ShuttingDown: after :meth:`close`.
        """
        engine = self.engines.get(job.lane.model)
        if engine is None:
            raise no_such("model", job.lane.model, self.engines, other_names={})
        engine.check_draft_nodes(job.lane.draft_nodes)
        self._check_size(job, engine)
        with self._changed:
            if self._drain_until is not None:
                raise ShuttingDown("the server is shutting down: send the request to another one")
            if len(self._queue) >= self.limits.max_waiting:
                wait = self._retry_after()
                raise QueueFull(
                    f"{counted(len(self._queue), 'request')} wait and at most {self.limits.max_waiting} may: "
                    f"retry after {wait:.0f} s",
                    retry_after=wait,
                )
            self._live.add(job)
            self._queue.push(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Ends a job without a further event. Its row leaves before the next step. Ended jobs are ignored."""
        with self._changed:
            if job in self._live:
                self._live.remove(job)
                self._queue.remove(job)
                self._count(cancelled=1)
                self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """The counts as of the last step."""
        with self._changed:
            return replace(self._counts, waiting=len(self._queue))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the model thread between two steps. Its future fails when the scheduler is closed."""
        future: Future[T] = Future()
        with self._changed:
            if self._drain_until is not None:
                future.set_exception(ShuttingDown("the scheduler is closed"))
            else:
                self._calls.append((function, future))
                self._changed.notify_all()
        return future

    def close(self, *, drain_seconds: float) -> None:
        """Takes no more jobs, finishes those that it has for so many seconds, and stops. The rest fail."""
        with self._changed:
            end = self._clock() + drain_seconds
            self._drain_until = end if self._drain_until is None else min(end, self._drain_until)
            self._changed.notify_all()
        if self._thread is None:
            self._end()
        elif self._thread is not current_thread():
            self._thread.join()

    def _check_size(self, job: Job, engine: Engine) -> None:
        slots = job.request.most_tokens + engine.most_nodes(job.lane.draft_nodes)
        needed = slots * self._bytes_per_slot
        if needed > self.limits.kv_bytes:
            raise TooLarge(
                f"the prompt and {counted(job.request.most_new_tokens, 'new token')} need {needed >> 20} MiB for keys "
                f"and values; the server has {self.limits.kv_bytes >> 20} MiB: ask for fewer tokens"
            )

    def _retry_after(self) -> float:
        """Seconds in which a job ends, at the rate of the last ones; at least 1."""
        if len(self._finishes) < 2:
            return 1.0
        gaps = [after - before for before, after in pairwise(self._finishes)]
        return max(1.0, min(60.0, sum(gaps) / len(gaps)))

    # --- the model thread ---

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._iterate()
            except Exception as error:  # our own fault; the server goes on
                logger.exception("the scheduler failed")
                self._lanes = []
                self._fail(list(self._live), error)
        self._end()

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False if it is time to end."""
        if not self._has_work():
            return_freed_memory()
        with self._changed:
            while not self._has_work() and self._drain_until is None:
                self._changed.wait()
            return self._drain_until is None or (self._has_work() and self._clock() < self._drain_until)

    def _has_work(self) -> bool:
        return bool(self._live or self._calls or self._lanes)

    def _iterate(self) -> None:
        """Everything between two steps, and one step of every lane."""
        self._run_calls()
        self._end_late_jobs()
        self._admit()
        for lane in list(self._lanes):
            self._step(lane)
        self._lanes = [lane for lane in self._lanes if lane.jobs]
        with self._changed:
            self._counts = replace(
                self._counts,
                running=sum(len(lane.jobs) for lane in self._lanes),
                lanes=len(self._lanes),
                kv_bytes=sum(lane.batch.target.cache.num_bytes for lane in self._lanes),
            )

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    future.set_exception(error)

    def _end_late_jobs(self) -> None:
        """Jobs beyond their deadline fail, and rows of jobs that have ended leave."""
        now = self._clock()
        with self._changed:
            late = [job for job in self._live if job.deadline is not None and job.deadline <= now]
            for job in late:
                self._queue.remove(job)
                self._deliver(job, JobFailed("deadline", "the deadline passed before the answer was finished"))
            for lane in self._lanes:
                self._drop(lane, [request for request, job in lane.jobs.items() if job not in self._live])
        self._lanes = [lane for lane in self._lanes if lane.jobs]

    def _drop(self, lane: _RunningLane, requests: list[Request]) -> None:
        if requests:
            lane.batch.drop(requests)
            for request in requests:
                del lane.jobs[request]

    def _admit(self) -> None:
        """Waiting jobs whose turn it is join their lanes."""
        room = self.limits.max_rows - sum(len(lane.jobs) for lane in self._lanes)
        joining: dict[int, tuple[_RunningLane, list[Job]]] = {}
        with self._changed:
            for _ in range(min(room, len(self._queue))):
                job = self._queue.pop()
                lane = self._lane_of(job)
                lane.jobs[job.request] = job
                joining.setdefault(id(lane), (lane, []))[1].append(job)
        for lane, jobs in joining.values():
            requests = sorted((job.request for job in jobs), key=lambda request: len(request.prompt_ids))
            self._deliver_all(lane, requests, partial(lane.batch.join, requests))

    def _lane_of(self, job: Job) -> _RunningLane:
        engine = self.engines[job.lane.model]
        for lane in self._lanes:
            if lane.lane == job.lane and lane.engine is engine:
                return lane
        lane = _RunningLane(job.lane, engine, engine.batch(draft_nodes=job.lane.draft_nodes))
        self._lanes.append(lane)
        return lane

    def _step(self, lane: _RunningLane) -> None:
        if lane.batch.requests:
            self._deliver_all(lane, list(lane.batch.requests), lane.batch.step)
            self._count(steps=1)

    def _deliver_all(self, lane: _RunningLane, requests: list[Request], work: Callable[[], list[StreamEvent]]) -> None:
        """Delivers the events of a join or step, one for each request. If it fails, all jobs of the lane fail."""
        try:
            events = work()
        except Exception as error:
            logger.exception("a step of %s failed", lane.lane.model)
            self._fail(lane.jobs.values(), error)
            lane.jobs.clear()
            self._lanes.remove(lane)
            return
        for request, event in zip(requests, events, strict=True):
            self._deliver(lane.jobs[request], event)
            if event.finish_reason is not None:
                del lane.jobs[request]

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            self._deliver(job, JobFailed("error", f"the answer could not be computed: {first_line(error)}"))

    def _deliver(self, job: Job, event: StreamEvent | JobFailed) -> None:
        """Hands an event over, unless the job has ended."""
        with self._changed:
            if job not in self._live:
                return
            if isinstance(event, JobFailed):
                self._live.remove(job)
                self._count(failed=1)
            elif event.finish_reason is not None:
                self._live.remove(job)
                self._count(finished=1)
                self._finishes.append(self._clock())
            try:
                job.on_event(event)
            except Exception:
                logger.exception("an event could not be delivered; its job is cancelled")
                self.cancel(job)

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + value for name, value in more.items()}
            )

    def _end(self) -> None:
        with self._changed:
            for job in list(self._live):
                self._queue.remove(job)
                self._deliver(job, JobFailed("shutdown", "the server shut down before the answer was finished"))
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(ShuttingDown("the scheduler is closed"))
            self._calls.clear()
        self._lanes = []
        self._counts = replace(self._counts, running=0, lanes=0, kv_bytes=0)
