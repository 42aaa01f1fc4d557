"""Answers by a server with OpenAI's chat API. The only file that knows HTTP."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftheads.data.forms import messages_of
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import DistillOptions
from draftheads.errors import DataError, EndpointError, InvalidPrompt, MissingDependency, PromptTooLong
from draftheads.utils.api_keys import api_key
from draftheads.utils.counts import counted
from draftheads.utils.messages import short

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

FIRST_WAIT_SECONDS = 1.0  # before a request is repeated; doubled each time
_LONGEST_WAIT_SECONDS = 60.0
_REFUSED_STATUSES = frozenset({400, 413, 422, 451})  # the server does not answer this prompt; it may answer others
_BUSY_STATUSES = frozenset({408, 409, 425, 429})  # these and all from 500 on: worth a repeated request
_FINISHED = ("stop", "tool_calls", "function_call")
_TOO_LONG_WORDS = ("context_length_exceeded", "context length", "context window", "too long", "max_model_len")


class EndpointSource:
    """Continues conversations with a server; ``batch_size`` is the number of requests at the same time.

    Raises:
        MissingDependency: on construction, if httpx2 is not installed.
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
        key = api_key(options.api_key_env)
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    @property
    def identity(self) -> dict[str, str]:
        """The model's name on the server; the address may change."""
        assert self.options.endpoint_model is not None
        return {"model": self.options.endpoint_model, "answered_by": "endpoint"}

    def converse(self, dialogues: Sequence[Dialogue], on_progress: OnProgress) -> None:
        """Continues all to their end."""
        asyncio.run(self._converse(dialogues, on_progress))

    async def _converse(self, dialogues: Sequence[Dialogue], on_progress: OnProgress) -> None:
        from httpx2 import AsyncClient, InvalidURL, Limits, UnsupportedProtocol  # noqa: PLC0415 - an extra

        slots = asyncio.Semaphore(self.options.batch_size)
        limits = Limits(max_connections=self.options.batch_size)
        async with AsyncClient(headers=self.headers, timeout=self.options.request_timeout, limits=limits) as client:
            tasks = [
                asyncio.ensure_future(self._continue(client, slots, dialogue, on_progress)) for dialogue in dialogues
            ]
            try:
                await asyncio.gather(*tasks)
            except (InvalidURL, UnsupportedProtocol) as error:
                raise EndpointError(f"--endpoint {self.options.endpoint} is not a valid address: {error}") from error
            finally:  # if one failed, the others must stop
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _continue(
        self, client: "AsyncClient", slots: asyncio.Semaphore, dialogue: Dialogue, on_progress: OnProgress
    ) -> None:
        async with slots:
            while not dialogue.is_over:
                dialogue.ask_next()
                try:
                    response = await self._post(client, self._request(dialogue))
                    message, num_tokens, is_finished = _answer_in(response, self.url)
                except PromptTooLong:
                    dialogue.stop("too_long")
                except InvalidPrompt as error:
                    dialogue.refusal = str(error)
                    dialogue.stop("refused")
                else:
                    dialogue.count(num_tokens)
                    dialogue.answer(**message, is_finished=is_finished)
                    on_progress(num_tokens, 0)
        on_progress(0, 1)

    def _request(self, dialogue: Dialogue) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.options.endpoint_model,
            # servers leave earlier thoughts out, and some refuse them
            "messages": [{k: v for k, v in said.items() if k != "reasoning_content"} for said in dialogue.messages],
            "max_tokens": self.options.max_new_tokens,
            "temperature": dialogue.temperature,
            "top_p": self.options.top_p,
            "seed": dialogue.next_seed,
        }
        if dialogue.prompt.tools:
            request["tools"] = dialogue.prompt.tools
        # top_k is not in the API, but many servers accept it
        return request if self.options.top_k is None else {**request, "top_k": self.options.top_k}

    async def _post(self, client: "AsyncClient", request: dict[str, Any]) -> "Response":
        """The server's response; a request that failed for now is repeated after growing waits."""
        from httpx2 import RequestError, UnsupportedProtocol  # noqa: PLC0415 - an extra

        problem, response = "", None
        for attempt in range(self.options.request_retries + 1):
            if attempt:
                await asyncio.sleep(_wait_seconds(attempt - 1, response, request["seed"]))
            response = None
            try:
                response = await client.post(self.url, json=request)
            except UnsupportedProtocol:
                raise
            except RequestError as error:
                problem = str(error) or type(error).__name__
                continue
            if response.status_code not in _BUSY_STATUSES and response.status_code < 500:
                return response
            problem = f"status {response.status_code}, {response.text[:200]}"
        raise EndpointError(
            f"{self.url} did not answer in {counted(self.options.request_retries + 1, 'attempt')}; "
            f"the last problem: {problem}; check the server; the same command continues"
        )


def _wait_seconds(attempt: int, response: "Response | None", seed: int) -> float:
    """How long to wait before the next attempt: as long as the server says, else about twice as long each time.

    The seed spreads the requests, so that they are not all repeated at the same moment.
    """
    said = "" if response is None else response.headers.get("retry-after", "")
    seconds = float(said) if said.isdecimal() else FIRST_WAIT_SECONDS * 2**attempt * (0.75 + seed % 1000 / 2000)
    return min(seconds, _LONGEST_WAIT_SECONDS)


def _answer_in(response: "Response", url: str) -> tuple[dict[str, Any], int, bool]:
    """Content, thought and calls; the number of tokens (0 if it is not counted); whether it is finished."""
    if response.status_code in _REFUSED_STATUSES:
        is_too_long = any(words in response.text.lower() for words in _TOO_LONG_WORDS)
        raise (PromptTooLong if is_too_long else InvalidPrompt)(f"status {response.status_code}, {response.text[:200]}")
    if response.status_code in (401, 403):
        raise EndpointError(f"{url} refuses the key ({response.status_code}): name its variable in --api-key-env")
    if response.status_code != 200:
        raise EndpointError(
            f"{url} refuses the request: status {response.status_code}, {response.text[:200]}; "
            "see --endpoint and --endpoint-model"
        )
    try:
        # lone surrogates cannot be written
        body = json.loads(json.dumps(response.json(), ensure_ascii=False).encode(errors="replace"))
        choice = body["choices"][0]
        reason, content = choice.get("finish_reason"), choice["message"].get("content")
        (message,) = messages_of([{**choice["message"], "role": "assistant", "content": content or ""}])
        num_tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
    except (DataError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{url} did not return a valid chat completion ({type(error).__name__}: {error}): {response.text[:200]}"
        ) from error
    if reason == "content_filter":
        raise InvalidPrompt("a content filter stopped the answer")
    is_whole = reason in _FINISHED and (content is not None or "tool_calls" in message)
    kept = ("content", "reasoning_content", *(["tool_calls"] if is_whole else []))  # no part of a call
    answer = {name: message[name] for name in kept if name in message}
    refusal = choice["message"].get("refusal")
    if refusal or (answer == {"content": ""} and not is_whole):
        why = f"refusal: {short(str(refusal))}" if refusal else f"content is {content!r}, ended by {reason!r}"
        raise InvalidPrompt(why)
    return answer, num_tokens, is_whole
