"""Lines of published data sets, each recognised by its fields and never by a file's name, as lines of our own form.

MT-Bench, Spec-Bench and SPEED-Bench have our own form already: ``question_id``, ``category``, ``turns``. A list of
messages comes before all other fields: those repeat a part of it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from draftheads.data.lines import Line
from draftheads.errors import DataError, UnlearnableChat
from draftheads.utils.messages import ROLES, Message, message_problem, short

_NAMES = (("role", "from"), ("content", "value"))  # ours, and those of ShareGPT
_CALLS = ("function_call", "tool_call")  # roles whose content is a call
_ROLES = {**dict.fromkeys(("human", "prompter"), "user")}
_ROLES |= dict.fromkeys(("observation", "tool_response", "function_response"), "tool")
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai", *_CALLS), "assistant")
_PAIR = {**_ROLES, **{role: role for role in ROLES}, "input": "user", "output": "assistant"}  # keys of {"user": "…"}
_CONVERSATIONS = ("messages", "conversations", "conversation", "data")  # the first one of them that has messages counts
# the first one of them that is there is asked, learned, read before
_QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input", "inputs", "human", "user")
_ANSWERS = ("output", "response", "solution", "answer", "chosen", "preferred_output", "targets", "assistant", "bot")
_SYSTEMS = ("system", "system_prompt")
_FURTHER = ("context", "input")  # texts that belong to the question
_MARKS = ("weight", "train", "training", "train_on_turn", "loss_mask", "is_learned")  # 0 or false: it is not learned
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_TEXT_PARTS = {None, "text", "input_text", "output_text"}  # types of parts of a content


def own_form(line: Line) -> Line:
    """The line in our own form; the line itself where it is in none of the forms of other projects.

    >>> own_form(Line({"question": "6 times 7?", "answer": "It is 42. #### 42"}))["reference"]
    '42'
    """
    for name in _MEDIA:
        if line.get(name):
            raise UnlearnableChat(f"there are {name} beside the texts, and only texts are read")
    if name := next((name for name in _CONVERSATIONS if _is_conversation(name, line)), ""):
        return line.changed(_conversation(line, field=name))
    for fields, convert in _FORMS.values():
        if line.keys() >= {*fields} and (found := convert(line)):
            return line.changed(found)
    return line.changed({}) if line.keys() & {*_CONVERSATIONS[1:3]} else line  # it is empty


def _is_conversation(name: str, line: Line) -> bool:
    """Whether a field has messages. ``data`` is a usual name, and messages only as a list of texts."""
    value = dict.get(line, name)
    return bool(value) and (name != "data" or (isinstance(value, list) and all(isinstance(one, str) for one in value)))


def is_learned(line: Line) -> bool:
    """Whether nothing marks a line or a message as not to learn."""
    preferred = ["label"] if isinstance(dict.get(line, "label"), bool) else []  # of KTO
    for name in (*_MARKS, *preferred):
        value = line.get(name)
        if (value := json_value(value.lower() if isinstance(value, str) else value)) not in (None, 0, 1):
            raise UnlearnableChat(f"{name} is {short(repr(value))}: only 0 and 1, or false and true, are known")
        if value is not None and not value:
            return False
    return True


def _human_eval(line: Line) -> Mapping[str, Any]:
    code = _text(line, "prompt").strip("\n")
    text = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"
    asked = {name: line[name] for name in ("entry_point", "test")}  # for the check of an answer
    return {**asked, "prompt": text, "question_id": line["task_id"]}


def _question(line: Line) -> Mapping[str, Any]:
    """A question with what belongs to it, and its answer."""
    name = next((name for name in _QUESTIONS if name in line), "")
    is_ours = name == "prompt" and line.keys().isdisjoint({*_ANSWERS, *_SYSTEMS, *_FURTHER, "history"})
    if not name or is_ours or line.keys() & {"completion", "turns"}:
        return {}
    asked = _said(line, name, "user")
    more = [text for other in _FURTHER if other != name and (text := _text(line, other).strip())]
    if more:
        last = asked[-1]["content"] if asked else ""
        asked = [*asked[:-1], {"role": "user", "content": "\n\n".join(filter(None, [last, *more]))}]
    system = _system(line)
    before = [*system, *_history(line)]
    field = next((name for name in _ANSWERS if name in line), "")
    answered = _said(line, field, "assistant") if field else []
    answer = answered[-1]["content"] if answered else ""
    whole = answered if answered and answered[0]["role"] != "assistant" else [*before, *asked, *answered]
    number = answer.rpartition("####")[2].strip().replace(",", "") if "####" in answer else answer or None  # of GSM8K
    return {
        "prompt": asked[0]["content"] if not before and isinstance(line[name], str) else [*before, *asked],
        "messages": whole if answer.strip() else None,
        "reference": line.get("reference", number),
    }


def _said(line: Line, name: str, role: str) -> list[Message]:
    """What one side says in a field: a text, or a list of messages."""
    if isinstance(value := json_value(line[name]), list) and value and all(isinstance(turn, Mapping) for turn in value):
        return inner_messages(line, name, value)
    return [{"role": role, "content": _text(line, name)}]


def _system(line: Line) -> list[Message]:
    texts = (text for name in _SYSTEMS if (text := _text(line, name)).strip())
    return [{"role": "system", "content": text} for text in [next(texts, None)] if text]


def _history(line: Line) -> list[Message]:
    """Earlier turns: pairs of a question and its answer."""
    pairs = json_value(line.get("history")) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError(f"history is {short(repr(pairs))}; it must be a list of pairs of a question and its answer")
    return messages_of([{"user": question, "assistant": answer} for question, answer in pairs])


def _summary(line: Line, *, article: str, summary: str) -> Mapping[str, Any]:
    answer, question = _text(line, summary), f"Article: {_text(line, article)}\nSummary:"  # as in the Amphista paper
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"prompt": question, "messages": messages if answer.strip() else None, "reference": answer}


def messages_of(turns: Sequence[Any]) -> list[Message]:
    """The turns of a chat as chat templates read them, in any mixture of ``from``, ``value``, ``role`` and ``content``.

    A turn can also be a pair, ``{"user": "…", "assistant": "…"}``. A message that is marked as not to learn has
    ``"is_learned": False``.

    >>> messages_of([{"from": "human", "value": "hi"}, {"role": "assistant", "content": "yes"}])
    [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]
    """
    messages = [_message(part) for turn in turns for part in _sides(turn)]
    for number, message in enumerate(messages):
        if problem := message_problem(message):
            raise DataError(f"message {number}{problem}")
    return messages


def inner_messages(line: Line, name: str, turns: Sequence[Any]) -> list[Message]:
    """The messages in a field of a line, which notes what is not read of them."""
    return messages_of([line.inner(name, turn) if isinstance(turn, Mapping) else turn for turn in turns])


def _sides(turn: Any) -> Iterator[Any]:
    """A message, or the two of a pair."""
    if not isinstance(turn, Mapping) or turn.keys() & {"role", "from", "content", "value"}:
        yield turn
    elif sides := [name for name in turn if name.lower() in _PAIR]:
        yield from ({"role": _PAIR[name.lower()], "content": turn[name]} for name in sides)
    else:
        yield turn


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
    content = _joined(content)
    if content is None and turn.keys() & {"content", "value"}:
        raise UnlearnableChat("a message has null as its content")
    role = _ROLES.get(str(role), role)
    line = turn if isinstance(turn, Line) else Line(turn)
    if role != "assistant":  # it is not learned in any case
        line.read |= {name for name in _MARKS if not dict.get(line, name)}
    elif not is_learned(line):
        message["is_learned"] = False
    return {"role": role, "content": content, **message}


def _joined(content: Any) -> Any:
    """A content without its parts, if all of them are texts."""
    if not isinstance(content, list) or not all(isinstance(part, str | Mapping) for part in content):
        return content
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    if kinds := sorted({str(kind) for part in parts if (kind := part.get("type")) not in _TEXT_PARTS}):
        raise UnlearnableChat(f"a message has parts that are not text: {', '.join(kinds)}")
    return "\n".join(str(part.get("text") or "") for part in parts)


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


def _conversation(line: Line, *, field: str) -> Mapping[str, Any]:
    turns = json_value(line[field])
    if field == "data":
        turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"{field} is {short(repr(turns))}; it must be a list of objects with role and content")
    marked = [name for name in _MARKS if isinstance(dict.get(line, name), list)]  # each message
    for name in marked:
        if len(marks := line[name]) != len(turns):
            raise UnlearnableChat(f"{name} has {len(marks)} values for {len(turns)} messages")
        turns = [{**turn, name: mark} for turn, mark in zip(turns, marks, strict=True)]
    messages = inner_messages(line, field, turns)
    system = [message for message in messages if message["role"] in ("system", "developer")]
    said = messages
    if field != "messages":
        # long conversations were split, so that some begin with an answer
        sides = [message["role"] for message in messages]
        first = sides.index("user") if "user" in sides else len(sides)
        system = [message for message in system if message in messages[:first]]
        filled = [number for number in range(first, len(messages)) if _has_words(messages[number])]
        if filled and len(filled) <= filled[-1] - first:
            raise UnlearnableChat(f"an empty turn has others after it in {field}")
        said = [messages[number] for number in filled]
        said = [*system, *said] if said else []
    given = [] if system or not said else _system(line)
    return {**dict.fromkeys(("prompt", "turns", "completion", *marked)), "messages": [*given, *said]}


def _has_words(message: Message) -> bool:
    more = message.keys() - {"role", "content", "name", "is_learned"}
    return bool(message["content"].strip() or message["role"] == "tool" or more)


def _text(line: Line, name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str | None):
        raise DataError(f"{name} is {short(repr(value))}; it must be a text")
    return value or ""


_Form = tuple[tuple[str, ...], Callable[[Line], Mapping[str, Any]]]  # the fields that a line must have, and its reader
_FORMS: Mapping[str, _Form] = {
    "HumanEval": (("task_id", "prompt", "entry_point", "test"), _human_eval),
    "CNN/DM": (("article", "highlights"), partial(_summary, article="article", summary="highlights")),
    "XSUM": (("document", "summary"), partial(_summary, article="document", summary="summary")),
    "": ((), _question),
}
KNOWN_FORMS = f"or {' or '.join(_CONVERSATIONS[1:3])} (ShareGPT), or {', '.join(_QUESTIONS[1:5])} (Alpaca, GSM8K)"
