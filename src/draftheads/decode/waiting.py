"""The requests that wait for a place: clients take turns, and each client's requests go first come, first served."""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from itertools import zip_longest
from threading import Lock

from draftheads.decode.request import Request

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
    """A request, and how it is decoded."""

    request: Request
    lane: Lane
    client: str = ""
    """Clients take turns: an API key or an address."""
    cache_salt: str = ""
    """Prompts with the same salt share what was read of a common beginning."""
    num_overtaken: int = 0
    """How many requests were admitted before it, although it was their turn later, because it did not fit."""
    admission: int = 0
    """Its number in the order of admissions."""


class FairQueue:
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

    def in_turn(self) -> list[QueuedRequest]:
        """All that wait: the first one of each client, then the second one of each, and so on."""
        with self._lock:
            ranks = zip_longest(*map(tuple, self._lines.values()))
        return [queued for rank in ranks for queued in rank if queued is not None]

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
