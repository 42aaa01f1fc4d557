"""Reads prompts in chunks and steps the lanes, within a budget of memory. All of it runs on one thread."""

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.prefix_cache import PrefixCache
from draftheads.decode.prompt_reader import PromptReader, ReadText
from draftheads.decode.request import Request, StreamEvent
from draftheads.errors import first_line
from draftheads.models.kv_target import bytes_per_slot, slots_for
from draftheads.serve.jobs import Job, JobFailed, Lane, Limits
from draftheads.speculation.draft import bytes_per_slot_of

logger = logging.getLogger(__name__)

Deliver = Callable[[Job, StreamEvent | JobFailed], None]


class SlotBytes:
    """Memory of the requests of each model, as it would be at most."""

    def __init__(self) -> None:
        self._per_slot: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()  # heads are replaced

    def per_slot(self, engine: Engine) -> int:
        """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
        if engine not in self._per_slot:
            model = engine.model
            states = max(1, len(engine.hidden_layers)) * model.hidden_size * model.dtype.itemsize
            self._per_slot[engine] = bytes_per_slot(model) + states + bytes_per_slot_of(engine.drafter)
        return self._per_slot[engine]

    def of_prompt(self, engine: Engine, request: Request) -> int:
        """While the prompt is read."""
        return slots_for(engine.model, len(request.prompt_ids)) * self.per_slot(engine)

    def alone(self, engine: Engine, draft_nodes: int | None, request: Request) -> int:
        """If there is no other request."""
        slots = slots_for(engine.model, request.most_tokens, engine.most_nodes(draft_nodes))
        return slots * self.per_slot(engine) + self.of_prompt(engine, request)


class RunningLane:
    """A batch, and the jobs of its rows and of prompts that are being read for it."""

    def __init__(self, lane: Lane, engine: Engine, on_leave: "OnLeave") -> None:
        self.lane, self.engine = lane, engine
        self.batch: Batch = engine.batch(draft_nodes=lane.draft_nodes)
        self.batch.on_leave = partial(on_leave, self)
        self.batch.isolates_failures = True
        self.jobs: dict[Request, Job] = {}
        self._most_nodes = engine.most_nodes(lane.draft_nodes)

    def space(self, request: Request) -> Hashable:
        """The space of a request's text in the cache of prefixes."""
        return self.engine.model, self.batch.target.layers, self.jobs[request].cache_salt

    def slots(self, *more: Request, trimmed: bool = False) -> int:
        """Slots of the batch's cache, a rectangle, at the end of the longest possible answer.

        Args:
            more: requests beside those of the lane.
            trimmed: as if unused slots were freed first.
        """
        requests = [*self.jobs, *more]
        longest = max((request.most_tokens for request in requests), default=0)
        slots = slots_for(self.engine.model, longest, self._most_nodes) if requests else 0
        cache = self.batch.target.cache
        if trimmed:
            return len(requests) * slots
        return max(len(requests), cache.held_rows) * max(slots, cache.capacity)


OnLeave = Callable[[RunningLane, Request, ReadText], None]


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read, or that waits for it."""

    lane: RunningLane
    request: Request
    reader: PromptReader | None = None  # made when reading begins: another prompt may have left a common beginning


class Decoder:
    """The requests that are read and decoded, and the texts that were read before.

    Args:
        limits: memory, and the tokens of a chunk.
        sizes: of the models.
        deliver: gets the events of all jobs.
    """

    def __init__(self, limits: Limits, sizes: SlotBytes, deliver: Deliver) -> None:
        self.limits, self.sizes, self.deliver = limits, sizes, deliver
        self.prefixes = PrefixCache(limits.kv_bytes)
        self.lanes: list[RunningLane] = []
        self.steps = 0
        self.tokens_read = 0
        self._reading: list[_Reading] = []  # first come, first served

    @property
    def num_jobs(self) -> int:
        """Requests that are read or decoded."""
        return sum(len(lane.jobs) for lane in self.lanes)

    @property
    def num_reading(self) -> int:
        """Requests whose prompts are being read."""
        return len(self._reading)

    @property
    def kv_bytes(self) -> int:
        """Memory of the requests that are read and decoded."""
        readers = (reading.reader for reading in self._reading)
        return sum(lane.batch.num_bytes for lane in self.lanes) + sum(one.num_bytes for one in readers if one)

    def admit(self, job: Job, engine: Engine) -> bool:
        """Begins with a job; False if its memory is not free."""
        lane = self._lane_of(job, engine)
        if self._reserved() + self._growth(lane, job.request) > self.limits.kv_bytes:
            if self._reserved(trimmed=True) + self._growth(lane, job.request, trimmed=True) > self.limits.kv_bytes:
                return False
            for each in self.lanes:
                each.batch.target.trim()
        lane.jobs[job.request] = job
        self._reading.append(_Reading(lane, job.request))
        self._limit_prefixes()
        return True

    def work(self) -> None:
        """Reads a chunk of prompts, and steps every lane once."""
        self._read()
        for lane in list(self.lanes):
            if lane.batch.requests:
                self._advance(lane, list(lane.batch.requests), lane.batch.step)
                self.steps += 1
        self._drop_empty_lanes()

    def drop(self, is_gone: Callable[[Job], bool]) -> None:
        """Removes jobs, whatever becomes of them."""
        for lane in self.lanes:
            gone = [request for request, job in lane.jobs.items() if is_gone(job)]
            if gone:
                self._reading = [reading for reading in self._reading if reading.request not in gone]
                lane.batch.drop(gone)
                for request in gone:
                    del lane.jobs[request]
        self._drop_empty_lanes()

    def clear(self) -> None:
        """Forgets all requests and texts."""
        self._reading, self.lanes = [], []
        self.prefixes.limit(0)

    def _lane_of(self, job: Job, engine: Engine) -> RunningLane:
        for lane in self.lanes:
            if lane.lane == job.lane and lane.engine is engine:
                return lane
        lane = RunningLane(job.lane, engine, self._remember)
        self.lanes.append(lane)
        return lane

    def _drop_empty_lanes(self) -> None:
        self.lanes = [lane for lane in self.lanes if lane.jobs]
        self._limit_prefixes()

    # --- memory ---

    def _reserved(self, *, trimmed: bool = False) -> int:
        """Memory that the requests take at most before the next one is admitted."""
        lanes = sum(lane.slots(trimmed=trimmed) * self.sizes.per_slot(lane.engine) for lane in self.lanes)
        return lanes + sum(self.sizes.of_prompt(one.lane.engine, one.request) for one in self._reading)

    def _growth(self, lane: RunningLane, request: Request, *, trimmed: bool = False) -> int:
        """By how much one more request adds to it."""
        slots = lane.slots(request, trimmed=trimmed) - lane.slots(trimmed=trimmed)
        return slots * self.sizes.per_slot(lane.engine) + self.sizes.of_prompt(lane.engine, request)

    def _limit_prefixes(self) -> None:
        self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved()))

    def _remember(self, lane: RunningLane, request: Request, text: ReadText) -> None:
        """Keeps what was read of a row that leaves."""
        self.prefixes.add(lane.space(request), text)

    # --- passes of the model ---

    def _read(self) -> None:
        """Reads at most a chunk of tokens, of one prompt or several; lanes adopt those that are read whole."""
        left = self.limits.chunk_tokens
        done: dict[RunningLane, list[PromptReader]] = {}
        for reading in list(self._reading):
            if not left:
                break
            try:
                reader = reading.reader = reading.reader or self._reader(reading)
                count = reader.read(left)
            except Exception as error:
                logger.exception("the prompt of a request could not be read")
                self._reading.remove(reading)
                self._fail([reading.lane.jobs.pop(reading.request)], error)
                continue
            left -= count
            self.tokens_read += count
            if not reader.num_left:
                self.prefixes.add(reading.lane.space(reading.request), reader.text, copy=False)
                done.setdefault(reading.lane, []).append(reader)
        for lane, readers in done.items():
            requests = [reader.request for reader in readers]
            self._advance(lane, requests, partial(lane.batch.adopt, readers))
            self._reading = [reading for reading in self._reading if reading.request not in requests]

    def _reader(self, reading: _Reading) -> PromptReader:
        lane, request = reading.lane, reading.request
        known = self.prefixes.find(lane.space(request), request.prompt_ids)
        return PromptReader(lane.engine.model, request, known, lane.batch.target.layers)

    def _advance(self, lane: RunningLane, requests: list[Request], work: Callable[[], list[StreamEvent]]) -> None:
        """Delivers the events of new rows or of a step. If it fails, all jobs of the lane fail."""
        try:
            events = work()
        except Exception as error:
            logger.exception("a step of %s failed", lane.lane)
            self._reading = [reading for reading in self._reading if reading.lane is not lane]
            self.lanes.remove(lane)
            self._fail(lane.jobs.values(), error)
            return
        going = [request for request in requests if request.failure is None]
        for request, event in zip(going, events, strict=True):
            self.deliver(lane.jobs[request], event)
        for request in requests:
            if request.failure is not None:
                self._fail([lane.jobs[request]], request.failure)
            if request.failure is not None or request.finish_reason is not None:
                del lane.jobs[request]

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            self.deliver(job, JobFailed("error", f"the answer could not be computed: {first_line(error)}"))
