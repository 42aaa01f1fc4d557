"""What a form of answers is: tags around calls and thoughts, what reads the calls, and the grammar that writes them."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftheads.utils.messages import half_character

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of functions, by their names
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KNOWN = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "$defs"}
_MIXED = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer."""

    name: str
    arguments: str  # JSON, of an object
    is_cut: bool = False  # the answer was too long for all of them


class Members(NamedTuple):
    """How arguments are written one by one, where they are no JSON."""

    before: str  # with {} for the name
    end: str
    between: str
    quote: str | None  # around texts; None: they are JSON, too


@dataclass(frozen=True)
class CallForm:
    """How the models of some families write calls: between an opening and a closing tag, or up to the answer's end."""

    name: str  # in errors and docs
    # before the first call, before every further one (None: an answer has one), behind the last one; the closing tag
    layout: tuple[str, str | None, str, str]
    call: tuple[str, str, str]  # before a name, between it and the arguments, behind those
    read: Callable[[str, Schemas], list[ToolCall] | None]  # the calls of a text without its tags; None: it has none
    tags: tuple[str, ...]  # one of these opens a call
    closings: tuple[str, ...] = ()  # one of these closes it; none: the end of the answer
    members: Members | None = None  # None: arguments are JSON
    pattern: str = ""  # a regular expression of what templates or tokenizers have of it; else they have the first tag
    first: Callable[[Schemas], Sequence[str]] = lambda _: ()  # texts that open a call if the answer begins with them
    thinking: tuple[str, str] | None = None  # tags of thoughts; None: those that the template shows
    marks: tuple[str, ...] = ()  # other texts that are no part of the answer
    tokens: tuple[str, ...] = ()  # texts of special tokens, beside the tags, without which answers cannot be read
    text_opening: str = ""  # before a text that a grammar writes
    needs_identifiers: bool = False  # as names of functions

    @property
    def opening(self) -> str:
        return self.layout[0]

    def is_shown(self, text: str) -> bool:
        """Whether a template or a list of tokens has this form."""
        return re.search(self.pattern or re.escape(self.tags[0]), text) is not None

    def calls(self, text: str, schemas: Schemas) -> list[ToolCall] | None:
        """Those in a text with its tags; None: it has none."""
        for tag in self.tags:
            text = text.removeprefix(tag)
        for tag in self.closings:
            text = text.removesuffix(tag)
        return self.read(text.strip(), schemas)

    def part(self, text: str, schemas: Schemas) -> list[ToolCall]:
        """What a grammar has written of a call, whose text behind its opening was cut off."""
        before, between, _ = self.call
        starts = {name: f"{before}{name}{between}" for name in schemas}
        for name, rest in (
            (name, text.removeprefix(start)) for name, start in starts.items() if text.startswith(start)
        ):
            if self.members is not None:
                return [ToolCall(name, f"{{{_part_of(self.members, rest, schemas[name])}", is_cut=True)]
            with suppress(ValueError):
                return [ToolCall(name, rest[: raw_decode(rest)[1]])]
            return [ToolCall(name, rest, is_cut=True)]
        return []

    def grammar(self, schemas: Schemas, tokens: Mapping[str, int], *, text: str | None, parallel: bool) -> str:
        """Of an answer: the rest of one call behind its opening, or with ``text``, a JSON schema, such a text or calls.

        Raises:
            ValueError: the form cannot write these calls.
        """
        (opening, between, end, closing), lark = self.layout, Lark(tokens)
        if self.needs_identifiers and (odd := [name for name in schemas if not name.isidentifier()]):
            raise ValueError(f"the name {odd[0]!r}")
        before, middle, behind = self.call
        call = lark.any_of(
            f"{lark.text(before + name + middle)} {lark.arguments(schema, self.members)} {lark.text(behind)}"
            for name, schema in schemas.items()
        )
        if text is None:
            return lark.grammar(f"{call} {lark.text(end)}")
        if not opening:
            raise ValueError(f"{self.name} cannot be told from other JSON")
        more = "" if between is None or not parallel else f"({lark.text(between)} {call})*"
        calls = f"{lark.text(opening)} {call} {more} {lark.text(end + closing)}"
        return lark.grammar(f"{lark.text(self.text_opening)} {lark.json(json.loads(text))} | {calls}")


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Those of tools in OpenAI's form, or of functions alone."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or NOTHING for function in functions}


class Lark:
    """Rules of a grammar. ``tokens`` are the ids of added tokens, as which a model writes their texts."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens, self._rules = tokens, list[str]()
        longest = sorted(filter(None, tokens), key=len, reverse=True)
        self._token = re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, options: str = "") -> str:
        self._rules.append(f"r{len(self._rules)}{options}: {body}")
        return f"r{len(self._rules) - 1}"

    def any_of(self, bodies: Iterator[str]) -> str:
        return self.rule(" | ".join(bodies))

    def text(self, text: str) -> str:
        """Just this text."""
        parts = filter(None, self._token.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else _quoted(part) for part in parts)

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}")

    def until(self, end: str, schema: Mapping[str, Any]) -> str:
        """A text of a schema of strings, without quotes, and its end."""
        if (options := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return self.any_of(self.text(option + end) for option in options if isinstance(option, str))
        pattern = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
        if "pattern" in schema:
            raise ValueError("a pattern of texts")
        before, *rest = self._token.split(end, maxsplit=1)
        if rest:  # no text has a token in it
            return f"{self.rule(_regex(pattern + re.escape(before)))} {self.text(''.join(rest))}"
        tag, newline = end.rstrip("\n"), end[len(end.rstrip("\n")) :]
        return f"{self.rule(_regex(pattern), f'[suffix={_quoted(tag)}]')} {self.text(newline)}"

    def arguments(self, parameters: Mapping[str, Any], members: Members | None) -> str:
        """Those of a schema, in their order."""
        if members is None:
            return self.json(parameters)
        if more := parameters.keys() - _KNOWN:
            raise ValueError(f"{min(more)!r} of parameters")
        required = parameters.get("required", ())
        properties: dict[str, Any] = {**{name: {} for name in required}, **parameters.get("properties", {})}
        first = following = ""  # what follows, if nothing is before it, or something
        for name, given in reversed(properties.items()):
            schema = resolved(given, parameters)
            if members.quote is not None and "string" in types_of(schema, parameters):
                value = f"{self.text(members.quote)} {self.until(members.quote + members.end, schema)}"
            else:
                shared = {"$defs": parameters["$defs"]} if "$defs" in parameters else {}
                value = f"{self.json({**schema, **shared})} {self.text(members.end)}"
            member = self.rule(f"{self.text(members.before.format(name))} {value}")
            ways = f"{member} {following}", f"{self.text(members.between)} {member} {following}"
            needed = name in required
            first, following = (
                self.rule(way if needed else f"{way} | {rest or _quoted('')}")
                for way, rest in zip(ways, (first, following), strict=True)
            )
        return first


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/").replace("\\\n", "\n").replace("\n", r"\n") + "/"


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a ``$ref`` names."""
    place: Any = root
    if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
        return schema if isinstance(schema, Mapping) else {}
    for name in schema["$ref"][2:].split("/"):
        place = place.get(name, {}) if isinstance(place, Mapping) else {}
    return {**(place if isinstance(place, Mapping) else {}), **{k: v for k, v in schema.items() if k != "$ref"}}


def types_of(schema: Any, root: Mapping[str, Any], *, depth: int = 4) -> set[str]:
    """Names of the types that a value may have; none: any. Schemas may refer to themselves."""
    schema = resolved(schema, root) if depth else {}
    if isinstance(given := schema.get("type"), str | list):
        return {given} if isinstance(given, str) else set(map(str, given))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    parts = [types_of(part, root, depth=depth - 1) for key in _MIXED for part in schema.get(key, ())]
    return {"string" for value in values if isinstance(value, str)}.union(*parts)


def call_of(name: Any, arguments: str) -> list[ToolCall] | None:
    """A call with this text as its arguments; None if it is no JSON object that a client can send back."""
    with suppress(ValueError, RecursionError):
        value = decode(arguments.strip())
        is_call = isinstance(name, str) and name.strip() and isinstance(value, dict)
        if is_call and not half_character(json.dumps([name, value], ensure_ascii=False)):
            return [ToolCall(name.strip(), arguments.strip())]
    return None


def json_of_pairs(pairs: Iterable[tuple[str, str]], schema: Mapping[str, Any]) -> str:
    """A JSON object of texts; the function's schema says of which type they are."""
    properties = schema.get("properties", {})
    members = [f"{json.dumps(key)}: {typed(text, properties.get(key), schema)}" for key, text in pairs]
    return f"{{{', '.join(members)}}}"


def _part_of(members: Members, text: str, schema: Mapping[str, Any]) -> str:
    """The whole members in a text that is cut off, as JSON without braces."""
    before = re.compile(re.escape(members.before).replace(r"\{\}", "(.*?)"), re.DOTALL)
    found, at, properties = list[str](), 0, schema.get("properties", {})
    while key := before.match(text, at):
        at, end = key.end(), (members.quote or "") + members.end
        with suppress(ValueError):
            if members.quote is not None and "string" in types_of(properties.get(key[1]), schema):
                start, at = at + len(members.quote), text.index(end, at + len(members.quote))
                value, at = json.dumps(text[start:at], ensure_ascii=False), at + len(end)
            else:
                start, at = at, raw_decode(text, at)[1]
                value, at = text[start:at], at + len(members.end)
            found.append(f"{json.dumps(key[1])}: {value}")
            at += len(members.between)
            continue
        break
    return ", ".join(found)


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of an argument that a model wrote without quotes.

    >>> typed("3", {"type": "string"}, {}), typed("3", {}, {}), typed("True", {"type": "boolean"}, {})
    ('"3"', '3', 'true')
    """
    types = types_of(schema, root)
    if "string" not in types or (text.strip() == "null" and "null" in types):
        with suppress(*NO_VALUE):
            return value_text(text.strip())
    return json.dumps(text, ensure_ascii=False)


NO_VALUE = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)


def value_text(text: str) -> str:
    """The JSON of a value that a model wrote in JSON or in Python; raises one of ``NO_VALUE``."""
    with suppress(ValueError):
        decode(text)
        return text
    return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
decode, raw_decode = _DECODER.decode, _DECODER.raw_decode
