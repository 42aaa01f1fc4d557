"""What the routes share: the served models, the scheduler once they are loaded, the limits and the counts."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from socket import SHUT_RDWR, socket
from threading import BoundedSemaphore
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from draftheads.decode.answer_forms import form_of
from draftheads.decode.engine import Engine
from draftheads.decode.grammar import GrammarCompiler
from draftheads.errors import DeviceLost, InvalidSettings
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.serve.fields import ApiError, api_error_of, wrong
from draftheads.serve.guard import Access, HttpLimits
from draftheads.serve.limited import OverLimit, TrialFailed, Trials, in_thread, result_of
from draftheads.serve.metrics import Metrics
from draftheads.serve.recorder import Recorder
from draftheads.serve.scheduler import Scheduler

_SLOW = 2  # grammars and slow chat templates that are tried at once; of one client it is one
_QUICK = 8  # chat templates that are rendered at once
_QUICK_SECONDS = 0.1  # for a chat template; one that needs longer waits for a place among the slow ones
Phase = Literal["loading", "ready", "draining"]
F = TypeVar("F")
T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """A name that requests may choose."""

    name: str
    base: str  # the model's id
    head: str | None  # None: plain decoding
    adapter: str | None = None  # its name; None: the model itself
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def weights(self) -> str:
        """The same for all names with the same answers."""
        return self.adapter or self.base


@dataclass(eq=False)
class Untried(BaseException):
    """Raised while a request is read, if it has a job for another process that may take long.

    Not an Exception: chat templates raise those.
    """

    compiler: GrammarCompiler | None  # of a grammar; None: the job is the text of a chat template
    job: Callable[[], Any]
    field: str  # of the request
    problem: str  # in the error of a limit, with a place for it
    accept: Callable[[Any], object]  # takes the result; then the request is read again


class Service:
    """One server's state.

    Args:
        limits: of requests.
        access: who may send them.
        recorder: of answers; None records nothing.
    """

    def __init__(
        self, limits: HttpLimits | None = None, access: Access | None = None, *, recorder: Recorder | None = None
    ) -> None:
        self.limits, self.access, self.recorder = limits or HttpLimits(), access or Access(), recorder
        self.exchange: Callable[[str, str], object] | None = None  # of the head of a served model, for /admin/head
        self.tokenizer_fingerprint = ""  # where answers are recorded
        self.models: dict[str, ServedModel] = {}
        self.phase: Phase = "loading"
        self._scheduler: Scheduler | None = None
        self.metrics = Metrics(
            lambda: None if self._scheduler is None else self._scheduler.snapshot(),
            *([] if recorder is None else [lambda: recorder.counts]),
        )
        self.scoring = asyncio.Semaphore(1)  # prompts are scored one at a time, as each has a cache of its own
        # threads read requests (JSON, templates, tokens, grammars), so that a long one holds up no stream, nor another
        self._threads: set[asyncio.Future[Any]] = set()
        self.trials, self._slow, self._quick = Trials(), asyncio.Semaphore(_SLOW), BoundedSemaphore(_QUICK)
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client

    def open(self, models: Iterable[ServedModel], scheduler: Scheduler) -> None:
        """The models are loaded: requests are accepted from now on. The scheduler must have been started.

        The form of answers is read from their chat templates here, so that no request pays for it.
        """
        self.models = {model.name: model for model in models}
        assert self.models.keys() == scheduler.engines.keys(), "every served name has an engine"
        for engine in scheduler.engines.values():
            form_of(engine.model, run=lambda call: self.trials.rendered(call, self.limits.schema_seconds)[0] or "")
        if self.recorder is not None:
            engine = next(iter(scheduler.engines.values()))  # all have the same tokenizer
            self.tokenizer_fingerprint = tokenizer_fingerprint(engine.model.tokenizer)
        self._scheduler = scheduler
        if self.phase == "loading":
            self.phase = "ready"

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler."""
        if self.lost is not None:
            raise api_error_of(self.lost)
        if self.phase == "draining":
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
        if self._scheduler is None:
            raise ApiError(503, "the server is loading its model: retry later", code="loading", retry_after=1)
        return self._scheduler

    @property
    def lost(self) -> DeviceLost | None:
        """Why nothing is answered any more, if the accelerator has failed."""
        return None if self._scheduler is None else self._scheduler.lost

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait and the model has done nothing for too long."""
        return self._scheduler is not None and self._scheduler.stalled_seconds > self.limits.stalled_seconds

    def model(self, name: str) -> ServedModel:
        """A served model."""
        _ = self.scheduler
        if name not in self.models:
            message = f"there is no model {name[:80]!r} here; models: {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    def engine(self, name: str) -> Engine:
        """The engine of a served model as it is now; a head may be replaced at run time."""
        self.model(name)
        return self.scheduler.engines[name]

    async def read(self, client: str, function: "Callable[[F, Service], T]", fields: F) -> T:
        """Reads fields on a thread: those of one client one after another, so that clients take turns.

        What may take long is done before, in a process that ends with the task.
        """
        async with self._reading.setdefault(client, asyncio.Lock()):
            while True:
                try:
                    return await self._on_thread(partial(function, fields, self))
                except Untried as trial:
                    async with self._slow:
                        connection = await asyncio.to_thread(self.trials.connect, trial.compiler)
                        await self._on_thread(partial(self.try_now, trial, connection), connection)

    def try_now(self, trial: Untried, connection: socket) -> None:
        """Does a job in the process of a connection, and ends it."""
        try:
            with connection:
                trial.accept(result_of(connection, trial.job(), self.limits.schema_seconds))
        except InvalidSettings as error:
            raise api_error_of(error, param=trial.field) from None
        except OverLimit as limit:
            raise wrong(trial.field, trial.problem.format(limit)) from None
        except TrialFailed as error:
            raise ApiError(500, f"the process that reads {trial.field} failed: {error}", code="trial_failed") from None

    def rendered(self, trial: Untried) -> Any:
        """The text of a chat template, or its error; on a thread that reads requests.

        Raises:
            Untried: it is slow, or a process that waited for it was killed.
        """
        try:
            with self._quick:
                return self.trials.rendered(trial.job(), _QUICK_SECONDS)
        except TrialFailed:
            raise trial from None

    def parsed(self, call: dict[str, Any]) -> Any:
        """What a ``response_template`` makes of an answer; on a thread. Raises TrialFailed."""
        result, problem = self.trials.rendered(call, self.limits.schema_seconds)
        if problem is not None:
            raise TrialFailed(problem)
        return result

    async def _on_thread(self, function: Callable[[], T], connection: socket | None = None) -> T:
        """Ends with the thread, also if its client has gone: the client's next request comes after it.

        The process of the connection ends before.
        """
        future = asyncio.wrap_future(in_thread(function)[1])
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        try:
            return await asyncio.shield(future)
        finally:
            if connection is not None:
                with suppress(OSError):  # it is closed
                    connection.shutdown(SHUT_RDWR)
            while not future.done() and self.phase == "ready":  # else the server ends
                await asyncio.wait([future], timeout=1)

    async def drain(self, seconds: float) -> None:
        """Takes no further requests, and finishes the answers that are under way within so many seconds."""
        self.phase = "draining"
        if self._scheduler is not None:
            await asyncio.to_thread(self._scheduler.close, drain_seconds=seconds)

    def close(self) -> bool:
        """Stops the threads at once; unfinished answers fail. False if one goes on: it reads a request, or is stuck."""
        self.phase = "draining"
        if self._scheduler is not None:
            self._scheduler.close(drain_seconds=0)
        self.trials.close()
        return not self._threads and not (self._scheduler is not None and self._scheduler.is_stuck)
