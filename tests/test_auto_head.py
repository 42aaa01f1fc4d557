"""``head="auto"``: which head is taken, from where, what is said about it, and that the text is plain decoding's."""

import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import draftheads
from cli_world import write_model
from draftheads.checkpoints import registry
from draftheads.cli.info import run
from draftheads.cli.main import read_options
from draftheads.decode.engine import Engine
from draftheads.errors import BaseModelWarning, InvalidSettings, ModelNotFound
from draftheads.loading import search_heads
from draftheads.serve.load_models import load_served
from draftheads.serve.options import ServeOptions
from draftheads.settings import LoadSettings
from families import tiny_head, tiny_model
from mtp_files import model_for, random_layer
from training_world import chat_tokenizer

FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
HUB_ID = "owner/model"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The working directory has a model and two heads for it. No head is installed, and the caches are empty."""
    monkeypatch.setattr(registry, "weights_folder", lambda: tmp_path / "installed")
    monkeypatch.setattr(registry, "data_package_folder", lambda: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "draftheads")
    monkeypatch.setattr(logging.getLogger("draftheads"), "propagate", True)
    return write_model(tmp_path)


def said(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [record.getMessage() for record in caplog.records if "head auto" in record.getMessage()]
    assert "\n" not in line
    return line


def same_text(model: str, **options: Any) -> Engine:
    """The engine by ``auto``, whose greedy text was that of plain decoding."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    plain = draftheads.load(model, **FP32).generate(["black ice on a hill", "a dog"], **settings)
    engine = draftheads.load(model, "auto", **{**FP32, **options})
    drafted = engine.generate(["black ice on a hill", "a dog"], **settings)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    return engine


def info(capsys: pytest.CaptureFixture[str], model: str) -> str:
    capsys.readouterr()
    run(read_options("info", [model]))
    return capsys.readouterr().out


def test_without_a_head_copies_are_drafted(caplog: pytest.LogCaptureFixture) -> None:
    assert same_text("model").drafter.name == "copies"
    words = "head auto: no head for model was found, so copies from the text are drafted"
    assert said(caplog) == f"{words}; the Hugging Face Hub was not asked: model is not an id of a model there"
    caplog.clear()
    assert draftheads.load("model", "auto", copy=False, **FP32).planner is None
    assert "so nothing is drafted" in said(caplog)
    with pytest.raises(InvalidSettings, match="tree 24: prompt-lookup takes no tree"):
        draftheads.load("model", "auto", tree="24", **FP32)


def test_a_head_in_the_model_s_folder_comes_first(
    here: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "medusa", here / "model" / "head")
    shutil.copytree(here / "hydra", here / "installed" / "model" / "hydra")
    assert same_text("model", tree="static:6").drafter.name == "medusa with copies"
    assert said(caplog).startswith("head auto takes model/head (medusa, in the model's folder); also found: hydra (ins")
    text = info(capsys, "model")
    assert text.index("model/head (medusa") < text.index("hydra (installed")


def test_of_many_heads_three_are_named(
    here: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abcdef":
        shutil.copytree(here / "medusa", here / "model" / name)
    draftheads.load("model", "auto", tree="static:6", **FP32)
    assert re.search(
        r"takes model/a .*found: model/b .*model/d .* and 2 more \(`draftheads info model`\)", said(caplog)
    )
    assert "model/f" in info(capsys, "model")


def test_installed_heads_come_before_cached_ones(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    (config := json.loads((here / "medusa" / "config.json").read_text()))["base"]["model_id"] = str(here / "model")
    shutil.copytree(here / "medusa", cached := here / "cache" / "heads" / "0123")
    (cached / "config.json").write_text(json.dumps(config))
    assert same_text("model", tree="static:6").drafter.name == "medusa with copies"
    assert f"head auto takes {cached} (medusa, in the cache); nothing else" in said(caplog)
    config["base"]["model_id"] = "owner/another"
    (cached / "config.json").write_text(json.dumps(config))
    assert search_heads("model")[0] == [], "it is another model's"
    shutil.copytree(here / "hydra", here / "installed" / "model" / "hydra")
    assert [head.name for head in search_heads("model")[0]] == ["hydra"]


def test_of_installed_heads_the_wheel_s_come_first_and_then_those_with_most_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    found, notes = search_heads("smollm2-135m")
    names = [head.name for head in found]
    assert names[:2] == ["hydra", "medusa"]
    assert (len(names) < 4 or names.index("eagle") < names.index("eagle3"), notes) == (True, [])


@pytest.mark.filterwarnings("ignore:.*it is assumed that half of its draft tokens")
def test_an_mtp_layer_in_the_model_s_own_files_drafts(
    here: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_for("mimo", vocab_size=len(chat_tokenizer()))
    model.model.save_pretrained(here / "mimo")
    chat_tokenizer().save_pretrained(str(here / "mimo"))
    weights = here / "mimo" / "model.safetensors"
    save_file({**load_file(weights), **random_layer("mimo")}, weights, metadata={"format": "pt"})
    assert "  mimo (mtp, in the model's own files)\n" in info(capsys, "mimo")
    assert same_text("mimo", tree="4").drafter.name == "mtp with copies"
    assert "head auto takes mimo (mtp, in the model's own files); nothing else was found" in said(caplog)
    assert [head.name for head in search_heads("mimo")[0]] == ["mimo"], "the converted one is the same"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen2", "gemma2"])
def test_a_model_without_such_layers_is_no_head(here: Path, family: str) -> None:
    tiny_model(family).model.save_pretrained(here / "plain")
    assert search_heads("plain")[0] == []


def test_a_head_that_does_not_fit_is_named_and_copies_are_drafted(here: Path) -> None:
    other = tiny_model("llama", seed=9, vocab_size=24)
    draftheads.save_head(tiny_head("medusa", other), here / "model" / "head", base=other, dtype=torch.float32)
    with pytest.warns(BaseModelWarning, match="head auto: model/head does not fit, so copies from"):
        assert draftheads.load("model", "auto", **FP32).drafter.name == "copies"


def test_a_head_that_cannot_be_read_is_passed_over(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(here / "medusa", here / "model" / "damaged")
    (here / "model" / "damaged" / "acceptance.json").unlink()
    shutil.copytree(here / "medusa", here / "model" / "head")
    assert draftheads.load("model", "auto", tree="4", **FP32).drafter.name == "medusa with copies"
    assert "head auto takes model/head" in said(caplog)
    assert "model/damaged cannot be used: " in said(caplog)


def test_of_a_tuned_model_the_heads_of_its_base_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(here / "medusa", here / "installed" / "base-1b" / "medusa")
    (here / "model" / "README.md").write_text("---\nbase_model:\n- base-1b\n---\nA card.\n")
    words = "model was tuned from base-1b, whose heads can be tried: base-1b/medusa (medusa, installed, "
    assert words in info(capsys, "model")
    assert draftheads.load("model", "base-1b/medusa", tree="4", **FP32).drafter.name == "medusa with copies"
    (here / "model" / "README.md").write_text("---\nbase_model: [\n---")
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "_name_or_path": "owner/base"}))
    assert "from owner/base, whose heads can be tried: see `draftheads info owner/base`" in info(capsys, "model")


class FakeHub:
    """The Hub's client with a model and what else names it as its base."""

    def __init__(self, here: Path) -> None:
        self.here, self.asked, self.error = here, [], None
        self.models = {"a/quantised": ["gguf"], "b/theirs": ["eagle3"], "c/ours": ["draftheads"], "d/mtp": ["mtp"]}

    def model_info(self, name: str, *, timeout: float) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(id=name, siblings=[])

    def list_models(self, *, filter: list[str], sort: str, limit: int) -> Any:  # noqa: A002 - its name there
        self.asked.append(filter)
        base, tag = filter
        assert (base, sort) == (f"base_model:{HUB_ID}", "downloads")
        return [SimpleNamespace(id=name) for name, tags in self.models.items() if tag in tags][:limit]

    def get_safetensors_metadata(self, name: str) -> Any:
        tensors = {"model.embed_tokens.weight": SimpleNamespace(shape=[40, 32])}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    def download(self, repo: str, *, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only or repo == "b/theirs":
            raise ConnectionError("not downloaded")
        return str(self.here / ("model" if repo == HUB_ID else "medusa"))


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(here)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


def test_heads_on_the_hub_are_found_by_their_cards(
    hub: FakeHub, here: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    found, notes = search_heads(HUB_ID)
    place = "on the Hugging Face Hub"
    assert ([*map(str, found)], notes) == ([f"c/ours (draftheads, {place})", f"b/theirs (eagle3, {place})"], [])
    assert {tag for _, tag in hub.asked} >= {"draftheads", "speculators", "eagle3", "dflash", "dspark", "medusa"}
    assert not {tag for _, tag in hub.asked} & {"gguf", "mtp", "small-llama"}, "these are whole models"
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    model.config._name_or_path = HUB_ID
    engine = draftheads.load(model, "auto", tokenizer=str(here / "model"), tree="4", **FP32)
    assert engine.drafter.name == "medusa with copies"
    assert said(caplog).startswith(f"head auto takes c/ours (draftheads, {place}); also found: b/theirs (eagle3, ")
    hub.models = {"b/theirs": ["eagle3"]}
    caplog.clear()
    assert draftheads.load(model, "auto", tokenizer=str(here / "model"), **FP32).drafter.name == "copies"
    assert "so copies from the text are drafted; b/theirs cannot be used: no head 'b/theirs'" in said(caplog)


def test_a_layer_of_a_model_on_the_hub_is_found_before_it_is_downloaded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: SimpleNamespace(shape=list(t.shape)) for name, t in random_layer("mimo").items()}
    files = {"a.safetensors": SimpleNamespace(tensors=tensors)}
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda _: SimpleNamespace(files_metadata=files))
    assert search_heads(HUB_ID)[0] == [registry.FoundHead(HUB_ID, "mtp", "in the model's own files")]
    assert hub.asked == [], "a head is here"


def test_without_a_network_it_is_said_that_the_hub_was_not_asked(hub: FakeHub) -> None:
    hub.error = ConnectionError("no route to host")
    found, notes = search_heads(HUB_ID)
    why = "the Hugging Face Hub was not asked, as it cannot be reached (no route to host)"
    assert (found, notes, hub.asked) == ([], [why], [])


def test_info_asks_the_hub_about_a_model_there(
    hub: FakeHub, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MOST_LAYERS", 1)
    assert "  c/ours (draftheads, on the Hugging Face Hub)\n" in info(capsys, HUB_ID)
    assert "method" in info(capsys, str(here / "medusa"))
    monkeypatch.setattr(hub, "download", lambda *_, **__: str(here / "medusa"))
    with pytest.raises(ModelNotFound):
        info(capsys, "owner/model/no/such")


def test_the_server_takes_it_as_a_value(here: Path) -> None:
    shutil.copytree(here / "medusa", here / "model" / "head")
    options = ServeOptions("model", head=("auto",), max_rows=2, load=LoadSettings(**FP32))
    [served], engines = load_served(options)
    assert (served.name, served.head) == ("model", "medusa with copies")
    assert engines["model"].drafter.name == "medusa with copies"
    shutil.rmtree(here / "model" / "head")
    [served], _ = load_served(options)
    assert served.head == "copies"
