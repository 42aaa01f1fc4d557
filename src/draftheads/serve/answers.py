"""The answers to one HTTP request: submits their jobs, and brings events from the model thread to the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from draftheads.decode.request import Request, StreamEvent
from draftheads.errors import DraftHeadsError
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.request_params import RequestParams
from draftheads.serve.scheduler import Job, JobFailed
from draftheads.serve.state import Service

_STATUS = {"error": 500, "deadline": 504, "shutdown": 503}
T = TypeVar("T")


class Answers:
    """An asynchronous context manager: on leaving it, unfinished answers are cancelled. Submitted before it is entered.

    Args:
        service: the server's state.
        requests: one for each answer.
        params: with the lane of all of them.
        client: for the fair queue.
        start: when the HTTP request came, by ``time.monotonic``.
    """

    on_finish: Callable[[Request], object] = id  # called with each request when its answer is complete

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        params: RequestParams,
        client: str,
        *,
        start: float,
    ) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._start = start
        # bounded by the lengths of the answers: the model thread never waits for a client
        self._events: asyncio.Queue[tuple[int, StreamEvent | JobFailed]] = asyncio.Queue()
        seconds = service.limits.request_seconds
        deadline = None if seconds is None else self._start + seconds
        self._jobs = [
            Job(request, params.lane, client, self._deliver_to(index), deadline, params.fields.cache_salt)
            for index, request in enumerate(requests)
        ]
        self._unfinished = set(range(len(self._jobs)))
        self._last = dict.fromkeys(self._unfinished, 0.0)  # when the last event of each came; 0: none came

    async def submit(self) -> None:
        """Submits all jobs, or none.

        Raises:
            ApiError: the queue is full, or the answers do not fit into memory.
        """
        scheduler = self._service.scheduler
        try:
            for job in self._jobs:
                scheduler.submit(job)
        except DraftHeadsError as error:
            self.cancel()
            raise api_error_of(error) from None
        for job in self._jobs:
            self._service.metrics.prompt(len(job.request.prompt_ids))

    def cancel(self) -> None:
        """Ends what is unfinished. Ended answers are not affected."""
        for job in self._jobs:
            self._service.cancel(job)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unfinished:
            self.cancel()

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent]]:
        """The events of all answers with their numbers, as they come.

        Raises:
            ApiError: an answer failed.
        """
        while self._unfinished:
            index, event = await self._events.get()
            if isinstance(event, JobFailed):
                self._unfinished.discard(index)
                # what went wrong in the server is in its log, and not for strangers
                message = "the answer could not be computed" if event.reason == "error" else event.message
                raise ApiError(_STATUS[event.reason], message, code=event.reason)
            self._note(index, event)
            if event.finish_reason is not None:
                self._unfinished.discard(index)
                self.on_finish(self._jobs[index].request)
            yield index, event

    async def finish(self) -> list[Request]:
        """Waits until all answers are finished."""
        async for _ in self.events():
            pass
        return [job.request for job in self._jobs]

    def _deliver_to(self, index: int) -> Callable[[StreamEvent | JobFailed], None]:
        """What the model thread calls."""

        def deliver(event: StreamEvent | JobFailed) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver

    def _note(self, index: int, event: StreamEvent) -> None:
        now, last = time.monotonic(), self._last[index]
        if last:
            self._service.metrics.step(event, now - last)
        else:
            self._service.metrics.first_token(event, now - self._start)
        self._last[index] = now


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled if the client disconnects before.

    Raises:
        ClientDisconnect: it did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _stop(working, watching)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
