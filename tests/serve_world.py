"""A server in a thread, on loopback, with a tiny model that reads any text."""

import asyncio
import atexit
import json
import os
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import httpx2
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from byte_tokenizers import byte_level
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult, Request, StreamEvent
from draftheads.models.chat_template import read_template
from draftheads.models.model import TargetModel
from draftheads.serve.app import HttpServer, http_server
from draftheads.serve.chat_completions import ChatCall, ChatFields, read_chat
from draftheads.serve.guard import Access, HttpLimits
from draftheads.serve.limited import Trials
from draftheads.serve.options import listen
from draftheads.serve.responses import ResponseCall, ResponseFields, read_response
from draftheads.serve.scheduler import Limits, Scheduler
from draftheads.serve.state import ServedModel, Service, Untried
from draftheads.speculation.shapes import BestFirst
from families import SMALL, tiny_head

T = TypeVar("T")
NAME = "tiny"
PLAIN = f"{NAME}:plain"
SNAPSHOTS = Path(__file__).parent / "serve" / "snapshots"
USER = {"role": "user", "content": "the cat sat on"}


def tiny_engines(
    template: str | None = "hermes", *, positions: int = 2048, tokens: Collection[str] = ()
) -> dict[str, Engine]:
    """A random model that can write all bytes, with a head and plain; it never ends its text by itself.

    ``template`` may be one's name, or the template; ``tokens`` are special ones.
    """
    template = template if template and "{" in template else read_template(template)
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
    torch.manual_seed(5)
    sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": positions, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(requires_grad=False)
    target = TargetModel(model, tokenizer, "org/tiny", chat_template=template)
    plain = Engine(target)
    drafting = Engine(target, tiny_head("medusa", target), shape=BestFirst(12))
    return {NAME: drafting, PLAIN: plain}


_TRIALS = Trials()  # of all services without a server
atexit.register(_TRIALS.close)


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

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.engines[NAME].model.tokenizer(text)["input_ids"]
        return ids

    def post(self, route: str, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx2.Response:
        content = json.dumps({"model": NAME, **fields})  # httpx2 would not send half characters
        headers = {"content-type": "application/json", **(headers or {})}
        return httpx2.post(f"{self.url}/v1/{route}", content=content, headers=headers, timeout=600)

    def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx2.Response:
        body = {"messages": [USER], "max_tokens": 12, "temperature": 0, **fields}
        return self.post("chat/completions", headers, **body)

    def complete(self, **fields: Any) -> httpx2.Response:
        return self.post("completions", **{"prompt": "the cat", "max_tokens": 12, **fields})

    def chat_call(self, **fields: Any) -> ChatCall:
        """A chat that is read and not answered."""
        body = ChatFields.model_validate({"model": NAME, "messages": [USER], **fields})
        return self.read(read_chat, body)

    def response_call(self, **fields: Any) -> ResponseCall:
        body = ResponseFields.model_validate({"model": NAME, "input": USER["content"], **fields})
        return self.read(read_response, body)

    def read(self, function: Callable[[Any, Service], T], fields: Any, *, compiles: bool = True) -> T:
        """A request that is read here, with what takes long in its process; ``compiles``: also grammars."""
        while True:
            try:
                return function(fields, self.service)
            except Untried as trial:
                if trial.compiler is not None and not compiles:
                    raise
                self.service.try_now(trial, self.service.trials.connect(trial.compiler))

    def prompt_of(self, call: ChatCall) -> str:
        """The text that the model reads."""
        return str(self.engines[NAME].model.tokenizer.decode(call.requests[0].prompt_ids))

    def plain_answer(self, prompt: Any, **settings: Any) -> GenerationResult:
        """What the offline engine says without drafts."""
        return self.engines[PLAIN].generate([prompt], **settings)[0]


@contextmanager
def listening(service: Service) -> Iterator[tuple[str, HttpServer]]:
    """Serves on a free port until the block ends."""
    server = http_server(service)
    with listen("127.0.0.1", 0) as free:
        address = free.getsockname()
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[free])))
        thread.start()
        try:
            # the socket listens already, so a connection waits until it is accepted
            assert httpx2.get(f"http://127.0.0.1:{address[1]}/health", timeout=600).status_code == 200
            yield f"http://127.0.0.1:{address[1]}", server
        finally:
            service.close()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def open_with(service: Service, engines: Mapping[str, Engine], **limits: int) -> None:
    """The engines are loaded; their names end in those of their heads."""
    scheduler = Scheduler(engines, Limits(**{"kv_bytes": 1 << 26, **limits}))
    scheduler.start()
    heads = {name: name.rpartition(":")[2] for name in engines} | {NAME: "medusa", PLAIN: None}
    service.open([ServedModel(name, NAME, heads[name]) for name in engines], scheduler)


@contextmanager
def running(
    engines: Mapping[str, Engine],
    limits: HttpLimits | None = None,
    access: Access | None = None,
    **scheduler_limits: int,
) -> Iterator[Running]:
    """Serves the engines until the block ends."""
    service = Service(limits, access)
    open_with(service, engines, **scheduler_limits)
    with listening(service) as (url, server):
        yield Running(url, service, server, engines)


def only_read(engines: Mapping[str, Engine]) -> Running:
    """No server: it reads requests and answers none."""
    service, none = Service(), cast("HttpServer", None)
    service.trials = _TRIALS
    scheduler = Scheduler(engines, Limits(kv_bytes=1 << 26))
    service.open([ServedModel(name, NAME, None) for name in engines], scheduler)
    return Running("", service, none, engines)


def events_of(server: Running, request: Request, text: str, step: int) -> list[tuple[int, StreamEvent]]:
    """As if the model wrote this text, and its end."""
    ids = [*server.engines[NAME].model.tokenizer(text)["input_ids"], 0]
    runs = [ids[at : at + step] for at in range(0, len(ids), step)]
    return [
        (0, request.append(run, num_drafted=len(run) - 1, logprobs=[-1.0] * len(run)))
        for run in runs
        if request.finish_reason is None
    ]


def bytes_of(choice: dict[str, Any]) -> bytes:
    """Of the tokens with log-probabilities."""
    return b"".join(bytes(each["bytes"]) for each in (choice["logprobs"] or {"content": []})["content"])


async def sent_chunks(call: Any, events: list[tuple[int, StreamEvent]]) -> list[dict[str, Any]]:
    async def given() -> AsyncGenerator[tuple[int, StreamEvent]]:
        for event in events:
            yield event

    return [chunk async for chunk in call.chunks(given())]


def answered(server: Running, text: str, *, step: int, **fields: Any) -> dict[str, Any]:
    """The parts of an answer; those of the stream have to be the same."""
    options = {"stream": True, "stream_options": {"include_draft": True}, "logprobs": True}
    streamed: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": [], "tokens": b""}
    call = server.chat_call(**fields, **options)
    for chunk in asyncio.run(sent_chunks(call, events_of(server, call.requests[0], text, step))):
        [choice] = chunk["choices"]
        for name in streamed.keys() & choice["delta"].keys():
            streamed[name] += choice["delta"][name]
            if "pieces" in choice:
                assert "".join(piece for piece, _ in choice["pieces"]) == choice["delta"][name]
        streamed["tokens"] += bytes_of(choice)
        for each in choice["delta"].get("tool_calls", ()):
            if "id" in each:
                assert each["index"] == len(streamed["calls"])
                streamed["calls"].append((each["function"]["name"], each["function"]["arguments"]))
            else:
                name, arguments = streamed["calls"].pop()
                streamed["calls"].append((name, arguments + each["function"]["arguments"]))
    num_thought = call.usage().get("completion_tokens_details")
    whole = call.response()["choices"][0]
    assert call.usage().get("completion_tokens_details") == num_thought
    streamed |= {"reason": choice["finish_reason"], "num_thought": (num_thought or {}).get("reasoning_tokens", 0)}
    message = whole["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    assert (message["content"] or "", message.get("reasoning_content", "")) == (
        streamed["content"],
        streamed["reasoning_content"],
    )
    assert (calls, bytes_of(whole), whole["finish_reason"]) == (
        streamed["calls"],
        streamed["tokens"],
        streamed["reason"],
    )
    return streamed


def raw_request(route: str, fields: Mapping[str, Any]) -> bytes:
    """The bytes of an HTTP request."""
    body = json.dumps(fields).encode()
    head = f"POST /v1/{route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


def check_wrong(response: httpx2.Response, param: str | None) -> None:
    """The request is refused, and this field is named."""
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The objects of a stream, or that of a whole answer."""
    lines = re.findall(r"^data: (\{.*)", response.text, re.MULTILINE) or [response.text]
    return list(map(json.loads, lines))


def texts_of(response: httpx2.Response) -> list[str]:
    """The texts of the answers to a chat or to completions, streamed or not."""
    assert response.status_code == 200, response.text
    texts: dict[int, str] = {}
    for chunk in chunks_of(response):
        for choice in chunk["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            texts.setdefault(choice["index"], "")
            texts[choice["index"]] += part.get("content") or part.get("text") or ""
    return [texts[index] for index in range(len(texts))]


def check_snapshot(name: str, text: str) -> None:
    """Compares a text with the file of this name, which DRAFTHEADS_SNAPSHOTS=write writes.

    Ids are numbered, so that equal ones stay equal; times and the digits of log-probabilities are left out.
    """
    ids: dict[str, int] = {}
    number = lambda found: f"{found[1]}{ids.setdefault(found[0], len(ids) + 1)}"  # noqa: E731
    text = re.sub(r"(?<=\")(chatcmpl-|cmpl-|resp_|msg_|fc_|call_|fp_)[0-9a-f]{8,}(?=\")", number, text)
    text = re.sub(r'(?<="created":|eated_at":|leted_at":)\d+', "0", text)
    text = re.sub(r"-?\d+\.\d{3,}(e-?\d+)?", "0.5", text)
    file = SNAPSHOTS / name
    if os.environ.get("DRAFTHEADS_SNAPSHOTS") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def metrics_of(url: str) -> dict[str, float]:
    """The values of ``/metrics`` by name and labels."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    assert all(name.startswith("draftheads_") for name, _ in pairs)
    return {name: float(value) for name, value in pairs}
