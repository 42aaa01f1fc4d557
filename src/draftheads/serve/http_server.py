"""Runs the application: listens at once, loads the model in a thread, and drains on SIGTERM or SIGINT.

The only file that knows uvicorn's server.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import uvicorn

from draftheads.serve.app import create_app
from draftheads.serve.scheduler import Scheduler
from draftheads.serve.state import ServedModel, Service

_LAST_BYTES_SECONDS = 5  # for clients to read the ends of their answers, once all are computed
_DRAIN_SECONDS = 30  # for answers that are under way when the first signal comes
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Load = Callable[[], tuple[Iterable[ServedModel], Scheduler]]


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process with a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(service: Service) -> HttpServer:
    """The server of a service; ``server.serve(sockets=[listen(host, port)])`` runs it."""
    config = uvicorn.Config(
        create_app(service),
        http="h11",  # the only one with a limit for headers
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could write any address into them
        limit_concurrency=service.limits.max_connections,
        timeout_keep_alive=service.limits.keep_alive_seconds,
        timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        h11_max_incomplete_event_size=service.limits.header_bytes,
    )
    return HttpServer(config)


async def serve(
    service: Service,
    listening: socket.socket,
    load: _Load,
    *,
    on_ready: Callable[[], object],
) -> bool:
    """Serves until a signal comes or the accelerator fails; a second signal ends it at once.

    Args:
        service: to serve.
        listening: where.
        load: gives the models and their scheduler, not started. It runs in a thread; meanwhile /ready is 503.
        on_ready: called once models are served.

    Returns:
        False if the signal came while ``load`` was running; its thread still is.
    """
    server = http_server(service)
    loading = _in_thread(load)
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
            service.open(models, scheduler)
            on_ready()
            await asyncio.wait(tasks - {loaded}, return_when=asyncio.FIRST_COMPLETED)
        await service.drain(_DRAIN_SECONDS)
    finally:
        server.should_exit = True
        stopping.cancel()
        await running
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        service.close()
    if service.lost is not None:
        raise service.lost
    return loading.done()


def _in_thread(load: _Load) -> Future[tuple[Iterable[ServedModel], Scheduler]]:
    """Runs a function in a thread that does not hold up the end of the process."""
    future: Future[tuple[Iterable[ServedModel], Scheduler]] = Future()

    def run() -> None:
        try:
            future.set_result(load())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    Thread(target=run, name="draftheads-loading", daemon=True).start()
    return future
