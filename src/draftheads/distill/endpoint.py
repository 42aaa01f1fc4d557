"""Answers by a server with OpenAI's chat API."""

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from draftheads.data.forms import messages_of
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import DistillOptions
from draftheads.errors import EndpointError, InvalidPrompt
from draftheads.utils.messages import short
from draftheads.utils.openai_client import CHAT, NoAnswer, OpenAIClient, api_key, at_once

_REFUSED_STATUSES = frozenset({400, 413, 422, 451})  # the server does not answer this prompt; it may answer others
_FINISHED = ("stop", "tool_calls", "function_call")
_TOO_LONG_WORDS = ("context_length_exceeded", "context length", "context window", "too long", "max_model_len")


class EndpointSource:
    """Continues conversations with a server; ``batch_size`` is the number of requests at the same time.

    Raises:
        MissingDependency: on construction, if httpx2 is not installed.
        InvalidSettings: the key's environment variable is not set, or the address is not one of HTTP.
    """

    def __init__(self, options: DistillOptions) -> None:
        assert options.endpoint is not None
        assert options.endpoint_model is not None
        self.options = options
        self.identity = {"model": options.endpoint_model, "answered_by": "endpoint"}  # the address may change
        self._client = OpenAIClient(
            *(options.endpoint, "--endpoint", options.endpoint_model, api_key(options.api_key_env)),
            timeout=options.request_timeout,
            retries=options.request_retries,
            repeats_timeouts=True,  # or one request would end a run of hours
            root="",
        )

    def converse(self, dialogues: Sequence[Dialogue], on_progress: OnProgress) -> None:
        """Continues all to their end."""
        try:
            with self._client, closing(at_once(self._continue, dialogues, self.options.batch_size)) as ended:
                for place, _ in ended:
                    on_progress(dialogues[place].num_tokens, 1)
        except EndpointError as error:
            fix = "see --endpoint and --endpoint-model; the same command continues"
            raise EndpointError(f"{error}; {fix}") from None

    def _continue(self, dialogue: Dialogue) -> None:
        while not dialogue.is_over:
            dialogue.ask_next()
            try:
                message, num_tokens, is_finished = self._client.post(CHAT, self._request(dialogue), _answer_in)
            except InvalidPrompt as error:
                dialogue.refusal = str(error)
                dialogue.stop("refused")
            except NoAnswer as error:
                if error.status not in _REFUSED_STATUSES:
                    raise EndpointError(f"{self._client.base}{CHAT} failed: {error}") from None
                if any(words in error.text.lower() for words in _TOO_LONG_WORDS):
                    dialogue.stop("too_long")
                else:
                    dialogue.refusal = str(error)
                    dialogue.stop("refused")
            else:
                dialogue.count(num_tokens)
                dialogue.answer(**message, is_finished=is_finished)

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


def _answer_in(body: Any, _: float) -> tuple[dict[str, Any], int, bool]:
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
