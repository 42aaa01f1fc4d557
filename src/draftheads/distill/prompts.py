"""The prompts of files, each conversation once.

Files are read twice, once to count and once to answer, so that a million prompts need not be in memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.data.files import at_line
from draftheads.data.records import Record, read_prompts
from draftheads.data.texts import read_texts
from draftheads.errors import DataError
from draftheads.utils.messages import short

SELF_TALK = "self-talk"


@dataclass(frozen=True)
class Prompt:
    """What the user and the system say in a conversation."""

    turns: tuple[str, ...]  # what the user says, turn by turn; empty in self-talk
    system: str | None  # the system message, if there is one
    source: str  # file and line, or SELF_TALK
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, as JSON schemas
    is_document: bool = False  # the one turn is a text whose beginning is continued, without a chat template

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.system, *self.turns) if self.system is not None else self.turns


@dataclass(frozen=True)
class Survey:
    """Counts of the prompt files."""

    num_prompts: int  # without duplicates
    num_duplicates: int
    fingerprint: str  # of the prompts, in their order


class Seen:
    """Remembers lists of texts by eight bytes each; texts that differ only in white space are the same.

    >>> seen = Seen()
    >>> seen.add(["Why is", "the sky?"]), seen.add([" Why  is", "the sky?"]), seen.add(["Why is the", "sky?"])
    (True, False, True)
    """

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def add(self, texts: Iterable[str]) -> bool:
        plain = json.dumps([" ".join(text.split()) for text in texts])
        digest = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest())
        is_new = digest not in self._digests
        self._digests.add(digest)
        return is_new


def unique_prompts(paths: Sequence[Path], documents: Sequence[Path] = ()) -> Iterator[Prompt]:
    """The prompts of all files in order, each once, and then the documents, each once.

    The model answers anew: answers in the files are ignored.
    """
    seen = Seen()
    return (prompt for prompt in _read_all(paths, documents) if seen.add(prompt.texts))


def survey(paths: Sequence[Path], documents: Sequence[Path] = ()) -> Survey:
    """Reads all files once."""
    seen, digest = Seen(), hashlib.sha256()
    num_prompts = num_duplicates = 0
    for prompt in _read_all(paths, documents):
        if seen.add(prompt.texts):
            num_prompts += 1
            digest.update(json.dumps([prompt.turns, prompt.system, prompt.source, *prompt.tools]).encode())
        else:
            num_duplicates += 1
    files = (*paths, *documents)
    if files and not num_prompts:
        raise DataError(f"no prompts in {', '.join(map(str, files))}")
    return Survey(num_prompts, num_duplicates, digest.hexdigest()[:16])


def _read_all(paths: Sequence[Path], documents: Sequence[Path]) -> Iterator[Prompt]:
    for record in read_prompts(*paths):
        with at_line(record.path, record.line_number):
            _check_turns(record)
        system = "\n\n".join(message["content"] for message in record.messages if message["role"] == "system") or None
        yield Prompt(record.user_turns, system, f"{record.path.name}:{record.line_number}", record.tools)
    for path in documents:
        for text, place in read_texts(path):
            if text.strip():
                yield Prompt((text,), None, f"{path.name}{place.removeprefix(str(path))}", is_document=True)


def _check_turns(record: Record) -> None:
    """Can the user's turns be asked one by one?"""
    unknown = {message["role"] for message in record.messages} - {"system", "user", "assistant"}
    if unknown:
        raise DataError(f"role is {short(repr(min(unknown)))}; distill knows only system, user and assistant")
    if not all(text.strip() for text in record.user_turns):
        raise DataError("a turn of the user is empty: leave it out")
