"""Tools of chats: the fields, and what they mean for an answer."""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WithJsonSchema

from draftheads.decode.answer_forms import FORMS, form_of
from draftheads.decode.answer_forms.form import CallForm, Schemas, ToolCall, schemas_of
from draftheads.models.chat_template import added_tokens
from draftheads.models.model import TargetModel
from draftheads.models.model_names import shown_name
from draftheads.serve.fields import ApiError, Fields, check_schema, only, wrong
from draftheads.settings import Grammar
from draftheads.utils.messages import short

_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CHOSEN = {"type": {"const": "function"}, "function": _NAMED}
_FUNCTION = {"type": "object", "properties": _CHOSEN, "required": ["type", "function"]}
_LISTED = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _FUNCTION}}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {"type": "object", "properties": _LISTED, "required": ["mode", "tools"]},
    },
    "required": ["type", "allowed_tools"],
}
TOOL_CHOICE: dict[str, Any] = {"anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION, _ALLOWED]}  # what is read
_NOT_SHOWN = {"async", "cache_control", "allowed_callers", "defer_loading"}  # to the model, of a tool
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    tools: tuple[dict[str, Any], ...]  # for the chat template
    forced: tuple[str, ...] = ()  # one of these must be called; none: the model decides
    parallel: bool = True  # an answer may have several calls
    barred: frozenset[str] = frozenset()  # tools of the request that must not be called

    @property
    def schemas(self) -> Schemas:
        """Of the parameters of the functions, by their names."""
        return schemas_of(self.tools)

    def grammar(self, model: TargetModel, text: Grammar | None, field: str) -> Grammar | None:
        """Of an answer that is a forced call, or else one that is calls or such a text; None if it is free.

        The field is that of the text, for errors.
        """
        if not self.forced and text is None:
            return None
        param, fix = (
            ("tool_choice", "use tool_choice auto") if self.forced else (field, "leave response_format or tools out")
        )
        if (calls := call_form(model)) is None:
            raise wrong(param, f"cannot write calls that only the tokenizer's response_template describes: {fix}")
        forced = {name: schema for name, schema in self.schemas.items() if name in self.forced}
        try:
            written = calls.grammar(
                forced or self.schemas,
                added_tokens(model.tokenizer),
                text=None if forced or text is None else text.text,
                parallel=self.parallel,
            )
        except ValueError as error:
            problem = f"calls of the form {calls.name} cannot be forced: {error}: {fix}"
            raise ApiError(400, problem, param=param) from None
        return Grammar.lark(written)


def call_json(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A call in OpenAI's form; calls in streams have an index."""
    place = {} if index is None else {"index": index}
    function = {"name": call.name, "arguments": call.arguments}
    return {**place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _tool_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"is {short(repr(name))}; it must have 1 to 64 letters, digits, _ or -")
    return name


ToolName = Annotated[
    str, AfterValidator(_tool_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


FunctionType = Annotated[
    Literal["function"], only("function", fix="only functions can be called here: leave this tool out")
]


class _Function(Fields, extra="ignore"):
    name: ToolName
    parameters: dict[str, Any] = Field({})


class Tool(Fields, extra="ignore"):
    """A tool of a chat."""

    type: FunctionType
    function: _Function


def as_sent(kind: type[Fields]) -> BeforeValidator:
    """Checks a list of tools of a kind, which stay as they were sent.

    Templates show all of their fields, in the same order, and responses repeat them.
    """
    tools = Annotated[list[kind], Field(max_length=64)]  # type: ignore[valid-type]
    adapter: TypeAdapter[list[Any]] = TypeAdapter(tools)

    def check(given: Any) -> Any:
        names = [getattr(tool, "function", tool).name for tool in adapter.validate_python(check_schema(given))]
        if len(set(names)) < len(names):
            raise ValueError("has two functions of the same name")
        return given

    return BeforeValidator(check, json_schema_input_type=tools)


def use_of(tools: Sequence[dict[str, Any]], choice: Any, *, parallel: bool) -> ToolUse | None:
    """What the field ``tool_choice`` says of tools, in the form of either route."""
    tools = list(map(_shown, tools))
    names = tuple(tool["function"]["name"] for tool in tools)
    match choice:
        case "none":
            return None
        case "auto":
            return ToolUse(tuple(tools), (), parallel) if names else None
        case _ if not names:
            raise wrong("tool_choice", "needs tools")
        case "required":
            return ToolUse(tuple(tools), names, parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*listed]}} | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [*listed],
        }:
            chosen = list(map(_name_of, listed))
        case _:
            mode, chosen = "", [_name_of(choice)]
    if None in chosen:
        form = '{"type": "function", "function": {"name": …}}'
        raise wrong("tool_choice", f'must be "none", "auto", "required", {form} or a list of these in "allowed_tools"')
    for name in chosen:
        if name not in names:
            raise wrong("tool_choice", f"names {short(repr(name))}, which is not among the tools: {', '.join(names)}")
    if mode:  # the model is shown no others
        use = use_of([tool for tool in tools if tool["function"]["name"] in chosen], mode, parallel=parallel)
        return use and replace(use, barred=frozenset(names).difference(chosen))
    return ToolUse(tuple(tools), tuple(filter(None, chosen)), parallel)


def _name_of(chosen: Any) -> Any:
    """Of a function that ``tool_choice`` names; None: it is none."""
    match chosen:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """What the model is shown of a tool."""
    shown = {key: value for key, value in tool.items() if key not in _NOT_SHOWN}
    return {**shown, "function": _shown(shown["function"])} if "function" in shown else shown


def call_form(model: TargetModel) -> CallForm | None:
    """The form of calls that the model's chat template shows, with the tools; None: transformers reads them."""
    form = form_of(model)
    if not (form.calls or form.template) or not form.shows_tools:
        problem = f"the chat template of {shown_name(model.model_id)} shows no tools or none of the forms of calls"
        names = "; ".join(each.name for each in FORMS)
        fix = "leave tools out, or start the server with a template that has one, such as --chat-template hermes"
        raise ApiError(400, f"{problem} ({names}): {fix}", param="tools")
    return form.calls
