"""The forms in which models write calls and thoughts. A model's chat template says which is its own."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from draftheads.decode.answer_forms.channels import GEMMA_4, HARMONY
from draftheads.decode.answer_forms.form import NOTHING, CallForm
from draftheads.decode.answer_forms.json_calls import GRANITE, HERMES, LLAMA_3, MISTRAL, MISTRAL_LIST
from draftheads.decode.answer_forms.pairs import GLM, XML
from draftheads.decode.answer_forms.pythonic import LFM2, PYTHONIC
from draftheads.decode.answer_forms.response_template import usable_template
from draftheads.models.chat_template import ChatReader, Run, added_tokens, render, template_of, template_source

# a form comes before those of which it has the tags
FORMS = (XML, GLM, HERMES, GEMMA_4, HARMONY, GRANITE, LFM2, PYTHONIC, LLAMA_3, MISTRAL, MISTRAL_LIST)
# </think>, [/THINK], <|END_THINKING|>, <|end_of_thought|>, <|inner_suffix|>
_END_OF_THOUGHT = re.compile(
    r"(?P<left><\|?|\[|◁)/(?P<name>[\w:]*(?:think|thought|reason)[\w:]*)(?P<right>\|?>|\]|▷)"
    r"|<\|end(?P<what>_\w*(?:think|thought)\w*)\|>|<\|inner_suffix\|>",
    re.IGNORECASE,
)
_PROBE = "probe_of_template"
_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": NOTHING}}
_CALLED = {"id": "probe0000", "type": "function", "function": {"name": _PROBE, "arguments": {"key": "value"}}}
_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
]


@dataclass(frozen=True)
class AnswerForm:
    """How one model writes its answers."""

    calls: CallForm | None  # None: none of the forms
    thinking: tuple[str, str] | None  # the tags around a thought; None: it does not think
    shows_tools: bool  # whether the chat template shows tools to the model
    template: Any = None  # of transformers' parser, which reads answers that are in none of the forms


_KNOWN: WeakKeyDictionary[Any, dict[str, AnswerForm]] = WeakKeyDictionary()


def form_of(reader: ChatReader, *, run: Run | None = None) -> AnswerForm:
    """The form that the chat template shows, or else the tokens of the tokenizer; ``run`` as in :func:`render`."""
    known, key = _KNOWN.setdefault(reader.tokenizer, {}), f"{template_of(reader)} {len(added_tokens(reader.tokenizer))}"
    if key not in known:
        known[key] = _find(reader, run)
    return known[key]


def _find(reader: ChatReader, run: Run | None) -> AnswerForm:
    shown = _shown(reader, _CHAT, run) or _shown(reader, _CHAT[:1], run)
    places = shown, template_source(reader), " ".join(added_tokens(reader.tokenizer))
    calls = next((form for text in places for form in FORMS if form.is_shown(text)), None)
    thinking = (calls and calls.thinking) or _tags(f"{places[1]} {places[2]}")
    return AnswerForm(calls, thinking, _PROBE in shown, None if calls else usable_template(reader.tokenizer))


def _shown(reader: ChatReader, messages: list[dict[str, Any]], run: Run | None) -> str:
    """What a template makes of messages and a tool; nothing where it refuses them."""
    try:
        return render(reader, messages, tools=[_TOOL], run=run)
    except Exception:  # noqa: BLE001 - a template is a program of the model's author
        return ""


def _tags(source: str) -> tuple[str, str] | None:
    for match in _END_OF_THOUGHT.finditer(source):
        if match["name"]:
            return match["left"] + match["name"] + match["right"], match[0]
        starts = (f"start{match['what']}", f"begin{match['what']}") if match["what"] else ("inner_prefix",)
        for tag in (f"<|{start}|>" for start in starts):
            if found := re.search(re.escape(tag), source, re.IGNORECASE):
                return found[0], match[0]
    return None


def shown_tokens(special: Iterable[str], template: Any = None) -> set[str]:
    """The special tokens without which calls and thoughts cannot be told from the answer."""
    special = set(special)
    forms = [form for form in FORMS if not form.tokens or form.tokens[0] in special]
    tags = {tag for form in forms for tag in (*form.tags, *form.closings, *form.tokens)}
    fields = template.get("fields") if isinstance(template, dict) else None
    parts = map(str, fields.values() if isinstance(fields, dict) else ())
    of_template = " ".join(part for part in parts if "'open" in part).replace("\\", "")  # fields with tags
    word = re.compile(r"think|thought|reason|\|inner_", re.IGNORECASE)
    return {text for text in special if text in tags or text in of_template or word.search(text)}
