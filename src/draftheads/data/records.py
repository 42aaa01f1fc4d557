"""The one reader of prompts and chats, in files that :mod:`draftheads.data.files` opens.

A line is an object with

* ``"prompt"``: what a user says, or a list of messages,
* ``"messages"``: a list of ``{"role": …, "content": …}``, of the assistant also ``"reasoning_content"`` and
  ``"tool_calls"``, or
* ``"turns"``: what a user says, turn by turn.

A line to learn from is a chat with ``"messages"``, or it has ``"prompt"`` and ``"completion"``: two texts that follow
each other without a chat template, or two lists of messages. Or it was recorded by ``draftheads serve`` and has
``"prompt_ids"``, ``"answer_ids"`` and ``"tokenizer"``, the fingerprint of the tokenizer; then these count. Or it has
``"input_ids"``, with ``"labels"``, ``"loss_mask"`` or neither. ``"tools"`` are functions that the model may call, as
JSON schemas. A line that cannot be used is left out and counted. What nothing reads, of records and of messages, is
named once for each file.

Published data sets with other fields are read, too: see :mod:`draftheads.data.forms`. A suite of questions, for
``draftheads bench``, is one of our own, files, or a data set of the Hugging Face Hub.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from draftheads.data.files import KINDS, is_known, read_lines
from draftheads.data.forms import KNOWN_FORMS, inner_messages, is_learned, json_value, own_form
from draftheads.data.lines import LeftOut, Line, Row, leave_out, none_left, noted, usable
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
_MADE = ("model", "time", "temperature", "seed", "index", "source")  # what we write beside "finished"
_LABELS = ("id", "question_id", "category", "language")  # kept beside the answer
_NEEDED = (
    'needs "prompt" (text), "messages" (a list of objects with "role" and "content") or "turns" (a list of texts), '
    f"with something that the user says; {KNOWN_FORMS}"
)
_MASKS = {  # what the values of lists beside "input_ids" are
    "labels": "the id itself, or -100 where nothing is learned",
    **dict.fromkeys(("loss_mask", "assistant_masks", "attention_mask"), "0 or 1"),
}
_NO_QUESTION = "no question of the user"
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # so begin the texts that SPEED-Bench may not contain
_NO_CHAT = f'a chat is an object such as {{"messages": [{{"role": "user", "content": "…"}}, …]}}, {KNOWN_FORMS}'
_MARKED = "it is marked as not to learn"
NO_ANSWER = "no message of role 'assistant', so there is nothing to learn from"


class RecordedTokens(NamedTuple):
    """A text as tokens; ids and mask have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    tokenizer: str | None  # its fingerprint, if it is known


@dataclass(frozen=True)
class Record:
    """One line of a file."""

    messages: tuple[Message, ...]  # the whole conversation as far as it is given
    path: Path = Path()
    line_number: int = 0  # counted from 1
    is_text: bool = False  # the line has texts of the user, not messages
    labels: Mapping[str, Any] = field(
        default_factory=dict
    )  # id, question_id, category and language, where the line has them
    finished: bool = True  # False where the last assistant turn was cut off: it has no end-of-turn token
    is_completion: bool = False  # a text of the user and its completion, without a chat template
    tokens: RecordedTokens | None = None  # there are no messages if they are given
    reference: Any = None  # the right answer, where the line has one: its form is that of the data set
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, as JSON schemas
    problem: str = ""  # why nothing can be learned from the line; then there are no messages
    is_generated: bool = False  # the answers are what a model wrote after its generation prompt, word for word
    before: tuple[Message, ...] = ()  # earlier messages, which are read and not learned
    unlearned: frozenset[int] = frozenset()  # messages that are marked as not to learn; ``read_chats`` has none

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


def read_prompts(*paths: Path, left_out: LeftOut | None = None, says: bool = True) -> Iterator[Record]:
    """What is asked in all files and folders, in any of the known forms.

    Args:
        paths: files and folders.
        left_out: lines that cannot be asked are added to it. If it is None, they are told in warnings at the end.
        says: whether there are any warnings.

    Raises:
        DataError: a file cannot be read, or all of its lines are left out.

    Warns:
        DataWarning: a file has columns that are not read, or lines are left out.
    """
    return _prompts_of(read_lines(*paths, says=says), paths, left_out, says=says)


def _prompts_of(
    rows: Iterable[Row], sources: Sequence[object], left_out: LeftOut | None = None, *, says: bool = True
) -> Iterator[Record]:
    found = usable(rows, _prompt_of, what="prompt", sources=sources, left_out=left_out, says=says)
    return (replace(record, path=path, line_number=number) for path, number, record in found)


def _prompt_of(value: Any) -> Record:
    """What is asked in the value of a line."""
    fields = own_form(value) if isinstance(value, Line) else value
    record = _conversation(fields, _PROMPT_FORMS)
    if record is None or not any(text.strip() for text in record.user_turns):
        raise DataError(_NO_QUESTION if fields is not value else f"{_misspelt(value, _PROMPT_FORMS)}{_NEEDED}")
    if record.user_turns[0].startswith(_MASKED):
        raise DataError("the question is a placeholder: run SPEED-Bench's prepare_data.py, which downloads the text")
    return record


def read_chats(*paths: Path, says: bool = True) -> Iterator[Record]:
    """What can be learned from in all files and folders: chats with a message of the assistant, or completions.

    ``"finished": false`` in a record says that its last assistant turn, or its completion, was cut off. A line that
    nothing can be learned from gives a record with its ``problem``. Answers that are marked as not to learn are among
    the messages ``before`` of the next ones. Warnings as of :func:`read_prompts`.
    """
    for file, line_number, value in read_lines(*paths, says=says):
        try:
            records = _learned_parts(_chat(value))
        except DataError as error:
            records = [Record((), problem=str(error))]
            leave_out(value)
        for record in records:
            yield replace(record, path=file, line_number=line_number)


def check_chats(path: Path) -> None:
    """Reads up to the first chat of a file or folder that can be learned from; raises DataError if there is none."""
    left_out: LeftOut = {}
    for chat in read_chats(path, says=False):
        if not chat.problem:
            return
        left_out.setdefault(chat.problem, []).append(chat.source)
    raise none_left(left_out, [path], "chat")


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
    rows: Iterable[Row]
    if path.exists() or is_known(path):
        rows = read_lines(path)
    elif _HUB_NAME.fullmatch(source):
        rows = noted(((path, number, row) for number, row in enumerate(_hub_rows(source), 1)), source, says=True)
    else:
        fix = f"give {', '.join(SUITES)}, a file ({KINDS}), a folder, or OWNER/NAME of a data set on the Hub"
        raise DataError(f"no file, folder or suite has the name {source!r}: {fix}")
    if not (records := list(_prompts_of(rows, [source]))):
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
        raise MissingDependency(problem, extra="bench") from None
    name, config, split = (part or None for part in f"{source}::".split(":")[:3])
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises errors of half a dozen others
        raise DataError(f"no file, and no data set that can be loaded: {first_line(error)}", path=source) from error
    rows: Iterable[dict[str, Any]] = found if split else found["test" if "test" in found else next(iter(found))]
    return rows


def _chat(value: Any) -> Record:
    if isinstance(value, DataError):
        raise value
    if isinstance(value, Line) and value.keys() & {"input_ids", "answer_ids"}:
        return Record((), tokens=_tokens(value))
    fields = own_form(value) if isinstance(value, Line) else Line({})
    if not is_learned(fields):
        raise UnlearnableChat(_MARKED)
    has_completion = "completion" in fields and not fields.get("messages")
    record = _completion(fields) if has_completion else _conversation(fields, ("messages",))
    if record is None and isinstance(value, Line) and fields is not value:
        raise UnlearnableChat(NO_ANSWER)
    if record is None:
        fix = "; `draftheads distill` answers prompts" if fields.keys() & {"prompt", "turns"} else ""
        fix = "; plain text goes to --text" if "text" in fields else fix
        misspelt = _misspelt(value, ("messages", "prompt", "completion"))
        raise DataError(f"{misspelt}{_NO_CHAT}, not {short(repr(value))}{fix}")
    if not isinstance(record.finished, bool):
        raise DataError(f"finished is {record.finished!r}; it must be true or false")
    places = {place for place, message in enumerate(record.messages) if message["role"] == "assistant"}
    if not places - record.unlearned:
        raise UnlearnableChat(_MARKED if places else NO_ANSWER)
    return record


def _learned_parts(record: Record) -> list[Record]:
    """The record, or several ones between the answers that are marked as not to learn."""
    said, parts = record.messages, []
    for start, end in pairwise([-1, *sorted(record.unlearned), len(said)]):
        part = said[start + 1 : end]
        if record.tokens is not None or any(message["role"] == "assistant" for message in part):
            finished = record.finished or end < len(said)
            parts.append(
                replace(record, before=said[: start + 1], messages=part, finished=finished, unlearned=frozenset())
            )
    return parts


def _tokens(line: Line) -> RecordedTokens:
    """A text that is tokens already: an answer that a server gave, or a text with labels or masks."""
    if "answer_ids" in line:
        line.read |= {*line}  # all else says the same
        prompt, answer = (_numbers(line, name) for name in ("prompt_ids", "answer_ids"))
        tokenizer = line.get("tokenizer")
        if not isinstance(tokenizer, str):
            raise DataError(f"tokenizer is {tokenizer!r}; beside token ids it must be a tokenizer's fingerprint")
        return RecordedTokens((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer), tokenizer)
    ids = _numbers(line, "input_ids")
    masks = {name: _numbers(line, name, least=-100) for name in _MASKS if name in line}
    for name, mask in masks.items():
        wrong = [i for i, one in zip(ids, mask, strict=False) if one not in ((i, -100) if name == "labels" else (0, 1))]
        if len(mask) != len(ids) or wrong:
            raise DataError(f"{name} must have one value for each of {len(ids)} input_ids: {_MASKS[name]}")
    kept = [bool(one) for one in masks.pop("attention_mask", (1,) * len(ids))]
    learned = [True] * len(ids)
    for name, mask in masks.items():
        learned = [
            known and (one != -100 if name == "labels" else one > 0) for known, one in zip(learned, mask, strict=True)
        ]
    if not any(learned):
        raise UnlearnableChat(_MARKED)
    return RecordedTokens(tuple(compress(ids, kept)), tuple(compress(learned, kept)), None)


def _numbers(line: Line, name: str, *, least: int = 0) -> list[int]:
    """A list of whole numbers, also as JSON text."""
    values = json_value(line.get(name))
    if not isinstance(values, list) or not values or not all(isinstance(i, int) and i >= least for i in values):
        raise DataError(f"{name} is {short(repr(values))}; it must be a list of whole numbers from {least} on")
    return values


def _completion(fields: Line) -> Record | None:
    """The record of a prompt and its completion."""
    prompt, completion = fields.get("prompt"), fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages = [*prompt, *completion]
    else:
        raise DataError(f"prompt and completion must be two texts or two lists of messages, not {short(repr(fields))}")
    record = _conversation(fields.changed({"messages": messages}), ("messages",))
    return record and replace(record, is_completion=isinstance(prompt, str))


def _conversation(value: Any, forms: Sequence[str]) -> Record | None:
    """The record of a JSON value in the first of the forms that it has; None where it has none of them."""
    fields = value if isinstance(value, Line) else Line({})
    form = next((name for name in forms if fields.get(name) is not None), None)
    if form is None:
        return None
    items = fields[form]
    is_text = form == "turns" or (form == "prompt" and isinstance(items, str))
    if form == "prompt" and is_text:
        items = [items]
    if not isinstance(items, list) or not items:
        return None
    if is_text:
        items = [{"role": "user", "content": item} for item in items]
    messages = inner_messages(fields, form, items)
    if "finished" in fields:
        fields.read |= {*_MADE}
    return Record(
        tuple({name: value for name, value in message.items() if name != "is_learned"} for message in messages),
        unlearned=frozenset(place for place, message in enumerate(messages) if not message.get("is_learned", True)),
        is_text=is_text,
        labels={name: fields[name] for name in _LABELS if name in fields},
        finished=fields.get("finished", True),
        reference=fields.get("reference"),
        tools=_tools(fields),
        is_generated="finished" in fields,
    )


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions in ``tools``: a list, one alone, or JSON text; some lack ``{"type": "function"}``."""
    tools = json_value(fields.get("tools") or fields.get("functions") or [])
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
