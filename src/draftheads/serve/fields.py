"""Reads the fields of a request's JSON object, with their types. Every error names the field."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from reprlib import repr as short_repr
from typing import Any

from draftheads.serve.api_error import ApiError
from draftheads.utils.messages import half_character

# fields of OpenAI's API that change no answer of ours
_WITHOUT_EFFECT = frozenset(
    [
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    ]
)
# fields that would change the answer, with the values that do not
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
_INSTEAD = {
    "best_of": "send n and choose among the answers",
    "frequency_penalty": "use repetition_penalty",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "presence_penalty": "use repetition_penalty",
}


class Fields:
    """The fields of an object; :meth:`finish` refuses those that were not read.

    Args:
        values: the object. A field that is null counts as left out.
        place: what to write before its fields' names in errors.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._place = place
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """The whole name of a field, as errors have it."""
        return self._place + field

    def given(self, field: str) -> bool:
        """Is there a value?"""
        return field in self._values

    def without(self, field: str) -> "Fields":
        """The same fields but one."""
        others = Fields({name: value for name, value in self._values.items() if name != field}, self._place)
        others._read = self._read
        return others

    def any(self, field: str, default: Any = None) -> Any:
        """A value of any type."""
        self._read.add(field)
        return self._values.get(field, default)

    def integer(self, field: str, default: Any = None, *, least: int | None = None, most: int | None = None) -> Any:
        """An integer in a range."""
        value = self._of(field, default, lambda value: type(value) is int, "an integer")
        for limit, wrong, words in ((least, -1, "at least"), (most, 1, "at most")):
            if value is not default and limit is not None and (value - limit) * wrong > 0:
                raise self.wrong(field, f"is {short_repr(value)}; it must be {words} {limit}")
        return value

    def number(self, field: str, default: Any = None) -> Any:
        """An integer or float."""
        return self._of(field, default, lambda value: type(value) in (int, float), "a number")

    def flag(self, field: str, *, default: bool = False) -> bool:
        """True or false."""
        return bool(self._of(field, default, lambda value: type(value) is bool, "true or false"))

    def text(self, field: str, default: Any = None) -> Any:
        """A string that a tokenizer can read."""
        value = self._of(field, default, lambda value: type(value) is str, "a string")
        if isinstance(value, str) and (problem := half_character(value)):
            raise self.wrong(field, problem)
        return value

    def object(self, field: str) -> "Fields | None":
        """The fields of an object in the object."""
        value = self._of(field, None, lambda value: type(value) is dict, "an object")
        return None if value is None else Fields(value, f"{self.name(field)}.")

    def list(self, field: str, *, most: int) -> Any:
        """A list of limited length."""
        value = self._of(field, None, lambda value: type(value) is list, "a list")
        if value is not None and len(value) > most:
            raise self.wrong(field, f"has {len(value)} entries; it must have at most {most}")
        return value

    def wrong(self, field: str, problem: str) -> ApiError:
        """The error of a field."""
        return ApiError(400, f"{self.name(field)} {problem}", param=self.name(field))

    def finish(self) -> None:
        """Refuses fields that were not read, unless they change nothing.

        Raises:
            ApiError: a field that is not supported, or unknown.
        """
        for field in self._values.keys() - self._read - _WITHOUT_EFFECT:
            value = self._values[field]
            if field in _UNSUPPORTED:
                if value in _UNSUPPORTED[field]:
                    continue
                instead = f": {_INSTEAD[field]}" if field in _INSTEAD else ": leave it out"
                raise self.wrong(field, f"is not supported here{instead}")
            close = get_close_matches(field, self._read, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            shown = ascii(field) if len(field) <= 60 else ascii(field[:57]) + "…"
            raise ApiError(
                400, f"unknown field {self._place}{shown}; {hint}", param=self.name(field[:60]), code="unknown_field"
            )

    def _of(self, field: str, default: Any, holds: Callable[[Any], bool], words: str) -> Any:
        value = self.any(field, default)
        if value is not default and not holds(value):
            raise self.wrong(field, f"is {short_repr(value)}; it must be {words}")
        return value
