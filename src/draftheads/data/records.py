"""The one reader of prompt and chat files, which :mod:`draftheads.data.json_lines` opens.

A line is one JSON object with

* ``"prompt"``: what a user says, or a list of messages,
* ``"messages"``: a list of ``{"role": …, "content": …}``, of the assistant also ``"reasoning_content"`` and
  ``"tool_calls"``, or
* ``"turns"``: what a user says, turn by turn.

A line to learn from is a chat with ``"messages"``, or it has ``"prompt"`` and ``"completion"``: two texts that follow
each other without a chat template, or two lists of messages. Or it was recorded by ``draftheads serve`` and has
``"prompt_ids"``, ``"answer_ids"`` and ``"tokenizer"``, the fingerprint of the tokenizer; then these count. ``"tools"``
are functions that the model may call, as JSON schemas. Other keys, of records and of messages, are ignored. Every error
names the file and the line.

Published data sets with other fields are read, too: see :mod:`draftheads.data.forms`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftheads.data.forms import KNOWN_FORMS, json_value, messages_of, own_form
from draftheads.data.json_lines import at_line, read_json_lines
from draftheads.errors import DataError, UnlearnableChat, close_name
from draftheads.utils.messages import Message, short

OwnPrompts = Literal["calibration", "demo", "tasks"]
TextPrompt = str | list[Message]  # a user's text, or a conversation
_PROMPT_FORMS = ("prompt", "messages", "turns")  # the first one of them that is there counts
_LABELS = ("id", "question_id", "category")  # kept beside the answer
_NEEDED = (
    'needs "prompt" (text), "messages" (a list of objects with "role" and "content") or "turns" (a list of texts), '
    f"with something that the user says; {KNOWN_FORMS}"
)
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # so begin the texts that SPEED-Bench may not contain
_NO_CHAT = f'a chat is an object such as {{"messages": [{{"role": "user", "content": "…"}}, …]}}, {KNOWN_FORMS}'
NO_ANSWER = "no message of role 'assistant', so there is nothing to learn from"


class RecordedTokens(NamedTuple):
    """What a model read and wrote."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    tokenizer: str  # its fingerprint

    def check_tokenizer(self, own_fingerprint: str) -> None:
        """Raises DataError where another tokenizer than a model's own made the tokens."""
        if self.tokenizer != own_fingerprint:
            raise DataError(
                f"recorded with a tokenizer of fingerprint {self.tokenizer}; that of this model is {own_fingerprint}: "
                "give the model that was served"
            )


@dataclass(frozen=True)
class Record:
    """One line of a file."""

    messages: tuple[Message, ...]  # the whole conversation as far as it is given
    path: Path = Path()
    line_number: int = 0  # counted from 1
    is_text: bool = False  # the line has texts of the user, not messages
    labels: Mapping[str, Any] = field(default_factory=dict)  # id, question_id and category, where the line has them
    finished: bool = True  # False where the last assistant turn was cut off: it has no end-of-turn token
    is_completion: bool = False  # a text of the user and its completion, without a chat template
    tokens: RecordedTokens | None = None  # there are no messages if they are given
    reference: Any = None  # the right answer, where the line has one: its form is that of the data set
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, as JSON schemas
    problem: str = ""  # why nothing can be learned from the line; then there are no messages
    is_generated: bool = False  # the answers are what a model wrote after its generation prompt, word for word

    @property
    def prompt(self) -> TextPrompt:
        """What a model is asked: the messages, or the first text."""
        return self.messages[0]["content"] if self.is_text else list(self.messages)

    @property
    def category(self) -> str:
        """The kind of question; empty without one."""
        return str(self.labels.get("category") or "")

    @property
    def source(self) -> str:
        return f"{self.path}:{self.line_number}"

    @property
    def user_turns(self) -> tuple[str, ...]:
        """What the user says, turn by turn."""
        return tuple(message["content"] for message in self.messages if message["role"] == "user")


def read_prompts(*paths: Path) -> Iterator[Record]:
    """The records of all files in any of the known forms; empty lines are skipped."""
    for path in paths:
        for line_number, value in read_json_lines(path):
            if record := prompt_of(value, path, line_number):
                yield record


def prompt_of(value: Any, path: Path, line_number: int) -> Record | None:
    """What is asked in the JSON value of a line; errors as of :func:`read_prompts`.

    None where a line of another project has no question: published data sets contain such lines.
    """
    with at_line(path, line_number):
        fields = own_form(value)
        record = _conversation(fields, _PROMPT_FORMS)
        if record is None or not any(text.strip() for text in record.user_turns):
            if fields is not value:
                return None
            raise DataError(f"{_misspelt(value, _PROMPT_FORMS)}{_NEEDED}")
        if record.user_turns[0].startswith(_MASKED):
            raise DataError(
                "the question is a placeholder: run SPEED-Bench's prepare_data.py, which downloads the text"
            )
        return replace(record, path=path, line_number=line_number)


def read_chats(*paths: Path) -> Iterator[Record]:
    """What can be learned from in all files: chats with a message of the assistant, or prompts with completions.

    ``"finished": false`` in a record says that its last assistant turn, or its completion, was cut off. Empty lines are
    skipped. A folder stands for its files, where an incomplete last line is skipped, too: a server may be writing it.
    A line without an answer, or with an image or null for a text, gives a record with its ``problem``.
    """
    for path in paths:
        for file in files_in(path):
            for line_number, value in read_json_lines(file, may_be_torn=path.is_dir()):
                yield chat_of(value, file, line_number)


def chat_of(value: Any, path: Path, line_number: int) -> Record:
    """What can be learned from in the JSON value of a line; errors as of :func:`read_chats`."""
    with at_line(path, line_number):
        try:
            record = _chat(value)
        except UnlearnableChat as error:
            record = Record((), problem=str(error))
        return replace(record, path=path, line_number=line_number)


def prompts_in(path: Path) -> list[TextPrompt]:
    """What the records of one file ask; errors as of :func:`read_prompts`."""
    return [record.prompt for record in read_prompts(path)]


def own_prompts(name: OwnPrompts) -> Path:
    """The file of our own prompts.

    ``calibration``: 64 first turns of chats in eight kinds, which take turns, so that the first few are as fair a
    sample as all of them. ``demo``: a handful of short ones. ``tasks``: 135 in the six categories of Spec-Bench, some
    with a second turn or a reference.
    """
    return Path(__file__).parent.parent / "assets" / "prompts" / f"{name}.jsonl"


def files_in(path: Path) -> list[Path]:
    """The chat files in a folder, by name; a file stands for itself."""
    if not path.is_dir():
        return [path]
    if files := sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]):
        return files
    inside = sorted({file.parent.name for file in path.glob("*/*.jsonl*")})
    fix = f"; give a folder in it: {', '.join(inside)}" if inside else ""
    raise DataError(f"cannot be read: the folder has no .jsonl file{fix}", path=path)


def check_readable(paths: Iterable[Path]) -> None:
    """Opens all files, to fail before long work."""
    for path in chain.from_iterable(map(files_in, paths)):
        try:
            with path.open("rb") as file:
                is_empty = not file.read(1)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=path) from None
        if is_empty:
            raise DataError("the file is empty", path=path)


def _chat(value: Any) -> Record:
    ours = own_form(value)
    fields = ours if isinstance(ours, dict) else {}
    if "prompt_ids" in fields and "answer_ids" in fields:
        return _recorded(fields)
    has_completion = "completion" in fields and fields.get("messages") is None
    record = _completion(fields) if has_completion else _conversation(fields, ("messages",))
    if record is None and ours is not value:
        raise UnlearnableChat(NO_ANSWER)
    if record is None:
        fix = "; `draftheads distill` answers prompts" if "prompt" in fields or "turns" in fields else ""
        misspelt = _misspelt(value, ("messages", "prompt", "completion"))
        raise DataError(f"{misspelt}{_NO_CHAT}, not {short(repr(value))}{fix}")
    if not isinstance(record.finished, bool):
        raise DataError(f"finished is {record.finished!r}; it must be true or false")
    if not any(message["role"] == "assistant" for message in record.messages):
        raise UnlearnableChat(NO_ANSWER)
    return record


def _recorded(fields: Mapping[str, Any]) -> Record:
    """The record of an answer that a server gave."""
    texts = [fields["prompt_ids"], fields["answer_ids"]]
    if not all(isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in texts):
        raise DataError(f"prompt_ids and answer_ids must be lists of token ids, not {short(repr(texts))}")
    tokenizer = fields.get("tokenizer")
    if not isinstance(tokenizer, str):
        raise DataError(f"tokenizer is {tokenizer!r}; beside token ids it must be a tokenizer's fingerprint")
    prompt_ids, answer_ids = map(tuple, texts)
    return Record((), tokens=RecordedTokens(prompt_ids, answer_ids, tokenizer))


def _completion(fields: Mapping[str, Any]) -> Record | None:
    """The record of a prompt and its completion."""
    prompt, completion = fields.get("prompt"), fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages = [*prompt, *completion]
    else:
        raise DataError(f"prompt and completion must be two texts or two lists of messages, not {short(repr(fields))}")
    record = _conversation({**fields, "messages": messages}, ("messages",))
    return record and replace(record, is_completion=isinstance(prompt, str))


def _conversation(value: Any, forms: Sequence[str]) -> Record | None:
    """The record of a JSON value in the first of the forms that it has; None where it has none of them."""
    fields = value if isinstance(value, dict) else {}
    form = next((name for name in forms if fields.get(name) is not None), None)
    if form is None:
        return None
    items = fields[form]
    is_text = form == "turns" or (form == "prompt" and isinstance(items, str))
    if form == "prompt" and is_text:
        items = [items]
    if not isinstance(items, list) or not items:
        return None
    return Record(
        tuple(messages_of([{"role": "user", "content": item} for item in items] if is_text else items)),
        is_text=is_text,
        labels={name: fields[name] for name in _LABELS if name in fields},
        finished=fields.get("finished", True),
        reference=fields.get("reference"),
        tools=_tools(fields),
        is_generated="finished" in fields,
    )


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions in ``tools``: a list, one alone, or JSON text; some lack ``{"type": "function"}``."""
    tools = json_value(fields.get("tools") or [])
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools is {short(repr(tools))}; it must be a list of JSON schemas of functions")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _misspelt(value: Any, known: Sequence[str]) -> str:
    """The field of a JSON value that is probably a misspelt one, as the beginning of a message; empty without any."""
    for name in value if isinstance(value, dict) else ():
        if name not in known and (close := close_name(name, known)):
            return f"unknown field {name!r}; did you mean {close!r}? "
    return ""
