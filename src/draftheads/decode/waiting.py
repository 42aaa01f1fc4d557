"""Requests that wait for their turn: for a row in a round robin over clients, for reading by the time it took."""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from threading import Lock

from draftheads.decode.request import Request

_MEMORY_STEPS = 4  # over which the time of a step is averaged


class WaitingLine:
    """A round robin over the clients that have waiting requests. A client that comes anew is the last one.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Request]] = OrderedDict()
        self._lock = Lock()

    def push(self, request: Request, *, first: bool = False) -> None:
        """The last one of its client, or its first one."""
        with self._lock:
            line = self._lines.setdefault(request.client, deque())
            line.appendleft(request) if first else line.append(request)

    def in_turn(self, num_rows: Mapping[str, int], most: int) -> list[Request]:
        """Who is next: of clients with the fewest rows the first ones, then the second ones of each, and so on."""
        with self._lock:
            turns = [
                (num_rows.get(client, 0), place, request)
                for client, line in self._lines.items()
                for place, request in enumerate(islice(line, most))
            ]
        return [request for *_, request in sorted(turns, key=itemgetter(0, 1))[:most]]

    def fewest_rows(self, num_rows: Mapping[str, int]) -> int:
        """Of a client that waits."""
        with self._lock:
            return min((num_rows.get(client, 0) for client in self._lines), default=0)

    def pop(self, request: Request, *, is_turn: bool = True) -> bool:
        """Removes one, if it still waits. If that was its client's turn, the client is the last one then."""
        with self._lock:
            line = self._lines.get(request.client)
            if line is None or request not in line:
                return False
            line.remove(request)
            if not line:
                del self._lines[request.client]
            elif is_turn:
                self._lines.move_to_end(request.client)
            return True

    def count(self, client: str) -> int:
        """How many requests of a client wait."""
        with self._lock:
            return len(self._lines.get(client, ()))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._lines.values()))


class ReadingTurns:
    """Whose prompts are read next: those of the client for which reading has taken the least time.

    A client that comes anew has as much as the one that was served last had before. So it goes first, once, and gains
    nothing by what was read before it came: start-time fair queueing (Goyal, Vin and Cheng 1996).

    >>> class Prompt:
    ...     def __init__(self, client):
    ...         self.client, self.token_seconds = client, 0.0
    >>> old, new, turns, served = Prompt("old"), Prompt("new"), ReadingTurns(None), []
    >>> for prompts in [old], [old], [old, new], [old, new], [old, new]:
    ...     first = turns.order(prompts)[0]
    ...     turns.note_reading({first: 1}, 2.0, is_beside=False)
    ...     served.append(first.client)
    >>> served
    ['old', 'old', 'new', 'old', 'new']
    """

    def __init__(self, chunk_steps: int | None) -> None:
        """A chunk takes as long as so many steps of what is decoded; None: no limit."""
        self._chunk_steps = chunk_steps
        self._seconds: dict[str, float] = {}
        self._start = 0.0
        self._step_seconds = self._token_seconds = 0.0  # that a step, and reading a token, took lately; 0: not known
        self.saved_seconds = 0.0  # for reading, by the steps since

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Those of one client stay in their order."""
        self._seconds = {each.client: self._seconds.get(each.client, self._start) for each in requests}
        return sorted(requests, key=lambda each: self._seconds[each.client])

    @property
    def most_seconds(self) -> float:
        """That a chunk takes while nothing is decoded."""
        return self._step_seconds * self._chunk_steps if self._chunk_steps and self._step_seconds else math.inf

    def price(self, request: Request) -> float:
        """Seconds that a token of its prompt takes; 0: not known."""
        return request.token_seconds or self._token_seconds

    def note_steps(self, seconds: float) -> None:
        """Steps of all batches give reading as much time as they took; little of it can be saved."""
        known = self._step_seconds
        self._step_seconds = known + (seconds - known) / _MEMORY_STEPS if known else seconds
        self.saved_seconds = min(self.saved_seconds + seconds, self.most_seconds / 2)

    def note_reading(self, chunks: Mapping[Request, int], seconds: float, *, is_beside: bool) -> None:
        """Shares the time among the prompts, by what their tokens took before: more behind a longer text.

        ``is_beside``: beside texts that are decoded, whose steps gave the time.
        """
        expected = {request: count * (self.price(request) or 1.0) for request, count in chunks.items()}
        self._start = min(self._seconds[request.client] for request in chunks)
        for request, part in expected.items():
            own = seconds * part / sum(expected.values())
            request.token_seconds = own / chunks[request]
            self._seconds[request.client] += own
        self._token_seconds = seconds / sum(chunks.values())
        self.saved_seconds -= seconds * is_beside
