"""Users of a server: streams over HTTP, in a closed loop, by Poisson arrivals, or joined by a long prompt."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import accumulate, count, pairwise
from random import Random
from typing import Any

import numpy as np
from httpx2 import AsyncClient, HTTPError

Messages = list[dict[str, str]]
_SECONDS_BEFORE = 2.0  # that the streams run undisturbed
_BETWEEN_SECONDS = 0.05  # between two requests of a neighbour
_FIRST_CHARACTERS_PER_TOKEN = 4.5  # of English text; the first long prompt shows the real number


class RequestFailed(Exception):
    """A server did not answer a request; the message is for the table."""


@dataclass(frozen=True)
class Sample:
    """One request as its user saw it. ``times`` and ``latency`` are in seconds since it was sent."""

    times: tuple[float, ...]  # of each event with text
    latency: float  # until the end of the stream
    num_tokens: int
    num_prompt_tokens: int | None  # None if the server's stream has no usage
    num_cached: int | None  # prompt tokens that the server had read before
    num_steps: int | None  # passes of the model; None if the server does not count them
    text: str
    sent: float = 0.0  # time.perf_counter() at that moment

    @property
    def first_token(self) -> float:
        return self.times[0] if self.times else self.latency

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first event; None for an answer of one token."""
        return (self.latency - self.first_token) / (self.num_tokens - 1) if self.num_tokens > 1 else None


Ask = Callable[[Messages], Coroutine[Any, Any, Sample]]


def health_milliseconds(url: str) -> float:
    """The median of 200 requests over one connection: over 40 where a socket waits for acknowledgements."""
    connection, times = HTTPConnection(url.removeprefix("http://")), []
    for _ in range(200):
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(1e3 * (time.perf_counter() - start))
    connection.close()
    return float(np.median(times))


async def ask(http: AsyncClient, url: str, body: dict[str, Any], messages: Messages) -> Sample:
    """Sends one chat request and reads its stream."""
    fields = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    parts: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json={**fields, **body}) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise RequestFailed(f"status {response.status_code}: {text[:200]}")
            # parsed when the stream has ended: here it would take the processor from the server
            parts.extend([(time.perf_counter() - start, part) async for part in response.aiter_raw()])
    except HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    return parsed(parts, time.perf_counter() - start, sent=start)


def parsed(parts: Sequence[tuple[float, bytes]], latency: float, *, sent: float = 0.0) -> Sample:
    r"""The sample of a stream of server-sent events, given as pieces of bytes with their times.

    A server without usage in its stream counts as one token for each event with text.

    >>> chunk = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\ndata: [DO'
    >>> parsed([(0.25, chunk), (0.5, b"NE]\n\n")], 0.5).times
    (0.25,)
    """
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for moment, data in _events(parts):
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed(f"not JSON: {data[:200]!r}") from None
        if "error" in event:
            raise RequestFailed(str(event["error"])[:200])
        usage = event.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if text:
            times.append(moment)
            texts.append(text)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = (usage.get("completion_tokens", len(times)), usage.get("prompt_tokens"), cached)
    return Sample(tuple(times), latency, *counts, usage.get("draft", {}).get("steps"), "".join(texts), sent)


def _events(parts: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each event but the last ("[DONE]"), with the time at which the event was complete."""
    found, rest = [], b""
    for moment, part in parts:
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        found += [(moment, one) for one in data if one != b"[DONE]"]
    return found


async def closed_loop(asked: Ask, prompts: Sequence[Messages], users: int) -> list[Sample]:
    """Each user sends the next prompt as soon as its last answer ended.

    The load stays the same until all prompts are answered: users without a prompt go on with the first ones again,
    which are not counted. There is a sample for each prompt.
    """
    numbers = count()
    samples: dict[int, Sample] = {}
    done = asyncio.Event()

    async def user() -> None:
        for number in numbers:
            samples[number] = await asked(prompts[number % len(prompts)])
            if all(place in samples for place in range(len(prompts))):
                done.set()

    tasks = [asyncio.create_task(user()) for _ in range(users)]
    end = asyncio.create_task(done.wait())
    try:
        await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)  # a user ends only by an error
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancelled(end, *tasks)
    return [samples[number] for number in range(len(prompts))]


async def poisson(asked: Ask, prompts: Sequence[Messages], rate: float, seed: int) -> list[Sample]:
    """Prompts are sent at random times, ``rate`` per second on average, whether or not earlier ones are answered."""
    random = Random(seed)  # noqa: S311 - arrival times, no secrets
    moments = accumulate(random.expovariate(rate) for _ in prompts)
    start = time.perf_counter()

    async def arrive(moment: float, messages: Messages) -> Sample:
        await asyncio.sleep(moment - (time.perf_counter() - start))
        return await asked(messages)

    tasks = [asyncio.create_task(arrive(*one)) for one in zip(moments, prompts, strict=True)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for their end; the server sees closed connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def throughput(samples: Sequence[Sample], users: int | None) -> float:
    """Tokens per second of all users together: in a closed loop users × tokens / latency.

    With Poisson arrivals (``users`` is None), tokens over the time from the first request to the end of the last.
    """
    tokens = sum(sample.num_tokens for sample in samples)
    if users is not None:
        return users * tokens / sum(sample.latency for sample in samples)
    return tokens / (max(one.sent + one.latency for one in samples) - min(one.sent for one in samples))


@dataclass(frozen=True)
class Joining:
    """What the streams of one way saw. Times are in milliseconds."""

    name: str
    prompt_tokens: int
    alone: float  # until the first text of a prompt of this length, on an idle server
    first_token: float  # the same while the streams run
    step: float  # between two events of a stream, before the long prompt came: the median
    longest: tuple[float, ...]  # of each stream: the longest time between two events while the prompt was read

    def allowed(self, chunk_tokens: int) -> float:
        """Two steps and one chunk of a prompt."""
        return 2 * self.step + self.alone / -(-self.prompt_tokens // chunk_tokens)


async def joining(
    name: str, long_ask: Ask, stream_ask: Ask, prompts: Sequence[Messages], *, streams: int, tokens: int
) -> Joining:
    """Measures one way: its streams run, then a prompt of so many tokens comes.

    A few tokens of answer to the long prompt are enough; those of the streams must still run when it comes.
    """
    characters = int(tokens * _FIRST_CHARACTERS_PER_TOKEN)
    alone = await long_ask(_long_prompt(prompts[::2], characters))
    length = alone.num_prompt_tokens or tokens
    running = [asyncio.create_task(stream_ask(prompts[number % len(prompts)])) for number in range(streams)]
    try:
        await asyncio.sleep(_SECONDS_BEFORE)
        joined = await long_ask(_long_prompt(prompts[1::2], characters * tokens // length))  # no prefix in common
        seen = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    start, end = joined.sent, joined.sent + joined.first_token
    pairs = [list(pairwise(one.sent + moment for moment in one.times)) for one in seen]
    before = [late - early for own in pairs for early, late in own if late <= start]
    during = [[late - early for early, late in own if late > start and early < end] for own in pairs]
    if not before or not any(during):
        raise RequestFailed("the streams ended before the long prompt came: ask for longer answers")
    num_read, longest = joined.num_prompt_tokens or length, tuple(1e3 * max(gaps) for gaps in during if gaps)
    idle, step = alone.first_token * num_read / length, float(np.median(before))
    return Joining(name, num_read, 1e3 * idle, 1e3 * joined.first_token, 1e3 * step, longest)


def _long_prompt(prompts: Sequence[Messages], characters: int) -> Messages:
    """A request with the texts of the prompts, repeated as often as needed."""
    text = " ".join(message["content"] for messages in prompts for message in messages)
    return [{"role": "user", "content": (text * (characters // len(text) + 1))[:characters]}]


def neighbours(prompts: Sequence[Messages], prompt_tokens: int = 7000) -> dict[str, list[dict[str, Any]]]:
    """What others ask for beside a user, by name: the fields of one request of each client.

    The chat template must have two loops, one in the other, of ``spin`` rounds.
    """
    schemas: dict[str, Any] = {
        f"multipleOf {number}": {"type": "integer", "multipleOf": number} for number in (86400000, 1000003, 9999991)
    }
    schemas["allOf of four primes"] = {"allOf": [{"multipleOf": prime} for prime in (1009, 1013, 1019, 1021)]}
    found: dict[str, list[dict[str, Any]]] = {"alone": []}
    for name, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        found[name] = [{"response_format": form}] * 3
    found["a template without end"] = [{"chat_template_kwargs": {"spin": 100_000}}] * 3
    characters = int(prompt_tokens * _FIRST_CHARACTERS_PER_TOKEN)
    long = [_long_prompt(prompts[number:], characters) for number in range(6)]
    found[f"six prompts of {prompt_tokens} tokens"] = [{"messages": one} for one in long]
    found["200 requests of 20 clients"] = [{"max_tokens": 32}] * 200
    return found


async def beside(asked: Ask, messages: Messages, others: Sequence[Ask], seconds: float) -> list[float]:
    """Latencies of a user who asks again and again for so many seconds, while each of the others does so, too."""

    async def again(other: Ask) -> None:
        while True:
            with suppress(RequestFailed):  # a refusal is an answer
                await other(messages)
            await asyncio.sleep(_BETWEEN_SECONDS)

    tasks = [asyncio.create_task(again(other)) for other in others]
    await asyncio.sleep(_SECONDS_BEFORE if others else 0)
    latencies, end = list[float](), time.perf_counter() + seconds
    try:
        while time.perf_counter() < end:
            start = time.perf_counter()
            with suppress(RequestFailed):  # it waited for as long as the client's limit
                await asked(messages)
            latencies.append(time.perf_counter() - start)
    finally:
        await cancelled(*tasks)
    return latencies
