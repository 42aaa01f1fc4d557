"""The output of a run while it grows: ``OUT.part`` has a line for each finished conversation, with its index.

Lines come in any order, and each is flushed to the disk. A run that continues reads them and answers the rest. At the
end ``OUT`` gets the records in order, and ``OUT.manifest.json`` tells what they are of.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from draftheads.distill.prompts import Seen
from draftheads.errors import DataError, InvalidSettings
from draftheads.utils.files import append_synced, locked, write_atomic
from draftheads.utils.provenance import as_json_values, require_same

WORK = ("generations", "tokens", "steps", "milliseconds")  # counts also of what is left out


class Journal:
    """The output of one run. Made by :meth:`locked`."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        self.identity = as_json_values(identity)  # everything that the lines depend on
        self.manifest: dict[str, Any] | None = None  # of a complete run
        self.places: dict[int, int] = {}  # where the line of each finished conversation is in OUT.part
        self.finished: list[str] = []  # digests of OUT, which was perhaps written
        self._num_bytes = 0  # of OUT.part that are valid

    @classmethod
    @contextlib.contextmanager
    def locked(cls, out: Path, identity: Mapping[str, Any]) -> Iterator[Self]:
        """The journal of a run, new or as a stopped process left it; no other process can write it meanwhile."""
        journal, part, manifest = cls(out, identity), part_path(out), manifest_path(out)
        with locked(out.parent, "name another --out", file=out.name):
            known = part if part.exists() else manifest if manifest.exists() else None
            if known is None and out.exists():
                raise _foreign(out)
            try:
                if known == part:
                    journal._read()
                    if out.exists() and hashlib.sha256(out.read_bytes()).hexdigest() not in journal.finished:
                        raise _foreign(out)
                elif known == manifest:
                    journal.manifest = json.loads(manifest.read_bytes())
                    journal._require_same(journal.manifest)
            except (ValueError, LookupError, TypeError) as error:
                fix = "delete it and the file it belongs to, or name another --out"
                raise DataError(f"is not of a distillation ({error}): {fix}", path=known) from error
            if known == manifest and not out.exists():
                raise DataError("is complete, but its output file is gone: delete it, too", path=manifest)
            if not journal._num_bytes and journal.manifest is None:
                journal._append({"identity": journal.identity})
            yield journal

    def add(self, index: int, entry: Mapping[str, Any]) -> None:
        """Saves a finished conversation, as of ``Dialogue.entry``."""
        self.places[index] = self._num_bytes
        self._append({"index": index, **entry})

    def finish(self, details: Mapping[str, Any]) -> None:
        """Writes OUT and the manifest, and removes OUT.part. Self-talk whose question was asked before is left out."""
        counts: Counter[str] = Counter()
        refused: list[Any] = []
        digests: list[str] = []

        def write(file: BinaryIO) -> None:
            counts.clear()
            refused.clear()
            seen, digest = Seen(), hashlib.sha256()
            for entry in self._entries():
                record, found = entry["record"], Counter(entry["counts"])
                if record and not seen.add(_questions(record)) and entry["is_self_talk"]:
                    record = None
                    found = Counter({"repeated": 1, **{name: found[name] for name in WORK}})
                counts.update(found + Counter(done=1, records=int(bool(record))))
                refused.extend([entry["refused"]] if entry["refused"] else [])
                if record:
                    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
                    digest.update(line)
                    file.write(line)
            digests.append(digest.hexdigest())

        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            write(nowhere)
        self._append({"finished": digests[-1]})  # a stop after OUT is written is known by it
        write_atomic(self.out, write)
        self.manifest = {
            "format": 2,
            "identity": self.identity,
            "counts": dict(counts),
            "sha256": digests[-1],
            "refused": refused,
            **details,
        }
        write_atomic(manifest_path(self.out), (json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n").encode())
        part_path(self.out).unlink()

    def _append(self, values: Mapping[str, Any]) -> None:
        line = (json.dumps(values, ensure_ascii=False) + "\n").encode()
        append_synced(part_path(self.out), line, offset=self._num_bytes)
        self._num_bytes += len(line)

    def _read(self) -> None:
        """What a stopped process left. The last line may be cut off: it does not count."""
        with part_path(self.out).open("rb") as lines:
            for number, line in enumerate(lines):
                if line.endswith(b"\n"):
                    values = json.loads(line)
                    if number == 0:
                        self._require_same(values)
                    elif "finished" in values:
                        self.finished.append(values["finished"])
                    else:
                        self.places[values["index"]] = self._num_bytes
                    self._num_bytes += len(line)

    def _entries(self) -> Iterator[dict[str, Any]]:
        with part_path(self.out).open("rb") as lines:
            for _, place in sorted(self.places.items()):
                lines.seek(place)
                yield json.loads(lines.readline())

    def _require_same(self, values: Mapping[str, Any]) -> None:
        fix = "To continue that run use its settings; else name another --out, or delete its files"
        require_same(values["identity"], self.identity, problem=f"{self.out} belongs to another run", fix=fix)


def _foreign(out: Path) -> InvalidSettings:
    return InvalidSettings(f"{out} exists, but is of no run: name another --out, or delete it")


def _questions(record: Mapping[str, Any]) -> list[str]:
    if "completion" in record:
        return [record["prompt"]]
    return [message["content"] for message in record["messages"] if message["role"] != "assistant"]


def part_path(out: Path) -> Path:
    """The file of the lines until the run is complete."""
    return out.with_name(out.name + ".part")


def manifest_path(out: Path) -> Path:
    return out.with_name(out.name + ".manifest.json")
