"""Where a user's turn begins and ends in a chat template."""

from pathlib import Path
from typing import Any

import pytest

from distill_world import options, run
from draftheads.distill.local import user_turn
from draftheads.errors import UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import ModelTokenizer
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
