"""Many clients at once: honest ones, some that leave and some that attack. All answers are right, and nothing leaks.

There is little memory, so long answers are interrupted.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil
import pytest

from adapter_world import merged, saved_adapter
from draftheads.decode.engine import Engine
from draftheads.serve.guard import HttpLimits
from draftheads.settings import Grammar
from serve_process import wait_until
from serve_world import NAME, PLAIN, Running, raw_request, running, texts_of, tiny_engines
from thorough import some

KV_BYTES = 2048 * 384  # for 2,048 tokens: three long answers begin together and need more at their ends
LONG = 600  # tokens
PROMPTS = ["the cat sat", "naïve café", "the mat", "日本 cat", "two  spaces", "🙂"]
SYSTEM = {"role": "system", "content": "the cat sat on the mat and " * 6}  # a common beginning
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}


@dataclass(frozen=True)
class Question:
    """An honest request, and what plain decoding answers."""

    route: str
    body: dict[str, Any]
    texts: list[str]


def questions(server: Running, plain: Engine, models: tuple[str, ...]) -> list[Question]:
    """Chats and completions, greedy and sampled, with stop strings, several answers, and JSON."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        chat, ids = [SYSTEM, {"role": "user", "content": prompt}], server.ids(prompt)
        first = plain.generate([chat], max_new_tokens=30)[0].text
        sampled, form = {"temperature": 1.0, "seed": number}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        for asked, fields, settings in (
            (chat, {}, [{}]),
            (chat, {"n": 2, **sampled}, [sampled, {**sampled, "seed": number + 1}]),
            (chat, {"response_format": form}, [{"grammar": Grammar.json_schema(SCHEMA)}]),
            (chat, {"stop": first[5:7]}, [{"stop": first[5:7]}]),
            (ids, sampled, [sampled]),
        ):
            texts = [plain.generate([asked], max_new_tokens=30, **each)[0].text for each in settings]
            route, name = ("completions", "prompt") if asked is ids else ("chat/completions", "messages")
            body = {name: asked, "max_tokens": 30, "temperature": 0, **fields}
            found += [Question(route, {"model": model, **body}, texts) for model in models]
    return found


def long_questions(plain: Engine, models: tuple[str, ...]) -> list[Question]:
    """Whose answers need more memory than is reserved for them when they begin."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    found = []
    for prompt in PROMPTS[:3]:
        chat = [SYSTEM, {"role": "user", "content": prompt}]
        texts = [plain.generate([chat], max_new_tokens=LONG, **settings)[0].text]
        body = {"messages": chat, "max_tokens": LONG, **settings}
        found += [Question("chat/completions", {"model": model, **body}, texts) for model in models]
    return found


@asynccontextmanager
async def connected(server: Running, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that sends something and goes at the end of the block."""
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def honest(client: httpx2.AsyncClient, question: Question, *, stream: bool) -> None:
    """Asks, and checks the answer."""
    response = await client.post(f"/v1/{question.route}", json={**question.body, "stream": stream})
    assert texts_of(response) == question.texts
    assert not stream or response.text.endswith("\n\ndata: [DONE]\n\n")


async def leaving(server: Running, question: Question, number: int) -> None:
    """Asks for a long answer and goes: at once, while it waits, or after the first chunks."""
    fields = {**question.body, "max_tokens": 1000, "ignore_eos": True, "stop": None, "response_format": None}
    is_stream = number % 2 == 0
    async with connected(server, raw_request(question.route, {**fields, "stream": is_stream})) as reader:
        match number % 3:
            case 1:
                await asyncio.sleep(0.05 * (number % 7))
            case 2 if is_stream:
                await reader.readuntil(b"data: ")


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
HOSTILE = [  # what is sent, and the status
    (CHAT + b"5242880\r\n\r\n" + b" " * 5242880, 413),
    (CHAT + b"1200000\r\n\r\n" + b'{"messages":' * 100_000, 400),
    (b"\x00\x01\x02\r\n\r\n" * 10, 400),
]


async def hostile(server: Running, number: int) -> None:
    if number % (len(HOSTILE) + 1) == len(HOSTILE):
        await no_reader(server)
        return
    sent, status = HOSTILE[number % (len(HOSTILE) + 1)]
    async with connected(server, sent) as reader:
        assert f" {status} ".encode() in await reader.readline()


async def no_reader(server: Running) -> None:
    """Asks for much and reads nothing."""
    fields = {"model": NAME, "prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "logprobs": 20}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.to_thread(client.connect, server.address)
        client.sendall(raw_request("completions", {**fields, "stream": True}))
        await asyncio.sleep(3)


async def crowd(server: Running, asked: list[Question], long: list[Question], num_clients: int) -> int:
    """All at once: of 20, 5 leave and 2 attack; of 100, 6 want long answers. Returns how many answers are right."""
    clients: list[Coroutine[Any, Any, None]] = []
    num_answers = 0
    many = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=server.url, limits=many, timeout=600) as client:
        for number in range(num_clients):
            question = asked[number * 7 % len(asked)]
            match number % 20:
                case 0 | 4 | 8 | 12 | 16:
                    clients.append(leaving(server, question, number))
                case 1 | 11:
                    clients.append(hostile(server, number // 10))
                case _:
                    question = long[number % len(long)] if number % 100 in (5, 6, 7, 9, 10, 13) else question
                    num_answers += len(question.texts)
                    clients.append(honest(client, question, stream=number % 3 == 0))
        results = await asyncio.gather(*clients, return_exceptions=True)
    assert [result for result in results if result is not None] == []
    return num_answers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, list[Question], list[Question]]]:
    """A server with an adapter, and what it is asked."""
    engines = tiny_engines()
    base = engines[PLAIN].model
    folder = saved_adapter(base, tmp_path_factory.mktemp("crowd") / "tuned")
    plain = {(NAME, PLAIN): engines[PLAIN], ("tuned",): Engine(merged(base, folder))}
    engines["tuned"] = engines[NAME].with_adapter(folder)
    with running(engines, HttpLimits(max_connections=1000), max_rows=24, max_waiting=1000, kv_bytes=KV_BYTES) as server:
        short = [question for names, engine in plain.items() for question in questions(server, engine, names)]
        plain["tuned",] = Engine(engines["tuned"].model)  # merged weights round otherwise: one token of 1,800 differs
        yield server, short, [each for names, engine in plain.items() for each in long_questions(engine, names)]


def is_idle(server: Running) -> bool:
    now = server.scheduler.snapshot()
    state = server.server.server_state
    busy = (now.running, now.waiting, now.reading, now.kv_bytes, len(state.connections), len(state.tasks))
    return not any(busy)


def num_threads() -> int:
    """Without those of the event loop's pool, which starts its few threads as they are needed and keeps them."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


@pytest.mark.parametrize("num_clients", some([80, 660], 80))  # 660 have more than 500 answers
def test_a_crowd_leaves_no_trace(world: tuple[Running, list[Question], list[Question]], num_clients: int):
    server, short, long = world
    asyncio.run(crowd(server, short, long, 40))  # threads and files that stay are open now
    wait_until(lambda: is_idle(server))
    process, old = psutil.Process(), server.scheduler.snapshot()
    before = (process.num_fds(), num_threads(), old.prefix_bytes > 0)
    num_answers = asyncio.run(crowd(server, short, long, num_clients))
    wait_until(lambda: is_idle(server))
    end = server.scheduler.snapshot()
    assert (process.num_fds(), num_threads(), end.prefix_bytes > 0) == before
    assert end.prefix_bytes <= KV_BYTES
    assert num_answers > 500 or num_clients < 660
    assert end.failed == 0
    assert end.finished - old.finished == num_answers  # nobody computed what nobody waits for
    assert end.cancelled > old.cancelled
    assert end.interruptions > old.interruptions
