"""The core of all decoding: which requests wait, which are read and decoded, and what happens when memory runs out.

Memory is reserved for the next tokens of an answer, not for the longest possible one. If it runs out, a request is
interrupted: it waits again, and its text is read again when it goes on. So plain, drafted, and interrupted answers are
the same. A client also gives up rows when it has more of them than another one that waits.

``Engine.generate`` and ``stream``, ``draftheads chat`` and the server are callers of it. One thread calls
:meth:`EngineCore.step`; others may add and cancel requests.
"""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import TYPE_CHECKING

import torch

from draftheads.decode.batch import Batch, BatchEvent
from draftheads.decode.prefix_cache import BLOCK_TOKENS, PrefixCache, ReadText, block_digests
from draftheads.decode.request import Lane, Request
from draftheads.decode.step_costs import wait_for
from draftheads.decode.waiting import ReadingTurns, WaitingLine
from draftheads.errors import DraftHeadsError, TooLarge, no_such, require_at_least
from draftheads.runners import bytes_of_states, num_slots
from draftheads.utils.counts import counted

if TYPE_CHECKING:
    from draftheads.decode.engine import Engine

Place = tuple["Engine", Lane]  # what the requests of a batch have in common
_PREFIX_BYTES = 1 << 30  # of texts that were read, where memory has no limit
_MOST_OVERTAKEN = 64  # times that a request is overtaken before memory is kept free for it
_CANDIDATES = 64  # waiting requests that are looked at for a free row
_WORTH_WAITING = 32 // BLOCK_TOKENS  # blocks that two prompts share: with more, one waits for the other


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
    """Prompt tokens that are read between two steps, at most."""
    chunk_steps: int | None = None
    """Steps that take as long as a chunk may. While others are decoded, a chunk takes half of it, and reading no
    more time than their steps; None: no limit."""
    headroom_tokens: int = 256
    """Further tokens of its answer for which there must be memory when a request is admitted."""

    def __post_init__(self) -> None:
        require_at_least(1, **vars(self))


class EngineCore:
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
        engines: Mapping[str, "Engine"],
        limits: CoreLimits,
        *,
        keeps_answers: bool = False,
        on_phase: Callable[[str], object] = str,
    ) -> None:
        self.engines = dict(engines)
        self.limits = limits
        self.waiting = WaitingLine()
        self.prefixes = PrefixCache(_PREFIX_BYTES if limits.kv_bytes is None else limits.kv_bytes)
        self.batches: dict[Place, Batch] = {}
        self.reading: list[Request] = []  # in the order in which they came
        self.turns = ReadingTurns(limits.chunk_steps)  # of those
        self.clock = time.perf_counter
        self.steps = 0
        self.tokens_read = 0
        self.interruptions = 0
        self.held_bytes = 0  # memory of what is read outside of requests
        self._keeps_answers, self._on_phase = keeps_answers, on_phase
        self._admissions = 0
        self._cancelled: deque[Request] = deque()  # which other threads fill

    # --- any thread ---

    def check(self, request: Request, lane: Lane) -> "Engine":
        """The engine that decodes a request of that lane; raises if none can."""
        engine = self.engines.get(lane.model)
        if engine is None:
            raise no_such("model", lane.model, self.engines)
        engine.check_draft_nodes(lane.draft_nodes)
        limit, nodes = self.limits.kv_bytes, lane.rounded().draft_nodes
        if limit is not None and (needed := engine.num_bytes([request.most_tokens], draft_nodes=nodes)) > limit:
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
        request.lane, request.client, request.cache_salt = lane.rounded(), client, cache_salt
        self.waiting.push(request, first=first)

    def cancel(self, request: Request) -> None:
        """The request leaves before the next step, without an event after that. Ended ones are ignored."""
        if not self.waiting.pop(request, is_turn=False):
            self._cancelled.append(request)

    # --- the thread that decodes ---

    def step(self) -> list[BatchEvent]:
        """Admits waiting requests, reads a chunk of prompts and steps every batch once."""
        self._drop_cancelled()
        self._interrupt_what_does_not_fit()
        events = [*self._admit(), *self._read()]
        start, steps = self.clock(), self.steps
        for place, batch in list(self.batches.items()):
            if batch.requests:
                with place[0].model.computing():
                    events += self._advance(place, batch.step)
                self.steps += 1
        if self.steps > steps:
            self.turns.note_steps(self.clock() - start)
        self._drop_empty_batches()
        return events

    def hold(self, num_tokens: int, engine: "Engine") -> None:
        """Reserves memory for a text that is read outside of requests; requests that do not fit beside it wait.

        A negative number of tokens gives it back.
        """
        limit = self.limits.kv_bytes
        size = num_slots(engine.model, [abs(num_tokens)]) * engine.bytes_per_token + bytes_of_states(engine.model, 1)
        if limit is not None and num_tokens > 0 and self.held_bytes + size > limit:
            words = f"{size >> 20} MiB for keys and values; the server has {limit >> 20} MiB"
            raise TooLarge(f"the prompt needs {words}: send a shorter one")
        self.held_bytes += size if num_tokens > 0 else -size
        self._interrupt_what_does_not_fit()
        self._drop_empty_batches()

    def clear(self) -> None:
        self.waiting, self.reading, self.batches = WaitingLine(), [], {}

    @property
    def has_work(self) -> bool:
        return bool(self.batches or len(self.waiting))

    @property
    def running(self) -> list[Request]:
        """Requests that are decoded or read."""
        return [*(request for batch in self.batches.values() for request in batch.requests), *self.reading]

    @property
    def kv_bytes(self) -> int:
        """Memory of the requests that are read and decoded."""
        parts = (part.nbytes for request in self.reading for part in request.hidden)
        return sum(batch.num_bytes for batch in self.batches.values()) + sum(parts)

    # --- admission ---

    def _admit(self) -> list[BatchEvent]:
        """Waiting requests join, as long as there are rows and memory; one that fits overtakes one that does not."""
        events: list[BatchEvent] = []
        while len(self.waiting) and self._admit_one(events):
            pass
        self._drop_empty_batches()
        return events

    def _admit_one(self, events: list[BatchEvent]) -> bool:
        """Whether a request joined. The events are of those that no engine can take any more."""
        rows = Counter(request.client for request in self.running)
        is_full = rows.total() >= self.limits.max_rows
        if is_full and self._giving_to(self.waiting.fewest_rows(rows), rows) is None:
            return False
        overtaken: list[Request] = []
        kept_free = 0
        for request in self.waiting.in_turn(rows, _CANDIDATES):
            if not self._find_place(request, events):
                continue
            giving = None
            if is_full or not self._fits(request, kept_free):
                giving = self._giving_to(rows[request.client], rows)
                if giving is None or not self._fits(request, kept_free, without=giving):
                    if not is_full:  # there is no memory for it
                        overtaken.append(request)
                        if request.num_overtaken >= _MOST_OVERTAKEN:
                            tokens = request.expected_tokens(self.limits.headroom_tokens)
                            kept_free += request.place[0].num_bytes([tokens], draft_nodes=request.lane.draft_nodes)
                    continue
            if not self.waiting.pop(request):  # it was cancelled meanwhile
                continue
            self._join(request, giving)
            for each in overtaken:
                each.num_overtaken += 1
            return True
        return False

    def _find_place(self, request: Request, events: list[BatchEvent]) -> bool:
        """Sets its place, if it has one. A request that its engine cannot take ends: this may be another one by now."""
        try:
            request.place = self.check(request, request.lane), request.lane
        except DraftHeadsError as error:
            if self.waiting.pop(request):
                events.append((request, error))
            return False
        return True

    def _giving_to(self, num_rows: int, rows: Counter[str]) -> Request | None:
        """The request that gives its place to a client with so many rows: the latest one of the client with most.

        None if that one would then have fewer rows than this client.
        """
        owner = max(rows, key=rows.__getitem__, default="")
        if rows[owner] < num_rows + 2:
            return None
        return max(self._interruptible(owner), key=lambda request: request.admission)

    def _join(self, request: Request, giving: Request | None) -> None:
        if giving is not None:
            self._interrupt(giving)
        if request.place not in self.batches:
            engine, lane = request.place
            self.batches[request.place] = engine.batch(draft_nodes=lane.draft_nodes, on_phase=self._on_phase)
            if self._keeps_answers:
                self.batches[request.place].on_leave = self._keep
        self._admissions += 1
        request.admission = self._admissions
        request.read_ids = request.ids_to_read
        request.digests = self._digests(request, request.read_ids)
        self.reading.append(request)

    def _digests(self, request: Request, token_ids: Sequence[int]) -> list[Hashable]:
        """Under which a text is found among the prefixes."""
        model, layers = request.place[0].model, self.batches[request.place].runner.layers
        return block_digests((model, layers, request.cache_salt, model.is_long(request.most_tokens)), token_ids)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            # it may have been interrupted since
            if not self.waiting.pop(request, is_turn=False) and request in self.running:
                self._leave(request)

    def _drop_empty_batches(self) -> None:
        reading = {request.place for request in self.reading}
        self.batches = {place: batch for place, batch in self.batches.items() if batch.requests or place in reading}
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved()))

    # --- memory ---

    def _fits(self, request: Request, kept_free: int, without: Request | None = None) -> bool:
        """Whether there is memory for one more request."""
        limit = self.limits.kv_bytes
        if limit is None or not (self.running or self.held_bytes):  # what was accepted is decoded, if only alone
            return True
        reserved = self._reserved(headroom=self.limits.headroom_tokens, more=[request], without=without)
        return reserved + kept_free <= limit

    def _reserved(self, *, headroom: int = 0, more: Sequence[Request] = (), without: Request | None = None) -> int:
        """Memory that the requests take at most in the next step, or with so many more tokens of each answer."""
        lengths: defaultdict[Place, list[int]] = defaultdict(list)
        for request in (*self.running, *more):
            if request is not without:
                lengths[request.place].append(request.expected_tokens(headroom))
        sizes = (engine.num_bytes(of, draft_nodes=lane.draft_nodes) for (engine, lane), of in lengths.items())
        return self.held_bytes + sum(sizes)

    def _interrupt_what_does_not_fit(self) -> None:
        """Requests whose next step would take more memory than there is wait again: the one that frees most first."""
        if (limit := self.limits.kv_bytes) is None:
            return
        while len(self.running) > (0 if self.held_bytes else 1) and (reserved := self._reserved()) > limit:
            freed = {request: reserved - self._reserved(without=request) for request in self._interruptible()}
            self._interrupt(max(freed, key=lambda request: (freed[request], request.num_tokens)))

    def _interruptible(self, client: str | None = None) -> list[Request]:
        """Requests of a client, or of all. Those whose prompts are partly read only if there are no others."""
        requests = [request for request in self.running if client in (None, request.client)]
        return [request for request in requests if request.row is None] or requests

    def _interrupt(self, request: Request) -> None:
        """A request waits again. Where answers are kept, its text is, as long as there is memory."""
        self.interruptions += 1
        if self.limits.kv_bytes is not None:
            self.prefixes.limit(max(0, self.limits.kv_bytes - self._reserved(without=request)))
        self._leave(request)
        self.waiting.push(request, first=True)

    def _leave(self, request: Request) -> None:
        """A request leaves unfinished, between two steps."""
        batch = self.batches[request.place]
        if request in self.reading:
            self.reading.remove(request)
            if request.row is not None:
                batch.runner.drop([request.row])
        batch.drop([request])
        request.end_reading()

    # --- passes of the model ---

    def _read(self) -> list[BatchEvent]:
        """Reads at most a chunk of tokens, of one prompt or several; those that are read whole get their rows."""
        left, seconds = self.limits.chunk_tokens, self.turns.most_seconds
        if is_beside := seconds < math.inf and any(batch.requests for batch in self.batches.values()):
            seconds = self.turns.saved_seconds
        events: list[BatchEvent] = []
        while left > 0 and (chunks := self._next_chunks(left, seconds)):
            start = self.clock()
            for place in list(self.batches):
                if counts := {request: count for request, count in chunks.items() if request.place == place}:
                    with place[0].model.computing():
                        events += self._read_chunks(place, counts)
                    if seconds < math.inf:
                        wait_for(place[0].model.device)
            took = self.clock() - start
            self.turns.note_reading(chunks, took, is_beside=is_beside)
            left, seconds = left - sum(chunks.values()), seconds - took
            if events and seconds < math.inf:  # there is a new row
                break
        return events

    def _next_chunks(self, most: int, seconds: float) -> dict[Request, int]:
        """How many tokens of which prompts are read next, in so many seconds.

        They are of the client whose turn it is, and of the next ones if that leaves some. Half of them are of its
        prompt with the fewest tokens left, so that a short one does not wait for a long one; the others are of those
        that came first, so that a long one is read, too, whatever comes.
        """
        if not self.reading:
            return {}
        num_read = {  # by it or by others
            each: self.prefixes.num_known(each.findable, each.read_ids[:-1]) if each.row is None else each.row.length
            for each in self.reading
        }
        left = {request: len(request.read_ids) - count for request, count in num_read.items()}
        order = self.turns.order(self.reading)
        if seconds < math.inf:  # a chunk is one client's
            order = [each for each in order if each.client == order[0].client]
        shortest = min((each for each in order if each.client == order[0].client), key=left.__getitem__)
        if seconds < min(self.turns.most_seconds / 2, left[shortest] * self.turns.price(shortest)):
            return {}  # more time is saved first: few large chunks take less of it than many small ones
        chosen: Counter[Request] = Counter()
        coming = {digest for request in self.reading if request.row is not None for digest in request.digests}
        for request, share in [(shortest, 0.5), *((request, 1.0) for request in order)]:
            if request.row is None and request not in chosen:
                first_new = num_read[request] // BLOCK_TOKENS
                if any(digest in coming for digest in request.digests[first_new + _WORTH_WAITING :][:1]):
                    continue  # another one reads the same beginning
                coming.update(request.digests)
            request.stop = self._stop(request, num_read[request])
            to_read = request.stop - num_read[request] if request.stop else left[request]
            count = min(to_read - chosen[request], math.ceil(most * share), most - chosen.total())
            if (price := self.turns.price(request)) and seconds < math.inf:
                count = min(count, max(not chosen, int(seconds * share / price)))
                seconds -= count * price
            if count > 0:
                chosen[request] += count
        return dict(chosen)

    def _stop(self, request: Request, num_read: int) -> int:
        """Where states of recurrent layers are kept next: behind what others share, and at the last block; 0: nowhere.

        A state is large (:mod:`draftheads.decode.prefix_cache`), so a prompt has one or two of them.
        """
        ids = request.findable
        if not request.place[0].model.is_recurrent or len(ids) <= _WORTH_WAITING:
            return 0
        others = [sum(map(eq, ids, each.findable)) for each in self.reading if each is not request]
        stops = [self.prefixes.num_shared(ids), BLOCK_TOKENS * max(others, default=0)]
        if self._keeps_answers or len(self.waiting):
            stops.append(BLOCK_TOKENS * len(ids))
        return min((stop for stop in stops if stop > max(num_read, _WORTH_WAITING * BLOCK_TOKENS)), default=0)

    def _read_chunks(self, place: Place, counts: Mapping[Request, int]) -> list[BatchEvent]:
        """Reads the next tokens of some prompts. If that fails, each is read alone; one fails without the others."""
        batch, model = self.batches[place], place[0].model
        try:
            for request in counts:
                if request.row is None:
                    self._begin(request, batch)
            ended = batch.read(counts)
        except Exception as error:  # noqa: BLE001 - it is the end of that request
            if len(counts) > 1:
                pairs = (pair for pair in counts.items() if place in self.batches)  # one of them may end the batch
                return [event for pair in pairs for event in self._read_chunks(place, dict([pair]))]
            [request] = counts
            self._leave(request)
            return [(request, error)]
        self.tokens_read += sum(counts.values())
        keep = self._keeps_answers or len(self.waiting) or len(self.reading) > len(ended)
        for request in counts:
            if request.begun_row.length == request.stop or (request in ended and keep and not model.is_recurrent):
                self._keep(request, batch.read_part(request))
        if not ended:
            return []
        events = self._advance(place, partial(batch.join, ended))
        self.reading = [request for request in self.reading if request not in ended]
        return events

    @torch.inference_mode()
    def _begin(self, request: Request, batch: Batch) -> None:
        """Its row, with what was read of the same beginning."""
        known = self.prefixes.find(request.findable, request.read_ids[:-1])
        parts = (None, None) if known is None else (known.entries, known.states)
        request.row = batch.runner.open(request.most_tokens, *parts)
        if known is not None:
            request.hidden = [known.hidden]
            if not request.token_ids:
                request.num_cached = len(known.token_ids)

    def _keep(self, request: Request, text: ReadText) -> None:
        """A text, or what was read of it, is kept among the prefixes."""
        self.prefixes.add(self._digests(request, text.token_ids), text)

    def _advance(self, place: Place, work: Callable[[], list[BatchEvent]]) -> list[BatchEvent]:
        """The events of new rows or of a step. If it fails, all requests of the batch fail."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - it is the end of these requests
            failed = [*self.batches.pop(place).requests, *(each for each in self.reading if each.place == place)]
            self.reading = [request for request in self.reading if request.place != place]
            for request in failed:
                request.end_reading()
            return [(request, error) for request in dict.fromkeys(failed)]
