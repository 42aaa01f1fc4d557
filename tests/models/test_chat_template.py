"""Chat templates: built-in ones, files, and text that continues other tokens."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import continuing_ids, dated, read_template, render, template_of
from draftheads.models.pretrained import ModelTokenizer
from spaced_tokenizer import spaced_tokenizer
from training_world import chat_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)


def rendered(name: str, *messages: dict[str, str], prompt: bool = False) -> str:
    reader = ModelTokenizer(spaced_tokenizer(), frozenset({2}), read_template(name))
    return render(reader, messages, add_generation_prompt=prompt)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2001"),
        ("\n{% set form = '%d.%m.' %}{{ strftime_now(format=form) }}", "\n03.02."),
        ("{%if strftime_now is defined%}{{ strftime_now('%d') | int + 1 }}{%endif%}", "4"),
        ("{% macro day() %}{{ strftime_now('%A') }}{% endmacro %}{{ day() }}", "Saturday"),
    ],
)
def test_the_date_of_a_run_is_written_wherever_its_format_stands(template: str, text: str):
    with dated("2001-02-03T04:05:06"):
        assert render(ModelTokenizer(spaced_tokenizer(), frozenset({2}), template), [USER]) == text


def test_vicuna():
    """As FastChat's vicuna_v1.1."""
    assert rendered("vicuna", USER, prompt=True) == f"<s>{VICUNA_SYSTEM} USER: Hi ASSISTANT:"
    whole = "<s>Be brief. USER: Hi ASSISTANT: Hello</s>USER: Hi ASSISTANT:"
    assert rendered("vicuna", SYSTEM, USER, ASSISTANT, USER, prompt=True) == whole


def test_llama_2():
    assert rendered("llama-2", USER, prompt=True) == "<s>[INST] Hi [/INST]"
    whole = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello</s><s>[INST] Hi [/INST]"
    assert rendered("llama-2", SYSTEM, USER, ASSISTANT, USER, prompt=True) == whole


def test_chatml():
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert rendered("chatml", SYSTEM, USER) == turns
    assert rendered("chatml", SYSTEM, USER, prompt=True) == turns + "<|im_start|>assistant\n"


def test_hermes_is_chatml_with_tools():
    assert rendered("hermes", SYSTEM, USER, prompt=True) == rendered("chatml", SYSTEM, USER, prompt=True)
    reader = ModelTokenizer(spaced_tokenizer(), frozenset({2}), read_template("hermes"))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    called = {**ASSISTANT, "content": "", "tool_calls": [call, call]}
    chat = [SYSTEM, USER, called, {"role": "tool", "content": "2"}]
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert render(reader, chat, tools=[tool]) == (
        "<|im_start|>system\nBe brief.\n\nYou can call these functions:\n<tools>\n"
        '{"name": "add", "parameters": {"type": "object"}}\n</tools>\n'
        "To call a function, answer with its name and arguments:\n<tool_call>\n"
        '{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{shown}\n{shown}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["vicuna", "llama-2"])
def test_turns_in_the_wrong_order_are_refused(name: str):
    with pytest.raises(Exception, match="must take turns"):
        rendered(name, USER, USER)


def test_a_template_can_be_a_file(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
    assert rendered(str(tmp_path / "mine.jinja"), USER) == "Hi!"
    assert read_template(None) is None


@pytest.mark.parametrize("name", ["vicunna", "."])
def test_an_unknown_template_is_an_error_that_names_the_choices(name: str):
    with pytest.raises(
        InvalidSettings, match=f"chat template '{name}' cannot be read .* chatml, hermes, llama-2, vicuna"
    ):
        read_template(name)


def test_a_given_template_is_used_in_place_of_the_tokenizers_own_which_stays():
    tokenizer = chat_tokenizer("own")
    given, own = ModelTokenizer(tokenizer, frozenset(), "given"), ModelTokenizer(tokenizer, frozenset())
    assert (render(given, [USER]), render(own, [USER])) == ("given", "own")
    assert (template_of(given), template_of(own), tokenizer.chat_template) == ("given", "own", "own")


@pytest.mark.parametrize("style", ["prepend", "metaspace"])
@pytest.mark.parametrize("text", ["Hi", " Hi", "  Hi", "\n", "\nHi", ":", "</s>", " ", ""])
def test_a_continuation_has_no_space_of_the_tokenizers(style: str, text: str):
    tokenizer: Any = spaced_tokenizer(style)
    found = "".join(tokenizer.convert_ids_to_tokens(continuing_ids(tokenizer, text)))
    assert found.replace("▁", " ") == text


@pytest.mark.parametrize("text", ["w1 w2", "\n w1", "w1 \n", "<e> \n", ""])
def test_other_tokenizers_read_a_continuation_as_a_text(text: str):
    tokenizer = chat_tokenizer()
    assert continuing_ids(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]
