"""``tools/zoo.py`` on a tiny model: the heads it trains, their folders and their cards."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftheads.bench.table import Row
from draftheads.checkpoints import registry
from draftheads.checkpoints.checkpoint import load_head, read_head
from draftheads.cli.main import read_options
from draftheads.heads import head_classes, parse_head_options
from draftheads.heads.attention import LayerConfig, SeveralLayersConfig
from draftheads.models.model import TargetModel
from training_world import chat_model, counting_chats, tool_module, write_chats

pytestmark = pytest.mark.usefixtures("one_thread")

ONLY = ["medusa", "hydra", "hydra++", "amphista"]


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_module("zoo")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture(scope="module")
def work(tool: Any, target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    data = write_chats(folder / "chats.jsonl", counting_chats(24))
    arguments = ["train", str(folder / "work"), "--data", str(data), "--only", *ONLY]
    small = ["--batch-tokens", "128", "--held-out", "0.2", "--draft-vocab-size", "48"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetModel, "load", lambda *_, **__: target)
        assert tool.main([*arguments, "--", *small]) == 0
        assert tool.main([*arguments, "--", *small]) == 0, "all is there already"
        assert tool.main([*arguments, "--", *small, "--seed", "3"]) == 1, "an error of the training is the tool's"
    return folder / "work"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "weights_folder", lambda: tmp_path / "weights")
    return tmp_path / "weights" / "smollm2-135m"


def bench(work: Path, names: list[str], *, sampled: bool = True, **changes: Any) -> dict[str, Any]:
    row = {"tree": "growing, 24", "tokens_per_step": 2.345, "tokens_per_step_interval": (2.25, 2.5)}
    row |= {"speedup": 1.5, "speedup_interval": (1.25, 1.75), **changes}
    greedy = {"batch_size": 1, "temperature": 0.0, "tree": "best", "num_nodes": 24, "acceptance": "exact"}
    warm = [{**greedy, "temperature": 0.7, "acceptance": rule} for rule in ("exact", "typical")]
    rows = [  # the keys of a real bench.json
        asdict(Row(name=name, tokens_per_second=30.0, settings=settings, part=part, **{**row, **more}))
        for name in names
        for settings, part, more in [
            (greedy, "all", {}),
            (greedy, "maths", {"tokens_per_step": 9.0}),
            ({**greedy, "tree": "defaults"}, "all", {"tokens_per_step": 8.0}),
            ({**greedy, "batch_size": 4}, "all", {"tokens_per_step": 7.0}),
            *((one, "all", {"tokens_per_step": n}) for one, n in zip(warm, (1.875, 2.125), strict=True) if sampled),
        ]
    ]
    drafters = {name: f"{name}-{read_head(work / name).digest}-0123" for name in names}
    shared = {"num_prompts": 80, "prompts": "mt_bench/question.jsonl", "precision": "bf16", "threads": 2}
    return {**shared, "settings": {"max_new_tokens": 128}, "rows": rows, "drafters": drafters}


def written(folder: Path, numbers: dict[str, Any], name: str = "bench.json") -> str:
    (folder / name).write_text(json.dumps(numbers))
    return str(folder / name)


def test_all_heads_have_the_same_training_settings_and_start_from_each_other(work: Path):
    made = {name: json.loads((work / name / "metrics.json").read_text())["options"] for name in ONLY}
    own = {"method", "out", "num_heads", "num_layers", "start_from", "head_options", "epochs"}
    shared = [{key: value for key, value in made[name].items() if key not in own} for name in ONLY]
    assert shared == [shared[0]] * len(ONLY)
    assert (made["hydra"]["start_from"], made["hydra++"]["start_from"]) == (None, None)
    assert made["amphista"]["start_from"] == str(work / "medusa"), "not from the bundled one"
    assert {name: made[name]["epochs"] for name in ONLY} == {"medusa": 4, "hydra": 4, "hydra++": 4, "amphista": 2}
    assert (work / "features").is_dir()


WRONG = {
    "train new --data chats.jsonl --only amphista": "amphista starts from medusa, .* not in .*: train medusa first",
    "train work --data chats.jsonl --only hydra eagle-9": "no head eagle-9 in the zoo; choose among medusa, hydra",
    "bundle work --only hydra eagle-9": "no head eagle-9 in the zoo; choose among medusa, hydra",
    "bundle nowhere --only medusa": "error: no head at .*nowhere",
    "bundle work -- --epochs 3": "this command does not train: leave out --epochs 3",
    "cards": r"name one or more bench\.json",
}


def test_wrong_commands_are_errors(tool: Any, work: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(work.parent)
    for words, message in WRONG.items():
        with pytest.raises(SystemExit, match=message):
            tool.main(words.split())
    assert not zoo.exists(), "all or nothing"


def test_the_heads_of_the_zoo_are_within_the_size_limits(tool: Any):
    """At the sizes of SmolLM2-135M, in bf16."""
    sizes: dict[str, Any] = {"hidden_size": 576, "vocab_size": 49152}
    layer = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_size": 64, "intermediate_size": 1536}
    found = []
    for name, settings in tool.HEADS.items():
        arguments = ["--method", name, *shlex.split(f"{tool.COMMON} {settings}"), "--data", __file__, "--out", "y"]
        options = read_options("train", arguments)
        config_class, head_class = head_classes(name)
        more = {
            **(layer if issubclass(config_class, LayerConfig) else {}),
            **({"layers": [2, 15, 27]} if issubclass(config_class, SeveralLayersConfig) else {}),
            **parse_head_options(name, options.head_options),
        }
        own = {name: getattr(options, name) for name in ("num_heads", "num_layers", "draft_vocab_size")}
        with torch.device("meta"):
            head = head_class(config_class(**{**sizes, **own, **more}))
        found.append(2 * sum(parameter.numel() for parameter in head.parameters()) + 8 * options.draft_vocab_size)
        start = options.start_from
        assert not start or list(tool.HEADS).index(start) < list(tool.HEADS).index(name)
    assert max(found) < tool.MOST_BYTES
    assert sum(found) < tool.MOST_BYTES_IN_ALL


def test_bundled_heads_are_those_that_were_trained(
    tool: Any, target: TargetModel, work: Path, zoo: Path, tmp_path: Path
):
    compared = written(tmp_path, bench(work, ["medusa", "amphista"]))
    assert tool.main(["bundle", str(work), "--bench", compared, "--only", *ONLY]) == 0
    assert [head.method for head in registry.zoo_heads()] == sorted(ONLY)
    for name in ONLY:
        files = {path.name for path in (zoo / name).iterdir()}
        assert files == {"README.md", "acceptance.json", "config.json", "model.safetensors"}
        load_head(zoo / name, target)
        ours, theirs = (load_file(folder / name / "model.safetensors") for folder in (zoo, work))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        card = read_head(zoo / name).card
        metrics = json.loads((work / name / "metrics.json").read_text())
        for i, (loss, top1) in enumerate(zip(metrics["losses"], metrics["top1"], strict=True)):
            assert f"\n| {i + 1} | {loss:.3f} | {top1:.1%} | " in card
        assert f"Is trained to draft {len(metrics['losses'])} tokens beyond the next one, for" in card
        assert f"{metrics['num_training_texts']} chats for training, {metrics['num_held_out_texts']} held" in card
        tokens, answers = (metrics[f"num_{what}_tokens"] / 1e6 for what in ("training", "answer"))
        assert f"\n{tokens:.2f} M tokens, of which {answers:.2f} M are answers." in card
        assert "The model's own answers in int8 (up to 320 tokens" in card
        assert "It shares the model's lm_head. It predicts the 48 most frequent tokens." in card
        assert f"{metrics['options']['epochs']} passes over the text" in card
        assert str(work) not in card + (zoo / name / "config.json").read_text()
        for words in (
            "2.35 (2.25 to 2.50) tokens/step, 1.50 (1.25 to 1.75) times plain",
            "80 prompts (mt_bench/question.jsonl), 128 greedy tokens",
            "At temperature 0.7: 1.88 tokens/step with exact acceptance, 2.12 tokens/step with typical",
        ):
            assert (words in card) == (name in ("medusa", "amphista"))
        start = {"amphista": "medusa"}.get(name)
        assert (f"Its training started from `{start}`" in card) == (start is not None)


def test_a_comparison_of_other_weights_is_refused(tool: Any, work: Path, zoo: Path, tmp_path: Path):
    compared = written(tmp_path, {**bench(work, ["medusa"]), "drafters": {"medusa": "medusa-of-another-day"}})
    with pytest.raises(SystemExit, match="other weights of medusa"):
        tool.main(["bundle", str(work), "--bench", compared, "--only", "hydra", "medusa"])
    assert not zoo.exists(), "all or nothing"
    assert tool.main(["bundle", str(work), "--only", "medusa"]) == 0
    with pytest.raises(SystemExit, match="other weights of medusa: run draftheads bench --heads medusa"):
        tool.main(["cards", compared])
    with pytest.raises(SystemExit, match=r"bench\.json: no bundled head was compared"):
        tool.main(["cards", written(tmp_path, bench(work, []))])


def test_the_command_makes_the_head_again(tool: Any, work: Path):
    options = json.loads((work / "amphista" / "metrics.json").read_text())["options"]
    assert tool.command(options) == (
        "draftheads train --method amphista --model smollm2-135m --data chats.jsonl --out amphista --start-from medusa "
        "--num-layers 2 --draft-vocab-size 48 --max-length 512 --held-out 0.2 --batch-tokens 128 "
        "--learning-rate 0.0005"
    )
    several = {**options, "data": ["a/b.jsonl", "c.jsonl"], "head_options": ["inner_size=8", "x=1"], "start_from": None}
    words = tool.command({**several, "text": ["/private/t.txt"], "betas": [0.9, 0.95]})
    for part in ("--data b.jsonl c.jsonl --text t.txt --out", "--betas 0.9 0.95", "--head-options inner_size=8 x=1"):
        assert part in words
    assert "start-from" not in words


@pytest.mark.parametrize(
    ("learned", "told"),
    [(1.0, "more text of this kind would help"), (9.0, "the head does not overfit: more passes, a larger head")],
)
def test_a_card_compares_training_loss_and_held_out_loss(
    tool: Any, work: Path, tmp_path: Path, learned: float, told: str
):
    folder = tmp_path / "medusa"
    folder.mkdir()
    metrics = json.loads((work / "medusa" / "metrics.json").read_text())
    lines = [{"head_losses": [0.5 if step < 38 else learned, 7.0]} for step in range(40)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = tool.card(folder, {**metrics, "losses": [2.0, *metrics["losses"][1:]]}, [], num_bytes=5_400_000, depth=9)
    assert "beyond the next one, and drafts up to 9 where that gains, for" in text
    assert f"first head was {learned:.2f} on training text. On held-out text it is\n2.00. So {told}" in text
    assert "5.4 MB in bf16" in text
    assert "Side by side" not in text
    assert "None" not in text


def test_a_later_comparison_goes_into_the_cards(tool: Any, work: Path, zoo: Path, tmp_path: Path):
    assert tool.main(["bundle", str(work), "--only", *ONLY]) == 0
    before = {name: read_head(zoo / name).card for name in ONLY}
    for tokens, told in ((2.345, "2.35 (2.25 to 2.50) tokens/step"), (3.456, "3.46 (2.25 to 2.50) tokens/step")):
        found = written(tmp_path, bench(work, ["medusa", "hydra++"], tokens_per_step=tokens))
        assert tool.main(["cards", found]) == 0
        for name in ("medusa", "hydra++"):
            card = read_head(zoo / name).card
            assert card.startswith(before[name])
            assert card.count("## Side by side") == card.count(told) == card.count(" tokens/step, ") == 1
            assert "128 greedy tokens, growing trees of 24 nodes:\n" in card
    assert [read_head(zoo / name).card for name in ("hydra", "amphista")] == [before["hydra"], before["amphista"]]
    smaller = written(tmp_path, bench(work, ["medusa"], tree="static, 10", sampled=False), "smaller.json")
    assert tool.main(["cards", smaller, found]) == 0
    card = read_head(zoo / "medusa").card
    assert card.count("## Side by side") == 1
    assert card.index("greedy tokens, static trees of 10 nodes:\n2.35") < card.index("growing trees of 24 nodes:\n3.46")
    assert card.count("At temperature") == 1
    assert read_head(zoo / "hydra++").card.count("greedy tokens, ") == 1
    assert tool.main(["bundle", str(work), "--bench", smaller, found, "--only", "medusa"]) == 0
    assert read_head(zoo / "medusa").card == card, "the same section"


def test_a_card_has_singular_and_plural_and_nothing_of_what_was_not_measured(tool: Any, work: Path):
    metrics = json.loads((work / "medusa" / "metrics.json").read_text())
    found = bench(work, ["medusa"], sampled=False)
    for number, told in ((1, ("1 pass over the text", "on 1 thread of")), (2, ("2 passes over", "on 2 threads of"))):
        metrics["options"]["epochs"] = metrics["provenance"]["threads"] = number
        text = tool.card(work / "medusa", metrics, [(found, found["rows"][0], [])], num_bytes=1, depth=3)
        assert all(words in text for words in (*told, "2.35 (2.25 to 2.50) tokens/step"))
        assert "temperature 0.7:" not in text


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_BYTES_IN_ALL"])
def test_heads_over_the_size_limits_are_not_bundled(
    tool: Any, work: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch, limit: str
):
    sizes = [read_head(work / name).num_bytes for name in ("medusa", "hydra")]
    monkeypatch.setattr(tool, limit, max(sizes) if limit == "MOST_BYTES" else sum(sizes))
    assert tool.main(["bundle", str(work), "--only", "medusa", "hydra"]) == 0
    before = {path: path.read_bytes() for path in zoo.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="a head may have"):
        tool.main(["bundle", str(work), "--only", "hydra++"])
    assert {path: path.read_bytes() for path in zoo.rglob("*") if path.is_file()} == before
