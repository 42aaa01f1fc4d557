"""What the routes share: the served models, the scheduler once they are loaded, the limits and the counts."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from draftheads.decode.engine import Engine
from draftheads.decode.grammar import GrammarCompiler, in_llguidance
from draftheads.errors import DeviceLost, InvalidSettings
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.serve.fields import ApiError, api_error_of, wrong
from draftheads.serve.guard import Access, HttpLimits
from draftheads.serve.limited import TRIAL_BYTES, GrammarTrials, Untried, in_thread
from draftheads.serve.metrics import Metrics
from draftheads.serve.recorder import Recorder
from draftheads.serve.scheduler import Scheduler
from draftheads.settings import Grammar

_COMPILERS = 2  # grammars that are tried at once; of one client it is one
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
        self._compilers = asyncio.Semaphore(_COMPILERS)
        self._trials = GrammarTrials(self.limits.schema_seconds)
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client

    def open(self, models: Iterable[ServedModel], scheduler: Scheduler) -> None:
        """The models are loaded: requests are accepted from now on. The scheduler must have been started."""
        self.models = {model.name: model for model in models}
        assert self.models.keys() == scheduler.engines.keys(), "every served name has an engine"
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

        A grammar that may take long is compiled before, in a process that ends with the task.
        """
        async with self._reading.setdefault(client, asyncio.Lock()):
            while True:
                try:
                    return await self._on_thread(partial(function, fields, self))
                except Untried as untried:
                    async with self._compilers:
                        await self._compile(*untried.args)

    async def _compile(self, compiler: GrammarCompiler, grammar: Grammar, field: str) -> None:
        try:
            if not compiler.may_be_slow(grammar):  # another request had the same
                return
            if is_small := await self._trials.finishes(compiler, in_llguidance(grammar)):
                await self._on_thread(partial(compiler.compile, grammar))
        except InvalidSettings as error:
            raise api_error_of(error, param=field) from None
        if not is_small:
            limits = f"{self.limits.schema_seconds:g} s (--schema-seconds) and {TRIAL_BYTES >> 30} GiB of memory"
            fix = "use smaller or fewer numbers in multipleOf, and fewer nested repetitions"
            raise wrong(field, f"has a schema or grammar that takes more than {limits} to compile: {fix}")

    async def _on_thread(self, function: Callable[[], T]) -> T:
        """Ends with the thread, also if its client has gone: the client's next request comes after it."""
        future = asyncio.wrap_future(in_thread(function)[1])
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        try:
            return await asyncio.shield(future)
        finally:
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
        self._trials.close()
        return not self._threads and not (self._scheduler is not None and self._scheduler.is_stuck)
