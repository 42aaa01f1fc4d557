"""Which values are valid chat messages."""

from collections.abc import Iterable, Mapping
from typing import Any

Message = Mapping[str, Any]  # role and content; of the assistant perhaps reasoning_content and tool_calls, too
# what the chat templates of published models read; a template refuses or ignores those that it does not know
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


def message_problem(value: Any) -> str | None:
    r"""Why a value is not a message, to be read after its name; None for a valid message.

    >>> message_problem({"role": "user", "content": "hi"})
    >>> "message 0" + message_problem({"role": "user"})
    'message 0: content is None; it must be a string'
    >>> "message 0" + message_problem({"role": "bot", "content": "hi"})
    "message 0: role is 'bot'; it must be one of system, developer, user, assistant, tool, function, ipython"
    """
    if not isinstance(value, Mapping):
        return f" is {short(repr(value))}; it must be an object with role and content"
    for key in ("role", "content"):
        if not isinstance(value.get(key), str):
            return f": {key} is {short(repr(value.get(key)))}; it must be a string"
        if problem := half_character(value[key]):
            return f": {key} {problem}"
    if value["role"] not in ROLES:
        return f": role is {short(repr(value['role']))}; it must be one of {', '.join(ROLES)}"
    return None


def half_character(text: str) -> str | None:
    r"""Describes the first lone surrogate in a text, which no tokenizer can read; None where there is none.

    JSON can contain one, and so can a command line whose bytes are not UTF-8.

    >>> half_character("a\ud800b")
    "holds half a character, '\\ud800' as its number 2, which no tokenizer can read: leave it out"
    >>> half_character("whole: \U0001f600")
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place, half = error.start + 1, ascii(text[error.start])
        return f"holds half a character, {half} as its number {place}, which no tokenizer can read: leave it out"
    return None


def short(text: str) -> str:
    """The first 57 characters of a text that has more than 60, for error messages."""
    return text if len(text) <= 60 else text[:57] + "…"


def printable(name: str) -> str:
    r"""A name from a file, such that a terminal prints it and does nothing else.

    >>> printable("fc.weight"), printable("\x1b[2J")
    ('fc.weight', "'\\x1b[2J'")
    """
    return name if name.isprintable() else repr(name)


def first_names(names: Iterable[str]) -> str:
    """The first three of some names, and how many more there are.

    >>> first_names({"b", "a"}), first_names(["e", "d", "c", "b", "a"])
    ('a, b', 'a, b, c and 2 more')
    """
    ordered = [printable(name) for name in sorted(names)]
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3:,} more" if len(ordered) > 3 else "")
