"""The one reader of prompts and chats, in files that :mod:`draftheads.data.files` opens.

A line is an object with

* ``"prompt"``: what a user says, or a list of messages,
* ``"messages"``: a list of ``{"role": …, "content": …}``, of the assistant also ``"reasoning_content"`` and
  ``"tool_calls"``, or
* ``"turns"``: what a user says, turn by turn.

A line to learn from is a chat with ``"messages"``, or it has ``"prompt"`` and ``"completion"``: two texts that follow
each other without a chat template, or two lists of messages. Or it was recorded by ``draftheads serve`` and has
``"prompt_ids"``, ``"answer_ids"`` and ``"tokenizer"``, the fingerprint of the tokenizer; then these count. ``"tools"``
are functions that the model may call, as JSON schemas. Other keys, of records and of messages, are ignored. Every error
names the file and the line.

Published data sets with other fields are read, too: see :mod:`draftheads.data.forms`. A suite of questions, for
``draftheads bench``, is one of our own, files, or a data set of the Hugging Face Hub.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from draftheads.data.files import KINDS, at_line, is_known, read_values
from draftheads.data.forms import KNOWN_FORMS, json_value, messages_of, own_form
from draftheads.errors import (
    DataError,
    InvalidSettings,
    MissingDependency,
    UnlearnableChat,
    close_name,
    first_line,
    require_at_least,
)
from draftheads.utils.messages import Message, short

OwnPrompts = Literal["calibration", "demo", "tasks"]
SUITES: tuple[OwnPrompts, ...] = get_args(OwnPrompts)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}")
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
    """The records of all files and folders in any of the known forms."""
    return (record for path in paths for row in read_values(path) if (record := _prompt_of(*row)))


def _prompt_of(path: Path, line_number: int, value: Any) -> Record | None:
    """What is asked in the value of a line.

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
    """What can be learned from in all files and folders: chats with a message of the assistant, or completions.

    ``"finished": false`` in a record says that its last assistant turn, or its completion, was cut off. A line without
    an answer, or with an image or null for a text, gives a record with its ``problem``.
    """
    for file, line_number, value in (row for path in paths for row in read_values(path)):
        with at_line(file, line_number):
            try:
                record = _chat(value)
            except UnlearnableChat as error:
                record = Record((), problem=str(error))
            yield replace(record, path=file, line_number=line_number)


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


def read_suite(source: str) -> list[Record]:
    """All questions of a suite, in their order.

    Args:
        source: ``tasks``, ``demo`` or ``calibration``, our own; a file or a folder of files; or a data set of the
            Hugging Face Hub as ``OWNER/NAME``, ``OWNER/NAME:CONFIG`` or ``OWNER/NAME:CONFIG:SPLIT``
            (``openai/gsm8k:main:test``). The default split is ``test``, or the first one.
    """
    path = own_prompts(source) if source in SUITES else Path(source)
    rows: Iterable[tuple[Path, int, Any]]
    if path.exists() or is_known(path):
        rows = read_values(path)
    elif _HUB_NAME.fullmatch(source):
        rows = ((path, number, row) for number, row in enumerate(_hub_rows(source), 1))
    else:
        fix = f"give {', '.join(SUITES)}, a file ({KINDS}), a folder, or OWNER/NAME of a data set on the Hub"
        raise DataError(f"no file, folder or suite has the name {source!r}: {fix}")
    records = [record for row in rows if (record := _prompt_of(*row)) is not None]
    if not records:
        raise DataError("there is no question in it", path=source)
    return records


def select(records: Sequence[Record], categories: Sequence[str] = (), limit: int | None = None) -> list[Record]:
    """The records of some categories, or of all, in their order; the first ``limit`` of each category."""
    require_at_least(1, limit=limit)
    known = dict.fromkeys(record.category for record in records)
    if unknown := [name for name in categories if name not in known]:
        there = ", ".join(filter(None, known)) or "none: the questions have no category"
        raise InvalidSettings(f"no question has the category {unknown[0]!r}; the categories are {there}")
    counts = Counter[str]()
    chosen = []
    for record in records:
        counts[record.category] += 1
        if record.category in (categories or known) and counts[record.category] <= (limit or len(records)):
            chosen.append(record)
    return chosen


def _hub_rows(source: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets  # noqa: PLC0415 - an extra
    except ImportError:
        problem = f"there is no file {source}, and data sets of the Hugging Face Hub need datasets"
        raise MissingDependency(problem, pip_install="'draftheads[bench]'") from None
    name, config, split = (part or None for part in f"{source}::".split(":")[:3])
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises errors of half a dozen others
        raise DataError(f"no file, and no data set that can be loaded: {first_line(error)}", path=source) from error
    rows: Iterable[dict[str, Any]] = found if split else found["test" if "test" in found else next(iter(found))]
    return rows


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
