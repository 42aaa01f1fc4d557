"""Where a user's turn begins and ends in a chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from byte_tokenizers import byte_level
from distill_world import options, run
from draftheads.data.texts import load_texts
from draftheads.decode.request import Request
from draftheads.distill.conversation import Dialogue, Prompt
from draftheads.distill.local import add_result, user_turn
from draftheads.errors import UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import ModelTokenizer
from draftheads.settings import SamplingSettings
from training_world import EOS, TEMPLATE, chat_model, chat_tokenizer


@pytest.mark.parametrize(
    ("template", "opening", "end"),
    [
        (TEMPLATE, "<s> user \n", {"stop_token_ids": (EOS,)}),
        ("{% for m in messages %}<s> {{ m['content'] }} <e> \n {% endfor %}", "<s>", {"stop_token_ids": (EOS,)}),
        ("{% for m in messages %}w1 {{ m['content'] }} w2 w3 \n w4 {% endfor %}", "w1", {"stop": ("w2 w3",)}),
    ],
)
def test_the_beginning_and_the_end_of_a_user_turn_are_found_in_the_template(template: str, opening: str, end: Any):
    tokenizer = chat_tokenizer(template)
    ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
    assert user_turn(ModelTokenizer(tokenizer, frozenset({EOS}))) == (ids, end)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['content'] }}", "nothing after a user's words"),
        ("{% for m in messages %}<s> {{ m['content'] | upper }} <e>{% endfor %}", "does not show the user's words"),
        ("{{ raise_exception('only dogs') }}", "only dogs"),
    ],
)
def test_templates_that_do_not_allow_self_talk_are_refused(tmp_path: Path, template: str, words: str):
    target = TargetModel(chat_model().model, chat_tokenizer(template), "tiny")
    with pytest.raises(UnsupportedModel, match=words):
        run(target, options(tmp_path, prompts=(), num_self_talk=1))


_START = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:"
_END = "<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
_CHANNELS = (
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|channel|>commentary to=functions.{{ c.function.name }} "
    "<|constrain|>json<|message|>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}<|channel|>final<|message|>{{ m.content }}{% endif %}"
)
_TOKENS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "tokens", "said", "message"),
    [
        (
            "{# <tool_call> #}{{ m.content }}",
            (),
            'I look. <tool_call>{"name": "now",  "arguments": {}}</tool_call>',
            {"content": 'I look. <tool_call>{"name": "now",  "arguments": {}}</tool_call>'},
        ),
        (
            _CHANNELS,
            _TOKENS,
            _THOUGHT + '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"at": 1}',
            {
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {"at": 1}}}],
            },
        ),
        (
            _CHANNELS,
            _TOKENS,
            f"{_THOUGHT}<|channel|>final<|message|>Yes.",
            {"content": "Yes.", "reasoning_content": "Hm."},
        ),
    ],
)
def test_calls_and_thoughts_of_answers_are_kept_and_learned(
    tmp_path: Path, template: str, tokens: tuple[str, ...], said: str, message: dict[str, Any]
):
    """A call ends the conversation; only an answer in channels is separated, for the template."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
    reader = ModelTokenizer(tokenizer, frozenset({0}), _START + template + _END)
    tools = ({"type": "function", "function": {"name": "now"}},)
    dialogue = Dialogue(Prompt(("a", "b"), None, "file:1", tools), index=0, options=options(tmp_path))
    dialogue.ask_next()
    request = Request(
        [5], SamplingSettings(max_new_tokens=999), tokenizer=tokenizer, eos_ids=frozenset({0}), max_length=None
    )
    request.append([*tokenizer(said)["input_ids"], 0], num_drafted=0)
    add_result(dialogue, request, reader)
    assert dialogue.messages[1:] == [{"role": "assistant", **message}]
    assert dialogue.is_over == ("now" in said)
    (tmp_path / "out.jsonl").write_text(json.dumps(dialogue.record()))
    [text] = load_texts(reader, [tmp_path / "out.jsonl"], max_length=999)
    learned = [token for token, is_learned in zip(text.token_ids, text.loss_mask, strict=True) if is_learned]
    assert tokenizer.decode(learned) == f"{said}<eos>"
