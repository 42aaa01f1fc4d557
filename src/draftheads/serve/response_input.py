"""The body of ``/v1/responses``: its fields, and its input as the messages of a chat. Knows nothing of answers."""

from abc import abstractmethod
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, TypeAdapter

from draftheads.serve.chat_messages import Arguments, TemplateFields, message_of, tool_call
from draftheads.serve.fields import Fields, check_schema, read_fields, text_or_list, wrong
from draftheads.serve.request_params import CommonFields, StreamOptions, grammar_of
from draftheads.serve.tools import ToolFields, ToolName, ToolUse
from draftheads.settings import MOST_LOGPROBS, Effort, Grammar

LOGPROBS = "message.output_text.logprobs"  # in the field include
_MOST_PAIRS, _MOST_IN_KEY, _MOST_IN_VALUE = 16, 64, 512  # of metadata, as in OpenAI's API


class _Text(Fields):
    without_effect: ClassVar = {"annotations", "logprobs"}  # of an answer that is sent back

    type: Literal["input_text", "output_text"]  # the model reads only text
    text: str


def _parts(content: Any) -> list[Any]:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else text_or_list(content)


_Texts = Annotated[list[_Text], FailFast(), BeforeValidator(_parts)]


class _Item(Fields):
    """One part of the input."""

    without_effect: ClassVar = {"id", "status", "phase"}  # of a part of an answer that is sent back

    @abstractmethod
    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Adds it to the messages of a chat template; ``place`` names the item."""


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        messages.append(message_of(self.role, [part.text for part in self.content], f"{place}.content"))


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
    output: _Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        message = message_of("tool", [part.text for part in self.output], f"{place}.output")
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


def _checked(tools: Any) -> Any:
    """Tools as they were sent: a response repeats them."""
    _TOOLS.validate_python(check_schema(tools))
    return tools


_TOOLS = TypeAdapter(list[_FunctionTool])
_Tools = Annotated[list[dict[str, Any]], BeforeValidator(_checked, json_schema_input_type=list[_FunctionTool])]


class _TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    of_answers: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = Field(None, alias="schema")
    # change no answer: schemas are always strict
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _TextOptions(Fields):
    unsupported: ClassVar = {"verbosity": ("medium", "leave it out")}

    format: _TextFormat = _TextFormat(type="text", schema=None)


class _Reasoning(Fields):
    without_effect: ClassVar = {"summary", "generate_summary"}  # answers have no reasoning apart from their text

    effort: Effort | None = None


class _StreamOptions(StreamOptions):
    unsupported: ClassVar = {
        "include_usage": (True, "the last event always has the usage; leave it out"),
        "continuous_usage_stats": (False, "the last event has the usage; leave it out"),
    }


def _short_metadata(metadata: dict[Any, Any]) -> dict[Any, Any]:
    if len(metadata) > _MOST_PAIRS:
        raise ValueError(f"has {len(metadata)} entries; it must have at most {_MOST_PAIRS}")
    for key, value in metadata.items():
        if len(key) > _MOST_IN_KEY:
            raise ValueError(f"has a key of {len(key)} characters; keys must have at most {_MOST_IN_KEY}")
        if not isinstance(value, str) or len(value) > _MOST_IN_VALUE:
            is_ = f"is {short_repr(value)}; it must be a string of at most {_MOST_IN_VALUE} characters"
            raise ValueError(f"has an entry {key!a}, which {is_}")
    return metadata


class ResponseFields(TemplateFields, CommonFields):
    """The fields of a request for a response."""

    without_effect: ClassVar = {
        "max_tool_calls",  # of tools that a server runs itself
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
    unsupported: ClassVar = {
        "background": (False, "an answer is made while its client waits; leave it out"),
        "conversation": (None, "nothing is stored; send the earlier items in input"),
        "max_tokens": (None, "use max_output_tokens"),
        "messages": (None, "use input"),
        "n": (1, "send a request for each answer"),
        "previous_response_id": (None, "nothing is stored; send the earlier items in input"),
        "prompt": (None, "no prompts are stored; use instructions and input"),
        "reasoning_effort": (None, "use reasoning.effort"),
        "response_format": (None, "use text.format"),
    }

    input: Annotated[list[dict[str, Any]], FailFast(), BeforeValidator(_items)] = Field(min_length=1, max_length=2048)
    instructions: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, alias="max_output_tokens")
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    tools: _Tools = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    metadata: Annotated[dict[str, Any], AfterValidator(_short_metadata)] = Field({})
    truncation: Literal["disabled"] = "disabled"
    stream_options: _StreamOptions = _StreamOptions()

    @property
    def logprobs(self) -> int | None:
        """How many top log-probabilities of each token are asked for; None: not even its own."""
        if LOGPROBS in self.include:
            return self.top_logprobs
        if self.top_logprobs:
            raise wrong("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return None

    @property
    def grammar(self) -> Grammar | None:
        """Of the answer's text; None for free text."""
        return grammar_of(self.text.format.type, self.text.format.of_answers, "text.format.schema")

    def tool_use(self) -> ToolUse | None:
        """What the request says of its tools, as :meth:`ToolFields.tool_use`."""
        match self.tool_choice:
            case "none" | "auto" | "required":
                choice = self.tool_choice
            case {"type": "function", "name": str(name)}:
                choice = {"type": "function", "function": {"name": name}}
            case _:
                form = '"none", "auto", "required" or {"type": "function", "name": …}'
                raise wrong("tool_choice", f"must be {form}")
        chat_tools = [
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in self.tools
        ]
        given = {"tools": chat_tools, "tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}
        return read_fields(ToolFields, given, "").tool_use()

    def messages(self) -> list[dict[str, Any]]:
        """The instructions and the input as a chat template reads them."""
        messages = [] if self.instructions is None else [message_of("system", [self.instructions], "instructions")]
        for number, item in enumerate(self.input):
            _read_item(item, f"input[{number}]").add_to(messages, f"input[{number}]")
        return messages


def _read_item(item: dict[str, Any], place: str) -> _Item:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        names = list(map(repr, _ITEMS))
        raise wrong(f"{place}.type", f"is {short_repr(kind)}; it must be {', '.join(names[:-1])} or {names[-1]}")
    return read_fields(_ITEMS[kind], item, place)
