"""Reads a request's JSON object into a pydantic model. Every error names the field, its value and what is allowed."""

import json
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from draftheads.errors import close_name
from draftheads.serve.api_error import ApiError
from draftheads.serve.body import depth_of
from draftheads.utils.messages import half_character, short

_SCHEMA_BYTES, _SCHEMA_DEPTH = 64 << 10, 32  # at most
# fields of OpenAI's API that change no answer of ours
_WITHOUT_EFFECT = {"include_obfuscation", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key"} | {
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
# fields that would change the answer: a value that does not, and what to do instead
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "audio": (None, "leave it out"),
    "best_of": (1, "send n and choose among the answers"),
    "frequency_penalty": (0, "use repetition_penalty"),
    "function_call": ("none", "use tool_choice"),
    "functions": ([], "use tools"),
    "modalities": (["text"], "leave it out"),
    "presence_penalty": (0, "use repetition_penalty"),
    "reasoning_effort": (None, "leave it out"),
    "suffix": ("", "leave it out"),
    "verbosity": (None, "leave it out"),
    "web_search_options": (None, "leave it out"),
}
# by pydantic's type of error
_PROBLEMS = {
    "missing": "is missing",
    "too_short": "is empty",
    "string_too_short": "is empty",
    "too_long": "has {actual_length} entries; it must have at most {max_length}",
    "json_invalid": "is not valid JSON: {error}",
    "value_error": "{error}",
    "int_type": "is {value}; it must be an integer",
    "float_type": "is {value}; it must be a number",
    "bool_type": "is {value}; it must be true or false",
    "string_type": "is {value}; it must be a string",
    "string_too_long": "is {value}; it must be a string of at most {max_length} characters",
    "json_type": "is {value}; it must be a string",
    "list_type": "is {value}; it must be a list",
    "text_or_list": "is {value}; it must be a string or a list",
    "dict_type": "is {value}; it must be an object",
    "model_type": "is {value}; it must be an object",
    "greater_than_equal": "is {value}; it must be at least {ge}",
    "less_than_equal": "is {value}; it must be at most {le}",
    "literal_error": "is {value}; it must be {expected}",
}


class Fields(BaseModel):
    """The fields of an object. One that is null counts as left out; one that is unknown is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        if cls.model_config["extra"] != "forbid":
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in given.keys() - known - _WITHOUT_EFFECT:
            if name not in _UNSUPPORTED or given[name] != _UNSUPPORTED[name][0]:
                raise PydanticCustomError("unknown", "", {"name": ascii(name)[1:-1], "close": close_name(name, known)})
        return {name: given[name] for name in known & given.keys()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema for programs: a field that may be left out may be null."""
        schema = handler(core_schema)
        of_object = handler.resolve_ref_schema(schema)
        fields, null = of_object.get("properties", {}), {"type": "null"}
        for name in fields.keys() - of_object.get("required", ()):
            if null not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], null]}
        return schema


def other_fields() -> dict[str, JsonSchemaValue]:
    """Schemas of the fields of OpenAI's API that requests may have, but that change no answer."""
    ignored = {name: {"description": "has no effect"} for name in sorted(_WITHOUT_EFFECT)}
    fixed = {
        name: {"enum": [value] if value is None else [value, None], "description": f"not supported: {fix}"}
        for name, (value, fix) in _UNSUPPORTED.items()
    }
    return {**ignored, **fixed}


Model = TypeVar("Model", bound=Fields)


def read_fields(model: type[Model], values: Mapping[str, Any]) -> Model:
    """The fields of an object.

    Raises:
        ApiError: a field is wrong; the first one, if there are several.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)[0]) from None


def wrong(field: str, problem: str) -> ApiError:
    """The error of a field."""
    return ApiError(400, f"{field} {problem}", param=field)


def text_or_list(value: Any) -> list[Any]:
    """A list, which may be one string instead."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("text_or_list", "")
    return value if isinstance(value, list) else [value]


def check_schema(schema: Any) -> Any:
    """A JSON schema, or a list of tools with theirs.

    Raises:
        ValueError: it is too large, or nested too deeply.
    """
    if (size := len(json.dumps(schema))) > _SCHEMA_BYTES:
        raise ValueError(f"has {size} bytes; it must have at most {_SCHEMA_BYTES}")
    if (depth := depth_of(schema)) > _SCHEMA_DEPTH:
        raise ValueError(f"is nested {depth} levels deep; it must be at most {_SCHEMA_DEPTH}")
    return schema


def _api_error(error: ErrorDetails) -> ApiError:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "unknown":
        return _unknown(f"{field}." if field else "", **context)
    if kind == "string_unicode":
        return wrong(field, str(half_character(value)))
    return wrong(field, _PROBLEMS[kind].format(value=short_repr(value), **context))


def _unknown(place: str, name: str, close: str | None) -> ApiError:
    if name in _UNSUPPORTED:
        return wrong(place + name, f"is not supported here: {_UNSUPPORTED[name][1]}")
    hint = f"did you mean {close}?" if close else "leave it out"
    message = f"unknown field {place}'{short(name)}'; {hint}"
    return ApiError(400, message, param=place + name[:60], code="unknown_field")
