"""Errors in the form of OpenAI's API: a status and ``{"error": {"message", "type", "param", "code"}}``."""

import json
import math
from typing import Any

from pydantic import BaseModel
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
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, Any]:
        """The JSON object of the response.

        >>> ApiError(400, "n is 0; it must be at least 1", param="n").body()["error"]["type"]
        'invalid_request_error'
        """
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        fields = ErrorFields(message=self.detail, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=fields).model_dump()

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
