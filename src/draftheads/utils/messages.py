"""Which values are valid chat messages; variables of chat templates; names and texts in messages."""

import json
import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

from draftheads.errors import InvalidSettings

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


# --- variables of a chat template with fixed values, such as enable_thinking: Jinja text before the template, so that
# a template with its variables is one text, and what keeps, compares and names templates needs to know nothing more ---

_END = "{{ '' }}"  # no block tag: Jinja removes a line break behind those
_HEAD = re.compile(r"\{# variables (?P<values>\{.*?\}) #\}.*?" + re.escape(_END), re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def variables_of(pairs: Iterable[str]) -> dict[str, Any]:
    """Texts NAME=VALUE; a value that is no JSON is a text.

    >>> variables_of(["enable_thinking=false", "style=short"])
    {'enable_thinking': False, 'style': 'short'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or _NAME.fullmatch(name) is None or name in _RESERVED:
            raise InvalidSettings(
                f"template_variables has {pair!r}: write NAME=VALUE, such as enable_thinking=false; "
                f"not {', '.join(_RESERVED)}"
            )
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def with_variables(template: str | PathLike[str] | None, variables: Mapping[str, Any]) -> str | None:
    """A template, or its name, with these values where a chat gives no others; None stands for the tokenizer's own.

    Its variables so far are replaced. Without variables it is the template itself.
    """
    _, template = split_variables(None if template is None else fspath(template))
    if not variables:
        return template
    values = json.dumps(dict(variables), sort_keys=True).replace("#}", "#\\u007d")
    sets = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in sorted(variables.items())
    )
    return f"{{# variables {values} #}}{sets}{_END}{template or ''}"


def keep_variables(options: Any) -> None:
    """Settings with ``template_variables`` have them in their ``chat_template`` from now on."""
    if options.template_variables:  # the settings are frozen
        variables = variables_of(options.template_variables)
        object.__setattr__(options, "chat_template", with_variables(options.chat_template, variables))
        object.__setattr__(options, "template_variables", ())


def split_variables(template: str | None) -> tuple[dict[str, Any], str | None]:
    """The variables of a template's text, and the template; None for the tokenizer's own.

    >>> split_variables(with_variables("{{ a }}", {"b": 1}))
    ({'b': 1}, '{{ a }}')
    """
    match = _HEAD.match(template or "")
    if match is None or template is None:
        return {}, template
    return json.loads(match["values"]), template[match.end() :] or None


def _literal(value: Any) -> str:
    """A JSON value in Jinja, which writes None for null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False).replace("{{", "{\\u007b")
