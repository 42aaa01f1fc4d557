"""What the routes share: the served models, the scheduler once they are loaded, the limits and the counts."""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

from draftheads.decode.engine import Engine
from draftheads.errors import DeviceLost
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.serve.fields import ApiError, api_error_of
from draftheads.serve.guard import Access, HttpLimits
from draftheads.serve.metrics import Metrics
from draftheads.serve.recorder import Recorder
from draftheads.serve.scheduler import Scheduler

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
        # one thread reads requests (JSON, templates, tokens, grammars), so that a long one holds up no stream
        self._reader = ThreadPoolExecutor(1, "draftheads-reader")
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
        """Reads fields on a thread: those of one client one after another, so that clients take turns."""
        async with self._reading.setdefault(client, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._reader, function, fields, self)

    async def drain(self, seconds: float) -> None:
        """Takes no further requests, and finishes the answers that are under way within so many seconds."""
        self.phase = "draining"
        if self._scheduler is not None:
            await asyncio.to_thread(self._scheduler.close, drain_seconds=seconds)

    def close(self) -> None:
        """Stops the threads at once; unfinished answers fail."""
        self.phase = "draining"
        if self._scheduler is not None:
            self._scheduler.close(drain_seconds=0)
        self._reader.shutdown(cancel_futures=True)
