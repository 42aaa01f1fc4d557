"""The answers to one HTTP request: their jobs, their events on the event loop, and their stream to the client."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftheads.decode.request import Request, StreamEvent
from draftheads.errors import DraftHeadsError
from draftheads.serve.call import Call
from draftheads.serve.fields import ApiError, api_error_of
from draftheads.serve.recorder import Exchange
from draftheads.serve.scheduler import Job, JobFailed
from draftheads.serve.state import Service

_LOG = logging.getLogger(__name__)
_STATUS = {"error": 500, "deadline": 504, "shutdown": 503, "device_lost": 503, "grammar_failed": 400}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold chunks back
]
T = TypeVar("T")


class Answers:
    """Submits, waits for and cancels the answers. Complete ones are recorded, if the client and the server want it.

    Args:
        service: the server's state.
        call: what is answered.
        client: for the fair queue.
        start: when the HTTP request came, by ``time.monotonic``.
    """

    def __init__(self, service: Service, call: Call, client: str, *, start: float) -> None:
        self._service, self._call, self._start = service, call, start
        self._loop = asyncio.get_running_loop()
        # bounded by the lengths of the answers: the model thread never waits for a client
        self._events: asyncio.Queue[tuple[int, StreamEvent | JobFailed]] = asyncio.Queue()
        params, deadline = call.params, start + service.limits.request_seconds
        salt = service.access.cache_salt_of(client, params.fields.cache_salt)
        self._scheduler = service.scheduler
        self._jobs = [
            Job(request, params.lane, client, partial(self._deliver, index), deadline, salt)
            for index, request in enumerate(call.requests)
        ]
        self._unfinished = set(range(len(self._jobs)))
        self._last: dict[int, float] = {}  # when the last event of each came

    def submit(self) -> None:
        """Submits all jobs, or none."""
        try:
            for job in self._jobs:
                self._scheduler.submit(job)
        except DraftHeadsError as error:
            self.cancel()
            raise api_error_of(error) from None
        for job in self._jobs:
            self._service.metrics.prompt(len(job.request.prompt_ids))

    def cancel(self) -> None:
        """Ends what is unfinished. Ended answers are not affected."""
        for job in self._jobs:
            self._scheduler.cancel(job)

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent]]:
        """The events of all answers with their numbers, as they come."""
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
                self._record(self._jobs[index].request)
            yield index, event

    async def finish(self) -> None:
        """Waits until all answers are finished."""
        async for _ in self.events():
            pass

    def _deliver(self, index: int, event: StreamEvent | JobFailed) -> None:  # on the model thread
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _record(self, request: Request) -> None:
        service, call = self._service, self._call
        if service.recorder is None or not call.params.fields.store or not request.token_ids:
            return
        exchange = Exchange(
            model=service.models[call.params.lane.model].weights,
            tokenizer=service.tokenizer_fingerprint,
            prompt_ids=request.prompt_ids,
            answer_ids=request.token_ids,
            text=request.text,
            finished=request.finish_reason == "stop",
            messages=call.messages,
        )
        service.recorder.add(exchange)

    def _note(self, index: int, event: StreamEvent) -> None:
        now, last = time.monotonic(), self._last.get(index)
        self._service.metrics.event(event, now - (last or self._start), is_first=last is None)
        self._last[index] = now


class EventStream(Response):
    """Server-sent events: one JSON object each, the last one may be an error.

    ``named`` events have their ``type`` as a name; streams of others have ``[DONE]`` at the end.

    The stream ends when the client disconnects. The generator of its chunks is closed in any case, and ``at_end`` is
    called last, also if the stream never began.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], at_end: Callable[[], object], *, named: bool) -> None:
        super().__init__()
        self._chunks, self._at_end, self._named = chunks, at_end, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._at_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await _send_event(send, to_json(chunk), chunk["type"] if self._named else None)
            except ApiError as error:
                await _send_event(send, to_json(error.body()))
            except Exception:  # noqa: BLE001 - logged; too late for another status
                _LOG.exception("a stream failed")
                await _send_event(send, to_json(ApiError(500, "the server could not finish the answer").body()))
        if not self._named:
            await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: bytes, name: str | None = None) -> None:
    event = (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled if the client disconnects before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
