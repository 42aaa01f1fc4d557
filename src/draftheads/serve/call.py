"""A request that was read, and what the responses of both routes have in common."""

import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.request_params import RequestParams
from draftheads.serve.token_names import TokenNames


@dataclass(frozen=True)
class Call:
    """A request that was read."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    params: RequestParams
    requests: list[Request]  # n for each prompt; none if prompts are only scored
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    @cached_property
    def id(self) -> str:
        """The same in all chunks of a stream."""
        return f"{self.id_prefix}-{uuid.uuid4().hex}"

    @cached_property
    def names(self) -> TokenNames:
        """Of the model's tokens."""
        return TokenNames(self.params.engine.model.tokenizer)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole response."""
        return {**self._head(self.object_name), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """A chunk of a stream. If the request asks for the usage, only the last chunk has it."""
        last = {"usage": usage} if self.params.fields.stream_options.include_usage else {}
        return {**self._head(self.chunk_name), "choices": choices, **last}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.params.lane.model}


def num_shown(request: Request, event: StreamEvent | None = None) -> int:
    """How many tokens of an answer (or of an event of it) are text: all but one that ended it."""
    token_ids = request.token_ids if event is None else event.token_ids
    is_last = (request.finish_reason if event is None else event.finish_reason) == "stop"
    return len(token_ids) - (is_last and bool(token_ids) and request.is_stop_id(token_ids[-1]))
