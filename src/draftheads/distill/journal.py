"""The output file while it grows, and its manifest, which counts the bytes that are valid.

Lines are appended to ``OUT.part``, chunk by chunk; after each chunk ``OUT.manifest.json`` is replaced. A kill between
the two leaves bytes after the counted ones, which the next chunk overwrites. At the end the manifest is marked complete
and ``OUT.part`` is renamed to ``OUT``.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from draftheads.errors import DataError, InvalidSettings
from draftheads.utils.files import append_synced, locked, remove_leftovers, write_atomic
from draftheads.utils.identity import as_json_values, require_same

_FORMAT = 1


@dataclass(frozen=True)
class Counts:
    """The progress of a run."""

    num_done: int = 0  # conversations, with or without a line in the file
    num_bytes: int = 0  # of the output file
    num_records: int = 0  # lines of the output file
    num_answers: int = 0  # in these lines
    num_unfinished: int = 0  # lines whose last answer was cut off
    num_repeated: int = 0  # self-talk left out: its questions were asked before
    num_no_question: int = 0  # left out: the model wrote no question
    num_too_long: int = 0  # left out: longer than the model allows
    num_refused: int = 0  # left out: the server does not answer them
    num_shortened: int = 0  # lines without their last turns, which were too long or had no question
    num_generations: int = 0  # answers and self-talk questions, also of conversations left out
    num_tokens: int = 0  # generated
    num_steps: int = 0  # passes of the target after the prompts were read
    seconds: float = 0.0  # of answering

    def __add__(self, other: "Counts") -> "Counts":
        mine, its = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + its[name] for name in mine})

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of answering."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per pass of the target; 1 if the steps are not known."""
        return (self.num_tokens - self.num_generations) / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class Manifest:
    """The content of ``OUT.manifest.json``."""

    identity: Mapping[str, Any]  # everything that the lines depend on
    counts: Counts = Counts()
    is_complete: bool = False
    sha256: str | None = None  # of the complete file
    details: Mapping[str, Any] = field(default_factory=dict)  # for readers: all options, versions, …
    refused: Sequence[Mapping[str, Any]] = ()  # prompts that the server did not answer: source and reason

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The manifest in a file; None where there is no file."""
        try:
            values = json.loads(path.read_bytes())
            version = values.pop("format")
            if version != _FORMAT:
                raise DataError(f"has format {version!r}; this version knows {_FORMAT}", path=path)
            return cls(**{**values, "counts": Counts(**values["counts"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            fix = "delete it and the file it belongs to, or name another --out"
            raise DataError(f"is not a manifest of a distillation ({error}): {fix}", path=path) from error


class Journal:
    """The output of one run. Made by :meth:`locked`."""

    def __init__(self, out: Path, manifest: Manifest) -> None:
        self.out, self.manifest = out, manifest

    @classmethod
    @contextlib.contextmanager
    def locked(cls, out: Path, identity: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[Self]:
        """The journal of a run, new or as a stopped process left it; no other process can write it meanwhile."""
        with locked(out.parent, "name another --out", file=out.name):
            remove_leftovers(manifest_path(out))
            before = Manifest.read(manifest_path(out))
            if before is None:
                if unknown := next((path for path in (out, part_path(out)) if path.exists()), None):
                    raise InvalidSettings(
                        f"{unknown} exists, but {manifest_path(out)} does not, so no run can continue it: "
                        "name another --out, or delete it"
                    )
                journal = cls(out, Manifest(identity, details=details))
                journal._write_manifest()
            else:
                require_same(
                    before.identity,
                    as_json_values(identity),
                    problem=f"{out} belongs to another run",
                    fix="To continue that run use its settings; else name another --out, "
                    f"or delete {manifest_path(out)} and its output file",
                )
                journal = cls(out, before if before.is_complete else replace(before, details=details))
                journal._check_files()
            yield journal

    @property
    def counts(self) -> Counts:
        return self.manifest.counts

    def lines(self) -> Iterator[bytes]:
        """The valid lines of a run that is not complete."""
        left = self.counts.num_bytes
        if left:
            with part_path(self.out).open("rb") as file:
                while left > 0 and (line := file.readline()):
                    yield line
                    left -= len(line)

    def add(self, lines: bytes, counts: Counts, refused: Sequence[Mapping[str, Any]] = ()) -> None:
        """Saves a chunk; ``counts`` and ``refused`` are the chunk's own."""
        append_synced(part_path(self.out), lines, offset=self.counts.num_bytes)
        total = self.counts + replace(counts, num_bytes=len(lines))
        total = replace(total, seconds=round(total.seconds, 3))
        self.manifest = replace(self.manifest, counts=total, refused=[*self.manifest.refused, *refused])
        self._write_manifest()

    def finish(self) -> None:
        """Marks the run complete and renames the file; does nothing if that is done."""
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
        values = {"format": _FORMAT, **asdict(self.manifest)}
        write_atomic(manifest_path(self.out), (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())

    def _check_files(self) -> None:
        """Checks that the bytes that the manifest counts are there."""
        part, size = part_path(self.out), self.counts.num_bytes
        if self.out.exists() and (part.exists() or not self.manifest.is_complete):
            raise InvalidSettings(
                f"{self.out} exists, but does not belong to the run of {manifest_path(self.out)}: "
                "name another --out, or move it away"
            )
        there = self.out if self.out.exists() else part
        size_there = there.stat().st_size if there.exists() else 0
        if size_there < size or (self.manifest.is_complete and size_there != size):
            raise DataError(
                f"has {size_there:,} bytes, but {manifest_path(self.out)} counts {size:,}: "
                "delete both, or name another --out",
                path=there,
            )


def part_path(out: Path) -> Path:
    """The file of the lines until the run is complete."""
    return out.with_name(out.name + ".part")


def manifest_path(out: Path) -> Path:
    return out.with_name(out.name + ".manifest.json")
