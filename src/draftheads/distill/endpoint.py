"""Answers by a server that speaks OpenAI's chat protocol. The only file that knows HTTP."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftheads.distill.dialogue import Dialogue
from draftheads.distill.options import DistillOptions
from draftheads.distill.source import Heard
from draftheads.errors import EndpointError, InvalidSettings, MissingDependency, PromptTooLong

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

FIRST_WAIT_SECONDS = 1.0  # before a request is made again; doubled each time
_LONGEST_WAIT_SECONDS = 60.0
_BUSY_STATUSES = frozenset({408, 409, 425, 429})  # and all from 500 on: worth asking again
_TOO_LONG_WORDS = ("context_length_exceeded", "context length", "context window", "too long", "max_model_len")


@dataclass(frozen=True)
class Reply:
    """What the server said to one request."""

    text: str
    num_tokens: int  # 0 where the server does not count
    is_finished: bool


class EndpointSource:
    """Leads conversations with a server, as many requests at once as the batch size says.

    Raises:
        MissingDependency: on construction, without httpx2.
        InvalidSettings: the key's environment variable is not set.
    """

    def __init__(self, options: DistillOptions) -> None:
        assert options.endpoint is not None
        try:
            import httpx2  # noqa: F401, PLC0415 - an extra
        except ImportError:
            raise MissingDependency("--endpoint needs httpx2", pip_install="'draftheads[endpoint]'") from None
        self.url = options.endpoint.rstrip("/") + "/chat/completions"
        self.options = options
        self.headers = _headers(options.api_key_env)

    @property
    def identity(self) -> dict[str, str]:
        """The model's name there; the address may change."""
        assert self.options.endpoint_model is not None
        return {"model": self.options.endpoint_model, "answered_by": "endpoint"}

    def converse(self, dialogues: Sequence[Dialogue], heard: Heard) -> None:
        """Leads all to their end.

        Raises:
            EndpointError: the server cannot be reached, refuses, or does not speak the protocol.
        """
        asyncio.run(self._converse(dialogues, heard))

    async def _converse(self, dialogues: Sequence[Dialogue], heard: Heard) -> None:
        from httpx2 import AsyncClient, InvalidURL, Limits  # noqa: PLC0415 - an extra

        places = asyncio.Semaphore(self.options.batch_size)
        limits = Limits(max_connections=self.options.batch_size)
        async with AsyncClient(headers=self.headers, timeout=self.options.request_timeout, limits=limits) as client:
            tasks = [asyncio.ensure_future(self._lead(client, places, dialogue, heard)) for dialogue in dialogues]
            try:
                await asyncio.gather(*tasks)
            except InvalidURL as error:
                raise EndpointError(f"--endpoint {self.options.endpoint} is no address: {error}") from error
            finally:  # where one failed the others must not go on asking
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self, client: "AsyncClient", places: asyncio.Semaphore, dialogue: Dialogue, heard: Heard) -> None:
        async with places:
            while not dialogue.is_over:
                dialogue.ask_next()
                try:
                    reply = _reply(await self._ask(client, self._request(dialogue)), self.url)
                except PromptTooLong:
                    dialogue.give_up("too_long")
                else:
                    dialogue.spend(reply.num_tokens)
                    dialogue.answer(reply.text, is_finished=reply.is_finished)
                    heard(reply.num_tokens, 0)
        heard(0, 1)

    def _request(self, dialogue: Dialogue) -> dict[str, Any]:
        request = {
            "model": self.options.endpoint_model,
            "messages": dialogue.messages,
            "max_tokens": self.options.max_new_tokens,
            "temperature": dialogue.temperature,
            "top_p": self.options.top_p,
            "seed": dialogue.next_seed,
        }
        # not of the protocol, but many servers know it
        return request if self.options.top_k is None else {**request, "top_k": self.options.top_k}

    async def _ask(self, client: "AsyncClient", request: dict[str, Any]) -> "Response":
        """The server's response, asked for again with growing patience while it may yet come."""
        for attempt in range(self.options.request_retries + 1):
            response, problem = await self._try(client, request)
            if response is not None and not _is_busy(response):
                return response
            if attempt < self.options.request_retries:
                await asyncio.sleep(_wait_seconds(attempt, response, request["seed"]))
        raise EndpointError(
            f"{self.url} gave no answer in {self.options.request_retries + 1} attempts, at last: {problem}; "
            "see to the server, and the same command goes on"
        )

    async def _try(self, client: "AsyncClient", request: dict[str, Any]) -> tuple["Response | None", str]:
        """A response, or None; and in words what may be wrong with it."""
        from httpx2 import RequestError, UnsupportedProtocol  # noqa: PLC0415 - an extra

        try:
            response = await client.post(self.url, json=request)
        except UnsupportedProtocol as error:
            raise EndpointError(f"--endpoint {self.options.endpoint} is no address: {error}") from error
        except RequestError as error:
            return None, str(error) or type(error).__name__
        return response, f"status {response.status_code}, {response.text[:200]}"


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise InvalidSettings(f"--api-key-env is {api_key_env!r}, but that environment variable is not set: export it")
    return {"Authorization": f"Bearer {key}"}


def _is_busy(response: "Response") -> bool:
    return response.status_code in _BUSY_STATUSES or response.status_code >= 500


def _wait_seconds(attempt: int, response: "Response | None", seed: int) -> float:
    """How long to wait before asking again: as long as the server says, or each time about twice as long.

    The seed spreads the requests, so that they do not all come back at once.
    """
    said = "" if response is None else response.headers.get("retry-after", "")
    seconds = float(said) if said.isdecimal() else FIRST_WAIT_SECONDS * 2**attempt * (0.75 + seed % 1000 / 2000)
    return min(seconds, _LONGEST_WAIT_SECONDS)


def _reply(response: "Response", url: str) -> Reply:
    """The answer in a response.

    Raises:
        PromptTooLong: the server says that the chat is longer than its model allows.
        EndpointError: any other refusal, or not what the protocol says.
    """
    if response.status_code == 400 and any(words in response.text.lower() for words in _TOO_LONG_WORDS):
        raise PromptTooLong(response.text[:200])
    if response.status_code in (401, 403):
        raise EndpointError(f"{url} wants another key ({response.status_code}): name its variable in --api-key-env")
    if response.status_code != 200:
        raise EndpointError(
            f"{url} refuses: status {response.status_code}, {response.text[:200]}; see --endpoint and --endpoint-model"
        )
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"]["content"] or ""
        num_tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
        whole = str(text).encode(errors="replace").decode()  # half characters cannot be written
        return Reply(whole, num_tokens, choice.get("finish_reason") == "stop")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{url} says what is no chat completion ({type(error).__name__}: {error}): {response.text[:200]}"
        ) from error
