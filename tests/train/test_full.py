"""Runs that train all weights of the model: what changes and when, what is written, resumed, said and refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import draftheads
from draftheads.checkpoints.checkpoint import read_head
from draftheads.cli import train as command
from draftheads.errors import InvalidSettings, ModelNotFound
from draftheads.models.model import TargetModel
from draftheads.train import new_head as memory
from draftheads.train.full import FullRun
from draftheads.train.joint import TUNINGS
from draftheads.train.options import MergeOptions, TrainOptions
from draftheads.train.recipes import RECIPES, defaults_from
from draftheads.train.report import Movement
from draftheads.train.run import train
from draftheads.train.trainer import TrainingInterrupted
from draftheads.train.tuned_model import merge
from draftheads.utils.counts import byte_size, short_count
from fake_progress import FakeProgress
from joint_world import joint_options, on_disk
from training_world import (
    KilledError,
    counting_chats,
    lines,
    stop_by_crash,
    stop_by_ctrl_c,
    without_time,
    write_chats,
)

FULL = TUNINGS["full"]
FILES = ("tuned/model.safetensors", "tuned/head/model.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return on_disk(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "counting.jsonl", counting_chats(60))


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few steps are enough for the model, too."""
    monkeypatch.setitem(TUNINGS, "full", replace(FULL, head_rate_factor=4.0))


def full_options(out: Path, data: Path, model: str, **changes: Any) -> TrainOptions:
    return joint_options(out, data, **{"joint": "full", "model": model, "learning_rate": 0.005, **changes})


@pytest.mark.usefixtures("cheap_nodes")
@pytest.mark.parametrize(
    ("dtype", "tied", "method"), [(torch.float32, False, "hydra"), (torch.bfloat16, True, "medusa")]
)
def test_all_weights_are_trained_and_written_as_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tied: bool, method: str
):
    monkeypatch.setitem(sys.modules, "peft", None)  # not needed
    model = on_disk(tmp_path / "base", dtype=dtype, tie_word_embeddings=tied)
    data = write_chats(tmp_path / "counting.jsonl", counting_chats(200))
    options = full_options(tmp_path / "out", data, model, method=method, epochs=8)
    run = FullRun(options, FakeProgress())
    report = run.run()
    learned = [line["backbone_loss"] for line in lines(options.out) if "backbone_loss" in line]
    assert fmean(learned[-5:]) < 0.5 * fmean(learned[:5])
    assert report.movement.tuned_perplexity < 0.1 * report.movement.original_perplexity
    before = dict(TargetModel.load(model, dtype=torch.float32, device="cpu").model.named_parameters())
    after = dict(run.tuned.model.named_parameters())
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], weight.cpu()) for name, weight in after.items())
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    # the folder has these weights in the type of the base
    folder = options.out / "tuned"
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == load_file(Path(model) / "model.safetensors").keys()
    assert all(torch.equal(stored[name], after[name].detach().to(dtype)) for name in stored)
    again: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == dtype
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert again.generation_config.temperature == 0.7
    # and decodes losslessly with its head
    prompts = [[{"role": "user", "content": f"w{i}"}] for i in range(12)]
    plain = draftheads.load(folder, precision="fp32").generate(prompts, max_new_tokens=24)
    engine = draftheads.load(folder, head=folder / "head", precision="fp32", tree=draftheads.Tree.chain(3))
    headed = engine.generate(prompts, max_new_tokens=24)
    assert [result.token_ids for result in headed] == [result.token_ids for result in plain]
    assert max(result.tokens_per_step for result in headed) > 1.2
    assert read_head(folder / "head").model_id == str(folder)


def test_the_model_does_not_change_while_only_the_heads_are_trained(
    counting: Path, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TUNINGS, "full", replace(TUNINGS["full"], heads_first=1.0))
    options = full_options(tmp_path / "out", counting, base, weight_decay=0.1)
    report: Any = train(options, FakeProgress())
    first, last = (lines(options.out, "validation.jsonl")[at]["losses"] for at in (0, -1))
    assert fmean(last) < fmean(first)
    assert (options.out / FILES[0]).read_bytes() == (Path(base) / "model.safetensors").read_bytes()
    assert (report.movement.kl, report.movement.agreement) == (0.0, 1.0)


@pytest.mark.parametrize(("stop", "after"), [(stop_by_ctrl_c, 12), (stop_by_crash, 3)])
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(
    counting: Path, tmp_path: Path, base: str, stop: Any, after: int
):
    """In the second stage and in the first one."""
    whole = full_options(tmp_path / "a", counting, base, save_steps=2, method="hydra")
    progress = FakeProgress()
    expected: Any = train(whole, progress)
    assert 3 < expected.num_steps // 2 < 12
    options = replace(whole, out=tmp_path / "b")
    with pytest.raises((TrainingInterrupted, KilledError)):
        train(options, FakeProgress(after, stop, stage="training"))
    (checkpoint,) = (options.out / "checkpoints").glob("checkpoint-*.pt")
    if stop is stop_by_ctrl_c:  # it has moments of all weights
        (said,) = (stage for stage in progress.stages if stage.startswith("all weights of the model are trained"))
        value, unit = said.partition("each checkpoint ")[2].split()[:2]
        assert unit == "kB"
        assert checkpoint.stat().st_size == pytest.approx(float(value) * 1000, rel=0.2)
    assert not (options.out / "tuned").exists()
    found: Any = train(replace(options, resume=True), FakeProgress())
    assert without_time(replace(found, model_id="")) == without_time(replace(expected, model_id=""))
    for name in FILES:
        assert (options.out / name).read_bytes() == (whole.out / name).read_bytes()
    assert lines(options.out) == lines(whole.out)
    # a complete run is not done again
    assert train(replace(options, resume=True), FakeProgress()) == found


def test_the_best_step_is_a_whole_model_with_its_head_too(counting: Path, tmp_path: Path, base: str):
    options = full_options(tmp_path / "out", counting, base, learning_rate=0.3, epochs=6, loss="hard", save_steps=2)
    report: Any = train(options, FakeProgress())
    best = options.out / "best"
    kept = Movement(**json.loads((best / "metrics.json").read_text())["movement"])
    assert report.best_step < report.num_steps
    assert kept != report.movement
    for name in FILES:
        assert (best / name).read_bytes() != (options.out / name).read_bytes()
    draftheads.load(best / "tuned", head=best / "tuned" / "head", tree=[[0]])
    assert read_head(best / "tuned" / "head").model_id == str(best / "tuned")


def test_products_in_bf16_train_weights_in_fp32(counting: Path, tmp_path: Path, base: str):
    options = full_options(tmp_path / "out", counting, base, precision="bf16", learning_rate=1e-5, epochs=4)
    run = FullRun(options, FakeProgress())
    run.run()
    moved = [
        (weight - old).abs().max()
        for weight, old in zip(run.tuned.model.parameters(), run.original.model.parameters(), strict=True)
    ]
    assert all(0 < distance < 1e-3 for distance in moved)  # in bf16 the norms, which are 1, would not move


def test_memory_is_said_and_too_little_is_refused_before_the_weights_are_read(
    counting: Path, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
):
    num_weights = sum(tensor.numel() for tensor in load_file(Path(base) / "model.safetensors").values())
    count = num_weights + 3 * (32 * 32 + 32)
    options, progress = full_options(tmp_path / "out", counting, base, epochs=1), FakeProgress()
    monkeypatch.setattr(memory, "memory_bytes", lambda: 16 * count)
    train(options, progress)
    (at,) = (n for n, stage in enumerate(progress.stages) if stage.startswith("all weights of the model are trained"))
    assert progress.stages[at + 1] == "reading data"
    words = f"with its heads {short_count(count)} parameters: weights, gradients and optimizer take"
    assert f"{words} {byte_size(16 * count)} of memory" in progress.stages[at]
    assert f"each checkpoint {byte_size(12 * count)} of the disk" in progress.stages[at]
    monkeypatch.setattr(memory, "memory_bytes", lambda: 16 * count - 1)
    model = tmp_path / "no-weights"
    model.mkdir()
    for file in Path(base).glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    words = f"a model and heads of {short_count(count)} parameters need about {byte_size(16 * count)} of memory"
    with pytest.raises(InvalidSettings, match=f"{words}.*--optimizer adamw-8bit, or give --joint text"):
        train(replace(options, out=tmp_path / "none", model=str(model)), FakeProgress())


def test_models_that_cannot_be_trained_whole_are_refused_by_name(counting: Path, tmp_path: Path, base: str):
    with pytest.raises(InvalidSettings, match=r"--precision 4bit is not for --joint full.*--joint text"):
        full_options(tmp_path / "out", counting, base, precision="4bit")
    with pytest.raises(InvalidSettings, match=r"--optimizer muon is not for --joint"):
        full_options(tmp_path / "out", counting, base, optimizer="muon")
    config = json.loads((Path(base) / "config.json").read_text())
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, content, words in (
        (
            "rounded",
            {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantised weights, which cannot be trained",
        ),
        (
            "seeing",
            {"model_type": "llava", "architectures": ["Llava"], "text_config": config, "vision_config": vision},
            "reads more than text",
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        with pytest.raises(InvalidSettings, match=rf"--joint full: .*{name} .*{words}.*give --joint text"):
            train(full_options(tmp_path / "out", counting, str(folder)), FakeProgress())


def test_a_model_of_another_origin_is_not_written_over(counting: Path, tmp_path: Path):
    model = on_disk(tmp_path / "tuned")
    content = (tmp_path / FILES[0]).read_bytes()
    with pytest.raises(InvalidSettings, match="tuned is there already: name another --out"):
        train(full_options(tmp_path, counting, model), FakeProgress())
    assert (tmp_path / FILES[0]).read_bytes() == content


def test_there_is_nothing_to_merge_and_the_model_is_named(
    counting: Path, tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    command.run(full_options(out, counting, base, epochs=1))
    printed = capsys.readouterr()
    assert f"--model {out}/tuned --head {out}/tuned/head" in printed.out
    assert "draftheads merge" not in printed.out
    assert "Writing" not in printed.err  # no bar of transformers
    for model in (None, base):
        with pytest.raises(InvalidSettings, match="tuned is the whole model, nothing is to be merged"):
            merge(MergeOptions(model=model, adapter=out, out=tmp_path / "merged"))
    with pytest.raises(ModelNotFound, match=r"it has one in .*/tuned"):
        draftheads.load(out)


def test_all_weights_have_a_lower_rate_and_heads_the_same_one_as_with_an_adapter():
    both = [defaults_from({"joint": joint})["learning_rate"] for joint in ("text", "full")]
    assert both == [2.5e-4, 2e-5]
    assert both[0] * TUNINGS["text"].head_rate_factor == both[1] * FULL.head_rate_factor
    of_paper = defaults_from({"joint": "full", "recipe": "medusa-2"})
    assert of_paper == {**RECIPES["medusa-2"].settings, "learning_rate": 2e-5}
