"""``/openapi.json``: the routes, the fields of their requests, and their errors, in the form of OpenAPI 3.1.

The schemas of requests are made from the models that read them.
"""

import mimetypes
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from draftheads.serve.api_error import ErrorBody
from draftheads.serve.chat_completions import ChatFields
from draftheads.serve.completions import CompletionFields
from draftheads.serve.fields import Fields
from draftheads.serve.guard import Access, needs_key
from draftheads.serve.head_replacement import HeadFields
from draftheads.serve.response_input import ResponseFields

_JSON, _STREAM = "application/json", "text/event-stream"
_ERRORS = (400, 403, 431, 500, 503)  # of every route: no HTTP, a foreign page, large headers, a fault, too many clients
_OF_BODIES = (404, 408, 413, 415)
_NAMES = "#/components/schemas/{model}"


@dataclass(frozen=True)
class Operation:
    """A method of a route."""

    summary: str
    _: KW_ONLY
    body: type[Fields] | None = None  # the fields of the request
    media: tuple[str, ...] = (_JSON,)  # of the response
    errors: tuple[int, ...] = ()  # statuses, besides those that every route has


# a new route of the server is added here, too
OPERATIONS = {
    ("GET", "/health"): Operation("Status 200 while the process works"),
    ("GET", "/ready"): Operation("Status 200 while new requests are accepted"),
    ("GET", "/metrics"): Operation("Counts for Prometheus", media=("text/plain",)),
    ("GET", "/openapi.json"): Operation("This document"),
    ("GET", "/v1/models"): Operation("The served models"),
    ("GET", "/v1/models/{name}"): Operation("One served model", errors=(404,)),
    ("POST", "/v1/chat/completions"): Operation(
        "Answers a chat", body=ChatFields, media=(_JSON, _STREAM), errors=(*_OF_BODIES, 429, 504)
    ),
    ("POST", "/v1/responses"): Operation(
        "Answers a chat, with the interface that OpenAI's newer clients use",
        body=ResponseFields,
        media=(_JSON, _STREAM),
        errors=(*_OF_BODIES, 429, 504),
    ),
    ("POST", "/v1/completions"): Operation(
        "Continues a text", body=CompletionFields, media=(_JSON, _STREAM), errors=(*_OF_BODIES, 429, 504)
    ),
    ("POST", "/admin/head"): Operation(
        "Replaces the draft head of a model", body=HeadFields, errors=(*_OF_BODIES, 401, 409)
    ),
}


def document(app: FastAPI, access: Access) -> dict[str, Any]:
    """The document of an application with its routes."""
    paths: dict[str, dict[str, Any]] = {}
    bodies: list[type[BaseModel]] = [ErrorBody]
    for route in app.routes:
        assert isinstance(route, Route), "nothing is mounted"
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = OPERATIONS.get((method, path)) or _file_of_page(path)
            bodies += [] if operation.body is None else [operation.body]
            paths.setdefault(path, {})[method.lower()] = _described(operation, path, access)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_NAMES)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "draftheads",
            "version": version("draftheads"),
            "description": "Every route with GET also answers HEAD.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _file_of_page(path: str) -> Operation:
    name = "index.html" if path == "/" else path
    return Operation("A file of the chat page", media=(mimetypes.guess_type(name)[0] or "text/plain",))


def _described(operation: Operation, path: str, access: Access) -> dict[str, Any]:
    has_key = needs_key(path, access)
    errors = {*_ERRORS, *operation.errors, *([401] if has_key else [])}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "OK", "content": {media: {} for media in operation.media}},
            **{str(status): _error(status) for status in sorted(errors)},
        },
    }
    if "{name}" in path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        schema = {"$ref": _NAMES.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if has_key:
        described["security"] = [{"key": []}]
    return described


def _error(status: int) -> dict[str, Any]:
    schema = {"$ref": _NAMES.format(model="ErrorBody")}
    return {"description": HTTPStatus(status).phrase, "content": {_JSON: {"schema": schema}}}
