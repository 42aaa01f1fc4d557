"""Bad inputs through Python and through the command line; settings and options have further ones beside their tests.

Each is an error of our own, in one line that names what was found and what to do, and nothing is written.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import draftheads
from cli_world import TEMPLATE, write_model
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.errors import DraftHeadsError

World = tuple[Path, Engine]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A folder with a model, two heads, a LoRA adapter without its base, and files; and an engine of the model."""
    place = tmp_path_factory.mktemp("bad")
    write_model(place)
    (place / "wizard.jsonl").write_text('{"messages": [{"role": "wizard", "content": "a"}]}\n', encoding="utf-8")
    chats = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (place / "chats.jsonl").write_text(f"{json.dumps(chats)}\n" * 3, encoding="utf-8")
    (place / "empty.jsonl").write_text("\n", encoding="utf-8")
    (place / "empty").mkdir()
    (place / "not-a-head").mkdir()
    (place / "not-a-head" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}', encoding="utf-8")
    (place / "lora").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "no-such-base", "task_type": "CAUSAL_LM", "r": 4}
    (place / "lora" / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    (place / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return place, draftheads.load(str(place / "model"), precision="fp32")


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder is the working directory, and the user's cache is empty."""
    monkeypatch.chdir(world[0])
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return world[0]


def loaded(*arguments: Any, **options: Any) -> Callable[[Engine], object]:
    """``load`` with these arguments."""
    return lambda _: draftheads.load(*arguments, **options)


def trained(**settings: Any) -> Callable[[Engine], object]:
    """``train_head`` with these settings."""
    usual = {"model": "model", "method": "medusa", "data": "chats.jsonl", "out": "out"}
    return lambda _: draftheads.train_head(**{**usual, **settings})


IN_PYTHON: dict[str, tuple[Callable[[Engine], object], tuple[str, ...]]] = {
    # what to load
    "a model of bytes": (loaded(b"model"), ("bytes", "model")),
    "a model of two lines": (loaded("a\nb"), (r"'a\nb'", "folder")),
    "a model of 5000 letters": (loaded("x" * 5000), ("'xxx", "folder")),
    "no such model": (loaded("no such model"), ("no such model", "Hub")),
    "an empty folder as a model": (loaded("empty"), ("empty", "config.json")),
    "a head as a model": (loaded("medusa"), ("medusa", "head", "head=")),
    "an adapter without its base": (loaded("lora"), ("lora", "no-such-base")),
    "no such head": (loaded("model", "medusaa"), ("medusaa", "head")),
    "another folder as a head": (loaded("model", "not-a-head"), ("not-a-head", "not a draft head")),
    "the name in transformers": (loaded("model", dtype="fp32"), ("'dtype'", "did you mean precision?")),
    "an unknown argument": (loaded("model", heads=["medusa"]), ("'heads'", "did you mean head?")),
    "precision None": (loaded("model", precision=None), ("None", "fp32, bf16")),
    "a device without its driver": (loaded("model", device="xpu"), ("'xpu'", "cannot use")),
    "device is a list": (loaded("model", device=[0]), ("[0]", "cpu")),
    "a tree without its middle": (loaded("model", "medusa", tree=[[0, 0]]), ("[0, 0]", "add [0]")),
    "a tree of words": (loaded("model", "medusa", tree=["a"]), ("a",)),
    "a tree without a head": (loaded("model", tree=[[0]]), ("draft head",)),
    "no such profile": (loaded("model", "medusa", tree="none.json"), ("none.json", "give auto, plain")),
    "no such template": (loaded("model", chat_template="nope"), ("nope", "chatml")),
    "an empty quantisation": (loaded("model", quantization_config={}), ("{}", "BitsAndBytesConfig")),
    # settings of a request
    "settings of a wrong type": (lambda engine: engine.generate(["abc"], {"seed": 1}), ("SamplingSettings", "seed")),
    # work
    "no data to train on": (lambda _: draftheads.train_head(model="model", method="medusa", out="out"), ("data",)),
    "train into nothing": (trained(out=None), ("out is None", "path")),
    "train on a number": (trained(data=3), ("data is 3", "path")),
    "train no model": (trained(model=None), ("model is None",)),
    "compare no model": (lambda _: draftheads.compare_heads(None), ("model is None",)),
    "heads to compare are text": (lambda _: draftheads.compare_heads("model", "medusa"), ("'medusa'", "['medusa']")),
    "a head to compare is a number": (lambda _: draftheads.compare_heads("model", [3]), ("head is 3",)),
    "prompts to compare": (lambda _: draftheads.compare_heads("model", ["medusa"], "abc"), ("'abc'", "[prompt]")),
    "tune no head": (lambda _: draftheads.tune_head("model", None), ("head is None",)),
    "a wrong tensor to save": (
        lambda engine: draftheads.save_head(torch.nn.Linear(2, 2), "out", base=engine.model),
        ("Linear", "DraftHead"),
    ),
}

ON_THE_COMMAND_LINE: dict[str, tuple[str, ...]] = {
    "generate abc --model ''": ("''", "model"),
    "generate abc --model model --device cuda": ("cuda", "cpu"),
    "generate abc --model model --precision fp8": ("fp8", "fp32"),
    "generate abc --model model --temperature hot": ("hot", "--temperature"),
    "generate abc --model model --tree [[0],[0,0]": ("JSON",),
    "generate abc --model model --tree '{\"a\":1}'": ("JSON list of rank paths",),
    "generate abc --model model --max-tokens 3": ("--max-tokens", "--max-new-tokens"),
    "generate abc --prompts chats.jsonl": ("chats.jsonl", "give one of them"),
    "generate --prompts wizard.jsonl --model model": ("wizard.jsonl:1", "'wizard'", "assistant"),
    "generate abc --model model --out empty": ("empty", "folder"),
    "tune model": ("--head",),
    "info empty": ("empty", "config.json is missing; a head's folder has"),
    "train --method medusa --model model --data chats.jsonl --out out --num-heads 1000000": ("1000000", "--num-heads"),
    "train --method medusa --model model --data chats.jsonl --out out --head-options foo=1": ("foo", "medusa"),
    "train --method medusaa --model model --data chats.jsonl --out out": ("medusaa", "choose one of"),
    "train --method medusa --model model --data empty.jsonl --out out": ("empty.jsonl",),
    "train --method medusa --model model --data wizard.jsonl --out out": ("wizard.jsonl:1", "'wizard'"),
    "train --method medusa --model model --data chats.jsonl --out out --epochs 0": ("--epochs is 0", "1 …"),
    "train --method medusa --model model --data chats.jsonl --out model": ("holds a model", "another --out"),
    "train --method medusa --model model --out out": ("--data",),
    "train --method medusa --data chats.jsonl": ("--out",),
    "merge --model model --adapter nowhere --out merged": ("nowhere",),
    "merge --model model --adapter empty --out merged": ("empty", "adapter_config.json"),
    "show-batch --data none.jsonl --model model": ("none.jsonl",),
}


def files_in(*places: Path) -> set[str]:
    """All files and their sizes."""
    return {f"{path} {path.stat().st_size}" for place in places for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", IN_PYTHON)
def test_bad_input_in_python(case: str, world: World, here: Path, tmp_path: Path):
    call, words = IN_PYTHON[case]
    before = files_in(here)
    with pytest.raises(DraftHeadsError) as raised:
        call(world[1])
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert files_in(here) == before


@pytest.mark.parametrize("command", ON_THE_COMMAND_LINE)
def test_bad_input_on_the_command_line(command: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = files_in(here)
    try:
        code = main(shlex.split(command))
    except SystemExit as ended:  # of options that cannot be parsed
        code = ended.code
    err = capsys.readouterr().err
    assert code in (1, 2)
    assert "Traceback" not in err
    assert code == 2 or (err.startswith("error: ") and err.count("\n") == 1)
    for word in ON_THE_COMMAND_LINE[command]:
        assert word in err
    assert files_in(here) == before
