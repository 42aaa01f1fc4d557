"""The core of all decoding: it admits requests, reads their prompts in chunks and steps their rows.

Memory is reserved for the next tokens of an answer, not for the longest possible one. If it runs out, a request is
interrupted: it waits again, and its text is read again when it goes on. So plain, drafted, and interrupted answers are
the same. A client also gives up rows when it has more of them than another one that waits.

``Engine.generate`` and ``stream``, ``draftheads chat`` and the server are callers of it. One thread calls
:meth:`EngineCore.step`; others may add and cancel requests.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Generic

from draftheads.decode.prefix_cache import PrefixCache
from draftheads.decode.prompt_reader import ReadPrompt
from draftheads.decode.reading import Reading, ReadingQueue
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.running import AnyEngine, RunningLane, SlotBytes
from draftheads.decode.waiting import FairQueue, Lane, QueuedRequest
from draftheads.errors import DraftHeadsError, TooLarge, no_such, require_at_least
from draftheads.utils.counts import counted

CoreEvent = tuple[Request, StreamEvent | Exception]  # a request ends with a finish reason or an exception
_PREFIX_BYTES = 1 << 30  # of texts that were read, where memory has no limit
_MANY_IDLE_SLOTS = 2048  # fewer cost no time, even of a tiny model
_MOST_OVERTAKEN = 64  # times that a request is overtaken before memory is kept free for it


@dataclass(frozen=True, kw_only=True)
class CoreLimits:
    """What a core may use.

    Raises:
        InvalidSettings: a number below 1.
    """

    max_rows: int = 16
    """Requests that are read or decoded at the same time."""
    kv_bytes: int | None = None
    """Memory for keys and values, of running requests and cached prefixes together; None: no limit."""
    chunk_tokens: int = 256
    """Prompt tokens that are read between two steps."""
    headroom_tokens: int = 256
    """Further tokens of its answer for which there must be memory when a request is admitted."""

    def __post_init__(self) -> None:
        require_at_least(1, **{name: value for name, value in vars(self).items() if value is not None})


class EngineCore(Generic[AnyEngine]):
    """The requests that wait, are read and are decoded, and the texts that were read before.

    Args:
        engines: by name. They share one model, or are its adapters. An entry may be replaced between two steps:
            running requests keep the old engine, and waiting ones get the new one.
        limits: rows, memory, and the tokens of a chunk.
        keeps_answers: whether answers, too, are kept for prompts that begin with them, as in a conversation.
        answers_together: whether all answers are wanted at the same time, so that only the end of the last one counts.
        on_phase: called after each part of the work, as by :class:`Batch`.
    """

    def __init__(
        self,
        engines: Mapping[str, AnyEngine],
        limits: CoreLimits,
        *,
        keeps_answers: bool = False,
        answers_together: bool = False,
        on_phase: Callable[[str], object] = str,
    ) -> None:
        self.engines = dict(engines)
        self.limits = limits
        self.sizes = SlotBytes()
        self.waiting = FairQueue()
        self.prefixes = PrefixCache(_PREFIX_BYTES if limits.kv_bytes is None else limits.kv_bytes)
        self.lanes: list[RunningLane] = []
        self.steps = 0
        self.tokens_read = 0
        self.interruptions = 0
        self.held_bytes = 0  # memory of what is read outside of requests
        self._keeps_answers, self._answers_together, self._on_phase = keeps_answers, answers_together, on_phase
        self._reading = ReadingQueue(self.prefixes)
        self._admissions = 0
        self._cancelled: set[Request] = set()
        self._lock = Lock()  # of _cancelled

    # --- any thread ---

    def check(self, request: Request, lane: Lane) -> None:
        """Whether a request can be decoded.

        Raises:
            InvalidSettings: no engine of that name, or an impossible ``draft_nodes``.
            TooLarge: its keys and values may not fit, even alone.
        """
        engine = self._engine_of(lane)
        engine.check_draft_nodes(lane.draft_nodes)
        limit, nodes = self.limits.kv_bytes, lane.rounded().draft_nodes
        if limit is not None and (needed := self.sizes.alone(engine, nodes, request)) > limit:
            raise TooLarge(
                f"the prompt and {counted(request.most_new_tokens, 'new token')} need {needed >> 20} MiB for keys "
                f"and values; the server has {limit >> 20} MiB: ask for fewer tokens"
            )

    def add(
        self,
        request: Request,
        lane: Lane | None = None,
        *,
        client: str = "",
        cache_salt: str = "",
        first: bool = False,
    ) -> None:
        """A request waits for its turn.

        Args:
            request: is decoded.
            lane: which engine decodes it, and how much it drafts; numbers of nodes are rounded.
            client: clients take turns.
            cache_salt: prompts with the same salt share what was read of a common beginning.
            first: before the client's other requests.

        Raises:
            DraftHeadsError: as :meth:`check`.
        """
        lane = lane or Lane(next(iter(self.engines)))
        self.check(request, lane)
        self.waiting.push(QueuedRequest(request, lane.rounded(), client, cache_salt), first=first)

    def cancel(self, request: Request) -> None:
        """The request leaves before the next step, without an event after that. Ended ones are ignored."""
        if not self.waiting.remove(request):
            with self._lock:
                self._cancelled.add(request)

    # --- the thread that decodes ---

    def step(self) -> list[CoreEvent]:
        """Admits waiting requests, reads a chunk of prompts and steps every lane once."""
        models = [engine.model for engine in self.engines.values()]
        if any(model.native is None for model in models):  # an adapter's layers are computed by torch
            return self._step()
        with models[0].computing():
            return self._step()

    def _step(self) -> list[CoreEvent]:
        self._drop_cancelled()
        self._interrupt_what_does_not_fit()
        events = self._admit() + self._read()
        for lane in list(self.lanes):
            if lane.batch.requests:
                lane.batch.none_waits = self._answers_together and not self._reading and not len(self.waiting)
                events += self._advance(lane, list(lane.batch.requests), lane.batch.step)
                self.steps += 1
        self._drop_empty_lanes()
        return events

    def hold(self, num_bytes: int) -> None:
        """Reserves memory for what is read outside of requests; requests that no longer fit beside it wait.

        Raises:
            TooLarge: there is less memory, even without requests.
        """
        limit = self.limits.kv_bytes
        if limit is not None and self.held_bytes + num_bytes > limit:
            words = f"{num_bytes >> 20} MiB for keys and values; the server has {limit >> 20} MiB"
            raise TooLarge(f"the prompt needs {words}: send a shorter one")
        self.held_bytes += num_bytes
        self._interrupt_what_does_not_fit()
        self._drop_empty_lanes()

    def clear(self) -> None:
        self.waiting.clear()
        self._reading, self.lanes = ReadingQueue(self.prefixes), []

    @property
    def has_work(self) -> bool:
        return bool(self.lanes or len(self.waiting))

    @property
    def num_running(self) -> int:
        """Requests that are read or decoded."""
        return sum(len(lane.requests) for lane in self.lanes)

    @property
    def num_reading(self) -> int:
        """Requests whose prompts are being read."""
        return len(self._reading)

    @property
    def kv_bytes(self) -> int:
        """Memory of the requests that are read and decoded."""
        return sum(lane.batch.num_bytes for lane in self.lanes) + self._reading.num_bytes

    # --- admission ---

    def _admit(self) -> list[CoreEvent]:
        """Waiting requests join, as long as there are rows and memory; one that fits overtakes one that does not."""
        events: list[CoreEvent] = []
        while self._admit_one(events):
            pass
        self._drop_empty_lanes()
        return events

    def _admit_one(self, events: list[CoreEvent]) -> bool:
        """Whether a request joined. The events are of those that no engine can take any more."""
        overtaken: list[QueuedRequest] = []
        kept_free = 0
        rows = self._rows_of_clients()
        for queued in sorted(self.waiting.in_turn(), key=lambda queued: rows[queued.client]):
            try:
                place = self._place_for(queued, kept_free)
            except DraftHeadsError as error:  # the engine was replaced by one that cannot take it
                if self.waiting.pop(queued):
                    events.append((queued.request, error))
                continue
            if place is not None and self.waiting.pop(queued):  # else it was cancelled meanwhile
                self._join(queued, *place)
                for each in overtaken:
                    each.num_overtaken += 1
                return True
            if place is None and self.num_running < self.limits.max_rows:  # there is no memory for it
                overtaken.append(queued)
                if queued.num_overtaken >= _MOST_OVERTAKEN:
                    kept_free += self.sizes.at_first(self._engine_of(queued.lane), queued, self.limits.headroom_tokens)
        return False

    def _place_for(
        self, queued: QueuedRequest, kept_free: int
    ) -> tuple[RunningLane, tuple[RunningLane, Request] | None] | None:
        """The lane that a request joins, and the request that gives its place to it if none is free."""
        if self.num_running < self.limits.max_rows and (lane := self._lane_for(queued, kept_free)) is not None:
            return lane, None
        giving = self._giving_to(queued.client)
        if giving is None:
            return None
        lane = self._lane_for(queued, kept_free - self._freed(*giving))
        return None if lane is None else (lane, giving)

    def _join(self, queued: QueuedRequest, lane: RunningLane, giving: tuple[RunningLane, Request] | None) -> None:
        if giving is not None:
            self._interrupt(*giving)
        self._admissions += 1
        queued.admission = self._admissions
        lane.requests[queued.request] = queued
        if lane not in self.lanes:
            self.lanes.append(lane)
        self._reading.readings.append(Reading(lane, queued.request))

    def _engine_of(self, lane: Lane) -> AnyEngine:
        engine = self.engines.get(lane.model)
        if engine is None:
            raise no_such("model", lane.model, self.engines, other_names={})
        return engine

    def _lane_for(self, queued: QueuedRequest, kept_free: int) -> RunningLane | None:
        """Where the request joins, a new lane if none is suitable; None if there is no memory for it.

        Raises:
            DraftHeadsError: no engine can take it.
        """
        engine = self._engine_of(queued.lane)
        lanes = [lane for lane in self.lanes if lane.lane == queued.lane and lane.engine is engine]
        lanes = [lane for lane in lanes if not self._wastes_time(lane, queued.request)]
        for lane in sorted(lanes, key=lambda lane: self._growth(lane, queued.request)):
            if self._makes_room(lane, queued.request, kept_free):
                return lane
        if not self.num_running:
            self.check(queued.request, queued.lane)  # it fits alone, or never: the engine may be another one by now
        new = RunningLane(queued.lane, engine, self._on_phase)
        if self._keeps_answers:
            new.batch.on_leave = lambda request, text: self.prefixes.add(new.namespace(request), text)
        return new if self._makes_room(new, queued.request, kept_free) else None

    def _rows_of_clients(self) -> Counter[str]:
        return Counter(queued.client for lane in self.lanes for queued in lane.requests.values())

    def _giving_to(self, client: str) -> tuple[RunningLane, Request] | None:
        """The request that gives its place to a client: the latest one of the client that has most.

        None if that one would then have fewer places than this client.
        """
        rows = self._rows_of_clients()
        owner = max(rows, key=rows.__getitem__, default=client)
        if rows[owner] < rows[client] + 2:
            return None
        return max(self._interruptible(owner), key=lambda pair: pair[0].requests[pair[1]].admission, default=None)

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        for request in cancelled:
            self.waiting.remove(request)  # it may have been interrupted since
        for lane in self.lanes if cancelled else ():
            gone = [request for request in lane.requests if request in cancelled]
            self._reading.remove(*gone)
            lane.batch.drop(gone)
            for request in gone:
                del lane.requests[request]
        self._drop_empty_lanes()

    def _drop_empty_lanes(self) -> None:
        self.lanes = [lane for lane in self.lanes if lane.requests]
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved()))

    # --- memory ---

    def _makes_room(self, lane: RunningLane, request: Request, kept_free: int = 0) -> bool:
        """Whether the memory of one more request is free; frees unused slots if that helps."""
        limit = self.limits.kv_bytes
        if limit is None:
            return True
        if self._with(lane, request, trimmed=False) + kept_free <= limit:
            return True
        # what was accepted is decoded, if only alone; while an interrupted text is read again, it is there twice
        if self._with(lane, request, trimmed=True) + kept_free > limit and (self.num_running or self.held_bytes):
            return False
        self._trim()
        return True

    def _reserved(self, *, headroom: int = 0, trimmed: bool = False) -> int:
        """Memory that the requests take at most in the next step, if each answer were longer by so many tokens."""
        slots = ((lane, lane.slots(headroom=headroom, trimmed=trimmed)) for lane in self.lanes)
        texts = (self.sizes.of_text(reading.lane.engine, reading.request) for reading in self._reading.readings)
        slot_bytes = sum(count * self.sizes.per_slot(lane.engine) for lane, count in slots)
        return self.held_bytes + slot_bytes + sum(texts)

    def _growth(self, lane: RunningLane, request: Request, *, trimmed: bool = False) -> int:
        """By how much one more request adds to it."""
        headroom = self.limits.headroom_tokens
        slots = lane.slots(request, headroom=headroom, trimmed=trimmed) - lane.slots(headroom=headroom, trimmed=trimmed)
        return slots * self.sizes.per_slot(lane.engine) + self.sizes.of_text(lane.engine, request)

    def _with(self, lane: RunningLane, request: Request, *, trimmed: bool) -> int:
        """Memory that is reserved if one more request is admitted."""
        reserved = self._reserved(headroom=self.limits.headroom_tokens, trimmed=trimmed)
        return reserved + self._growth(lane, request, trimmed=trimmed)

    def _wastes_time(self, lane: RunningLane, *more: Request, passes: int = 2) -> bool:
        """Whether reading the idle slots of a lane's rectangle takes longer than so many passes of a further lane."""
        idle = lane.num_idle_slots(*more)
        weights = self.sizes.of_weights(lane.engine)
        return idle > _MANY_IDLE_SLOTS and idle * self.sizes.per_slot(lane.engine) > passes * weights

    def _trim(self) -> None:
        for lane in self.lanes:
            lane.batch.target.trim()

    def _interrupt_what_does_not_fit(self) -> None:
        """Requests whose next step would take more memory than there is wait again, and long rows among short ones.

        The one that frees most memory leaves first, so a lane's longest one: it soon goes on in a lane of its own.
        """
        for lane in self.lanes:
            if self._keeps_answers and len(lane.batch.requests) > 1 and self._wastes_time(lane, passes=4):
                self._interrupt(lane, max(lane.batch.requests, key=lambda request: request.num_tokens))
        limit = self.limits.kv_bytes
        if limit is None or self._reserved() <= limit:
            return
        self._trim()
        while self._reserved() > limit and self.num_running > (0 if self.held_bytes else 1):
            self._interrupt(*max(self._interruptible(), key=lambda pair: self._freed(*pair)))

    def _interruptible(self, client: str | None = None) -> list[tuple[RunningLane, Request]]:
        """Requests of a client, or of all. Those whose prompts are partly read only if there are no others."""
        pairs = [
            (lane, request)
            for lane in self.lanes
            for request, queued in lane.requests.items()
            if client in (None, queued.client)
        ]
        begun = {reading.request for reading in self._reading.readings if reading.reader is not None}
        return [pair for pair in pairs if pair[1] not in begun] or pairs

    def _freed(self, lane: RunningLane, request: Request) -> int:
        """Memory that is free without a request."""
        slots = lane.slots(trimmed=True) - lane.slots(without=request, trimmed=True)
        text = self.sizes.of_text(lane.engine, request) if self._reading.of(request) else 0
        return slots * self.sizes.per_slot(lane.engine) + text

    def _interrupt(self, lane: RunningLane, request: Request) -> None:
        """A request waits again. Where answers are kept, its text is, as long as there is memory."""
        self.interruptions += 1
        if self.limits.kv_bytes is not None:
            free = self.limits.kv_bytes - self._reserved() + self._freed(lane, request)
            self.prefixes.limit(max(0, free))
        self._reading.remove(request)
        lane.batch.drop([request])
        lane.batch.target.trim()
        self.waiting.push(lane.requests.pop(request), first=True)

    # --- passes of the model ---

    def _read(self) -> list[CoreEvent]:
        """Reads at most a chunk of tokens, of one prompt or several; lanes adopt those that are read whole."""
        left = self.limits.chunk_tokens
        done: dict[RunningLane, list[ReadPrompt]] = {}
        events: list[CoreEvent] = []
        while self._reading and left > 0:
            group, most = self._reading.next_group(left, self.limits.chunk_tokens)
            try:
                prompts, count = self._reading.read(group, most, keep=self._keeps_answers or bool(len(self.waiting)))
            except Exception as error:  # noqa: BLE001 - it is the end of that request
                events += self._not_read(group, error)
                continue
            left -= count
            self.tokens_read += count
            if prompts:
                done.setdefault(group[0].lane, []).extend(prompts)
        for lane, prompts in done.items():
            requests = [prompt.request for prompt in prompts if not prompt.request.token_ids]
            events += self._advance(lane, requests, partial(lane.batch.adopt, prompts))
        return events

    def _not_read(self, group: list[Reading], error: Exception) -> list[CoreEvent]:
        """After an error: several prompts are read again, each alone; a single one is the end of its request."""
        if len(group) == 1:
            self._reading.remove(group[0].request)
            return self._failed(group[0].lane, [group[0].request], error)
        for reading in group:
            reading.reader, reading.alone = None, True
        return []

    def _advance(
        self, lane: RunningLane, requests: list[Request], work: Callable[[], list[StreamEvent]]
    ) -> list[CoreEvent]:
        """The events of new rows or of a step. If it fails, all requests of the lane fail."""
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - it is the end of these requests
            self._reading.remove(*lane.requests)
            self.lanes.remove(lane)
            return self._failed(lane, list(lane.requests), error)
        going = [request for request in requests if request.failure is None]
        events: list[CoreEvent] = list(zip(going, made, strict=True))
        for request in requests:
            if request.failure is not None:
                events += self._failed(lane, [request], request.failure)
            elif request.finish_reason is not None:
                del lane.requests[request]
        return events

    @staticmethod
    def _failed(lane: RunningLane, requests: list[Request], error: Exception) -> list[CoreEvent]:
        for request in requests:
            del lane.requests[request]
        return [(request, error) for request in requests]
