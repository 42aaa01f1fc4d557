"""The body of ``/v1/responses``: its fields, and its input as the messages of a chat. Knows nothing of answers."""

from abc import abstractmethod
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from draftheads.serve.chat_messages import Arguments, ChatBody, Texts, message_of, tool_call
from draftheads.serve.fields import Fields, NoEffect, Unsupported, check_schema, read_fields, text_or_list, wrong
from draftheads.serve.request_params import NamedSchema, StreamOptions, grammar_of
from draftheads.serve.tools import ToolName, ToolUse, as_sent, use_of
from draftheads.settings import MOST_LOGPROBS, Effort, Grammar

LOGPROBS = "message.output_text.logprobs"  # in the field include


class _Item(Fields):
    """One part of the input; three fields are those of a part of an answer that is sent back."""

    id: NoEffect = None
    status: NoEffect = None
    phase: NoEffect = None

    @abstractmethod
    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Adds it to the messages of a chat template; ``place`` names the item."""


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        messages.append(message_of(self.role, self.content, f"{place}.content"))


class _FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = Field({})

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Calls belong to the message of the model before them, as in a chat."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(tool_call(self.name, self.arguments, self.call_id))


class _FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        message = message_of("tool", self.output, f"{place}.output")
        messages.append({**message, "tool_call_id": self.call_id})


_ITEMS: dict[Any, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


def _items(value: Any) -> list[Any]:
    return [{"role": "user", "content": value}] if isinstance(value, str) else text_or_list(value)


class _FunctionTool(Fields):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool | None = None  # changes no answer: forced calls always follow the schema


class _TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]
    of_answers: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = Field(None, alias="schema")


class _TextOptions(Fields):
    format: _TextFormat = _TextFormat(type="text", schema=None)
    verbosity: Annotated[Any, Unsupported("leave it out", only="medium")] = None


class _Reasoning(Fields):
    effort: Effort | None = None
    summary: NoEffect = None  # answers have no reasoning apart from their text
    generate_summary: NoEffect = None


_ITS_USAGE = "the last event has the usage; leave it out"
_NOT_STORED = "nothing is stored; send the earlier items in input"


class _StreamOptions(StreamOptions):
    include_usage: Annotated[Any, Unsupported(_ITS_USAGE, only=True)] = False
    continuous_usage_stats: Annotated[Any, Unsupported(_ITS_USAGE, only=False)] = False


class ResponseFields(ChatBody):
    """The fields of a request for a response."""

    names: ClassVar = {
        "messages": "input",
        "form": "text.format",
        "effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
    }

    input: Annotated[list[dict[str, Any]], FailFast(), BeforeValidator(_items)] = Field(min_length=1, max_length=2048)
    instructions: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, alias="max_output_tokens")
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    tools: Annotated[list[dict[str, Any]], as_sent(_FunctionTool)] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
    ] = Field({})
    truncation: Literal["disabled"] = "disabled"
    stream_options: _StreamOptions = _StreamOptions()
    max_tool_calls: NoEffect = None  # of tools that a server runs itself
    background: Annotated[Any, Unsupported("an answer is made while its client waits; leave it out", only=False)] = None
    conversation: Annotated[Any, Unsupported(_NOT_STORED)] = None
    max_tokens: Annotated[Any, Unsupported("use max_output_tokens")] = None
    messages: Annotated[Any, Unsupported("use input")] = None
    n: Annotated[Any, Unsupported("send a request for each answer", only=1)] = 1
    previous_response_id: Annotated[Any, Unsupported(_NOT_STORED)] = None
    prompt: Annotated[Any, Unsupported("no prompts are stored; use instructions and input")] = None
    reasoning_effort: Annotated[Any, Unsupported("use reasoning.effort")] = None
    response_format: Annotated[Any, Unsupported("use text.format")] = None

    @property
    def num_logprobs(self) -> int | None:
        if LOGPROBS in self.include:
            return self.top_logprobs
        if self.top_logprobs:
            raise wrong("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return None

    @property
    def grammar(self) -> Grammar | None:
        return grammar_of(self.text.format.type, self.text.format.of_answers, "text.format.schema")

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort

    def tool_use(self) -> ToolUse | None:
        tools = [
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in self.tools
        ]
        return use_of(tools, self.tool_choice, parallel=self.parallel_tool_calls, flat=True)

    def template_messages(self) -> list[dict[str, Any]]:
        """The instructions and the input as a chat template reads them."""
        messages = [] if self.instructions is None else [message_of("system", self.instructions, "instructions")]
        for number, item in enumerate(self.input):
            _read_item(item, f"input[{number}]").add_to(messages, f"input[{number}]")
        return messages


def _read_item(item: dict[str, Any], place: str) -> _Item:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        names = list(map(repr, _ITEMS))
        raise wrong(f"{place}.type", f"is {short_repr(kind)}; it must be {', '.join(names[:-1])} or {names[-1]}")
    return read_fields(_ITEMS[kind], item, place)
