"""Fields of requests: pydantic models that know OpenAI's further fields; and errors in the form of OpenAI's API.

An error is a status and ``{"error": {"message", "type", "param", "code"}}``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftheads.errors import (
    DeviceLost,
    DraftHeadsError,
    InvalidPrompt,
    InvalidSettings,
    PromptTooLong,
    QueueFull,
    ShuttingDown,
    TooLarge,
    close_name,
)
from draftheads.utils.messages import half_character, short
from draftheads.utils.strict_json import depth_of

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TYPES |= {500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}


class ErrorFields(BaseModel):
    """What clients are told."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The JSON object of a response without an answer."""

    error: ErrorFields


class ApiError(HTTPException):
    """A request that gets no answer.

    Args:
        status_code: of the HTTP response.
        detail: what is wrong and how to fix it.
        param: the field of the request that is wrong.
        code: for programs, such as "model_not_found".
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status_code: int,
        detail: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        headers = {"www-authenticate": "Bearer"} if status_code == 401 else {}
        if retry_after is not None:
            headers["retry-after"] = str(math.ceil(retry_after))
        super().__init__(status_code, detail, headers)
        self.param, self.code = param, code

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, Any]:
        """The JSON object of the response.

        >>> ApiError(400, "n is 0; it must be at least 1", param="n").body()["error"]["type"]
        'invalid_request_error'
        """
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # in ASCII: what a client sent may hold half a character
        return Response(json.dumps(self.body()), self.status_code, self.headers, "application/json")


def api_error_of(error: DraftHeadsError, *, param: str | None = None) -> ApiError:
    """The response to one of our errors, raised while a request was read or submitted; ``param`` is the wrong field."""
    match error:
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
        case DeviceLost():
            return ApiError(503, str(error), code="device_lost", retry_after=10)
        case ShuttingDown():
            return ApiError(503, str(error), code="shutting_down", retry_after=1)
        case TooLarge() | PromptTooLong():
            return ApiError(400, str(error), param=param, code="context_length_exceeded")
        case InvalidPrompt() | InvalidSettings():
            return ApiError(400, str(error), param=param)
        case _:
            return ApiError(500, "the server could not answer this request")


_SCHEMA_BYTES, _SCHEMA_DEPTH = 64 << 10, 32  # at most


@dataclass(frozen=True)
class Unsupported:
    """In ``Annotated``: a field that would change an answer, with a value that does not, and what to do instead."""

    fix: str
    only: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [self.only], "description": f"not supported: {self.fix}"}

    def _check(self, value: Any) -> Any:
        if value != self.only:
            raise PydanticCustomError("unsupported", "", {"fix": self.fix})
        return self.only  # 1.0 is 1


# the type of a field that is accepted and changes no answer
NoEffect = Annotated[Any, WithJsonSchema({"description": "has no effect"})]


class Fields(BaseModel):
    """The fields of an object. One that is null counts as left out; one that is unknown is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        if cls.model_config["extra"] != "forbid":
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in cls.model_fields else ()
        is_other = bool(kinds) and "type" in given and given["type"] not in kinds  # which is the error
        for name in () if is_other else given.keys() - known:
            raise PydanticCustomError("unknown", "", {"name": ascii(name)[1:-1], "close": close_name(name, known)})
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema for programs: a field that may be left out may be null."""
        schema = handler(core_schema)
        of_object = handler.resolve_ref_schema(schema)
        fields, null = of_object.setdefault("properties", {}), {"type": "null"}
        for name in fields.keys() - of_object.get("required", ()):
            if null not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], null]}
        return schema


class SentFields(Fields):
    """The fields of a part of a chat, with what other servers and programs write on such parts."""

    id: NoEffect = None
    cache_control: NoEffect = None  # all beginnings of prompts are cached
    prompt_cache_breakpoint: NoEffect = None
    index: NoEffect = None  # of a stream
    provider_specific_fields: NoEffect = None
    extra_content: NoEffect = None
    annotations: NoEffect = None
    logprobs: NoEffect = None


def only(*kinds: str, fix: str) -> BeforeValidator:
    """For the field ``type``: an error says what other kinds need."""

    def check(kind: Any) -> Any:
        if kind not in kinds:
            raise ValueError(f"is {short_repr(kind)}; {fix}")
        return kind

    return BeforeValidator(check)


def wrong(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field} {problem}", param=field)


def validation_error(errors: Sequence[Mapping[str, Any]], place: str) -> ApiError:
    """The first of pydantic's errors, with the path of the field; ``place`` is where the object is."""
    error = errors[0]
    field = place + "".join(f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in error["loc"])
    field, value, context = field.removeprefix("."), error["input"], error.get("ctx", {})
    code = None
    match error["type"]:
        case "unknown":
            place, name, close = f"{field}." if field else "", context["name"], context["close"]
            message = f"unknown field '{place}{short(name)}'; {f'did you mean {close}?' if close else 'leave it out'}"
            return ApiError(400, message, param=place + name[:60], code="unknown_field")
        case "unsupported":
            problem = f"is not supported here: {context['fix']}"
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
