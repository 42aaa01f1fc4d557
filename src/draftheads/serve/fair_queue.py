"""The jobs that wait: clients take turns, and each client's jobs go first come, first served."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from draftheads.serve.jobs import Job


class FairQueue:
    """A round robin over the clients that have waiting jobs. A client that comes anew is the last one."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()

    def push(self, job: Job) -> None:
        """The last job of its client."""
        self._lines.setdefault(job.client, deque()).append(job)

    def first(self) -> Job | None:
        """The job whose turn it is."""
        return next((line[0] for line in self._lines.values()), None)

    def pop(self) -> Job:
        """Removes the job whose turn it is. Its client is the last one then."""
        client, line = self._lines.popitem(last=False)
        job = line.popleft()
        if line:
            self._lines[client] = line
        return job

    def remove(self, job: Job) -> bool:
        """Removes that job, if it waits."""
        line = self._lines.get(job.client, deque())
        if job not in line:
            return False
        line.remove(job)
        if not line:
            del self._lines[job.client]
        return True

    def count(self, client: str) -> int:
        """How many jobs of a client wait."""
        return len(self._lines.get(client, ()))

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Job]:
        for line in self._lines.values():
            yield from line
