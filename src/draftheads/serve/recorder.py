"""Records answered requests as training data, on a thread of its own and within a disk budget.

Each model has a folder of JSON lines, ``traffic-000001.jsonl`` and so on, for ``draftheads train --data FOLDER/MODEL``.
A line has the token ids that the model read and wrote, so that training sees exactly these, and the messages for
people. Hidden states would need 130 times the disk (smollm2-135m); training computes them.
"""

import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Any

from draftheads.errors import InvalidSettings, StorageError
from draftheads.serve.metrics import gauge, total
from draftheads.utils.files import append_synced, locked

_LOG = logging.getLogger(__name__)
_MAX_WAITING = 1024  # exchanges; more are dropped, so that a slow disk costs no memory
_FILE_BYTES = 64 << 20
_FILES_AT_LEAST = 8  # of a full budget: at most an eighth of the traffic is deleted at once
_SMALLEST_BUDGET = 1 << 20
_PRIVATE = 0o700  # mode of the folders that are made here; one that is there already keeps its mode
_PRIVATE_FILE = 0o600


@dataclass(frozen=True)
class Exchange:
    """A prompt and the whole answer to it."""

    model: str  # the served name whose weights answered
    tokenizer: str  # its fingerprint
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    text: str  # of the answer
    finished: bool  # False if it was cut off
    messages: Sequence[Mapping[str, Any]] | None = None  # of a chat

    def line(self) -> bytes:
        """The record as a line of JSON."""
        record: dict[str, Any] = {"model": self.model, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if self.messages is not None:
            record["messages"] = [*self.messages, {"role": "assistant", "content": self.text}]
        ids = {"prompt_ids": list(self.prompt_ids), "answer_ids": list(self.answer_ids)}
        record |= {"finished": self.finished, "tokenizer": self.tokenizer, **ids}
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"  # ASCII: no character is cut in two


@dataclass(frozen=True)
class RecorderCounts:
    """Since the start."""

    recorded: int = total("answers_recorded", "Answers that were recorded")
    dropped: int = total("records_dropped", "Answers that could not be recorded: the disk is slow or full")
    num_bytes: int = gauge("record_bytes", "Disk that records take")


class Recorder:
    """Writes exchanges to a folder that only this process writes.

    Args:
        folder: made if missing, and then only its user can read it. Files of an earlier process are continued.
        max_bytes: of all files together.

    Raises:
        InvalidSettings: a budget below 1 MB.
        StorageError: the folder cannot be written, or another server writes it.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        if max_bytes < _SMALLEST_BUDGET:
            least = f"{_SMALLEST_BUDGET / 2**30:g}"
            raise InvalidSettings(f"--record-gib is {max_bytes / 2**30:g}; it must be at least {least}")
        self.folder, self.max_bytes = folder, max_bytes
        self._file_bytes = min(_FILE_BYTES, max_bytes // _FILES_AT_LEAST)
        self._held = ExitStack()
        is_new = not folder.exists()
        self._held.enter_context(locked(folder, "name another --record"))
        try:
            if is_new:
                folder.chmod(_PRIVATE)
            self._sizes = _repaired(folder)
        except OSError as error:
            self._held.close()
            raise StorageError(f"cannot record to {folder}: {error.strerror}") from error
        self._lock = Lock()
        self.counts = RecorderCounts(num_bytes=sum(self._sizes.values()))
        self._failing = False
        self._queue: Queue[Exchange | None] = Queue(_MAX_WAITING)
        self._thread = Thread(target=self._run, name="draftheads-recorder", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange) -> None:
        """Accepts an exchange, from any thread, and does not wait for the disk."""
        try:
            self._queue.put_nowait(exchange)
        except Full:
            self._count(dropped=1)

    def folder_of(self, model: str) -> Path:
        """Where the exchanges of a model are."""
        return self.folder / (re.sub(r"[^\w.+-]+", "_", model).strip("._") or "model")

    def close(self) -> None:
        """Writes what is waiting, and lets another process write the folder."""
        self._queue.put(None)
        self._thread.join()
        self._held.close()

    def _run(self) -> None:
        exchanges: list[Exchange | None] = []
        while not exchanges or exchanges[-1] is not None:
            exchanges = [self._queue.get()]
            with suppress(Empty):
                while exchanges[-1] is not None:  # all that came meanwhile are flushed to the disk together
                    exchanges.append(self._queue.get_nowait())
            by_model = defaultdict[str, list[bytes]](list)
            for exchange in filter(None, exchanges):
                by_model[exchange.model].append(exchange.line())
            for model, lines in by_model.items():
                self._write(model, lines)

    def _write(self, model: str, lines: list[bytes]) -> None:
        """Appends the lines of a model, a file after the other."""
        while lines:
            path = self._open_file(self.folder_of(model))
            room = self._file_bytes - self._sizes.get(path, 0)
            chunk = [lines.pop(0)]
            while lines and sum(map(len, chunk)) + len(lines[0]) <= room:
                chunk.append(lines.pop(0))
            self._append(path, chunk)

    def _append(self, path: Path, lines: list[bytes]) -> None:
        content = b"".join(lines)
        size = self._sizes.get(path, 0) if path.exists() else 0  # the user may have deleted it
        if len(content) > self._file_bytes:  # one line that is larger than a file may be
            self._count(dropped=len(lines))
            return
        try:
            self._make_room(len(content), keep=path)
            path.parent.mkdir(_PRIVATE, parents=True, exist_ok=True)
            append_synced(path, content, offset=size, mode=_PRIVATE_FILE)
        except (OSError, StorageError) as error:
            if not self._failing:
                _LOG.warning("answers are not recorded: %s", error)
            self._failing = True
            self._count(dropped=len(lines))
            return
        self._failing = False
        self._sizes[path] = size + len(content)
        self._count(recorded=len(lines))

    def _open_file(self, folder: Path) -> Path:
        """The last file of a model, or a new one if it is full. Numbers grow over all models."""
        files = [path for path in self._sizes if path.parent == folder]
        if files and self._sizes[files[-1]] < self._file_bytes:
            return files[-1]
        number = max(map(_number, self._sizes), default=0) + 1
        return folder / f"traffic-{number:06d}.jsonl"

    def _make_room(self, num_bytes: int, *, keep: Path) -> None:
        """Deletes the oldest files until so many bytes fit the budget."""
        while sum(self._sizes.values()) + num_bytes > self.max_bytes:
            oldest = min((path for path in self._sizes if path != keep), key=_number)
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]

    def _count(self, *, recorded: int = 0, dropped: int = 0) -> None:
        with self._lock:
            recorded, dropped = self.counts.recorded + recorded, self.counts.dropped + dropped
            self.counts = RecorderCounts(recorded, dropped, sum(self._sizes.values()))


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _repaired(folder: Path) -> dict[Path, int]:
    """The sizes of the files, oldest first, after lines were removed that a kill left incomplete."""
    paths = [path for path in folder.glob("*/traffic-*.jsonl") if re.fullmatch(r"traffic-\d+\.jsonl", path.name)]
    sizes = {}
    for path in sorted(paths, key=_number):
        end = 0
        if path.stat().st_size:  # an empty file cannot be mapped
            with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
        if end:
            os.truncate(path, end)
            with suppress(PermissionError):  # the file of another user
                path.chmod(_PRIVATE_FILE)
            sizes[path] = end
        else:
            path.unlink()
    return sizes
