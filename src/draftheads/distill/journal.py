"""The output file while it grows, and the manifest that says how much of it counts.

``OUT.part`` gets the lines, chunk by chunk; ``OUT.manifest.json`` is replaced whole after each. A kill between the two
leaves bytes behind the noted end, which the next chunk overwrites. When all is done the manifest says so, and then
the file takes its name ``OUT``. Knows nothing of what the lines mean.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from draftheads.errors import DataError, InvalidSettings
from draftheads.files import append_synced, locked, remove_leftovers, write_atomic

_FORMAT = 1


@dataclass(frozen=True)
class Counts:
    """How far a run is."""

    num_done: int = 0  # conversations, those that left no line included
    num_bytes: int = 0  # of the output file
    num_records: int = 0  # lines of the output file
    num_answers: int = 0  # in these lines
    num_unfinished: int = 0  # lines whose last answer was cut off
    num_repeated: int = 0  # made-up conversations left out: their questions were asked before
    num_no_question: int = 0  # left out: the model made up no question
    num_too_long: int = 0  # left out: longer than the model allows
    num_shortened: int = 0  # lines without the last turns, which would have been too long or were not made up
    num_generations: int = 0  # answers and made-up questions, of conversations left out, too
    num_tokens: int = 0  # generated
    num_steps: int = 0  # passes of the target after the prompts were read
    seconds: float = 0.0  # spent on answering

    def __add__(self, other: "Counts") -> "Counts":
        mine, its = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + its[name] for name in mine})

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of answering."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per pass of the target; 1 where it is not known."""
        return (self.num_tokens - self.num_generations) / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class Manifest:
    """What stands beside the output file."""

    identity: Mapping[str, Any]  # what the lines depend on
    counts: Counts = Counts()
    is_complete: bool = False
    sha256: str | None = None  # of the complete file
    details: Mapping[str, Any] = field(default_factory=dict)  # for readers: all options, versions, …

    def to_json(self) -> bytes:
        """As it stands on the disk."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The manifest in a file; None where there is no file.

        Raises:
            DataError: it is not one.
        """
        try:
            values = json.loads(path.read_bytes())
            found = values.pop("format")
            if found != _FORMAT:
                raise DataError(f"has format {found!r}; this version knows {_FORMAT}", path=path)
            return cls(**{**values, "counts": Counts(**values["counts"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            mend = "delete it and the file it belongs to, or name another --out"
            raise DataError(f"is no manifest of a distillation ({error}): {mend}", path=path) from error


class Journal:
    """One run's output. Made by :meth:`locked`."""

    def __init__(self, out: Path, manifest: Manifest) -> None:
        self.out = out
        self.manifest = manifest

    @classmethod
    @contextlib.contextmanager
    def locked(cls, out: Path, identity: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[Self]:
        """The journal of a run, new or as a killed one left it; no other process may write it meanwhile.

        Raises:
            InvalidSettings: ``out`` is of another run.
            DataError: the files are not as a run leaves them.
            StorageError: they cannot be written, or another process writes them.
        """
        with locked(out.parent, "name another --out", file=out.name):
            remove_leftovers(manifest_path(out))
            before = Manifest.read(manifest_path(out))
            if before is None:
                _refuse_strangers(out)
                journal = cls(out, Manifest(identity, details=details))
                journal._write_manifest()
            else:
                _refuse_another_run(out, before.identity, json.loads(json.dumps(identity)))
                journal = cls(out, before if before.is_complete else replace(before, details=details))
                journal._check_files()
            yield journal

    @property
    def counts(self) -> Counts:
        """How far the run is."""
        return self.manifest.counts

    def lines(self) -> Iterator[bytes]:
        """The lines that count, of a run that is not complete."""
        left = self.counts.num_bytes
        if left:
            with part_path(self.out).open("rb") as file:
                while left > 0 and (line := file.readline()):
                    yield line
                    left -= len(line)

    def add(self, lines: bytes, counts: Counts) -> None:
        """Saves a chunk; ``counts`` are the chunk's own."""
        append_synced(part_path(self.out), lines, offset=self.counts.num_bytes)
        total = self.counts + replace(counts, num_bytes=len(lines))
        self.manifest = replace(self.manifest, counts=replace(total, seconds=round(total.seconds, 3)))
        self._write_manifest()

    def finish(self) -> None:
        """Gives the complete file its name; nothing is left to do where it has it."""
        part = part_path(self.out)
        if not self.manifest.is_complete:
            append_synced(part, b"", offset=self.counts.num_bytes)
            with part.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.manifest = replace(self.manifest, is_complete=True, sha256=sha256)
            self._write_manifest()
        if part.exists():
            part.replace(self.out)

    def _write_manifest(self) -> None:
        write_atomic(manifest_path(self.out), self.manifest.to_json())

    def _check_files(self) -> None:
        """What the manifest counts must be there."""
        part, size = part_path(self.out), self.counts.num_bytes
        if self.out.exists() and (part.exists() or not self.manifest.is_complete):
            raise InvalidSettings(
                f"{self.out} exists, but is not of the run that {manifest_path(self.out)} tells of: "
                "name another --out, or move it away"
            )
        there = self.out if self.out.exists() else part
        found = there.stat().st_size if there.exists() else 0
        if found < size or (self.manifest.is_complete and found != size):
            raise DataError(
                f"has {found:,} bytes, but {manifest_path(self.out)} counts {size:,}: "
                "delete both, or name another --out",
                path=there,
            )


def part_path(out: Path) -> Path:
    """Where the lines are until all are there."""
    return out.with_name(out.name + ".part")


def manifest_path(out: Path) -> Path:
    """Where the manifest is."""
    return out.with_name(out.name + ".manifest.json")


def _refuse_strangers(out: Path) -> None:
    for path in (out, part_path(out)):
        if path.exists():
            raise InvalidSettings(
                f"{path} exists, but {manifest_path(out)} does not, so it is of no run that could go on: "
                "name another --out, or delete it"
            )


def _refuse_another_run(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
        raise InvalidSettings(
            f"{out} is of another run: {changes}. Use what it was to go on with it, name another --out, "
            f"or delete {manifest_path(out)} and what it belongs to"
        )
