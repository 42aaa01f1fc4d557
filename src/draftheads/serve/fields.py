"""Fields of requests: pydantic models that know OpenAI's further fields, and their errors in OpenAI's form."""

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from reprlib import repr as short_repr
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from draftheads.errors import close_name
from draftheads.serve.api_error import ApiError
from draftheads.utils.messages import half_character, short
from draftheads.utils.strict_json import depth_of

_SCHEMA_BYTES, _SCHEMA_DEPTH = 64 << 10, 32  # at most
# fields of OpenAI's chats and completions that change no answer of ours
WITHOUT_EFFECT = {"metadata", "parallel_tool_calls", "prediction", "prompt_cache_key"} | {
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
# fields that would change an answer: a value that does not, and what to do instead
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "audio": (None, "leave it out"),
    "best_of": (1, "send n and choose among the answers"),
    "function_call": ("none", "use tool_choice"),
    "functions": ([], "use tools"),
    "modalities": (["text"], "leave it out"),
    "suffix": ("", "leave it out"),
    "verbosity": (None, "leave it out"),
    "web_search_options": (None, "leave it out"),
}


class Fields(BaseModel):
    """The fields of an object. One that is null counts as left out; one that is unknown is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    without_effect: ClassVar[AbstractSet[str]] = frozenset()  # further fields that are accepted and change nothing
    unsupported: ClassVar[Mapping[str, tuple[Any, str]]] = {}  # as UNSUPPORTED; also fields of a base class

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        if cls.model_config["extra"] != "forbid":
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()} - cls.unsupported.keys()
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in cls.model_fields else ()
        is_other = bool(kinds) and "type" in given and given["type"] not in kinds  # which is the error
        for name in () if is_other else given.keys() - known - cls.without_effect:
            neutral, fix = cls.unsupported.get(name, (None, None))
            if given[name] != neutral:
                hints = {"close": close_name(name, known), "fix": fix}
                raise PydanticCustomError("unknown", "", {"name": ascii(name)[1:-1], **hints})
        return {name: given[name] for name in known & given.keys()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema for programs: a field that may be left out may be null."""
        schema = handler(core_schema)
        of_object = handler.resolve_ref_schema(schema)
        fields, null = of_object.setdefault("properties", {}), {"type": "null"}
        fields |= {name: {"description": "has no effect"} for name in sorted(cls.without_effect)}
        for name, (value, fix) in cls.unsupported.items():
            fields[name] = {"enum": [value], "description": f"not supported: {fix}"}
        for name in fields.keys() - of_object.get("required", ()):
            of_field = fields[name]
            if null not in of_field.get("anyOf", ()) and of_field.keys() != {"description"}:
                fields[name] = {"anyOf": [of_field, null]}
        return schema


Model = TypeVar("Model", bound=Fields)


def read_fields(model: type[Model], values: Mapping[str, Any], place: str) -> Model:
    """The fields of an object inside of a request; ``place`` is where, for errors."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), place) from None


def wrong(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field} {problem}", param=field)


def validation_error(errors: Sequence[Mapping[str, Any]], place: str) -> ApiError:
    """The first of pydantic's errors, with the path of the field; ``place`` is where the object is."""
    error = errors[0]
    field = place + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    field, value, context = field.removeprefix("."), error["input"], error.get("ctx", {})
    code = None
    match error["type"]:
        case "unknown":
            return _unknown(f"{field}." if field else "", **context)
        case "json_invalid":
            problem = f"is not valid JSON: {context['error']}"
            if field.startswith("["):  # of the body: its place is a number of characters
                field, code = "", "invalid_json"
        case "missing":
            problem = "is missing"
        case "value_error":  # our own words
            problem = str(context["error"])
        case "model_type":
            problem = f"is {short_repr(value)}; it must be an object"
        case "string_unicode":
            problem = str(half_character(value))
        case _:
            problem = f"is {short_repr(value)}: {error['msg']}"
    return ApiError(400, f"{field or 'the body'} {problem}", param=field or None, code=code)


def text_or_list(value: Any) -> list[Any]:
    """A list, which may be one string instead."""
    if not isinstance(value, str | list):
        raise ValueError(f"is {short_repr(value)}; it must be a string or a list")  # noqa: TRY004 - for pydantic
    return value if isinstance(value, list) else [value]


def check_schema(schema: Any) -> Any:
    """A JSON schema, or a list of tools with theirs."""
    if (depth := depth_of(schema)) > _SCHEMA_DEPTH:
        raise ValueError(f"is nested {depth} levels deep; it must be at most {_SCHEMA_DEPTH}")
    if (size := len(json.dumps(schema))) > _SCHEMA_BYTES:
        raise ValueError(f"has {size} bytes; it must have at most {_SCHEMA_BYTES}")
    return schema


def _unknown(place: str, name: str, close: str | None, fix: str | None) -> ApiError:
    if fix:
        return wrong(place + name, f"is not supported here: {fix}")
    hint = f"did you mean {close}?" if close else "leave it out"
    message = f"unknown field '{place}{short(name)}'; {hint}"
    return ApiError(400, message, param=place + name[:60], code="unknown_field")
