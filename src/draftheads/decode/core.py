"""The core of all decoding: which requests wait, which are read and decoded, and what happens when memory runs out.

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
from operator import eq
from threading import Lock
from typing import Generic

import torch

from draftheads.decode.lanes import AnyEngine, RunningLane, bytes_per_token, num_bytes
from draftheads.decode.prefix_cache import BLOCK_TOKENS, PrefixCache
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.waiting import Lane, QueuedRequest, WaitingLine
from draftheads.errors import DraftHeadsError, TooLarge, no_such, require_at_least
from draftheads.runners import bytes_of_states, num_slots
from draftheads.utils.counts import counted

_Pair = tuple[RunningLane[AnyEngine], QueuedRequest]
CoreEvent = tuple[Request, StreamEvent | Exception]  # a request ends with a finish reason or an exception
_PREFIX_BYTES = 1 << 30  # of texts that were read, where memory has no limit
_MOST_OVERTAKEN = 64  # times that a request is overtaken before memory is kept free for it
_CANDIDATES = 64  # waiting requests that are looked at for a free row
# blocks that two prompts share: with more, one waits until the other is read, and states are kept
_WORTH_WAITING = 32 // BLOCK_TOKENS


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
        on_phase: called after each part of the work, as by :class:`Batch`.
    """

    def __init__(
        self,
        engines: Mapping[str, AnyEngine],
        limits: CoreLimits,
        *,
        keeps_answers: bool = False,
        on_phase: Callable[[str], object] = str,
    ) -> None:
        self.engines = dict(engines)
        self.limits = limits
        self.waiting = WaitingLine()
        self.prefixes = PrefixCache(_PREFIX_BYTES if limits.kv_bytes is None else limits.kv_bytes)
        self.lanes: list[RunningLane[AnyEngine]] = []
        self.reading: list[_Pair[AnyEngine]] = []  # in the order in which they came
        self.steps = 0
        self.tokens_read = 0
        self.interruptions = 0
        self.held_bytes = 0  # memory of what is read outside of requests
        self._keeps_answers, self._on_phase = keeps_answers, on_phase
        self._admissions = 0
        self._cancelled: set[Request] = set()
        self._lock = Lock()  # of _cancelled

    # --- any thread ---

    def check(self, request: Request, lane: Lane) -> AnyEngine:
        """The engine that decodes a request of that lane; raises if none can."""
        engine = self.engines.get(lane.model)
        if engine is None:
            raise no_such("model", lane.model, self.engines, other_names={})
        engine.check_draft_nodes(lane.draft_nodes)
        limit = self.limits.kv_bytes
        if limit is not None and (needed := num_bytes(engine, lane.rounded(), [request.most_tokens])) > limit:
            raise TooLarge(
                f"the prompt and {counted(request.most_new_tokens, 'new token')} need {needed >> 20} MiB for keys "
                f"and values; the server has {limit >> 20} MiB: ask for fewer tokens"
            )
        return engine

    def add(
        self, request: Request, lane: Lane | None = None, *, client: str = "", cache_salt: str = "", first: bool = False
    ) -> None:
        """A request waits for its turn; ``first``: before the client's other requests. Clients take turns.

        The lane says which engine decodes it, and how much it drafts; numbers of nodes are rounded. Prompts with the
        same ``cache_salt`` share what was read of a common beginning.
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
        self._drop_cancelled()
        self._interrupt_what_does_not_fit()
        events = [*self._admit(), *self._read()]
        for lane in list(self.lanes):
            if lane.batch.requests:
                with lane.engine.model.computing():
                    events += self._advance(lane, list(lane.batch.requests), lane.batch.step)
                self.steps += 1
        self._drop_empty_lanes()
        return events

    def hold(self, num_tokens: int, engine: AnyEngine) -> None:
        """Reserves memory for a text that is read outside of requests; requests that do not fit beside it wait.

        A negative number of tokens gives it back.
        """
        limit, sign = self.limits.kv_bytes, 1 if num_tokens > 0 else -1
        size = num_slots(engine.model, [abs(num_tokens)]) * bytes_per_token(engine) + bytes_of_states(engine.model, 1)
        size *= sign
        if limit is not None and self.held_bytes + size > limit:
            words = f"{size >> 20} MiB for keys and values; the server has {limit >> 20} MiB"
            raise TooLarge(f"the prompt needs {words}: send a shorter one")
        self.held_bytes += size
        self._interrupt_what_does_not_fit()
        self._drop_empty_lanes()

    def clear(self) -> None:
        self.waiting, self.reading, self.lanes = WaitingLine(), [], []

    @property
    def has_work(self) -> bool:
        return bool(self.lanes or len(self.waiting))

    @property
    def num_running(self) -> int:
        """Requests that are read or decoded."""
        return sum(len(lane.requests) for lane in self.lanes)

    @property
    def kv_bytes(self) -> int:
        """Memory of the requests that are read and decoded."""
        parts = (part.nbytes for _, queued in self.reading for part in queued.hidden)
        return sum(lane.batch.num_bytes for lane in self.lanes) + sum(parts)

    # --- admission ---

    def _admit(self) -> list[CoreEvent]:
        """Waiting requests join, as long as there are rows and memory; one that fits overtakes one that does not."""
        events: list[CoreEvent] = []
        while len(self.waiting) and self._admit_one(events):
            pass
        self._drop_empty_lanes()
        return events

    def _admit_one(self, events: list[CoreEvent]) -> bool:
        """Whether a request joined. The events are of those that no engine can take any more."""
        rows = Counter(queued.client for lane in self.lanes for queued in lane.requests.values())
        is_full = self.num_running >= self.limits.max_rows
        if is_full and self._giving_to(self.waiting.fewest_rows(rows), rows) is None:
            return False
        overtaken: list[QueuedRequest] = []
        kept_free = 0
        for queued in self.waiting.in_turn(rows, _CANDIDATES):
            engine = self._engine_for(queued, events)
            if engine is None:
                continue
            giving = None
            if is_full or not self._fits(queued, engine, kept_free):
                giving = self._giving_to(rows[queued.client], rows)
                if giving is None or not self._fits(queued, engine, kept_free, without=giving[1]):
                    if not is_full:  # there is no memory for it
                        overtaken.append(queued)
                        if queued.num_overtaken >= _MOST_OVERTAKEN:
                            tokens = queued.expected_tokens(self.limits.headroom_tokens)
                            kept_free += num_bytes(engine, queued.lane, [tokens])
                    continue
            if not self.waiting.pop(queued):  # it was cancelled meanwhile
                continue
            self._join(queued, engine, giving)
            for each in overtaken:
                each.num_overtaken += 1
            return True
        return False

    def _giving_to(self, num_rows: int, rows: Counter[str]) -> _Pair[AnyEngine] | None:
        """The request that gives its place to a client with so many rows: the latest one of the client with most.

        None if that one would then have fewer rows than this client.
        """
        owner = max(rows, key=rows.__getitem__, default="")
        if rows[owner] < num_rows + 2:
            return None
        return max(self._interruptible(owner), key=lambda pair: pair[1].admission)

    def _engine_for(self, queued: QueuedRequest, events: list[CoreEvent]) -> AnyEngine | None:
        """None if it cannot take the request any more, which ends: the engine may be another one by now."""
        try:
            return self.check(queued.request, queued.lane)
        except DraftHeadsError as error:
            if self.waiting.pop(queued):
                events.append((queued.request, error))
            return None

    def _join(self, queued: QueuedRequest, engine: AnyEngine, giving: _Pair[AnyEngine] | None) -> None:
        if giving is not None:
            self._interrupt(*giving)
        lane = next((each for each in self.lanes if each.lane == queued.lane and each.engine is engine), None)
        if lane is None:
            lane = RunningLane(
                queued.lane, engine, self.prefixes, keeps_answers=self._keeps_answers, on_phase=self._on_phase
            )
            self.lanes.append(lane)
        self._admissions += 1
        queued.admission = self._admissions
        queued.token_ids = queued.request.ids_to_read
        queued.digests = lane.digests(queued, queued.token_ids)
        lane.requests[queued.request] = queued
        self.reading.append((lane, queued))

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        for request in cancelled:
            self.waiting.remove(request)  # it may have been interrupted since
        for lane in self.lanes if cancelled else ():
            for queued in [lane.requests[request] for request in lane.requests if request in cancelled]:
                self._leave(lane, queued)
        self._drop_empty_lanes()

    def _drop_empty_lanes(self) -> None:
        self.lanes = [lane for lane in self.lanes if lane.requests]
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved()))

    # --- memory ---

    def _fits(
        self, queued: QueuedRequest, engine: AnyEngine, kept_free: int, without: QueuedRequest | None = None
    ) -> bool:
        """Whether there is memory for one more request."""
        limit = self.limits.kv_bytes
        if limit is None or not (self.num_running or self.held_bytes):  # what was accepted is decoded, if only alone
            return True
        needed = self._reserved(headroom=self.limits.headroom_tokens, more=(engine, queued), without=without)
        return needed + kept_free <= limit

    def _reserved(
        self,
        *,
        headroom: int = 0,
        more: tuple[AnyEngine, QueuedRequest] | None = None,
        without: QueuedRequest | None = None,
    ) -> int:
        """Memory that the requests take at most in the next step, or with so many more tokens of each answer."""
        lanes = {(lane.engine, lane.lane): [*lane.requests.values()] for lane in self.lanes}
        if more is not None:
            lanes.setdefault((more[0], more[1].lane), []).append(more[1])
        return self.held_bytes + sum(
            num_bytes(engine, lane, [each.expected_tokens(headroom) for each in members if each is not without])
            for (engine, lane), members in lanes.items()
        )

    def _interrupt_what_does_not_fit(self) -> None:
        """Requests whose next step would take more memory than there is wait again: the one that frees most first."""
        if (limit := self.limits.kv_bytes) is None:
            return
        while self.num_running > (0 if self.held_bytes else 1) and (reserved := self._reserved()) > limit:
            freed = {pair: reserved - self._reserved(without=pair[1]) for pair in self._interruptible()}
            self._interrupt(*max(freed, key=lambda pair: (freed[pair], pair[1].request.num_tokens)))

    def _interruptible(self, client: str | None = None) -> list[_Pair[AnyEngine]]:
        """Requests of a client, or of all. Those whose prompts are partly read only if there are no others."""
        pairs = [
            (lane, each) for lane in self.lanes for each in lane.requests.values() if client in (None, each.client)
        ]
        begun = {queued for _, queued in self.reading if queued.row is not None}
        return [pair for pair in pairs if pair[1] not in begun] or pairs

    def _interrupt(self, lane: RunningLane[AnyEngine], queued: QueuedRequest) -> None:
        """A request waits again. Where answers are kept, its text is, as long as there is memory."""
        self.interruptions += 1
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved(without=queued)))
        self._leave(lane, queued)
        self.waiting.push(queued, first=True)

    def _leave(self, lane: RunningLane[AnyEngine], queued: QueuedRequest) -> None:
        self.reading = [pair for pair in self.reading if pair[1] is not queued]
        lane.leave(queued)

    # --- passes of the model ---

    def _read(self) -> list[CoreEvent]:
        """Reads at most a chunk of tokens, of one prompt or several; those that are read whole get their rows."""
        left = self.limits.chunk_tokens
        events: list[CoreEvent] = []
        while left > 0 and (chunks := self._next_chunks(left)):
            for lane in list(self.lanes):
                counts = {queued: count for (of, queued), count in chunks.items() if of is lane}
                if counts:
                    with lane.engine.model.computing():
                        events += self._read_chunks(lane, counts)
            left -= sum(chunks.values())
        return events

    def _next_chunks(self, most: int) -> dict[_Pair[AnyEngine], int]:
        """How many tokens of which prompts are read next.

        Half of them are of the prompt with the fewest tokens left, so that a short one does not wait for a long one;
        the others are of those that came first, so that a long one is read, too, whatever comes.
        """
        left = {pair: pair[0].num_left(pair[1]) for pair in self.reading}
        if not left:
            return {}
        shortest = min(left, key=left.__getitem__)
        chosen: Counter[_Pair[AnyEngine]] = Counter()
        coming = {digest for _, queued in self.reading if queued.row is not None for digest in queued.digests}
        for pair, limit in [(shortest, most - most // 2), *((pair, most) for pair in self.reading)]:
            queued = pair[1]
            if queued.row is None and pair not in chosen:
                first_new = (len(queued.token_ids) - left[pair]) // BLOCK_TOKENS
                if any(digest in coming for digest in queued.digests[first_new + _WORTH_WAITING :][:1]):
                    continue  # another one reads the same beginning
                coming.update(queued.digests)
            num_read = len(queued.token_ids) - left[pair]
            queued.stop = self._stop(*pair, num_read)
            to_read = queued.stop - num_read if queued.stop else left[pair]
            count = min(to_read - chosen[pair], limit, most - chosen.total())
            if count > 0:
                chosen[pair] += count
        return dict(chosen)

    def _stop(self, lane: RunningLane[AnyEngine], queued: QueuedRequest, num_read: int) -> int:
        """Where states of recurrent layers are kept next: behind what others share, and at the last block; 0: nowhere.

        A state is large (:mod:`draftheads.decode.prefix_cache`), so a prompt has one or two of them.
        """
        if not lane.engine.model.is_recurrent:
            return 0
        ids = queued.findable
        others = [sum(map(eq, ids, each.findable)) for _, each in self.reading if each is not queued]
        stops = [self.prefixes.num_shared(ids), BLOCK_TOKENS * max(others, default=0)]
        if self._keeps_answers or len(self.waiting):
            stops.append(BLOCK_TOKENS * len(ids))
        return min((stop for stop in stops if stop > max(num_read, _WORTH_WAITING * BLOCK_TOKENS)), default=0)

    def _read_chunks(self, lane: RunningLane[AnyEngine], counts: Mapping[QueuedRequest, int]) -> list[CoreEvent]:
        """Reads the next tokens of some prompts. If that fails, each is read alone; one fails without the others."""
        try:
            ended = lane.read(counts)
        except Exception as error:  # noqa: BLE001 - it is the end of that request
            if len(counts) > 1:
                return [event for pair in counts.items() for event in self._read_chunks(lane, dict([pair]))]
            [queued] = counts
            self._leave(lane, queued)
            return [(queued.request, error)]
        self.tokens_read += sum(counts.values())
        for queued in counts:
            if queued.begun_row.length == queued.stop:
                lane.keep(queued)
        if not ended:
            return []
        keep = self._keeps_answers or len(self.waiting) or len(self.reading) > len(ended)
        for queued in ended:
            queued.hidden = [torch.cat(queued.hidden)]
            if keep and not lane.engine.model.is_recurrent:
                lane.keep(queued)
        self.reading = [pair for pair in self.reading if pair[1] not in ended]
        new = [queued.request for queued in ended if not queued.request.token_ids]
        return self._advance(lane, new, partial(lane.join, ended))

    def _advance(
        self, lane: RunningLane[AnyEngine], requests: list[Request], work: Callable[[], list[StreamEvent]]
    ) -> list[CoreEvent]:
        """The events of new rows or of a step. If it fails, all requests of the lane fail."""
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - it is the end of these requests
            self.lanes.remove(lane)
            self.reading = [pair for pair in self.reading if pair[0] is not lane]
            return [(request, error) for request in lane.requests]
        going = [request for request in requests if request.failure is None]
        events: list[CoreEvent] = list(zip(going, made, strict=True))
        events += [(request, request.failure) for request in requests if request.failure is not None]
        for request in requests:
            if request.failure is not None or request.finish_reason is not None:
                del lane.requests[request]
        return events
