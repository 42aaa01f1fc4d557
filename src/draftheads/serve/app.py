"""The routes. Each reads its request on a thread, and waits for events of the model thread."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from draftheads.errors import CheckpointError, DraftHeadsError, ModelNotFound
from draftheads.models.chat_template import template_of, thinking_tags
from draftheads.serve.answers import Answers, EventStream, unless_gone
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.body import read_body, read_json
from draftheads.serve.call import Call
from draftheads.serve.chat_completions import read_chat
from draftheads.serve.completions import CompletionCall, read_completion
from draftheads.serve.fields import read_fields
from draftheads.serve.guard import Guard
from draftheads.serve.head_replacement import Busy, HeadFields
from draftheads.serve.json_bytes import json_bytes
from draftheads.serve.openapi import document
from draftheads.serve.responses import read_response
from draftheads.serve.scoring import PromptScores, score
from draftheads.serve.state import ServedModel, Service

T = TypeVar("T")
_PAGE = Path(__file__).parent / "page"


def create_app(service: Service) -> FastAPI:
    """The application; requests are answered once ``service`` is open."""
    app = FastAPI(title="draftheads", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, access=service.access, count=service.metrics.request, log_requests=service.log_requests)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    _add_state_routes(app, service)
    _add_model_routes(app, service)
    _add_answer_routes(app, service)
    _add_admin_route(app, service)
    for (
        file
    ) in _PAGE.iterdir():  # a route for each, as a mount at / would answer wrong methods of all other routes, too
        app.add_route("/" if file.name == "index.html" else f"/{file.name}", partial(_file, file))
    if service.schema:
        _add_schema_route(app, service)
    return app


def _add_schema_route(app: FastAPI, service: Service) -> None:
    @app.get("/openapi.json")
    async def schema() -> Response:
        return Response(content, media_type="application/json")

    content = json_bytes(document(app, service.access))


async def _file(path: Path, _: Request) -> Response:
    return FileResponse(path)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        return _state("ok" if service.lost is None else "failed", good="ok")

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return _state(service.phase if service.lost is None else "failed", good="ready")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _state(status: str, *, good: str) -> JSONResponse:
    return JSONResponse({"status": status}, status_code=200 if status == good else 503)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        _ = service.scheduler  # 503 while it loads
        return {"object": "list", "data": [_described(service, model) for model in service.models.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _described(service, service.model(name))


def _add_answer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(request, service, await _read(request, service, read_chat))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _answered(request, service, await _read(request, service, read_response))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        call = await _read(request, service, read_completion)
        if call.num_scored is not None:
            scores = await unless_gone(request.receive, _scores(service, call, call.num_scored))
            call.scores.extend(scores)
        return await _answered(request, service, call)


async def _read(request: Request, service: Service, read: Callable[[bytes, Service], T]) -> T:
    _ = service.scheduler  # 503 while it loads
    body = await read_body(request, service.limits)
    return await service.read(request.state.client, read, body, service)


async def _answered(request: Request, service: Service, call: Call) -> Response:
    """The response to a request that was read: submits its jobs; a full queue is an error also of a stream."""
    answers = Answers(service, call, request.state.client, start=request.state.start)
    answers.submit()
    if call.params.fields.stream:
        return EventStream(call.chunks(answers.events()), answers.cancel, service.write, named=call.has_named_events)
    try:
        await unless_gone(request.receive, answers.finish())
    finally:
        answers.cancel()
    content = await service.write(lambda: json_bytes(call.response()))
    return Response(content, media_type="application/json")


async def _scores(service: Service, call: CompletionCall, num_top: int) -> list[PromptScores]:
    """Log-probabilities of the prompts, one prompt after another."""
    scores = []
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            for prompt in call.prompts:
                async with service.scoring:
                    scores.append(await score(service.scheduler, call.params.engine, prompt.token_ids, num_top))
    except TimeoutError:
        raise ApiError(504, "the deadline passed before the prompts were scored", code="deadline") from None
    except DraftHeadsError as error:  # the server shuts down
        raise api_error_of(error) from None
    return scores


def _add_admin_route(app: FastAPI, service: Service) -> None:
    """Replaces the draft head of a model while it is served. The guard checks the admin key."""

    @app.post("/admin/head")
    async def head(request: Request) -> dict[str, Any]:
        _ = service.scheduler
        assert service.heads is not None, "a service with an admin key can replace heads"
        fields = read_fields(HeadFields, read_json(await read_body(request, service.limits), service.limits))
        name, wanted = fields.model, fields.head
        model = service.model(name)
        try:
            result = await asyncio.to_thread(
                service.heads.replace, name, wanted, weights=model.weights, force=fields.force
            )
        except DraftHeadsError as error:
            raise _refusal(error) from None
        if result.replaced:
            service.models[name] = replace(model, head=wanted)
        counts = asdict(result)
        old, new = counts.pop("old"), counts.pop("new")
        return {"model": name, "head": wanted, "tokens_per_step": {"old": old, "new": new}, **counts}


def _refusal(error: DraftHeadsError) -> ApiError:
    match error:
        case Busy():
            return ApiError(409, str(error), code="busy", retry_after=10)
        case ModelNotFound():
            return ApiError(404, str(error), param="head", code="head_not_found")
        case CheckpointError():
            return ApiError(400, str(error), param="head", code="head_does_not_fit")
        case _:
            return api_error_of(error)


def _described(service: Service, model: ServedModel) -> dict[str, Any]:
    engine = service.engine(model.name)
    details = {"head": model.head, "base": model.base, "context": engine.model.max_positions}
    details |= {"chat": template_of(engine.model) is not None, "thinks": thinking_tags(engine.model) is not None}
    details |= {"adapter": model.adapter} if model.adapter else {}
    usual = {"id": model.name, "object": "model", "created": model.created, "owned_by": "draftheads"}
    return {**usual, "draftheads": details}


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path[:100])[1:-1]
    words = {404: f"there is no {path} here", 405: f"{request.method} is not a method of {path}"}
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    response = ApiError(error.status_code, words.get(error.status_code, str(error.detail)), code=code).response()
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, error: Exception) -> Response:
    """The client has gone: nobody reads this."""
    return Response(status_code=499)
