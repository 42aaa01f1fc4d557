"""Lines of published data sets, each recognised by its fields and never by a file's name, as lines of our own form.

MT-Bench, Spec-Bench and SPEED-Bench have our own form already: ``question_id``, ``category``, ``turns``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from draftheads.errors import DataError, UnlearnableChat
from draftheads.utils.messages import ROLES, Message, message_problem, short

Line = Mapping[str, Any]

_NAMES = (("role", "from"), ("content", "value"))  # ours, and those of ShareGPT
_OUR_FIELDS = ("prompt", "messages", "turns", "prompt_ids", "completion")
_CALLS = ("function_call", "tool_call")  # roles whose content is a call
_ROLES = {"human": "user", **dict.fromkeys(("observation", "tool_response", "function_response"), "tool")}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", *_CALLS), "assistant")


def own_form(value: Any) -> Any:
    """The line in our own form; the value itself where it is in none of the forms of other projects.

    >>> own_form({"question": "6 times 7?", "answer": "It is 42. #### 42"})["reference"]
    '42'
    """
    given = {name for name in value if value[name] is not None} if isinstance(value, Mapping) else set()
    for fields, convert in _FORMS.values():
        if given.issuperset(fields) and given.isdisjoint(set(_OUR_FIELDS) - set(fields)):
            return {**value, **convert(value)}
    return value


def _gsm8k(line: Line) -> Line:
    answer = _text(line, "answer")
    return _asked(_text(line, "question"), answer, answer.rpartition("####")[2].strip().replace(",", ""))


def _human_eval(line: Line) -> Line:
    code = _text(line, "prompt").strip("\n")
    text = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"
    return {**_asked(text), "question_id": line["task_id"]}


def _alpaca(line: Line) -> Line:
    text, more = _text(line, "instruction"), _text(line, "input").strip()
    answer = _text(line, "output")
    return _asked(f"{text}\n\n{more}" if more else text, answer, answer or None)


def _summary(line: Line, *, article: str, summary: str) -> Line:
    answer = _text(line, summary)
    return _asked(f"Article: {_text(line, article)}\nSummary:", answer, answer)  # the prompt of the Amphista paper


def messages_of(turns: Sequence[Any]) -> list[Message]:
    """The turns of a chat as chat templates read them, in any mixture of ``from``, ``value``, ``role`` and ``content``.

    >>> messages_of([{"from": "human", "value": "hi"}, {"role": "assistant", "content": "yes"}])
    [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]
    """
    messages = [_message(turn) for turn in turns]
    for number, message in enumerate(messages):
        if problem := message_problem(message):
            raise DataError(f"message {number}{problem}")
    return messages


def _message(turn: Any) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    role, content = (turn[new] if turn.get(new) is not None else turn.get(old) for new, old in _NAMES)
    role = role.lower() if isinstance(role, str) and role.lower() in {*_ROLES, *ROLES} else role
    calls = turn.get("tool_calls") or turn.get("function_call") or (content if role in _CALLS else None)
    message = {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    thoughts = [turn.get(name) for name in ("reasoning_content", "reasoning", "thinking")]
    if thought := next((text for text in thoughts if isinstance(text, str) and text.strip()), ""):
        message["reasoning_content"] = thought
    if calls:
        if isinstance(calls := json_value(calls), str):
            raise UnlearnableChat("a call is not JSON")
        message["tool_calls"] = [tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    if role in _CALLS or (content is None and message.keys() & {"tool_calls", "reasoning_content"}):
        content = ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        if kinds := sorted({str(part.get("type")) for part in content} - {"text"}):
            raise UnlearnableChat(f"a message has parts that are not text: {', '.join(kinds)}")
        content = "\n".join(str(part.get("text") or "") for part in content)
    if content is None and turn.keys() & {"content", "value"}:
        raise UnlearnableChat("a message has null as its content")
    return {"role": _ROLES.get(str(role), role), "content": content, **message}


def tool_call(call: Any) -> dict[str, Any]:
    """A call as chat templates read it, with its arguments as values, which many files have as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a call is {short(repr(call))}; it must be an object with name and arguments")
    arguments = json_value(function.get("arguments")) or {}
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def json_value(value: Any) -> Any:
    """The value of a JSON text; what is not JSON text stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _conversation(line: Line, *, field: str) -> Line:
    turns = line[field]
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f'{field} is {short(repr(turns))}; it must be a list of objects with "from" and "value"')
    messages = messages_of(turns)
    # long conversations were split, so that some begin with an answer; what follows an empty turn answers nothing
    sides = [message["role"] for message in messages]
    first = sides.index("user") if "user" in sides else len(sides)
    said = list(takewhile(_has_words, messages[first:]))
    system = [message for message in messages[:first] if message["role"] in ("system", "developer")]
    if not system and _text(line, "system").strip():
        system = [{"role": "system", "content": line["system"]}]
    return {"messages": [*system, *said] if said else []}


def _has_words(message: Message) -> bool:
    return bool(message["content"].strip() or message["role"] == "tool" or message.keys() - {"role", "content", "name"})


def _asked(question: str, answer: str = "", reference: Any = None) -> Line:
    """A question to ask, and a chat to learn from if there is an answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"prompt": question, "messages": messages if answer.strip() else None, "reference": reference}


def _text(line: Line, name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str | None):
        raise DataError(f"{name} is {short(repr(value))}; it must be a text")
    return value or ""


_FORMS: Mapping[str, tuple[tuple[str, ...], Callable[[Line], Line]]] = {  # the fields that a line must have
    "HumanEval": (("task_id", "prompt", "entry_point", "test"), _human_eval),
    "GSM8K": (("question", "answer"), _gsm8k),
    "Alpaca": (("instruction",), _alpaca),
    "CNN/DM": (("article", "highlights"), partial(_summary, article="article", summary="highlights")),
    "XSUM": (("document", "summary"), partial(_summary, article="document", summary="summary")),
    "ShareGPT": (("conversations",), partial(_conversation, field="conversations")),
    "LMSYS-Chat": (("conversation",), partial(_conversation, field="conversation")),
}
KNOWN_FORMS = f"or the fields of {', '.join(list(_FORMS)[:-1])} or {list(_FORMS)[-1]}"
