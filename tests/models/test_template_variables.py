"""Variables of chat templates with fixed values: in texts, in heads, on the command line."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.distill.options import DistillOptions
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import effort_variables, read_template, reads_variable, render, unread_variables
from draftheads.models.chat_template import template_of as template_in_use
from draftheads.models.pretrained import ModelTokenizer
from draftheads.settings import TemplateSettings
from draftheads.train.options import TrainOptions
from draftheads.utils.messages import split_variables, variables_of, with_variables
from spaced_tokenizer import spaced_tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
MOOD = "{% macro mood() %}{{ style }}{% endmacro %}"
OWN = f"\n{MOOD}{{{{ enable_thinking }}}}|{{{{ style }}}}|{{{{ mood() }}}}|{{{{ messages[0].content }}}}"


def reader(template: str | None, own: Any = OWN) -> ModelTokenizer:
    tokenizer = spaced_tokenizer()
    tokenizer.chat_template = own
    return ModelTokenizer(tokenizer, frozenset({2}), template)


@pytest.mark.parametrize("own", [OWN, None])
@pytest.mark.parametrize(
    "values",
    [
        {"enable_thinking": False},
        {"enable_thinking": True, "style": None},
        {"style": 'it\'s "{{ x }}" {# a #} 日本 \\n\n🙂'},
        {"style": {"a": [1, 2.5, None, True], "b": {}}},
        {"style": ["{{ '' }} #} %}"]},
    ],
)
def test_a_chat_is_as_if_it_gave_the_values(values: dict[str, Any], own: str | None) -> None:
    """With the tokenizer's own template, and with another one."""
    given = with_variables(None if own else OWN, values)
    assert render(reader(given, own), CHAT) == render(reader(None), CHAT, variables=values)
    assert split_variables(given) == (values, None if own else OWN)


def test_values_of_a_chat_come_first() -> None:
    model = reader(with_variables(None, {"style": "long", "enable_thinking": True}))
    assert render(model, CHAT, variables={"style": "short"}) == render(
        reader(None), CHAT, variables={"style": "short", "enable_thinking": True}
    )


def test_values_are_replaced_and_taken_away() -> None:
    first = with_variables(OWN, {"style": 1})
    assert with_variables(first, {"style": 2}) == with_variables(OWN, {"style": 2})
    assert with_variables(first, {}) == OWN
    assert with_variables(None, {}) is None


def test_a_model_without_a_template_has_none_by_them() -> None:
    assert template_in_use(reader(with_variables(None, {"style": 1}), own=None)) is None
    named = {"default": OWN, "tool_use": "x"}
    found = template_in_use(reader(with_variables(None, {"style": 1}), own=named))
    assert split_variables(found) == ({"style": 1}, OWN)


def test_what_the_template_itself_reads() -> None:
    model = reader(with_variables(None, {"enable_thinking": False, "thinking": False}))
    assert unread_variables(model) == ["thinking"]
    assert reads_variable(model, "enable_thinking")
    quiet = reader(with_variables("{{ messages[0].content }}", {"enable_thinking": False}))
    assert effort_variables(quiet, "high") is None


def test_names_and_files_of_templates(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    for name, text in (("chatml", read_template("chatml")), (tmp_path / "own.jinja", OWN)):
        assert read_template(with_variables(name, {"style": 1})) == with_variables(text, {"style": 1})
    assert read_template(with_variables(None, {"style": 1})) == with_variables(None, {"style": 1})


@pytest.mark.parametrize("pair", ["enable_thinking", "=1", "a b=1", "1a=2", "messages=[]", "tools=1"])
def test_wrong_variables(pair: str) -> None:
    with pytest.raises(InvalidSettings, match="NAME=VALUE"):
        variables_of([pair])


def test_settings_keep_them_in_the_template(tmp_path: Path) -> None:
    given: Any = {"template_variables": ("enable_thinking=false",), "chat_template": "chatml"}
    for settings in (
        TemplateSettings(**given),
        DistillOptions(out=tmp_path / "a.jsonl", prompts=(tmp_path / "p.jsonl",), **given),
        TrainOptions(out=tmp_path / "h", method="medusa", data=(tmp_path,), **given),
    ):
        assert settings.chat_template == with_variables("chatml", {"enable_thinking": False})
        assert settings.template_variables == ()
    assert "template_variables" not in TemplateSettings(**given).given()
