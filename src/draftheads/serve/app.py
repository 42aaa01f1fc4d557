"""The routes, and the server that runs them: it listens at once, loads the model in a thread, and drains on a signal.

A route reads its request on a thread, and waits for events of the model thread. The only file that knows uvicorn.
"""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftheads.decode.answer_forms import form_of
from draftheads.errors import CheckpointError, DraftHeadsError, InvalidTree, ModelNotFound, UnknownMethod
from draftheads.models.chat_template import template_of
from draftheads.serve.answers import Answers, EventStream, unless_gone
from draftheads.serve.call import Call
from draftheads.serve.chat_completions import ChatFields, read_chat
from draftheads.serve.completions import CompletionCall, CompletionFields, PromptScores, read_completion, score
from draftheads.serve.fields import ApiError, ErrorBody, api_error_of, validation_error
from draftheads.serve.guard import Guard, note_unfinished
from draftheads.serve.limited import in_thread
from draftheads.serve.load_models import HeadFields
from draftheads.serve.responses import ResponseFields, read_response
from draftheads.serve.scheduler import Scheduler
from draftheads.serve.state import ServedModel, Service

F = TypeVar("F")
T = TypeVar("T")
_LAST_BYTES_SECONDS = 5  # for clients to read the ends of their answers, once all are computed
_LARGE_BODY = 256 << 10  # bytes: it is parsed on a thread
_READ_BYTES = 4096  # at a time: h11 takes 0.1 ms for a chunk of a body, which may have one byte; others wait meanwhile
_DRAIN_SECONDS = 30  # for answers that are under way when the first signal comes
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Load = Callable[[], tuple[Iterable[ServedModel], Scheduler]]
_PAGE = Path(__file__).parent / "page"
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_KEY = [Security(HTTPBearer(auto_error=False))]  # for /openapi.json; the guard checks keys


def create_app(service: Service) -> FastAPI:
    """The application; requests are answered once ``service`` is open."""
    app = FastAPI(
        title="draftheads",
        version=version("draftheads"),
        description="Every route with GET also answers HEAD.",
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.add_middleware(
        Guard, access=service.access, count=service.metrics.request, body_bytes=service.limits.body_bytes
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    key = _KEY if service.access.api_keys else []
    _add_state_routes(app, service, key)
    router = APIRouter(prefix="/v1", dependencies=key, route_class=_JsonRoute)
    _add_model_routes(app, router, service)
    _add_answer_routes(router, service)
    app.include_router(router)
    for file in _PAGE.iterdir():  # a mount at / would answer wrong methods of all other routes, too
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.get(path, include_in_schema=False)(_sender_of(file))
    return app


class _JsonRequest(Request):
    """Its body is JSON, which knows no NaN and no Infinity."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _LARGE_BODY:
            return json.loads(body, parse_constant=_no_number)
        # the parser in C lets other threads run only where it calls Python: at each object and each integer
        hooks: dict[str, Any] = {"object_hook": lambda value: value, "parse_int": lambda word: int(word)}  # noqa: PLW0108
        return await asyncio.to_thread(json.loads, body, parse_constant=_no_number, **hooks)


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


def _no_number(word: str) -> float:
    raise json.JSONDecodeError(f"{word} is not a number of JSON", word, 0)


def _sender_of(file: Path) -> Callable[[], FileResponse]:
    return lambda: FileResponse(file)


def _add_state_routes(app: FastAPI, service: Service, key: list[Any]) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Status 200 while the process works; 503 also if requests wait and the model does nothing for a minute."""
        return _state("failed" if service.lost else "stalled" if service.is_stalled else "ok", good="ok")

    @app.get("/ready")
    async def ready() -> Response:
        """Status 200 while new requests are accepted."""
        return _state(service.phase if service.lost is None else "failed", good="ready")

    @app.get("/metrics", dependencies=key, responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _state(status: str, *, good: str) -> JSONResponse:
    return JSONResponse({"status": status}, status_code=200 if status == good else 503)


def _add_model_routes(app: FastAPI, router: APIRouter, service: Service) -> None:
    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The served models."""
        _ = service.scheduler  # 503 while it loads
        return {"object": "list", "data": [_described(service, model) for model in service.models.values()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One served model."""
        return _described(service, service.model(name))

    @app.post("/admin/head", dependencies=_KEY)
    async def head(fields: HeadFields) -> dict[str, Any]:
        """Exchanges the draft head of a model. The guard checks the admin key."""
        model = service.model(fields.model)
        assert service.exchange is not None, "a service with an admin key can exchange heads"
        try:
            await asyncio.to_thread(service.exchange, fields.model, fields.head)
        except ModelNotFound as error:
            raise ApiError(404, str(error), param="head", code="head_not_found") from None
        except (CheckpointError, UnknownMethod, InvalidTree) as error:
            raise ApiError(400, str(error), param="head", code="head_does_not_fit") from None
        except DraftHeadsError as error:
            raise api_error_of(error) from None
        service.models[fields.model] = replace(model, head=fields.head)
        return fields.model_dump()


def _add_answer_routes(router: APIRouter, service: Service) -> None:
    async def ready() -> None:
        _ = service.scheduler  # 503 while it loads, before the body is checked

    is_ready = [Depends(ready)]

    @router.post("/chat/completions", responses=_STREAM, dependencies=is_ready)
    async def chat(request: Request, fields: ChatFields) -> Response:
        """Answers a chat."""
        return await _answered(request, service, await _read(request, service, read_chat, fields))

    @router.post("/responses", responses=_STREAM, dependencies=is_ready)
    async def responses(request: Request, fields: ResponseFields) -> Response:
        """Answers a chat, with the interface that OpenAI's newer clients use."""
        return await _answered(request, service, await _read(request, service, read_response, fields))

    @router.post("/completions", responses=_STREAM, dependencies=is_ready)
    async def completions(request: Request, fields: CompletionFields) -> Response:
        """Continues a text."""
        call = await _read(request, service, read_completion, fields)
        if call.num_scored is not None:
            call.scores.extend(await unless_gone(request.receive, _scores(service, call, call.num_scored)))
        return await _answered(request, service, call)


async def _read(request: Request, service: Service, function: Callable[[F, Service], T], fields: F) -> T:
    """Reads the fields, until the client disconnects."""
    return await unless_gone(request.receive, service.read(request.state.client, function, fields))


async def _answered(request: Request, service: Service, call: Call) -> Response:
    """The response to a request that was read: submits its jobs; a full queue is an error also of a stream."""
    answers = Answers(service, call, request.state.client, start=request.state.start)
    answers.submit()
    if call.params.fields.stream:
        return EventStream(call.chunks(answers.events()), answers.cancel, named=call.has_named_events)
    try:
        await unless_gone(request.receive, answers.finish())
    finally:
        answers.cancel()
    # on a thread: many log-probabilities take a while
    content = await asyncio.to_thread(lambda: to_json(call.response()))
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


def _described(service: Service, model: ServedModel) -> dict[str, Any]:
    engine = service.engine(model.name)
    details = {"head": model.head, "base": model.base, "context": engine.model.max_positions}
    details |= {"chat": template_of(engine.model) is not None, "thinks": form_of(engine.model).thinking is not None}
    details |= {"adapter": model.adapter} if model.adapter else {}
    usual = {"id": model.name, "object": "model", "created": model.created, "owned_by": "draftheads"}
    return {**usual, "draftheads": details}


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):
        kind = request.headers.get("content-type", "")[:60]
        return ApiError(415, f"Content-Type is {kind!r}; it must be application/json").response()
    errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # without "body"
    return validation_error(errors, "").response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        path = ascii(request.url.path[:100])[1:-1]
        words = {404: f"there is no {path} here", 405: f"{request.method} is not a method of {path}"}
        code = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        headers = error.headers
        error = ApiError(error.status_code, words.get(error.status_code, error.detail), code=code)
        error.headers = headers
    return error.response()


async def _gone(_: Request, __: Exception) -> Response:
    """The client has gone: nobody reads this."""
    return Response(status_code=499)


def _connection_of(service: Service) -> type[H11Protocol]:
    limits = service.limits

    class Connection(H11Protocol):
        """Is closed when a request stops coming. The guard refuses one too many, and so logs and counts it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.app_state = {**self.app_state, "is_full": self._is_full}

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
            self._wait_for_more()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_for_more()

        def _is_full(self) -> bool:
            return len(self.connections) >= limits.max_connections or len(self.tasks) > limits.max_connections

        def _wait_for_more(self) -> None:
            # uvicorn cancels its timer when data comes
            if self.timeout_keep_alive_task is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                self.timeout_keep_alive_task = self.loop.call_later(limits.incoming_seconds, self._give_up)

        def _give_up(self) -> None:
            # of a request whose body stops the guard knows
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                note_unfinished(service.metrics.request, (self.client or ("-",))[0])
            self.transport.close()

    return Connection


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process with a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(service: Service) -> HttpServer:
    """The server of a service; ``server.serve(sockets=[listen(host, port)])`` runs it."""
    config = uvicorn.Config(
        create_app(service),
        http=_connection_of(service),  # of h11, the only one with a limit for headers
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could write any address into them
        timeout_keep_alive=service.limits.keep_alive_seconds,
        timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        h11_max_incomplete_event_size=service.limits.header_bytes,
    )
    return HttpServer(config)


async def serve(service: Service, listening: socket.socket, load: _Load, *, on_ready: Callable[[], object]) -> bool:
    """Serves until a signal comes or the accelerator fails; a second signal ends it at once.

    Args:
        service: to serve.
        listening: where.
        load: gives the models and their scheduler, not started. It runs in a thread; meanwhile /ready is 503.
        on_ready: called once models are served.

    Returns:
        False if a thread still runs: ``load``, the reading of a request, or a step of the model that did not end.
    """
    server = http_server(service)
    loading = in_thread(load)[1]
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            server.force_exit = True
            service.close()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(stop.wait())
    try:
        loaded = asyncio.ensure_future(asyncio.wrap_future(loading))
        tasks: set[asyncio.Future[Any]] = {loaded, stopping, running}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            models, scheduler = loaded.result()
            scheduler.on_lost = lambda: loop.call_soon_threadsafe(stop.set)
            scheduler.start()
            await asyncio.to_thread(service.open, models, scheduler)
            on_ready()
            await asyncio.wait(tasks - {loaded}, return_when=asyncio.FIRST_COMPLETED)
        await service.drain(_DRAIN_SECONDS)
    finally:
        server.should_exit = True
        stopping.cancel()
        await running
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        is_idle = service.close()
    if service.lost is not None:
        raise service.lost
    return is_idle and loading.done()
