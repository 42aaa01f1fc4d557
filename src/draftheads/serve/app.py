"""The routes. Each reads its request on a thread, and waits for events of the model thread."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from draftheads.errors import DraftHeadsError
from draftheads.serve.admin import add_admin_routes
from draftheads.serve.answers import Answers, unless_gone
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.body import read_body
from draftheads.serve.chat_completions import ChatCall, read_chat
from draftheads.serve.completions import CompletionCall, read_completion
from draftheads.serve.event_stream import EventStream
from draftheads.serve.guard import Guard
from draftheads.serve.scoring import score
from draftheads.serve.state import ServedModel, Service

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
    add_admin_routes(app, service)
    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """The chat page. A route for each file, as a mount at / would answer wrong methods of all other routes, too."""
    for file in _PAGE.iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.add_route(path, partial(_file, file))


async def _file(path: Path, _: Request) -> Response:
    return FileResponse(path)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"status": service.phase}, status_code=200 if service.phase == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
        _ = service.scheduler
        body = await read_body(request, service.limits)
        call = await service.read(request.state.client, read_chat, body, service)
        return await _answered(request, service, call, _answers(request, service, call, call.messages))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _ = service.scheduler
        body = await read_body(request, service.limits)
        call = await service.read(request.state.client, read_completion, body, service)
        if call.num_scored is not None:
            return await unless_gone(request.receive, _scored(request, service, call))
        return await _answered(request, service, call, _answers(request, service, call))


def _answers(
    request: Request, service: Service, call: ChatCall | CompletionCall, messages: list[dict[str, Any]] | None = None
) -> Answers:
    """The answers to a request that was read; complete ones are recorded, if the client and the server want it."""
    answers = Answers(service, call.requests, call.params, request.state.client, start=request.state.start)
    if call.params.fields.store:
        answers.on_finish = partial(service.record, call.params.lane.model, messages=messages)
    return answers


async def _answered(request: Request, service: Service, call: ChatCall | CompletionCall, answers: Answers) -> Response:
    """The response to a request that was read: submits its jobs; a full queue is an error also of a stream."""
    await answers.submit()
    if call.params.fields.stream:
        return EventStream(call.chunks(answers), answers.cancel)
    async with answers:
        await unless_gone(request.receive, answers.finish())
    return JSONResponse(await service.write(call.response))


async def _scored(request: Request, service: Service, call: CompletionCall) -> Response:
    """A completion with log-probabilities of its prompts, one prompt after another."""
    assert call.num_scored is not None
    scores = []
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            for prompt in call.prompts:
                async with service.scoring:
                    scores.append(await score(service.scheduler, call.params.engine, prompt.token_ids, call.num_scored))
    except TimeoutError:
        raise ApiError(504, "the deadline passed before the prompts were scored", code="deadline") from None
    except DraftHeadsError as error:  # the server shuts down
        raise api_error_of(error) from None
    answers = _answers(request, service, call)
    await answers.submit()
    async with answers:
        await answers.finish()
    return JSONResponse(await service.write(call.response, scores))


def _described(service: Service, model: ServedModel) -> dict[str, Any]:
    engine = service.engine(model.name)
    details = {"head": model.head, "base": model.base, "context": engine.model.max_positions}
    details |= {"adapter": model.adapter} if model.adapter else {}
    usual = {"id": model.name, "object": "model", "created": model.created, "owned_by": "draftheads"}
    return {**usual, "draftheads": details}


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
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
