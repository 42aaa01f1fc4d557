"""Lanes: requests that are read and decoded in one batch, and the memory that they take."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftheads.decode.batch import Batch
from draftheads.decode.prefix_cache import BLOCK_TOKENS, PrefixCache, ReadText, block_digests
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.waiting import Lane, QueuedRequest
from draftheads.models.model import TargetModel
from draftheads.runners import bytes_of_states, bytes_per_slot, num_slots
from draftheads.speculation.drafter import Drafter


class DecodingEngine(Protocol):
    """What the core needs of an engine."""

    model: TargetModel
    drafter: Drafter

    def batch(self, *, draft_nodes: int | None = None, on_phase: Callable[[str], object] = str) -> Batch:
        """A batch without rows."""

    def check_draft_nodes(self, draft_nodes: int | None) -> None:
        """Raises where trees cannot have so many nodes."""

    def most_nodes(self, draft_nodes: int | None = None) -> int:
        """The most nodes that a step verifies for a row."""


AnyEngine = TypeVar("AnyEngine", bound=DecodingEngine)


class RunningLane(Generic[AnyEngine]):
    """A batch, and the requests of its rows and of prompts that are being read for it.

    Prompts go on from the texts in ``prefixes``, where texts of rows that leave are kept if it ``keeps_answers``.
    """

    def __init__(
        self,
        lane: Lane,
        engine: AnyEngine,
        prefixes: PrefixCache,
        *,
        keeps_answers: bool,
        on_phase: Callable[[str], object],
    ) -> None:
        self.lane, self.engine, self.prefixes = lane, engine, prefixes
        self.batch = engine.batch(draft_nodes=lane.draft_nodes, on_phase=on_phase)
        self.requests: dict[Request, QueuedRequest] = {}
        if keeps_answers:
            self.batch.on_leave = lambda request, text: prefixes.add(
                self.digests(self.requests[request], text.token_ids), text
            )

    def digests(self, queued: QueuedRequest, token_ids: Sequence[int]) -> list[Hashable]:
        """Under which a text is found among the prefixes."""
        is_long = self.engine.model.is_long(queued.request.most_tokens)
        return block_digests((self.engine.model, self.batch.runner.layers, queued.cache_salt, is_long), token_ids)

    def num_left(self, queued: QueuedRequest) -> int:
        """Tokens of a prompt that are still to be read."""
        if queued.row is not None:
            return len(queued.token_ids) - queued.row.length
        return len(queued.token_ids) - self.prefixes.num_known(queued.findable, queued.token_ids[:-1])

    def keep(self, queued: QueuedRequest) -> None:
        """Keeps what was read of a prompt among the prefixes."""
        runner, row = self.batch.runner, queued.begun_row
        if len(queued.hidden) > 1:
            queued.hidden = [torch.cat(queued.hidden)]
        parts = runner.entries(row, row.length), queued.hidden[0], runner.states(row)
        self.prefixes.add(
            queued.digests[: row.length // BLOCK_TOKENS], ReadText(queued.token_ids[: row.length], *parts)
        )

    @torch.inference_mode()
    def read(self, counts: Mapping[QueuedRequest, int]) -> dict[QueuedRequest, Tensor]:
        """Reads so many next tokens of some prompts. Of those that are read whole, h_t (D,) of the last token."""
        runner = self.batch.runner
        for queued in counts:
            if queued.row is None:
                self._begin(queued)
        rows = [queued.begun_row for queued in counts]
        chunks = [
            queued.token_ids[row.length :][:count] for row, (queued, count) in zip(rows, counts.items(), strict=True)
        ]
        last = {}
        for queued, (states, hidden) in zip(counts, runner.read(rows, chunks), strict=True):
            queued.hidden.append(hidden)
            last[queued] = states[-1]
        return {queued: state for queued, state in last.items() if queued.begun_row.length == len(queued.token_ids)}

    def _begin(self, queued: QueuedRequest) -> None:
        """Its row, with what was read of the same beginning."""
        known = self.prefixes.find(queued.findable, queued.token_ids[:-1])
        parts = (None, None) if known is None else (known.entries, known.states)
        queued.row = self.batch.runner.open(queued.request.most_tokens, *parts)
        if known is not None:
            queued.hidden = [known.hidden]
            if not queued.request.token_ids:
                queued.request.num_cached = len(known.token_ids)

    @torch.inference_mode()
    def join(self, ended: Mapping[QueuedRequest, Tensor]) -> list[StreamEvent]:
        """Prompts that :meth:`read` has read whole become rows of the batch."""
        logits = self.engine.model.logits(torch.stack(list(ended.values())))
        hidden = [queued.hidden[0] for queued in ended]
        for queued in ended:
            queued.hidden = []
        return self.batch.join(
            [queued.request for queued in ended], [queued.begun_row for queued in ended], logits, hidden
        )

    def leave(self, queued: QueuedRequest) -> None:
        """A request leaves unfinished, between two steps."""
        if queued.row is not None and queued.request not in self.batch.requests:
            self.batch.runner.drop([queued.row])
        self.batch.drop([queued.request])
        queued.row, queued.hidden = None, []
        del self.requests[queued.request]


def bytes_per_token(engine: DecodingEngine) -> int:
    """Memory of one token: keys, values and hidden states, and what the drafter keeps of it."""
    model = engine.model
    states = max(1, len(engine.drafter.hidden_layers)) * model.hidden_size * model.dtype.itemsize
    return bytes_per_slot(model) + states + engine.drafter.bytes_per_slot


def num_bytes(engine: DecodingEngine, lane: Lane, lengths: Sequence[int]) -> int:
    """Memory of the requests of a lane, whose texts have so many tokens."""
    slots = num_slots(engine.model, lengths, engine.most_nodes(lane.draft_nodes))
    states = bytes_of_states(engine.model, len(lengths)) + engine.drafter.bytes_of_rows(len(lengths))
    return slots * bytes_per_token(engine) + states
