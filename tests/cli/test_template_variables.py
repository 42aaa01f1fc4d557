"""``--template-variables``: heads keep them, and a head that is used with other ones is warned of."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import draftheads
from cli_world import Run
from draftheads.errors import ChatTemplateWarning
from draftheads.train.run_folder import chat_template_text
from draftheads.utils.messages import with_variables
from training_world import chat_options

TEMPLATE = "{% if thinks is defined and not thinks %}dead {% endif %}{{ messages[0].content }}"
THINKS_NOT = {"thinks": False}
TOKENS = ("--max-new-tokens", "6", "--precision", "fp32")


@pytest.fixture
def model(here: Path, tmp_path: Path) -> Path:
    """A model whose template reads ``thinks``."""
    folder = Path(shutil.copytree(here / "model", tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def head(here: Path, tmp_path: Path) -> Path:
    """A head that was trained with thinks=false."""
    folder = Path(shutil.copytree(here / "medusa", tmp_path / "head"))
    template = chat_template_text(
        chat_options(tmp_path / "out", data=(tmp_path,), template_variables=("thinks=false",))
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def answer(run: Run, model: Path, *words: str) -> str:
    return str(run(["generate", "ab", "--model", str(model), *TOKENS, *words]).out).strip()


def test_a_prompt_has_the_value(run: Run, model: Path) -> None:
    plain = draftheads.load(model, precision="fp32")
    thinking, not_thinking = (plain.generate([text], max_new_tokens=6)[0].text for text in ("ab", "dead ab"))
    assert thinking != not_thinking, "the two prompts can be told apart"
    assert answer(run, model) == thinking
    assert answer(run, model, "--template-variables", "thinks=false") == not_thinking
    engine = draftheads.load(model, precision="fp32", template_variables=THINKS_NOT)
    assert engine.generate(["ab"], max_new_tokens=6)[0].text == not_thinking


def test_a_head_brings_its_variables(model: Path, head: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChatTemplateWarning)
        for given in (None, THINKS_NOT):
            engine = draftheads.load(model, head, precision="fp32", template_variables=given)
            assert engine.model.chat_template == with_variables(None, THINKS_NOT)


def test_other_variables_than_in_training(model: Path, head: Path, here: Path) -> None:
    with pytest.warns(ChatTemplateWarning, match="trained with thinks=false, and the chat template has thinks=true"):
        draftheads.load(model, head, precision="fp32", template_variables={"thinks": True})
    with pytest.warns(ChatTemplateWarning, match="trained with thinks=false.* has no template variables"):
        draftheads.load(model, head, precision="fp32", chat_template="chatml")
    with pytest.warns(ChatTemplateWarning, match="trained with no template variables.* has thinks=false"):
        draftheads.load(model, here / "medusa", precision="fp32", template_variables=THINKS_NOT)


def test_a_variable_that_is_not_read(run: Run, model: Path) -> None:
    words = ["generate", "ab", "--model", str(model), *TOKENS, "--template-variables", "thonks=false"]
    with warnings.catch_warnings():
        warnings.simplefilter("default", ChatTemplateWarning)
        assert "does not read thonks: it changes nothing" in " ".join(run(words).err.split())
    assert "NAME=VALUE" in run([*words[:-1], "thinks"], code=1).err
