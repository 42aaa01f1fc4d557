"""Variables of a chat template with fixed values, such as ``enable_thinking``: Jinja text before the template.

So a template with its variables is one text: what keeps, compares and names templates needs to know nothing more.
"""

import json
import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

from draftheads.errors import InvalidSettings

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
