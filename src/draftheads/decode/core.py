"""The core of all decoding: which requests wait, which are read and decoded, and what happens when memory runs out.

Memory is reserved for the next tokens of an answer, not for the longest possible one. If it runs out, a request is
interrupted: it waits again, and its text is read again when it goes on. So plain, drafted, and interrupted answers are
the same. A client also gives up rows when it has more of them than another one that waits.

``Engine.generate`` and ``stream``, ``draftheads chat`` and the server are callers of it. One thread calls
:meth:`EngineCore.step`; others may add and cancel requests.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice, zip_longest
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftheads.decode.batch import Batch
from draftheads.decode.prefix_cache import BLOCK_TOKENS, PrefixCache, ReadText, block_digests
from draftheads.decode.request import Request, StreamEvent
from draftheads.errors import DraftHeadsError, TooLarge, no_such, require_at_least
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_per_slot, num_slots
from draftheads.runners.runner import Row
from draftheads.speculation.drafter import Drafter
from draftheads.utils.counts import counted

CoreEvent = tuple[Request, StreamEvent | Exception]  # a request ends with a finish reason or an exception
TREE_SIZES = (0, 8, 16, 32, 64, 128)  # few, as each one that is asked for takes a pass of the model in every step
_PREFIX_BYTES = 1 << 30  # of texts that were read, where memory has no limit
_MOST_OVERTAKEN = 64  # times that a request is overtaken before memory is kept free for it
_CANDIDATES = 64  # waiting requests that are looked at for a free row
_WORTH_WAITING = 32 // BLOCK_TOKENS  # blocks that two prompts share: with more, one waits until the other is read


class DecodingEngine(Protocol):
    """What the core needs of an engine."""

    model: TargetModel
    drafter: Drafter

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers of the model whose inputs the drafter reads."""

    def batch(self, *, draft_nodes: int | None = None, on_phase: Callable[[str], object] = str) -> Batch:
        """A batch without rows."""

    def check_draft_nodes(self, draft_nodes: int | None) -> None:
        """Raises where trees cannot have so many nodes."""

    def most_nodes(self, draft_nodes: int | None = None) -> int:
        """The most nodes that a step verifies for a row."""


AnyEngine = TypeVar("AnyEngine", bound=DecodingEngine)


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


@dataclass(frozen=True)
class Lane:
    """Requests that are decoded in one batch: they have the same drafter, adapter and rule for trees."""

    model: str = ""
    """The name of the engine."""
    draft_nodes: int | None = None
    """0 decodes plainly; n drafts on growing trees of n nodes; None leaves it to the engine."""

    def rounded(self) -> "Lane":
        """With the nearest of ``TREE_SIZES``, the larger one of two.

        >>> [Lane("m", nodes).rounded().draft_nodes for nodes in (3, 4, 11, 12, 90, None)]
        [0, 8, 8, 16, 64, None]
        """
        nodes = self.draft_nodes
        if nodes is None:
            return self
        return replace(self, draft_nodes=min(TREE_SIZES, key=lambda size: (abs(size - nodes), -size)))


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits, is read or is decoded."""

    request: Request
    lane: Lane
    client: str = ""
    cache_salt: str = ""
    num_overtaken: int = 0  # requests that were admitted before it, out of turn, because it did not fit
    admission: int = 0  # its number in the order of admissions
    # while its prompt is read:
    token_ids: list[int] = field(default_factory=list)  # of a request that was interrupted, with its answer so far
    digests: list[Hashable] = field(default_factory=list)
    row: Row | None = None  # from its first chunk on: another prompt may have left a common beginning
    hidden: list[Tensor] = field(default_factory=list)  # parts (t, D or n·D)

    @property
    def begun_row(self) -> Row:
        assert self.row is not None, "reading has begun"
        return self.row


class WaitingLine:
    """A round robin over the clients that have waiting requests. A client that comes anew is the last one.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()
        self._lock = Lock()

    def push(self, queued: QueuedRequest, *, first: bool = False) -> None:
        """The last one of its client, or its first one."""
        with self._lock:
            line = self._lines.setdefault(queued.client, deque())
            line.appendleft(queued) if first else line.append(queued)

    def in_turn(self, num_rows: Mapping[str, int], most: int) -> list[QueuedRequest]:
        """Who is next: of clients with the fewest rows the first ones, then the second ones of each, and so on."""
        with self._lock:
            clients = sorted(self._lines, key=lambda client: num_rows.get(client, 0))
            found: list[QueuedRequest] = []
            for _, group in groupby(clients, key=lambda client: num_rows.get(client, 0)):
                ranks = zip_longest(*(tuple(islice(self._lines[client], most)) for client in group))
                found += [queued for rank in ranks for queued in rank if queued is not None]
                if len(found) >= most:
                    break
            return found[:most]

    def fewest_rows(self, num_rows: Mapping[str, int]) -> int:
        """Of a client that waits."""
        with self._lock:
            return min((num_rows.get(client, 0) for client in self._lines), default=0)

    def pop(self, queued: QueuedRequest) -> bool:
        """Removes one, if it still waits. Its client is the last one then."""
        with self._lock:
            line = self._lines.get(queued.client)
            if line is None or queued not in line:
                return False
            del self._lines[queued.client]
            line.remove(queued)
            if line:
                self._lines[queued.client] = line
            return True

    def remove(self, request: Request) -> bool:
        """Removes that request, if it waits."""
        with self._lock:
            for client, line in self._lines.items():
                for queued in line:
                    if queued.request is request:
                        line.remove(queued)
                        if not line:
                            del self._lines[client]
                        return True
        return False

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()

    def count(self, client: str) -> int:
        """How many requests of a client wait."""
        with self._lock:
            return len(self._lines.get(client, ()))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._lines.values()))


class RunningLane(Generic[AnyEngine]):
    """A batch, and the requests of its rows and of prompts that are being read for it."""

    def __init__(self, lane: Lane, engine: AnyEngine, on_phase: Callable[[str], object]) -> None:
        self.lane, self.engine = lane, engine
        self.batch = engine.batch(draft_nodes=lane.draft_nodes, on_phase=on_phase)
        self.requests: dict[Request, QueuedRequest] = {}

    def digests(self, queued: QueuedRequest, token_ids: Sequence[int]) -> list[Hashable]:
        """Under which a text is found in the cache of prefixes."""
        is_long = self.engine.model.is_long(queued.request.most_tokens)
        return block_digests((self.engine.model, self.batch.runner.layers, queued.cache_salt, is_long), token_ids)


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
        self.reading: list[tuple[RunningLane[AnyEngine], QueuedRequest]] = []  # in the order in which they came
        self.steps = 0
        self.tokens_read = 0
        self.interruptions = 0
        self.held_bytes = 0  # memory of what is read outside of requests
        self._keeps_answers, self._on_phase = keeps_answers, on_phase
        self._admissions = 0
        self._cancelled: set[Request] = set()
        self._lock = Lock()  # of _cancelled

    # --- any thread ---

    def check(self, request: Request, lane: Lane) -> None:
        """Whether a request can be decoded."""
        engine = self._engine_of(lane)
        engine.check_draft_nodes(lane.draft_nodes)
        limit = self.limits.kv_bytes
        if limit is not None and (needed := _num_bytes(engine, lane.rounded(), [request.most_tokens])) > limit:
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
        limit, num_bytes = self.limits.kv_bytes, num_slots(engine.model, [abs(num_tokens)]) * bytes_per_token(engine)
        num_bytes = num_bytes if num_tokens > 0 else -num_bytes
        if limit is not None and self.held_bytes + num_bytes > limit:
            words = f"{num_bytes >> 20} MiB for keys and values; the server has {limit >> 20} MiB"
            raise TooLarge(f"the prompt needs {words}: send a shorter one")
        self.held_bytes += num_bytes
        self._interrupt_what_does_not_fit()
        self._drop_empty_lanes()

    def clear(self) -> None:
        self.waiting.clear()
        self.reading, self.lanes = [], []

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
                            kept_free += _num_bytes(engine, queued.lane, [self._expected_tokens(queued)])
                    continue
            if not self.waiting.pop(queued):  # it was cancelled meanwhile
                continue
            self._join(queued, engine, giving)
            for each in overtaken:
                each.num_overtaken += 1
            return True
        return False

    def _giving_to(self, num_rows: int, rows: Counter[str]) -> tuple[RunningLane[AnyEngine], QueuedRequest] | None:
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
            self.check(queued.request, queued.lane)
        except DraftHeadsError as error:
            if self.waiting.pop(queued):
                events.append((queued.request, error))
            return None
        return self._engine_of(queued.lane)

    def _join(
        self, queued: QueuedRequest, engine: AnyEngine, giving: tuple[RunningLane[AnyEngine], QueuedRequest] | None
    ) -> None:
        if giving is not None:
            self._interrupt(*giving)
        lane = next((each for each in self.lanes if each.lane == queued.lane and each.engine is engine), None)
        if lane is None:
            lane = RunningLane(queued.lane, engine, self._on_phase)
            if self._keeps_answers:
                lane.batch.on_leave = partial(self._keep_answer, lane)
            self.lanes.append(lane)
        self._admissions += 1
        queued.admission = self._admissions
        queued.token_ids = queued.request.ids_to_read
        queued.digests = lane.digests(queued, queued.token_ids)
        lane.requests[queued.request] = queued
        self.reading.append((lane, queued))

    def _engine_of(self, lane: Lane) -> AnyEngine:
        engine = self.engines.get(lane.model)
        if engine is None:
            raise no_such("model", lane.model, self.engines, other_names={})
        return engine

    def _keep_answer(self, lane: RunningLane[AnyEngine], request: Request, text: ReadText) -> None:
        self.prefixes.add(lane.digests(lane.requests[request], text.token_ids), text)

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

    def _expected_tokens(self, queued: QueuedRequest) -> int:
        """For which there must be memory when it is admitted."""
        return min(queued.request.most_tokens, queued.request.num_tokens + self.limits.headroom_tokens)

    def _fits(
        self, queued: QueuedRequest, engine: AnyEngine, kept_free: int, without: QueuedRequest | None = None
    ) -> bool:
        """Whether there is memory for one more request."""
        limit = self.limits.kv_bytes
        if limit is None or not (self.num_running or self.held_bytes):  # what was accepted is decoded, if only alone
            return True
        return self._reserved(headroom=True, more=(engine, queued), without=without) + kept_free <= limit

    def _reserved(
        self,
        *,
        headroom: bool = False,
        more: tuple[AnyEngine, QueuedRequest] | None = None,
        without: QueuedRequest | None = None,
    ) -> int:
        """Memory that the requests take at most in the next step, or with some more tokens of each answer."""
        lanes = {(lane.engine, lane.lane): [*lane.requests.values()] for lane in self.lanes}
        if more is not None:
            lanes.setdefault((more[0], more[1].lane), []).append(more[1])
        return self.held_bytes + sum(
            _num_bytes(
                engine,
                lane,
                [
                    self._expected_tokens(queued) if headroom else queued.request.num_tokens
                    for queued in members
                    if queued is not without
                ],
            )
            for (engine, lane), members in lanes.items()
        )

    def _interrupt_what_does_not_fit(self) -> None:
        """Requests whose next step would take more memory than there is wait again: the one that frees most first."""
        limit = self.limits.kv_bytes
        while (
            limit is not None
            and self.num_running > (0 if self.held_bytes else 1)
            and (reserved := self._reserved()) > limit
        ):
            freed = {pair: reserved - self._reserved(without=pair[1]) for pair in self._interruptible()}
            self._interrupt(*max(freed, key=lambda pair: (freed[pair], pair[1].request.num_tokens)))

    def _interruptible(self, client: str | None = None) -> list[tuple[RunningLane[AnyEngine], QueuedRequest]]:
        """Requests of a client, or of all. Those whose prompts are partly read only if there are no others."""
        pairs = [
            (lane, queued)
            for lane in self.lanes
            for queued in lane.requests.values()
            if client in (None, queued.client)
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
        """A request leaves unfinished, between two steps."""
        self.reading = [pair for pair in self.reading if pair[1] is not queued]
        if queued.row is not None and queued.request not in lane.batch.requests:
            lane.batch.runner.drop([queued.row])
        lane.batch.drop([queued.request])
        queued.row, queued.hidden = None, []
        del lane.requests[queued.request]

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

    def _next_chunks(self, most: int) -> dict[tuple[RunningLane[AnyEngine], QueuedRequest], int]:
        """How many tokens of which prompts are read next.

        Half of them are of the prompt with the fewest tokens left, so that a short one does not wait for a long one;
        the others are of those that came first, so that a long one is read, too, whatever comes.
        """
        left = {pair: self._num_left(pair[1]) for pair in self.reading}
        shortest = min(self.reading, key=left.__getitem__, default=None)
        chosen: Counter[tuple[RunningLane[AnyEngine], QueuedRequest]] = Counter()
        coming = {digest for _, queued in self.reading if queued.row is not None for digest in queued.digests}
        for pair, limit in [(shortest, most - most // 2), *((pair, most) for pair in self.reading)]:
            if pair is None:
                continue
            queued = pair[1]
            if queued.row is None and pair not in chosen:
                first_new = self.prefixes.num_known(queued.digests) // BLOCK_TOKENS
                if any(digest in coming for digest in queued.digests[first_new + _WORTH_WAITING :][:1]):
                    continue  # another one reads the same beginning
                coming.update(queued.digests)
            count = min(left[pair] - chosen[pair], limit, most - chosen.total())
            if count > 0:
                chosen[pair] += count
        return dict(chosen)

    def _num_left(self, queued: QueuedRequest) -> int:
        known = self.prefixes.num_known(_but_last(queued)) if queued.row is None else queued.row.length
        return len(queued.token_ids) - known

    def _read_chunks(self, lane: RunningLane[AnyEngine], counts: Mapping[QueuedRequest, int]) -> list[CoreEvent]:
        """Reads the next tokens of some prompts. If that fails, each is read alone; one fails without the others."""
        try:
            read = self._passes(lane, counts)
        except Exception as error:  # noqa: BLE001 - it is the end of that request
            if len(counts) > 1:
                return [event for pair in counts.items() for event in self._read_chunks(lane, dict([pair]))]
            [queued] = counts
            self._leave(lane, queued)
            return [(queued.request, error)]
        self.tokens_read += sum(counts.values())
        ended = {queued: last for queued, last in read.items() if queued.begun_row.length == len(queued.token_ids)}
        if not ended:
            return []
        keep = self._keeps_answers or len(self.waiting) or len(self.reading) > len(ended)
        for queued in ended:
            queued.hidden = [torch.cat(queued.hidden)]
            if keep:
                entries = lane.batch.runner.entries(queued.begun_row, len(queued.token_ids))
                self.prefixes.add(queued.digests, ReadText(queued.token_ids, entries, queued.hidden[0]))
        self.reading = [pair for pair in self.reading if pair[1] not in ended]
        new = [queued.request for queued in ended if not queued.request.token_ids]
        return self._advance(lane, new, partial(self._join_batch, lane, ended))

    @torch.inference_mode()
    def _passes(self, lane: RunningLane[AnyEngine], counts: Mapping[QueuedRequest, int]) -> dict[QueuedRequest, Tensor]:
        """h_t of each prompt's last token that was read, (D,)."""
        runner = lane.batch.runner
        for queued in counts:
            if queued.row is None:
                self._begin(lane, queued)
        rows = [queued.begun_row for queued in counts]
        chunks = [queued.token_ids[queued.begun_row.length :][:count] for queued, count in counts.items()]
        last = {}
        for queued, (states, hidden) in zip(counts, runner.read(rows, chunks), strict=True):
            queued.hidden.append(hidden)
            last[queued] = states[-1]
        return last

    def _begin(self, lane: RunningLane[AnyEngine], queued: QueuedRequest) -> None:
        """Its row, with what was read of the same beginning; the last token is read in any case, for its logits."""
        known = self.prefixes.find(_but_last(queued))
        queued.row = lane.batch.runner.open(queued.request.most_tokens, None if known is None else known.entries)
        if known is not None:
            queued.hidden = [known.hidden]
            if not queued.request.token_ids:
                queued.request.num_cached = len(known.token_ids)

    @torch.inference_mode()
    def _join_batch(self, lane: RunningLane[AnyEngine], ended: Mapping[QueuedRequest, Tensor]) -> list[StreamEvent]:
        logits = lane.engine.model.logits(torch.stack(list(ended.values())))
        hidden = [queued.hidden[0] for queued in ended]
        for queued in ended:
            queued.hidden = []
        return lane.batch.join(
            [queued.request for queued in ended], [queued.begun_row for queued in ended], logits, hidden
        )

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
        for request in requests:
            if request.failure is not None:
                events.append((request, request.failure))
            if request.failure is not None or request.finish_reason is not None:
                del lane.requests[request]
        return events


def _but_last(queued: QueuedRequest) -> list[Hashable]:
    return queued.digests[: (len(queued.token_ids) - 1) // BLOCK_TOKENS]


def bytes_per_token(engine: DecodingEngine) -> int:
    """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
    model = engine.model
    states = max(1, len(engine.hidden_layers)) * model.hidden_size * model.dtype.itemsize
    return bytes_per_slot(model) + states + engine.drafter.bytes_per_slot


def _num_bytes(engine: DecodingEngine, lane: Lane, lengths: Sequence[int]) -> int:
    """Memory of the requests of a lane, whose texts have so many tokens."""
    return num_slots(engine.model, lengths, engine.most_nodes(lane.draft_nodes)) * bytes_per_token(engine)
