"""What users say, read from files: in the forms that data sets have, each conversation once.

Knows JSON lines; knows nothing of models. Files are read twice, once to count and once to answer, so that a million
prompts need not be in memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from draftheads.data.jsonl import read_json_lines, short
from draftheads.decode.text import half_character
from draftheads.errors import DataError

SELF_TALK = "self-talk"
_FORMS = (
    'needs "prompt" (text), "messages" (a list of objects with "role" and "content") or "turns" (a list of texts), '
    "with something that the user says"
)


@dataclass(frozen=True)
class Prompt:
    """The user's side of a conversation."""

    turns: tuple[str, ...]  # what the user says, turn by turn; empty where the model makes it up
    system: str | None  # what the system says first, if anything
    source: str  # file and line, or SELF_TALK

    @property
    def texts(self) -> tuple[str, ...]:
        """What makes it this prompt and no other."""
        return (self.system, *self.turns) if self.system is not None else self.turns


@dataclass(frozen=True)
class Survey:
    """What the prompt files hold."""

    num_prompts: int  # without those that came before
    num_duplicates: int
    fingerprint: str  # of the prompts, in their order


class Seen:
    """Remembers texts by eight bytes each; texts that differ only in white space are the same.

    >>> seen = Seen()
    >>> seen.add(["Why is", "the sky?"]), seen.add([" Why  is", "the sky?"]), seen.add(["Why is the", "sky?"])
    (True, False, True)
    """

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def add(self, texts: Iterable[str]) -> bool:
        """Whether these texts are new."""
        plain = json.dumps([" ".join(text.split()) for text in texts])
        digest = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest())
        is_new = digest not in self._digests
        self._digests.add(digest)
        return is_new


def read_prompts(paths: Sequence[Path]) -> Iterator[Prompt]:
    """The prompts of all files, in order, each once.

    Raises:
        DataError: no such file, a line that is not JSON, or one without a user's words.
    """
    seen = Seen()
    return (prompt for prompt in _read_all(paths) if seen.add(prompt.texts))


def survey(paths: Sequence[Path]) -> Survey:
    """Reads all files once.

    Raises:
        DataError: as :func:`read_prompts`; or there is no prompt at all.
    """
    seen, digest = Seen(), hashlib.sha256()
    num_prompts = num_duplicates = 0
    for prompt in _read_all(paths):
        if seen.add(prompt.texts):
            num_prompts += 1
            digest.update(json.dumps([prompt.turns, prompt.system, prompt.source]).encode())
        else:
            num_duplicates += 1
    if paths and not num_prompts:
        raise DataError(f"no prompts in {', '.join(map(str, paths))}")
    return Survey(num_prompts, num_duplicates, digest.hexdigest()[:16])


def _read_all(paths: Sequence[Path]) -> Iterator[Prompt]:
    return chain.from_iterable(map(_read, paths))


def _read(path: Path) -> Iterator[Prompt]:
    for line_number, record in read_json_lines(path):
        messages = _messages(record) if isinstance(record, dict) else []
        turns = tuple(text for role, text in messages if role == "user")
        problem = _problem(messages, turns)
        if problem:
            raise DataError(problem, path=path, line_number=line_number)
        system = "\n\n".join(text for role, text in messages if role == "system") or None
        yield Prompt(turns, system, f"{path.name}:{line_number}")


def _messages(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of what a record holds; empty where it has none of the known forms.

    >>> _messages({"turns": ["One.", "Two."]})
    [('user', 'One.'), ('user', 'Two.')]
    """
    for key in ("prompt", "messages", "turns"):
        value = record.get(key)
        if isinstance(value, str) and key == "prompt":
            return [("user", value)]
        if isinstance(value, list) and value:
            found = [("user", item) if isinstance(item, str) else _role_and_text(item) for item in value]
            return [message for message in found if message is not None] if None not in found else []
    return []


def _role_and_text(item: object) -> tuple[str, str] | None:
    if isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str):
        return item["role"], item["content"]
    return None


def _problem(messages: Sequence[tuple[str, str]], turns: Sequence[str]) -> str | None:
    """What keeps messages from being asked one by one."""
    if not turns or not all(text.strip() for text in turns):
        return _FORMS
    problem = next(filter(None, (half_character(text) for _, text in messages)), None)
    if problem is not None:
        return problem
    unknown = next((role for role, _ in messages if role not in ("system", "user", "assistant")), None)
    if unknown is not None:
        return f"role is {short(repr(unknown))}; only system, user and assistant can be asked again"
    return None
