<<<<<<< HEAD
"""A server in a thread, on loopback, with a tiny model that reads any text."""

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx2
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from byte_tokenizers import byte_level
from draftheads.chat_template import read_template
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.models.model import TargetModel
from draftheads.serve.guard import Access
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.scheduler import Limits, Scheduler
from draftheads.serve.server import HttpServer, http_server, listen
from draftheads.serve.service import ServedModel, Service
from draftheads.shapes import BestFirst
from families import SMALL, tiny_head

NAME = "tiny"
USER = {"role": "user", "content": "the cat sat on"}


def tiny_engines(template: str | None = "hermes") -> dict[str, Engine]:
    """A random model that can write all bytes, with a head and plain; it never ends its text by itself."""
    tokenizer = byte_level()
    torch.manual_seed(5)
    sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(requires_grad=False)
    target = TargetModel(model, tokenizer, "org/tiny", chat_template=read_template(template))
    plain = Engine(target)
    drafting = Engine(target, tiny_head("medusa", target), shape=BestFirst(12))
    return {NAME: drafting, f"{NAME}:plain": plain}


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    url: str
    service: Service
    server: HttpServer
    engines: Mapping[str, Engine]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    def post(self, route: str, body: Any, **options: Any) -> httpx2.Response:
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        content = json.dumps(body)  # httpx2 would not send half characters
        return httpx2.post(f"{self.url}/v1/{route}", content=content, headers=headers, timeout=60, **options)

    def chat(self, **fields: Any) -> httpx2.Response:
        body = {"model": NAME, "messages": [USER], "max_tokens": 12, "temperature": 0, **fields}
        return self.post("chat/completions", body)

    def chat_with(self, headers: dict[str, str], **fields: Any) -> httpx2.Response:
        """A chat with headers."""
        body = {"model": NAME, "messages": [USER], "max_tokens": 4, "temperature": 0, **fields}
        return self.post("chat/completions", body, headers=headers)

    def complete(self, **fields: Any) -> httpx2.Response:
        return self.post("completions", {"model": NAME, "prompt": "the cat", "max_tokens": 12, **fields})

    def plain_answer(self, prompt: Any, **settings: Any) -> GenerationResult:
        """What the offline engine says without drafts."""
        return self.engines[f"{NAME}:plain"].generate([prompt], **settings)[0]


@contextmanager
def running(
    engines: Mapping[str, Engine],
    limits: HttpLimits | None = None,
    access: Access | None = None,
    **scheduler_limits: int,
) -> Iterator[Running]:
    """Serves the engines until the block ends."""
    service = Service(limits, access)
    scheduler = Scheduler(engines, Limits(**{"kv_bytes": 1 << 26, **scheduler_limits}))
    scheduler.start()
    models = [ServedModel(name, NAME, None if name.endswith("plain") else "medusa") for name in engines]
    service.open(models, scheduler)
    server = http_server(service)
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            wait_until_open("127.0.0.1", port)
            yield Running(f"http://127.0.0.1:{port}", service, server, engines)
        finally:
            service.close()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def wait_until_open(host: str, port: int) -> None:
    """The socket listens already, so a connection waits until it is accepted."""
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
=======
"""A scheduler that tests drive iteration by iteration, and inboxes that collect the events of jobs."""

import queue
from collections.abc import Sequence
from typing import Any

from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.scheduler import Job, JobFailed, Lane, Limits, Scheduler
from draftheads.settings import SamplingSettings

ROOM = 1 << 24  # bytes: more than tiny models need


class Inbox:
    """Collects a job's events; any thread may wait for its end."""

    def __init__(self) -> None:
        self.events: list[StreamEvent | JobFailed] = []
        self.end: queue.Queue[StreamEvent | JobFailed] = queue.Queue()

    def __call__(self, event: StreamEvent | JobFailed) -> None:
        self.events.append(event)
        if self.is_last(event):
            self.end.put(event)

    @staticmethod
    def is_last(event: StreamEvent | JobFailed) -> bool:
        return isinstance(event, JobFailed) or event.finish_reason is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events if isinstance(event, StreamEvent) for token in event.token_ids)

    @property
    def ends(self) -> list[StreamEvent | JobFailed]:
        return [event for event in self.events if self.is_last(event)]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens of a finished answer."""
        assert len(self.ends) == 1
        assert isinstance(self.events[-1], StreamEvent), self.events[-1]
        return self.token_ids

    @property
    def failure(self) -> JobFailed:
        assert len(self.ends) == 1
        assert isinstance(self.events[-1], JobFailed)
        return self.events[-1]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request_of(engine: Engine, prompt: Sequence[int], **settings: Any) -> Request:
    return engine.request(prompt, SamplingSettings(**{"max_new_tokens": 12, "ignore_eos": True, **settings}))


def plain_answer(engine: Engine, prompt: Sequence[int], **settings: Any) -> tuple[int, ...]:
    """By the offline engine, alone and without drafts."""
    settings = {"max_new_tokens": 12, "ignore_eos": True, **settings}
    return Engine(engine.model, max_batch_size=1).generate([prompt], **settings)[0].token_ids


def scheduler_of(engines: dict[str, Engine], *, clock: Any = None, **limits: Any) -> Scheduler:
    """Not started: tests call :func:`iterate`."""
    options = {} if clock is None else {"clock": clock}
    return Scheduler(engines, Limits(**{"kv_bytes": ROOM, **limits}), **options)


def submit(
    scheduler: Scheduler,
    prompt: Sequence[int],
    lane: Lane | None = None,
    *,
    client: str = "someone",
    deadline: float | None = None,
    **settings: Any,
) -> tuple[Job, Inbox]:
    lane = lane or Lane(next(iter(scheduler.engines)))
    inbox = Inbox()
    request = request_of(scheduler.engines[lane.model], prompt, **settings)
    job = Job(request, lane, client, inbox, deadline)
    scheduler.submit(job)
    return job, inbox


def iterate(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        scheduler._iterate()


def run_to_end(scheduler: Scheduler, *, most: int = 2000) -> None:
    """Until nothing is left to do."""
    for _ in range(most):
        if not scheduler._has_work():
            return
        scheduler._iterate()
    raise AssertionError(f"not finished after {most} iterations: {scheduler.snapshot()}")


def check_empty(scheduler: Scheduler) -> None:
    """Nothing is kept of ended jobs but cached prefixes."""
    found = scheduler.snapshot()
    assert (found.waiting, found.reading, found.running, found.lanes, found.kv_bytes) == (0, 0, 0, 0, 0)
    assert not scheduler._live
    assert not scheduler._decoder.lanes
    assert not scheduler._decoder._reading
>>>>>>> ea0a5af (Tests of the scheduler's answers: in chunks, after cached texts, beside other requests)
