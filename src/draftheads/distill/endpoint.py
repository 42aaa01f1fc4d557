"""Answers by servers with OpenAI's chat API.

Each has its own window of requests, which is filled as soon as one is answered. All decisions are made by one thread.
"""

import contextlib
import json
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.pool import ThreadPool
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from draftheads.data.forms import messages_of
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import DistillOptions
from draftheads.errors import (
    DataError,
    EndpointError,
    EndpointWarning,
    InvalidPrompt,
    InvalidSettings,
    MissingDependency,
)
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names, short

_REFUSED_STATUSES = frozenset({400, 413, 422, 451})  # the server does not answer this prompt; it may answer others
REQUEST_SECONDS = 600.0  # to wait for an answer
REQUEST_RETRIES = 6  # if the server is busy, fails or cannot be reached
DROPPED_SECONDS = 60.0  # after which a server that failed gets one request again
_MODELS_SECONDS = 10.0  # to wait for a server's list of models
_FINISHED = ("stop", "tool_calls", "function_call")
_TOO_LONG_WORDS = ("context_length_exceeded", "context length", "context window", "too long", "max_model_len")


@dataclass
class _Server:
    """What the main thread knows of one server."""

    url: str
    client: Any
    num_running: int = 0  # its conversations
    num_ended: int = 0
    error: EndpointError | None = None  # why it is dropped
    again_at: float = 0.0  # when it may be asked again, if it is dropped

    def has_room(self, batch_size: int) -> bool:
        """Whether it can take another conversation; one that is dropped gets a single one, after a while."""
        return self.num_running < (batch_size if self.error is None else time.monotonic() >= self.again_at)


class EndpointSource:
    """Continues conversations with servers; ``batch_size`` is the number of requests at the same time at each.

    Raises:
        MissingDependency: on construction, if openai is not installed.
        InvalidSettings: on construction, if an address is not one of HTTP; before the first question, if a key's
            environment variable is not set, or a server does not have the model.
    """

    def __init__(self, options: DistillOptions) -> None:
        try:
            import openai  # noqa: PLC0415 - an extra
        except ImportError:
            raise MissingDependency("asking a server needs openai", extra="endpoint") from None
        for url in options.endpoint:
            _check_address(url)
        self.options = options
        self.openai: Any = openai
        self.identity = {"model": options.model, "answered_by": "endpoint"}  # the address may change
        self._silent = dict.fromkeys(options.endpoint, True)  # servers of which no failure was told yet

    def converse(self, dialogues: Iterator[Dialogue], on_progress: OnProgress) -> None:
        """Continues all to their end. Those of a server that fails go on at the others, from where they are."""

        def converse_one(server: _Server, dialogue: Dialogue) -> tuple[_Server, Dialogue, Exception | None]:
            try:
                while not dialogue.is_over:
                    self._continue(server, dialogue)
            except Exception as error:  # noqa: BLE001 - the main thread raises it
                return server, dialogue, error
            return server, dialogue, None

        batch_size = self.options.batch_size
        ended: SimpleQueue[tuple[_Server, Dialogue, Exception | None]] = SimpleQueue()
        unfinished: deque[Dialogue] = deque()  # of servers that failed
        servers = list(map(self._server, self.options.endpoint, cycle(self.options.api_key_env or (None,))))
        with contextlib.ExitStack() as clients:
            for server in servers:
                clients.enter_context(server.client)
                self._check_model(server)
            # its threads are daemons: after an error nobody waits for them; a closed client sends no further request
            pool = clients.enter_context(ThreadPool(batch_size * len(servers)))
            while True:
                while (ready := [server for server in servers if server.has_room(batch_size)]) and (
                    next_one := unfinished.popleft() if unfinished else next(dialogues, None)
                ):
                    server = min(ready, key=lambda server: server.num_running)
                    server.num_running += 1
                    pool.apply_async(converse_one, (server, next_one), callback=ended.put)
                if not any(server.num_running for server in servers):
                    return
                server, dialogue, error = ended.get()
                server.num_running -= 1
                if error is not None:
                    unfinished.append(dialogue)
                    self._drop(server, error, servers)
                else:
                    server.num_ended += 1
                    if time.monotonic() >= server.again_at:
                        server.error = None
                    on_progress(dialogue.num_tokens, dialogue)

    def _drop(self, server: _Server, error: Exception, servers: Sequence[_Server]) -> None:
        """Raises the errors of all servers if it was the last one."""
        if not isinstance(error, EndpointError):
            raise error
        is_new = server.error is None
        server.error, server.again_at = error, time.monotonic() + DROPPED_SECONDS
        if all(each.error for each in servers):
            options = f"--endpoint {' '.join(self.options.endpoint)}, --model {self.options.model!r} and --api-key-env"
            errors = "; ".join(str(each.error) for each in servers)
            raise EndpointError(f"{errors}; see {options}; the same command continues")
        if is_new:
            ended = counted(server.num_ended, "conversation")
            then = f"the other servers go on, and it is tried again after {DROPPED_SECONDS:.0f} seconds"
            warnings.warn(f"after {ended}, {error}; {then}", EndpointWarning, stacklevel=2)

    def _server(self, url: str, key_variable: str | None) -> _Server:
        client = self.openai.OpenAI(
            base_url=url,
            api_key=_api_key(key_variable),
            timeout=REQUEST_SECONDS,
            max_retries=REQUEST_RETRIES,
            # those of the environment are not for others
            default_headers=dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), self.openai.Omit()),
            http_client=self.openai.DefaultHttpxClient(  # keys go to no other server
                follow_redirects=False, event_hooks={"request": [partial(self._tell_retry, url)]}
            ),
        )
        return _Server(url, client)

    def _tell_retry(self, url: str, request: Any) -> None:
        """Warns once for each server; openai counts in this header how often it has sent the request again."""
        if request.headers.get("x-stainless-retry-count", "0") != "0" and self._silent.pop(url, False):
            often = f"each request is sent up to {REQUEST_RETRIES} times more"
            warnings.warn(f"{url}: a request failed and is sent again; {often}", EndpointWarning, stacklevel=2)

    def _check_model(self, server: _Server) -> None:
        """A server without a list of models, or that cannot be reached yet, is accepted."""
        client, names = server.client.with_options(timeout=_MODELS_SECONDS, max_retries=0), []
        with contextlib.suppress(self.openai.APIError, LookupError, TypeError, ValueError):
            names = [str(model["id"]) for model in json.loads(client.get("/models", cast_to=str))["data"]]
        if names and self.options.model not in names:
            raise InvalidSettings(f"--model is {self.options.model!r}, but {server.url} has {first_names(names)}")

    def _continue(self, server: _Server, dialogue: Dialogue) -> None:
        """Asks for one answer."""
        dialogue.ask_next()
        try:
            text = server.client.post("/chat/completions", body=self._request(dialogue), cast_to=str)
            message, num_tokens, is_finished = _answer_in(json.loads(text))
        except InvalidPrompt as error:
            dialogue.refusal = str(error)
            dialogue.stop("refused")
        except self.openai.APIStatusError as error:
            body = error.body.get("message", error.body) if isinstance(error.body, Mapping) else error.body
            said = f"status {error.status_code}: {' '.join(str(body or 'no message').split())[:300]}"
            if error.status_code not in _REFUSED_STATUSES:
                raise _failed(server, said) from None
            if any(words in f"{error.body} {said}".lower() for words in _TOO_LONG_WORDS):
                dialogue.stop("too_long")
            else:
                dialogue.refusal = said
                dialogue.stop("refused")
        except self.openai.APIConnectionError as error:
            raise _failed(server, f"{error.__cause__ or error}; is the server running?") from None
        except (DataError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"not a valid completion ({type(error).__name__}: {error}): {short(text)}"
            raise _failed(server, why) from None
        else:
            dialogue.count(num_tokens)
            dialogue.answer(**message, is_finished=is_finished)

    def _request(self, dialogue: Dialogue) -> dict[str, Any]:
        request = {
            "model": self.options.model,
            # servers leave earlier thoughts out, and some refuse them
            "messages": [{k: v for k, v in said.items() if k != "reasoning_content"} for said in dialogue.messages],
            "max_tokens": self.options.max_new_tokens,
            "temperature": dialogue.temperature,
            "top_p": 1.0,  # not the model's own
            "seed": dialogue.next_seed,
        }
        return {**request, "tools": dialogue.prompt.tools} if dialogue.prompt.tools else request


def _failed(server: _Server, why: str) -> EndpointError:
    return EndpointError(f"{server.url.rstrip('/')}/chat/completions failed: {why}")


def _check_address(url: str) -> None:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise InvalidSettings(f"--endpoint is {url!r}; give an address such as http://127.0.0.1:8000/v1")


def _api_key(variable: str | None) -> str:
    """The key in an environment variable; never the one that is meant for OpenAI's own server."""
    if variable is None:
        return "EMPTY"
    if key := os.environ.get(variable):
        return key
    raise InvalidSettings(f"--api-key-env is {variable!r}, but this environment variable is not set: export it")


def _answer_in(body: Any) -> tuple[dict[str, Any], int, bool]:
    """Content, thought and calls; the number of tokens (0 if it is not counted); whether it is finished."""
    # lone surrogates cannot be written
    body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    choice = body["choices"][0]
    reason, content = choice.get("finish_reason"), choice["message"].get("content")
    (message,) = messages_of([{**choice["message"], "role": "assistant", "content": content or ""}])
    num_tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
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
