"""Answers by a server with OpenAI's chat API."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

from draftheads.data.forms import messages_of
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import DistillOptions
from draftheads.errors import DataError, EndpointError, InvalidPrompt, InvalidSettings, MissingDependency
from draftheads.utils.messages import short

_REFUSED_STATUSES = frozenset({400, 413, 422, 451})  # the server does not answer this prompt; it may answer others
REQUEST_SECONDS = 600.0  # to wait for an answer
REQUEST_RETRIES = 6  # if the server is busy, fails or cannot be reached
_FINISHED = ("stop", "tool_calls", "function_call")
_TOO_LONG_WORDS = ("context_length_exceeded", "context length", "context window", "too long", "max_model_len")


class EndpointSource:
    """Continues conversations with a server; ``batch_size`` is the number of requests at the same time.

    Raises:
        MissingDependency: on construction, if openai is not installed.
        InvalidSettings: the key's environment variable is not set, or the address is not one of HTTP.
    """

    def __init__(self, options: DistillOptions) -> None:
        try:
            import openai  # noqa: PLC0415 - an extra
        except ImportError:
            raise MissingDependency("asking a server needs openai", extra="endpoint") from None
        _check_address(str(options.endpoint))
        self.options = options
        self.openai: Any = openai
        self.identity = {"model": options.model, "answered_by": "endpoint"}  # the address may change

    def converse(self, dialogues: Sequence[Dialogue], on_progress: OnProgress) -> None:
        """Continues all to their end."""

        def converse_one(dialogue: Dialogue) -> Dialogue:
            while not dialogue.is_over:
                self._continue(client, dialogue)
            return dialogue

        client = self.openai.OpenAI(
            base_url=self.options.endpoint,
            api_key=_api_key(self.options.api_key_env),
            timeout=REQUEST_SECONDS,
            max_retries=REQUEST_RETRIES,
            # those of the environment are not for others
            default_headers=dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), self.openai.Omit()),
            http_client=self.openai.DefaultHttpxClient(follow_redirects=False),  # keys go to no other server
        )
        # its threads are daemons: after an error nobody waits for them, and a closed client sends no further request
        with client, ThreadPool(self.options.batch_size) as pool:
            for dialogue in pool.imap_unordered(converse_one, dialogues):
                on_progress(dialogue.num_tokens, dialogue)

    def _continue(self, client: Any, dialogue: Dialogue) -> None:
        """Asks for one answer."""
        dialogue.ask_next()
        try:
            text = client.post("/chat/completions", body=self._request(dialogue), cast_to=str)
            message, num_tokens, is_finished = _answer_in(json.loads(text))
        except InvalidPrompt as error:
            dialogue.refusal = str(error)
            dialogue.stop("refused")
        except self.openai.APIStatusError as error:
            body = error.body.get("message", error.body) if isinstance(error.body, Mapping) else error.body
            said = f"status {error.status_code}: {' '.join(str(body or 'no message').split())[:300]}"
            if error.status_code not in _REFUSED_STATUSES:
                raise self._failed(said) from None
            if any(words in f"{error.body} {said}".lower() for words in _TOO_LONG_WORDS):
                dialogue.stop("too_long")
            else:
                dialogue.refusal = said
                dialogue.stop("refused")
        except self.openai.APIConnectionError as error:
            raise self._failed(f"{error.__cause__ or error}; is the server running?") from None
        except (DataError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._failed(f"not a valid completion ({type(error).__name__}: {error}): {short(text)}") from None
        else:
            dialogue.count(num_tokens)
            dialogue.answer(**message, is_finished=is_finished)

    def _failed(self, why: str) -> EndpointError:
        url, model = str(self.options.endpoint), self.options.model
        return EndpointError(
            f"{url.rstrip('/')}/chat/completions failed: {why}; see --endpoint {url}, --model {model!r} and "
            "--api-key-env; the same command continues"
        )

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
