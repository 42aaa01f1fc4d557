"""Errors in the form of OpenAI's API: a status and ``{"error": {"message", "type", "param", "code"}}``."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from draftheads.errors import (
    DeviceLost,
    DraftHeadsError,
    InvalidPrompt,
    InvalidSettings,
    PromptTooLong,
    QueueFull,
    ShuttingDown,
    TooLarge,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorFields(BaseModel):
    """What clients are told."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The JSON object of a response without an answer."""

    error: ErrorFields


@dataclass(eq=False)
class ApiError(Exception):
    """A request that gets no answer."""

    status: int  # of the HTTP response
    message: str  # what is wrong and how to fix it
    _: KW_ONLY
    param: str | None = None  # the field of the request that is wrong
    code: str | None = None  # for programs, such as "model_not_found"
    retry_after: float | None = None  # seconds after which to try again

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 408:
            headers["connection"] = "close"
        return headers

    def body(self) -> dict[str, Any]:
        """The JSON object of the response.

        >>> ApiError(400, "n is 0; it must be at least 1", param="n").body()["error"]["type"]
        'invalid_request_error'
        """
        kind = _TYPES.get(self.status, "invalid_request_error")
        fields = ErrorFields(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=fields).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


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
