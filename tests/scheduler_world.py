"""A scheduler that tests drive iteration by iteration, and inboxes that collect the events of jobs."""

import queue
from collections.abc import Sequence
from typing import Any

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.scheduler import Job, JobFailed, Lane, Limits, Scheduler
from draftheads.settings import SamplingSettings

ROOM = 1 << 24  # bytes: more than tiny models need


class Inbox:
    """Collects a job's events; any thread may wait for its end."""

    def __init__(self) -> None:
        self.events: list[StreamEvent | JobFailed] = []
        self.end: queue.Queue[StreamEvent | JobFailed] = queue.Queue()

    def __call__(self, event: StreamEvent | JobFailed) -> None:
        self.events.append(event)
        if self.is_last(event):
            self.end.put(event)

    @staticmethod
    def is_last(event: StreamEvent | JobFailed) -> bool:
        return isinstance(event, JobFailed) or event.finish_reason is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events if isinstance(event, StreamEvent) for token in event.token_ids)

    @property
    def ends(self) -> list[StreamEvent | JobFailed]:
        return [event for event in self.events if self.is_last(event)]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens of a finished answer."""
        assert len(self.ends) == 1
        assert isinstance(self.events[-1], StreamEvent), self.events[-1]
        return self.token_ids

    @property
    def failure(self) -> JobFailed:
        assert len(self.ends) == 1
        assert isinstance(self.events[-1], JobFailed)
        return self.events[-1]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request_of(engine: Engine, prompt: Sequence[int], **settings: Any) -> Request:
    return engine.request(prompt, SamplingSettings(**{"max_new_tokens": 12, "ignore_eos": True, **settings}))


def plain_answer(engine: Engine, prompt: Sequence[int], **settings: Any) -> tuple[int, ...]:
    """By the offline engine, alone and without drafts."""
    settings = {"max_new_tokens": 12, "ignore_eos": True, **settings}
    return Engine(engine.model, max_batch_size=1).generate([prompt], **settings)[0].token_ids


def assert_plain(engine: Engine, *requests: Request, **settings: Any) -> None:
    """Their answers are those of the offline engine without drafts."""
    for request in requests:
        expected = plain_answer(engine, request.prompt_ids, max_new_tokens=request.most_new_tokens, **settings)
        assert request.result().token_ids == expected


def join(batch: Batch, requests: Sequence[Request]) -> None:
    """New rows, whose prompts are read side by side."""
    for request in requests:
        request.read_ids, request.row = request.ids_to_read, batch.runner.open(request.most_tokens)
    batch.join(batch.read({request: len(request.read_ids) for request in requests}))


def scheduler_of(engines: dict[str, Engine], *, clock: Any = None, **limits: Any) -> Scheduler:
    """Not started: tests call :func:`iterate`."""
    options = {} if clock is None else {"clock": clock}
    return Scheduler(engines, Limits(**{"kv_bytes": ROOM, "chunk_steps": None, **limits}), **options)


def submit(
    scheduler: Scheduler,
    prompt: Sequence[int],
    lane: Lane | None = None,
    *,
    client: str = "someone",
    deadline: float | None = None,
    cache_salt: str = "",
    **settings: Any,
) -> tuple[Job, Inbox]:
    lane = lane or Lane(next(iter(scheduler.engines)))
    inbox = Inbox()
    request = request_of(scheduler.engines[lane.model], prompt, **settings)
    job = Job(request, lane, client, inbox, deadline, cache_salt)
    scheduler.submit(job)
    return job, inbox


def iterate(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        scheduler._iterate()


def run_to_end(scheduler: Scheduler, *, most: int = 2000) -> None:
    """Until nothing is left to do."""
    for _ in range(most):
        if not scheduler._has_work():
            return
        scheduler._iterate()
    raise AssertionError(f"not finished after {most} iterations: {scheduler.snapshot()}")


def check_empty(scheduler: Scheduler) -> None:
    """Nothing is kept of ended jobs but cached prefixes."""
    found = scheduler.snapshot()
    assert (found.waiting, found.reading, found.running, found.kv_bytes) == (0, 0, 0, 0)
    assert [*scheduler._live, *scheduler.core.batches, *scheduler.core.reading] == []
