"""Chats to text by chat templates, and texts to token ids.

Knows ``transformers`` and ``tokenizers``; knows nothing of models or files of chats. A template is given by the name of
a built-in one (``assets/chat_templates``) or as a file, and takes the place of the tokenizer's own. It is never set on
the tokenizer, which other models may share.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial
from inspect import signature
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tokenizers import pre_tokenizers

from draftheads.errors import InvalidSettings, PromptTooLong
from draftheads.models.model_names import shown_name
from draftheads.utils.files import user_path
from draftheads.utils.messages import Message, split_variables, with_variables

_FOLDER = Path(__file__).parents[1] / "assets" / "chat_templates"
BUILT_IN = tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))  # chatml, hermes, llama-2, vicuna
_ANCHORS = ("\n", ":")  # texts before a continuation; a tokenizer may merge one of them with what follows
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"  # in place of a space in the tokens of SentencePiece
_LETTERS = 16  # for each token that a model takes: a text that is longer is refused if its beginning has too many
_DATE: ContextVar[datetime | None] = ContextVar("_DATE", default=None)
_DATE_CODE = re.compile(r"(?<!\{)%-?[A-Za-z]")
# transformers' own function of that name knows no other day; the end keeps a line break behind it
_DATE_MACRO = (
    "{% macro strftime_now(format) %}{% set own = namespace(text=format) %}{% for code, text in CODES.items() %}"
    "{% set own.text = own.text.replace(code, text) %}{% endfor %}{{ own.text }}{% endmacro %}{{ '' }}"
)
_EFFORT_SWITCHES = ("enable_thinking", "thinking")  # of templates without levels of effort


Run = Callable[[dict[str, Any]], str]  # renders with the arguments of transformers' ``render_jinja_template``


class ChatReader(Protocol):
    """How a model reads texts and chats: the model itself, or only this part of it."""

    @property
    def model_id(self) -> str:
        """Its name."""

    @property
    def tokenizer(self) -> Any:
        """A ``transformers`` tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""

    @property
    def chat_template(self) -> str | None:
        """A template in place of the tokenizer's own; None: the tokenizer's own."""

    @property
    def max_positions(self) -> int | None:
        """The maximal number of tokens in a text; None if it is not known."""


def read_template(name_or_file: str | PathLike[str] | None) -> str | None:
    """The text of a built-in template (``chatml``, ``hermes``, ``llama-2``, ``vicuna``) or of a file; None for None."""
    variables, name = split_variables(None if name_or_file is None else fspath(name_or_file))
    if name is None:
        return with_variables(None, variables)
    path = _FOLDER / f"{name}.jinja" if name in BUILT_IN else user_path(name)
    try:
        return with_variables(path.read_text(encoding="utf-8"), variables)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(
            f"chat template {name!r} cannot be read ({error}): give a Jinja file, or one of {', '.join(BUILT_IN)}"
        ) from None


def template_of(reader: ChatReader) -> Any:
    """The template in use: the given one, else the tokenizer's own; None where there is neither."""
    own = getattr(reader.tokenizer, "chat_template", None) or None
    variables, given = split_variables(reader.chat_template)
    if given or not variables:
        return reader.chat_template or own
    own = own.get("default") if isinstance(own, dict) else own
    return None if own is None else with_variables(own, variables)


@contextmanager
def dated(date: str) -> Iterator[None]:
    """A ``with`` block in which templates that write the date (``strftime_now``) write this one, in ISO 8601."""
    before = _DATE.set(datetime.fromisoformat(date))
    try:
        yield
    finally:
        _DATE.reset(before)


def date_now() -> str:
    """The date that templates write, local and in ISO 8601: that of :func:`dated`, else now."""
    return (_DATE.get() or datetime.now().astimezone()).isoformat(timespec="seconds")


def render(
    reader: ChatReader,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    run: Run | None = None,
) -> str:
    """A chat as text.

    Args:
        reader: the model.
        messages: may have more than a role and a content, where the template reads more.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: end with the content of the last message, as the beginning of an answer.
        tools: functions that the model may call, as JSON schemas; templates may ignore them.
        variables: further variables of the template, such as ``enable_thinking``; no names of :func:`reserved_names`.
        run: renders, such as in another process; None: here.
    """
    given = {} if reader.chat_template is None else {"chat_template": template_of(reader)}
    chat = [_with_thought(message) for message in messages]
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **given}
    if (date := _DATE.get()) is not None and reads_variable(reader, "strftime_now"):
        source = reader.tokenizer.get_chat_template(given.get("chat_template"), tools)
        codes = {code: date.strftime(code) for code in _DATE_CODE.findall(source)}
        options["chat_template"] = _DATE_MACRO.replace("CODES", json.dumps(codes)) + source
    if continue_final_message:
        options["continue_final_message"] = True
    if tools:
        options["tools"] = [dict(tool) for tool in tools]
    variables, apply = variables or {}, reader.tokenizer.apply_chat_template
    if run is None or apply.__module__ != "transformers.tokenization_utils_base":  # of a tokenizer with code of its own
        return str(apply(chat, tokenize=False, **options, **variables))
    options["chat_template"] = reader.tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    return run(dict(conversations=[chat], **options, **{**reader.tokenizer.special_tokens_map, **variables}))


def _with_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thought in all names that templates have for it."""
    if "reasoning_content" not in message:
        return dict(message)
    # gpt-oss's template refuses a "thinking" beside content and calls
    names = ("reasoning",) if message.get("tool_calls") and message["content"] else ("reasoning", "thinking")
    return {**message, **dict.fromkeys(names, message["reasoning_content"])}


def reserved_names(reader: ChatReader) -> set[str]:
    """Variables of a chat template that arguments of :func:`render` set, and options of the tokenizer."""
    return {"messages", *signature(reader.tokenizer.apply_chat_template).parameters}


def reads_variable(reader: ChatReader, name: str) -> bool:
    """Does the source of the chat template mention this variable?"""
    return re.search(rf"\b{name}\b", template_source(reader)) is not None


def unread_variables(reader: ChatReader) -> list[str]:
    """Variables with fixed values that the source of the template does not mention."""
    return [name for name in split_variables(reader.chat_template)[0] if not reads_variable(reader, name)]


def template_source(reader: ChatReader) -> str:
    """The source of the chat template in use."""
    found = template_of(reader)
    return str(split_variables(found)[1] if isinstance(found, str) else found)


def effort_variables(reader: ChatReader, effort: str) -> dict[str, Any] | None:
    """The variables of the chat template for a ``reasoning_effort``; None if it cannot have one.

    A template has levels, or a switch, or neither: its model thinks always or never.
    """
    has_levels = reads_variable(reader, "reasoning_effort")
    switches = dict.fromkeys(_EFFORT_SWITCHES if effort == "none" else (), False)
    if effort != "none" and not has_levels:
        switches = {name: True for name in _EFFORT_SWITCHES if reads_variable(reader, name)}
    return {"reasoning_effort": effort, **switches} if has_levels or switches else None


def continuing_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that follows other tokens; none for an empty text.

    Some tokenizers (Llama-2, Vicuna) put a space before every text. A model does not generate this space when it
    continues a prompt, so ``text`` is tokenized after another text, whose tokens are then removed.
    """
    if not text:
        return []
    for anchor in _ANCHORS:
        before, whole = ids_of(tokenizer, anchor), ids_of(tokenizer, anchor + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return ids_of(tokenizer, text)


def special_ids(tokenizer: Any) -> set[int]:
    """Token ids of a ``transformers`` tokenizer that are not text, such as the end of a turn."""
    return {*getattr(tokenizer, "all_special_ids", ()), *special_texts(tokenizer)}


def special_texts(tokenizer: Any) -> Mapping[int, str]:
    """The added tokens of a tokenizer that are not text, with what they look like."""
    return _added_tokens(tokenizer)[0]


def unused_token(reader: ChatReader, size: int, others: Collection[int]) -> int:
    """A token that texts do not have, for the masks of block drafters, of a vocabulary of that size.

    It is a special one that is not among ``others`` nor in the chat template; one with "mask" in its name if there is
    one. Without any it is the last of the vocabulary that may be taken.
    """
    tokenizer, template = reader.tokenizer, str(template_of(reader))
    used = {*others, *(getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))}
    free = {
        i: text for i, text in special_texts(tokenizer).items() if i < size and i not in used and text not in template
    }
    masks = [i for i, text in free.items() if "mask" in text.lower()]
    return max(masks or free or set(range(size)) - used)


_ADDED: WeakKeyDictionary[Any, tuple[Mapping[int, str], Mapping[str, int], int]] = WeakKeyDictionary()


def added_tokens(tokenizer: Any) -> Mapping[str, int]:
    """The ids of all added tokens."""
    return _added_tokens(tokenizer)[1]


def _added_tokens(tokenizer: Any) -> tuple[Mapping[int, str], Mapping[str, int], int]:
    """Those that are not text, the ids of all, and the size of the tokenizer, which may grow."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return {}, {}, 0
    if tokenizer not in _ADDED or _ADDED[tokenizer][2] != len(tokenizer):
        added = tokenizer.added_tokens_decoder
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        _ADDED[tokenizer] = special, {token.content: token_id for token_id, token in added.items()}, len(tokenizer)
    return _ADDED[tokenizer]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without the special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_ids_of(reader: ChatReader, text: str, **options: bool) -> list[int]:
    """The token ids of a text that a model continues; ``options`` are the tokenizer's.

    They end with the text, also where a tokenizer writes an end token behind texts. A text that is far too long is
    refused by its beginning: all of it could take seconds.
    """
    limit, read = reader.max_positions, partial(reader.tokenizer, **options)
    if limit is not None and len(text) > _LETTERS * limit:
        beginning = text[: _LETTERS * limit].rstrip()  # a special token behind it may take the spaces before it
        if len(read(beginning)["input_ids"]) > 2 * limit:
            name = shown_name(reader.model_id)
            raise PromptTooLong(f"the prompt has more than {limit:,} tokens; {name} takes at most {limit - 1}")
    ids = list(read(text)["input_ids"])
    if options.get("add_special_tokens", True) and ids and ids[-1] in reader.eos_ids:
        return ids[: len(ids) - len(ids_around(reader.tokenizer)[1])]
    return ids


def ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer writes before a text, such as its BOS, and behind it."""
    plain, whole = ids_of(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


@lru_cache(1)
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own letters, the others follow from U+0100 on."""
    printable = {letter: ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | {chr(256 + number): byte for number, byte in enumerate(others)}


class TokenBytes:
    """The bytes that the tokens of a tokenizer stand for; a token can be a part of a character.

    Attributes:
        are_known: whether the tokenizer is byte-level, as GPT-2's, or has byte fallback, as Llama-2's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._is_byte_level = "ByteLevel" in decoder
        self.are_known = self._is_byte_level or "ByteFallback" in decoder

    def of(self, token_id: int) -> bytes:
        """Of one token; special ones have the bytes of their names."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        token = convert(token_id) if convert else None
        if not isinstance(token, str):
            return str(self._tokenizer.decode([token_id])).encode()
        if self._is_byte_level:
            with suppress(KeyError):  # added tokens have any letters
                return bytes(map(byte_of_letter().__getitem__, token))
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


# --- long texts to token ids, a piece after the other: the ids of the whole text in the memory of a piece ---

# A text is cut only where its ids are those of the two parts. This is tried on the characters around the place, as no
# tokenizer says where it is so: one of words may be cut before a space; one whose tokens span lines not at each end.
PIECE = 1 << 13  # characters
LONGEST = 1 << 20  # characters without such a place: a text is then cut, and the ids there may differ
_AROUND = 128  # characters on each side of a place that is tried
_TRIES = 16  # of each kind
_PLACES = re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\w)(?=\W)")  # the last one of the first kind is best


def token_pieces(
    tokenizer: Any, text: str | Iterable[str], *, first: Callable[[Any, str], list[int]] = ids_of
) -> Iterator[list[int]]:
    """Token ids of a text, or of the parts of a text, without the special tokens around it.

    Args:
        tokenizer: of ``transformers``.
        text: read as far as the ids are used.
        first: how the first piece is read; ``continuing_ids`` for a text that follows other tokens.
    """
    read = first
    for piece in text_pieces(tokenizer, (text,) if isinstance(text, str) else text):
        yield read(tokenizer, piece)
        read = continuing_ids


def text_pieces(tokenizer: Any, parts: Iterable[str]) -> Iterator[str]:
    """The pieces of the parts of a text; the first by :func:`ids_of`, others by :func:`continuing_ids`."""
    held = ""
    for part in (long[start : start + PIECE] for long in parts for start in range(0, len(long), PIECE)):
        held += part
        place = _safe_place(tokenizer, held) if len(held) > PIECE else 0
        if place or len(held) >= LONGEST:
            yield held[: place or None]
            held = held[place:] if place else ""
    yield held


def _safe_place(tokenizer: Any, text: str) -> int:
    """The last place in the last piece of a text where it may be cut; 0 where none is found."""
    start, end = max(_AROUND, len(text) - PIECE), len(text) - _AROUND
    for places in _PLACES:
        for place in [found.start() for found in places.finditer(text, start, end)][: -_TRIES - 1 : -1]:
            left, right = text[place - _AROUND : place], text[place : place + _AROUND]
            if ids_of(tokenizer, left + right) == ids_of(tokenizer, left) + continuing_ids(tokenizer, right):
                return place
    return 0
