"""The core of all decoding: it admits requests, reads their prompts in chunks and steps their rows.

``Engine.generate`` and ``stream``, ``draftheads chat`` and the server are callers of it. One thread calls
:meth:`EngineCore.step`; others may add and cancel requests.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from draftheads.decode.batch import Batch
from draftheads.decode.prefix_cache import PrefixCache, num_shared
from draftheads.decode.prompt_reader import PromptReader, ReadPrompt, ReadText
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.waiting import FairQueue, Lane, QueuedRequest
from draftheads.errors import DraftHeadsError, TooLarge, no_such, require_at_least
from draftheads.models.kv_target import PREFILL_TOKENS, bytes_per_slot, slots_for
from draftheads.utils.counts import counted

if TYPE_CHECKING:
    from draftheads.decode.engine import Engine

CoreEvent = tuple[Request, StreamEvent | Exception]  # a request ends with a finish reason or an exception
_PREFIX_BYTES = 1 << 30  # of texts that were read, where memory has no limit
_WORTH_READING_ONCE = 32  # tokens that two prompts share; with more, one waits until the other is read


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

    def __post_init__(self) -> None:
        require_at_least(1, **{name: value for name, value in vars(self).items() if value is not None})


class SlotBytes:
    """Memory of the requests of each model, as it would be at most."""

    def __init__(self) -> None:
        self._per_slot: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()  # heads are replaced

    def per_slot(self, engine: "Engine") -> int:
        """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
        if engine not in self._per_slot:
            model = engine.model
            states = max(1, len(engine.hidden_layers)) * model.hidden_size * model.dtype.itemsize
            self._per_slot[engine] = bytes_per_slot(model) + states + engine.drafter.bytes_per_slot
        return self._per_slot[engine]

    def of_prompt(self, engine: "Engine", request: Request) -> int:
        """While the prompt is read."""
        return slots_for(engine.model, len(request.prompt_ids)) * self.per_slot(engine)

    def alone(self, engine: "Engine", draft_nodes: int | None, request: Request) -> int:
        """If there is no other request."""
        slots = slots_for(engine.model, request.most_tokens, engine.most_nodes(draft_nodes))
        return slots * self.per_slot(engine) + self.of_prompt(engine, request)


class RunningLane:
    """A batch, and the requests of its rows and of prompts that are being read for it."""

    def __init__(self, lane: Lane, engine: "Engine", on_phase: Callable[[str], object]) -> None:
        self.lane, self.engine = lane, engine
        self.batch: Batch = engine.batch(draft_nodes=lane.draft_nodes, on_phase=on_phase)
        self.requests: dict[Request, QueuedRequest] = {}
        self._most_nodes = engine.most_nodes(lane.draft_nodes)

    def namespace(self, request: Request) -> Hashable:
        """Where the request's text is found in the cache of prefixes."""
        return self.engine.model, self.batch.target.layers, self.requests[request].cache_salt

    def slots(self, *more: Request, trimmed: bool = False) -> int:
        """Slots of the batch's cache, a rectangle, at the end of the longest possible answer.

        Args:
            more: requests beside those of the lane.
            trimmed: as if unused slots were freed first.
        """
        requests = [*self.requests, *more]
        longest = max((request.most_tokens for request in requests), default=0)
        slots = slots_for(self.engine.model, longest, self._most_nodes) if requests else 0
        cache = self.batch.target.cache
        if trimmed:
            return len(requests) * slots
        return max(len(requests), cache.held_rows) * max(slots, cache.capacity)


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read, or that waits for it."""

    lane: RunningLane
    request: Request
    reader: PromptReader | None = None  # made when reading begins: another prompt may have left a common beginning
    alone: bool = False  # whether it is read beside no other, because reading it with others failed


class EngineCore:
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
        engines: Mapping[str, "Engine"],
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
        self._keeps_answers, self._answers_together, self._on_phase = keeps_answers, answers_together, on_phase
        self._reading: list[_Reading] = []  # first come, first served
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
        limit = self.limits.kv_bytes
        if limit is not None and (needed := self.sizes.alone(engine, lane.draft_nodes, request)) > limit:
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
            lane: which engine decodes it, and how much it drafts.
            client: clients take turns.
            cache_salt: prompts with the same salt share what was read of a common beginning.
            first: before the client's other requests.

        Raises:
            DraftHeadsError: as :meth:`check`.
        """
        lane = lane or Lane(next(iter(self.engines)))
        self.check(request, lane)
        self.waiting.push(QueuedRequest(request, lane, client, cache_salt), first=first)

    def cancel(self, request: Request) -> None:
        """The request leaves before the next step, without an event after that. Ended ones are ignored."""
        if not self.waiting.remove(request):
            with self._lock:
                self._cancelled.add(request)

    # --- the thread that decodes ---

    def step(self) -> list[CoreEvent]:
        """Admits waiting requests, reads a chunk of prompts and steps every lane once."""
        self._drop_cancelled()
        events = self._admit() + self._read()
        for lane in list(self.lanes):
            if lane.batch.requests:
                lane.batch.none_waits = self._answers_together and not self._reading and not len(self.waiting)
                events += self._advance(lane, list(lane.batch.requests), lane.batch.step)
                self.steps += 1
        self._drop_empty_lanes()
        return events

    def clear(self) -> None:
        """Forgets all requests, without events."""
        self.waiting.clear()
        self._reading, self.lanes = [], []

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
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
        readers = {reading.reader for reading in self._reading if reading.reader is not None}
        return sum(lane.batch.num_bytes for lane in self.lanes) + sum(reader.num_bytes for reader in readers)

    # --- admission ---

    def _admit(self) -> list[CoreEvent]:
        """Waiting requests whose turn it is join, as long as there are rows and memory."""
        events: list[CoreEvent] = []
        while (queued := self.waiting.first()) and self.num_running < self.limits.max_rows:
            try:
                lane = self._lane_of(queued)
            except DraftHeadsError as error:  # the engine was replaced by one that cannot take it
                if self.waiting.pop(queued):
                    events.append((queued.request, error))
                continue
            if not self._makes_room(lane, queued.request):
                break
            if self.waiting.pop(queued):  # else it was cancelled meanwhile
                lane.requests[queued.request] = queued
                self._reading.append(_Reading(lane, queued.request))
        self._drop_empty_lanes()
        return events

    def _engine_of(self, lane: Lane) -> "Engine":
        engine = self.engines.get(lane.model)
        if engine is None:
            raise no_such("model", lane.model, self.engines, other_names={})
        return engine

    def _lane_of(self, queued: QueuedRequest) -> RunningLane:
        engine = self._engine_of(queued.lane)
        for lane in self.lanes:
            if lane.lane == queued.lane and lane.engine is engine:
                return lane
        lane = RunningLane(queued.lane, engine, self._on_phase)
        if self._keeps_answers:
            lane.batch.on_leave = partial(self._remember, lane)
        self.lanes.append(lane)
        return lane

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        for lane in self.lanes if cancelled else ():
            gone = [request for request in lane.requests if request in cancelled]
            self._reading = [reading for reading in self._reading if reading.request not in gone]
            lane.batch.drop(gone)
            for request in gone:
                del lane.requests[request]
        self._drop_empty_lanes()

    def _drop_empty_lanes(self) -> None:
        self.lanes = [lane for lane in self.lanes if lane.requests]
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved()))

    # --- memory ---

    def _makes_room(self, lane: RunningLane, request: Request) -> bool:
        """Whether the memory of one more request is free; frees unused slots if that helps."""
        limit = self.limits.kv_bytes
        if limit is None or self._reserved() + self._growth(lane, request) <= limit:
            return True
        if self._reserved(trimmed=True) + self._growth(lane, request, trimmed=True) > limit:
            return False
        for each in self.lanes:
            each.batch.target.trim()
        return True

    def _reserved(self, *, trimmed: bool = False) -> int:
        """Memory that the requests take at most before the next one is admitted."""
        lanes = sum(lane.slots(trimmed=trimmed) * self.sizes.per_slot(lane.engine) for lane in self.lanes)
        return lanes + sum(self.sizes.of_prompt(each.lane.engine, each.request) for each in self._reading)

    def _growth(self, lane: RunningLane, request: Request, *, trimmed: bool = False) -> int:
        """By how much one more request adds to it."""
        slots = lane.slots(request, trimmed=trimmed) - lane.slots(trimmed=trimmed)
        return slots * self.sizes.per_slot(lane.engine) + self.sizes.of_prompt(lane.engine, request)

    def _remember(self, lane: RunningLane, request: Request, text: ReadText) -> None:
        """Keeps what was read of a row that leaves."""
        self.prefixes.add(lane.namespace(request), text)

    # --- passes of the model ---

    def _read(self) -> list[CoreEvent]:
        """Reads at most a chunk of tokens, of one prompt or several; lanes adopt those that are read whole."""
        left = self.limits.chunk_tokens
        done: dict[RunningLane, list[ReadPrompt]] = {}
        events: list[CoreEvent] = []
        while self._reading and left > 0:
            group = self._next_group(min(left, PREFILL_TOKENS))
            try:
                prompts, count = self._read_next(group, left)
            except Exception as error:  # noqa: BLE001 - it is the end of that request
                events += self._not_read(group, error)
                continue
            left -= count
            self.tokens_read += count
            if prompts:
                done.setdefault(group[0].lane, []).extend(prompts)
        for lane, prompts in done.items():
            if lane in self.lanes:
                requests = [prompt.request for prompt in prompts]
                events += self._advance(lane, requests, partial(lane.batch.adopt, prompts))
        return events

    def _read_next(self, group: list[_Reading], most_tokens: int) -> tuple[list[ReadPrompt], int]:
        """Reads the next tokens of prompts: those that are read whole now, all of them or none, and how many tokens."""
        lane = group[0].lane
        reader = group[0].reader or self._reader(group)
        for reading in group:
            reading.reader = reader
        count = reader.read(most_tokens)
        if reader.num_left:
            return [], count
        self._reading = [reading for reading in self._reading if reading not in group]
        for prompt in reader.prompts:
            if self._keeps_answers or self._reading or len(self.waiting):
                self.prefixes.add(lane.namespace(prompt.request), prompt.text, copy=len(group) > 1)
        return reader.prompts, count

    def _not_read(self, group: list[_Reading], error: Exception) -> list[CoreEvent]:
        """After an error: several prompts are read again, each alone; a single one is the end of its request."""
        if len(group) == 1:
            self._reading.remove(group[0])
            return self._failed(group[0].lane, [group[0].request], error)
        for reading in group:
            reading.reader, reading.alone = None, True
        return []

    def _next_group(self, most_tokens: int) -> list[_Reading]:
        """Prompts of one lane that the next pass reads together: the first one, and others that fit beside it."""
        first = self._reading[0]
        group, lane = [first], first.lane
        # with batch invariance, bits must not depend on the other prompts
        if first.reader is not None or first.alone or lane.engine.model.batch_invariant:
            return group
        slots = slots_for(lane.engine.model, len(first.request.prompt_ids))
        longest = self._num_unread(first)
        for other in self._reading[1:]:
            if other.lane is not lane or other.reader is not None or other.alone:
                continue
            prompt = other.request.prompt_ids
            if slots_for(lane.engine.model, len(prompt)) != slots:  # they share a rectangle
                continue
            unread = max(longest, self._num_unread(other))
            if (len(group) + 1) * unread > most_tokens:
                continue
            known = len(prompt) - self._num_unread(other)
            if any(num_shared(prompt, each.request.prompt_ids) - known > _WORTH_READING_ONCE for each in group):
                continue
            group.append(other)
            longest = unread
        return group

    def _num_unread(self, reading: _Reading) -> int:
        prompt = reading.request.prompt_ids
        return len(prompt) - self.prefixes.num_known(reading.lane.namespace(reading.request), prompt)

    def _reader(self, group: list[_Reading]) -> PromptReader:
        lane = group[0].lane
        requests = [reading.request for reading in group]
        known = [self.prefixes.find(lane.namespace(request), request.prompt_ids) for request in requests]
        return PromptReader(lane.engine.model, requests, known, lane.batch.target.layers)

    def _advance(
        self, lane: RunningLane, requests: list[Request], work: Callable[[], list[StreamEvent]]
    ) -> list[CoreEvent]:
        """The events of new rows or of a step. If it fails, all requests of the lane fail."""
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - it is the end of these requests
            self._reading = [reading for reading in self._reading if reading.lane is not lane]
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
