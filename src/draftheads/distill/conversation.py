"""The prompts of files, each once; a conversation in progress, and the interface of what answers it.

Files are read twice, once to count and once to answer, so that a million prompts need not be in memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from draftheads.data.files import PART
from draftheads.data.lines import LeftOut, none_left
from draftheads.data.records import read_prompts
from draftheads.data.texts import read_texts
from draftheads.distill.options import DistillOptions

SELF_TALK = "self-talk"


@dataclass(frozen=True)
class Prompt:
    """What the user and the system say in a conversation."""

    turns: tuple[str, ...]  # what the user says, turn by turn; empty in self-talk
    system: str | None  # the system message, if there is one
    source: str  # file and line, or SELF_TALK
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, as JSON schemas
    is_document: bool = False  # the one turn is a text whose beginning is continued, without a chat template


@dataclass(frozen=True)
class Survey:
    """Counts of the prompt files."""

    num_prompts: int  # without duplicates
    num_duplicates: int
    fingerprint: str  # of the prompts, in their order


class Seen:
    """Remembers prompts by eight bytes each: all that the model reads counts, white space and tools, too.

    >>> seen = Seen()
    >>> seen.add(["Why is", "the sky?"]), seen.add(["Why is", "the sky?"]), seen.add(["Why is the", "sky?"])
    (True, False, True)
    """

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def add(self, prompt: Any) -> bool:
        """Whether a JSON value is new."""
        plain = json.dumps(prompt, sort_keys=True)
        digest = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest())
        is_new = digest not in self._digests
        self._digests.add(digest)
        return is_new


def unique_prompts(paths: Sequence[Path], documents: Sequence[Path] = ()) -> Iterator[Prompt]:
    """The prompts of all files in order, each once, and then the documents, each once.

    The model answers anew: answers in the files are ignored.
    """
    seen = Seen()
    return (prompt for prompt in _read_all(paths, documents, {}, says=False) if seen.add(_read_of(prompt)))


def survey(paths: Sequence[Path], documents: Sequence[Path] = (), left_out: LeftOut | None = None) -> Survey:
    """Reads all files once; lines that cannot be asked are added to ``left_out``.

    Raises:
        DataError: there is no prompt.
    """
    seen, digest, left_out = Seen(), hashlib.sha256(), {} if left_out is None else left_out
    num_prompts = num_duplicates = 0
    for prompt in _read_all(paths, documents, left_out, says=True):
        if seen.add(_read_of(prompt)):
            num_prompts += 1
            digest.update(json.dumps([prompt.turns, prompt.system, prompt.source, *prompt.tools]).encode())
        else:
            num_duplicates += 1
    files = (*paths, *documents)
    if files and not num_prompts:
        raise none_left(left_out, files, "prompt")
    return Survey(num_prompts, num_duplicates, digest.hexdigest()[:16])


def _read_of(prompt: Prompt) -> Any:
    """What the model reads of a prompt."""
    return [prompt.system, prompt.turns, prompt.tools, prompt.is_document]


def _read_all(paths: Sequence[Path], documents: Sequence[Path], left_out: LeftOut, *, says: bool) -> Iterator[Prompt]:
    for record in read_prompts(*paths, left_out=left_out, says=says):
        roles = {message["role"] for message in record.messages}
        problem = "a turn of the user is empty" if not all(text.strip() for text in record.user_turns) else ""
        if calls := roles & {"tool", "function", "ipython"}:  # the user's turns are asked one by one
            problem = f"it has a message of role {min(calls)!r}, which answers a call that the model may not make again"
        if problem:
            left_out.setdefault(problem, []).append(record.source)
            continue
        told = (message["content"] for message in record.messages if message["role"] in ("system", "developer"))
        source = f"{record.path.name}:{record.line_number}"
        yield Prompt(record.user_turns, "\n\n".join(told) or None, source, record.tools)
    for path in documents:
        for parts, place in read_texts(path, left_out, says=says):
            text = next(iter(parts), "")  # the model reads the beginning
            if text.strip():
                yield Prompt((text[:PART],), None, f"{path.name}{place.removeprefix(str(path))}", is_document=True)


# --- a conversation ---

# more tokens than the model allows; the model wrote no question; the server does not answer it
StopReason = Literal["too_long", "no_question", "refused"]
OnProgress = Callable[..., None]  # new tokens since the last call, and a conversation that has just ended


class Source(Protocol):
    """What answers: an engine of ours, or a server."""

    @property
    def identity(self) -> dict[str, str]:
        """What the answers depend on besides the options. A stopped run can only continue with the same."""

    def converse(self, dialogues: Iterator["Dialogue"], on_progress: OnProgress) -> None:
        """Continues all dialogues to their end; takes only as many as it works on, so that few are in memory."""


class Dialogue:
    """A conversation, turn by turn. Its random choices depend on the run's seed and ``index``, its place in the run."""

    def __init__(self, prompt: Prompt, *, index: int, options: DistillOptions) -> None:
        self.prompt = prompt
        self.index = index
        self.seed = mixed_seed(options.seed, index)
        self.temperature = options.temperature[self.seed % len(options.temperature)]
        self.is_text = prompt.is_document  # whether a text is continued, without a chat template
        self.messages: list[dict[str, Any]] = []
        if prompt.system is not None:
            self.messages.append({"role": "system", "content": prompt.system})
        self.num_turns = len(prompt.turns) or 1  # in self-talk one, which the model writes
        self.num_answers = 0
        self.num_generations = 0  # answers and self-talk questions, also those that are not kept
        self.num_tokens = 0  # of all generations
        self.num_steps = 0  # passes of the target after the prompts were read
        self.is_called = False  # whether the last answer calls a function
        self.is_finished = True  # whether the last answer ended by itself
        self.stop_reason: StopReason | None = None
        self.refusal = ""  # why the server refused it

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to generate; nobody answers a call."""
        is_last = self.num_answers == self.num_turns or self.is_called
        return self.stop_reason is not None or not self.is_finished or is_last

    @property
    def awaits_answer(self) -> bool:
        """Whether the last message is the user's."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    @property
    def next_seed(self) -> int:
        """The seed of the next generation, a question or an answer."""
        return mixed_seed(self.seed, len(self.messages))

    def ask_next(self) -> bool:
        """Adds the next question of the prompt; returns False where the model has to write the question."""
        if not self.awaits_answer and self.num_answers < len(self.prompt.turns):
            self.ask(self.prompt.turns[self.num_answers])
        return self.awaits_answer

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def answer(self, content: str, *, is_finished: bool, is_called: bool = False, **further: Any) -> None:
        """Adds an answer; ``further`` are ``reasoning_content`` and ``tool_calls``."""
        self.messages.append({"role": "assistant", "content": content, **further})
        self.num_answers += 1
        self.is_finished, self.is_called = is_finished, is_called or "tool_calls" in further

    def count(self, num_tokens: int, *, num_steps: int = 0) -> None:
        self.num_generations += 1
        self.num_tokens += num_tokens
        self.num_steps += num_steps

    def stop(self, reason: StopReason) -> None:
        """Ends the conversation early; removes a question without an answer."""
        if self.awaits_answer:
            self.messages.pop()
        self.stop_reason = reason

    def record(self) -> dict[str, Any] | None:
        """The line to write; None where there is no answer."""
        if not self.num_answers:
            return None
        words: dict[str, Any] = {"messages": self.messages}
        if self.prompt.tools:
            words["tools"] = list(self.prompt.tools)
        if self.is_text:
            words = {"prompt": self.messages[0]["content"], "completion": self.messages[1]["content"]}
        made = {"finished": self.is_finished, "temperature": self.temperature, "seed": self.seed}
        return {**words, **made, "index": self.index, "source": self.prompt.source}

    def entry(self) -> dict[str, Any]:
        """What the journal keeps."""
        is_empty = not self.num_answers
        counts = {
            "answers": self.num_answers,
            "unfinished": not is_empty and not self.is_finished,
            "shortened": not is_empty and self.is_finished and self.num_answers < self.num_turns,
            **{reason: is_empty and self.stop_reason == reason for reason in get_args(StopReason)},
            "generations": self.num_generations,
            "tokens": self.num_tokens,
            "steps": self.num_steps,
        }
        return {
            "record": self.record(),
            "is_self_talk": self.prompt.source == SELF_TALK,
            "refused": {"source": self.prompt.source, "reason": self.refusal} if self.refusal else None,
            "counts": {name: int(number) for name, number in counts.items()},
        }


def mixed_seed(*numbers: int) -> int:
    """A seed of 32 bits (PyTorch's generators read no more) that depends on all numbers and their order.

    >>> mixed_seed(0, 1) == mixed_seed(0, 1), mixed_seed(0, 1) == mixed_seed(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=4).digest()
    return int.from_bytes(digest)
