"""Requests that wait for their turn: a round robin over clients."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, zip_longest
from threading import Lock

from torch import Tensor

from draftheads.decode.prefix_cache import BLOCK_TOKENS
from draftheads.decode.request import Request
from draftheads.runners.runner import Row

TREE_SIZES = (0, 8, 16, 32, 64, 128)  # few, as each one that is asked for takes a pass of the model in every step


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
    stop: int = 0  # of its tokens: where a chunk ends, so that states of recurrent layers are kept there; 0: nowhere

    @property
    def begun_row(self) -> Row:
        assert self.row is not None, "reading has begun"
        return self.row

    @property
    def findable(self) -> list[Hashable]:
        """The digests of what need not be read: the last token is read in any case, for its logits."""
        return self.digests[: (len(self.token_ids) - 1) // BLOCK_TOKENS]

    def expected_tokens(self, headroom: int) -> int:
        """Of its text, after so many further tokens of its answer."""
        return min(self.request.most_tokens, self.request.num_tokens + headroom)


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
                if (queued := next((each for each in line if each.request is request), None)) is not None:
                    line.remove(queued)
                    if not line:
                        del self._lines[client]
                    return True
        return False

    def count(self, client: str) -> int:
        """How many requests of a client wait."""
        with self._lock:
            return len(self._lines.get(client, ()))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._lines.values()))
