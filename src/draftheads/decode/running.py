"""The batches of running requests, and the memory that they take."""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from draftheads.cpu.kernels import PackedLinear
from draftheads.decode.batch import Batch
from draftheads.decode.request import Request
from draftheads.decode.waiting import Lane, QueuedRequest
from draftheads.models.kv_target import bytes_per_slot, slots_for
from draftheads.models.model import TargetModel
from draftheads.speculation.drafter import Drafter


class BatchSource(Protocol):
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


AnyEngine = TypeVar("AnyEngine", bound=BatchSource)


class SlotBytes:
    """Memory of the requests of each model, as it would be at most."""

    def __init__(self) -> None:
        self._per_slot: WeakKeyDictionary[BatchSource, int] = WeakKeyDictionary()  # heads are replaced
        self._weights: WeakKeyDictionary[BatchSource, int] = WeakKeyDictionary()

    def per_slot(self, engine: BatchSource) -> int:
        """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
        if engine not in self._per_slot:
            model = engine.model
            states = max(1, len(engine.hidden_layers)) * model.hidden_size * model.dtype.itemsize
            self._per_slot[engine] = bytes_per_slot(model) + states + engine.drafter.bytes_per_slot
        return self._per_slot[engine]

    def of_weights(self, engine: BatchSource) -> int:
        """Memory that each pass of the model reads, whatever its rows."""
        if engine not in self._weights:
            model = engine.model
            layers = [layer for layer in model.model.modules() if isinstance(layer, PackedLinear)]
            packed = sum(layer.in_features * layer.out_features for layer in layers if layer.tied is None)
            whole = sum(weight.nbytes for weight in model.model.parameters())
            self._weights[engine] = whole + packed * model.dtype.itemsize
        return self._weights[engine]

    def of_text(self, engine: BatchSource, request: Request) -> int:
        """While the prompt (of a resumed request, all of its text) is read."""
        return slots_for(engine.model, len(request.ids_to_read)) * self.per_slot(engine)

    def alone(self, engine: BatchSource, draft_nodes: int | None, request: Request) -> int:
        """If there is no other request, at the end of the longest possible answer."""
        slots = slots_for(engine.model, request.most_tokens, engine.most_nodes(draft_nodes))
        return (slots + slots_for(engine.model, len(request.prompt_ids))) * self.per_slot(engine)

    def at_first(self, engine: BatchSource, queued: QueuedRequest, headroom: int) -> int:
        """If there is no other request, for the next ``headroom`` tokens of the answer."""
        request = queued.request
        tokens = min(request.most_tokens, request.num_tokens + headroom)
        slots = slots_for(engine.model, tokens, engine.most_nodes(queued.lane.draft_nodes))
        return slots * self.per_slot(engine) + self.of_text(engine, request)


class RunningLane:
    """A batch, and the requests of its rows and of prompts that are being read for it."""

    def __init__(self, lane: Lane, engine: BatchSource, on_phase: Callable[[str], object]) -> None:
        self.lane, self.engine = lane, engine
        self.batch: Batch = engine.batch(draft_nodes=lane.draft_nodes, on_phase=on_phase)
        self.requests: dict[Request, QueuedRequest] = {}
        self._most_nodes = engine.most_nodes(lane.draft_nodes)

    def namespace(self, request: Request) -> Hashable:
        """Where the request's text is found in the cache of prefixes."""
        is_long = self.engine.model.is_long(request.most_tokens)
        return self.engine.model, self.batch.target.layers, self.requests[request].cache_salt, is_long

    def slots(self, *more: Request, without: Request | None = None, headroom: int = 0, trimmed: bool = False) -> int:
        """Slots of the batch's cache, a rectangle, in the next step.

        Args:
            more: requests beside those of the lane.
            without: a request that leaves.
            headroom: further tokens of each answer.
            trimmed: as if unused slots were freed first.
        """
        requests = [request for request in (*self.requests, *more) if request is not without]
        slots = 0
        if requests:
            longest = max(min(request.most_tokens, request.num_tokens + headroom) for request in requests)
            slots = slots_for(self.engine.model, longest, self._most_nodes)
        cache = self.batch.target.cache
        if trimmed:
            return len(requests) * slots
        return max(len(requests), cache.held_rows) * max(slots, cache.capacity)

    def num_idle_slots(self, *more: Request) -> int:
        """Slots that each step reads in vain, because the rows of a rectangle are as long as its longest one."""
        lengths = [request.num_tokens for request in (*self.requests, *more)]
        return len(lengths) * max(lengths, default=0) - sum(lengths)
