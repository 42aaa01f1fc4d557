"""Lines of published data sets, each recognised by its fields and never by a file's name, as lines of our own form.

MT-Bench, Spec-Bench and SPEED-Bench have our own form already: ``question_id``, ``category``, ``turns``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from draftheads.errors import DataError
from draftheads.utils.messages import short

Line = Mapping[str, Any]

_OUR_FIELDS = ("prompt", "messages", "turns", "prompt_ids", "completion")
_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}


def own_form(value: Any) -> Any:
    """The line in our own form; the value itself where it is in none of the forms of other projects.

    >>> own_form({"question": "6 times 7?", "answer": "It is 42. #### 42"})["reference"]
    '42'

    Raises:
        DataError: a field of a known form is not a text.
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


def _share_gpt(line: Line) -> Line:
    turns = line["conversations"]
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f'conversations is {short(repr(turns))}; it must be a list of objects with "from" and "value"')
    sides = [_ROLES.get(str(turn.get("from")), turn.get("from")) for turn in turns]
    messages = [{"role": side, "content": turn.get("value")} for side, turn in zip(sides, turns, strict=True)]
    # long conversations were split, so that some begin with an answer; what follows an empty turn answers nothing
    first = sides.index("user") if "user" in sides else len(sides)
    said = list(takewhile(lambda message: str(message["content"]).strip(), messages[first:]))
    system = [message for message in messages[:first] if message["role"] == "system"]
    return {"messages": [*system, *said] if said else []}


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
    "ShareGPT": (("conversations",), _share_gpt),
}
KNOWN_FORMS = f"or the fields of {', '.join(list(_FORMS)[:-1])} or {list(_FORMS)[-1]}"
