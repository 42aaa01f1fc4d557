"""New heads: their sizes and draft vocabulary, and the layers that they copy from another head."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro

from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.cli import train_options as command
from draftheads.cli.main import main
from draftheads.data.features import FeatureStore
from draftheads.data.texts import load_texts
from draftheads.errors import BaseModelWarning, CheckpointMismatch, InvalidSettings, ModelNotFound
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.models.model import TargetModel
from draftheads.models.model_config import num_weights
from draftheads.train import new_head as new_head_module
from draftheads.train import run
from draftheads.train.new_head import Start, frequent_tokens, new_head
from draftheads.train.options import TrainOptions
from draftheads.train.trainer import TrainingInterrupted
from fake_progress import FakeProgress
from families import tiny_model
from joint_world import joint_options, train_jointly_for
from training_world import (
    EOS,
    VOCAB,
    build_features,
    chat,
    chat_model,
    chat_tokenizer,
    lines,
    stop_by_ctrl_c,
    train_for,
    train_options,
    write_chats,
)


def options(out: Path, features: Path, **changes: Any) -> TrainOptions:
    small = {"method": "hydra", "num_heads": 2, "draft_vocab_size": 36}
    return train_options(out, features, **{**small, **changes})


@pytest.fixture(scope="module")
def hydra(target: TargetModel, features: Path) -> Path:
    """A trained head; its draft vocabulary and scale are not those that the features would give."""
    settings = options(features.parent / "hydra", features)
    store = FeatureStore(features)
    head = new_head(settings, target, store, range(3))
    assert isinstance(head.config, HydraConfig)
    scaled = HydraHead(replace(head.config, embedding_scale=1.25))
    scaled.initialise(target.weights, head.draft_vocab)
    save_head(scaled, features.parent / "start", base=target, dtype=torch.float32)
    train_for(target, replace(settings, start_from=str(features.parent / "start")))
    return settings.out


def saved(target: TargetModel, settings: TrainOptions) -> Start:
    """An untrained head with these settings, to start from."""
    assert settings.features is not None
    store = FeatureStore(settings.features)
    save_head(new_head(settings, target, store, range(len(store))), settings.out, base=target)
    return Start.read(str(settings.out), target)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters_get_the_models_mask_and_go_on_with_their_own(
    target: TargetModel, features: Path, tmp_path: Path, method: str
):
    store = FeatureStore(features)
    settings = options(tmp_path / "out", features, method=method, head_options=("layers=[]",))
    head: Any = new_head(settings, target, store, range(len(store)))
    assert head.config.mask_token_id == target.mask_token_id > 3
    assert head.embedding_scale == 1.0  # scaled masks would hide what attention adds to them
    own = replace(settings, out=tmp_path / "first", head_options=(*settings.head_options, "mask_token_id=3"))
    start = saved(target, own)
    assert new_head(settings, target, store, range(len(store)), start=start).config.mask_token_id == 3


def test_draft_vocabulary_and_embedding_scale_are_copied_with_the_weights(
    target: TargetModel, features: Path, hydra: Path, tmp_path: Path
):
    store = FeatureStore(features)
    settings = options(tmp_path / "out", features)
    start = Start.read(str(hydra), target)
    alone = new_head(settings, target, store, range(len(store)))
    grown = new_head(settings, target, store, range(len(store)), start=start)
    trained = load_head(hydra, target, dtype=torch.float32)
    assert not torch.equal(alone.draft_vocab, trained.draft_vocab)
    assert alone.config.embedding_scale != trained.config.embedding_scale  # type: ignore[attr-defined]
    assert grown.config == trained.config
    for name, value in trained.state_dict().items():
        assert torch.equal(grown.state_dict()[name], value), name


@pytest.mark.parametrize("size", [20, 48, 0, 1000])
def test_with_the_lm_head_of_the_model_the_draft_vocabulary_may_change(
    target: TargetModel, features: Path, hydra: Path, tmp_path: Path, size: int
):
    store = FeatureStore(features)
    settings = options(tmp_path / "out", features, draft_vocab_size=size)
    start = Start.read(str(hydra), target)
    assert start.part_of_new(settings, target) == 1
    head = new_head(settings, target, store, range(len(store)), start=start)
    trained = load_head(hydra, target, dtype=torch.float32)
    for name, value in trained.named_parameters():
        assert torch.equal(head.get_parameter(name), value), name
    assert head.config.draft_vocab_size == (size if size in (20, 48) else None)
    had, has = ({*head.to_target_ids(torch.arange(head.config.num_draft_tokens)).tolist()} for head in (trained, head))
    assert len(has) == (head.config.draft_vocab_size or target.vocab_size)
    assert had < has if size != 20 else has < had
    assert has >= target.eos_ids
    counts = np.bincount(np.concatenate([ids[mask] for ids, mask in map(store.texts.part, range(len(store)))]))
    counts = np.pad(counts, (0, target.vocab_size - len(counts)))
    can, left = (has - had, {*range(target.vocab_size)} - has) if size != 20 else (has - target.eos_ids, had - has)
    assert min(counts[[*can]]) >= max(counts[[*left]], default=0), "the most frequent ones"


def test_a_start_of_the_whole_vocabulary_may_get_a_smaller_one(target: TargetModel, features: Path, tmp_path: Path):
    store = FeatureStore(features)
    start = saved(target, options(tmp_path / "first", features, draft_vocab_size=0))
    head = new_head(
        options(tmp_path / "out", features, draft_vocab_size=20), target, store, range(len(store)), start=start
    )
    assert torch.equal(head.draft_vocab, frequent_tokens(target, store, range(len(store)), 20))


def test_another_size_of_the_draft_vocabulary_is_said(target: TargetModel, features: Path, hydra: Path, tmp_path: Path):
    of_all = f", and the new head {target.vocab_size}"
    for size, words in ((20, "; it predicts 36 tokens, and the new head 20"), (0, of_all), (1000, of_all), (36, "")):
        reporter = FakeProgress()
        changes = {"start_from": str(hydra), "draft_vocab_size": size, "epochs": 1}
        train_for(target, options(tmp_path / str(size), features, **changes), reporter)
        said = next(stage for stage in reporter.stages if stage.startswith("starting from"))
        assert said.endswith(words or "of the head's parameters")


def test_layers_that_are_added_to_eagle_start_as_the_identity(target: TargetModel, features: Path, tmp_path: Path):
    store = FeatureStore(features)
    start = saved(target, options(tmp_path / "first", features, method="eagle"))
    heads = [
        new_head(
            options(tmp_path / "out", features, method="eagle", num_layers=layers),
            target,
            store,
            range(len(store)),
            start=start,
        )
        for layers in (1, 2)
    ]
    hidden, token_ids = torch.randn(1, 6, target.hidden_size), torch.arange(6)[None]
    one, two = (head(hidden, token_ids) for head in heads)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    "changes", [{"num_layers": 3}, {"num_heads": 3}, {"method": "hydra++"}, {"method": "hydra++", "num_layers": 2}]
)
def test_layers_without_a_counterpart_keep_their_initial_values(
    target: TargetModel, features: Path, hydra: Path, tmp_path: Path, changes: dict[str, Any]
):
    store = FeatureStore(features)
    settings = options(tmp_path / "out", features, **changes)
    start = Start.read(str(hydra), target)
    grown = new_head(settings, target, store, range(len(store)), start=start)
    torch.manual_seed(settings.seed)
    alone = type(grown)(grown.config)
    alone.initialise(target.weights, grown.draft_vocab)
    taken = 0
    for name, value in grown.named_parameters():
        if name in start.tensors:
            assert torch.equal(value, start.tensors[name].float()), name
            taken += value.numel()
        else:
            assert torch.equal(value, dict(alone.named_parameters())[name]), name
    total = sum(value.numel() for value in grown.parameters())
    assert 0 < taken < total
    assert start.part_of_new(settings, target) == pytest.approx(taken / total)


@pytest.mark.parametrize(
    ("method", "base"), [("hydra", "hydra"), ("markov-medusa", "medusa"), ("amphista", "medusa"), ("hydra++", "hydra")]
)
def test_heads_start_with_the_predictions_of_their_start(
    target: TargetModel, features: Path, tmp_path: Path, method: str, base: str
):
    """Of the same method, or of the one that they extend. The start was saved in bf16."""
    report = train_for(target, options(tmp_path / "first", features, method=base, epochs=1))
    reporter, start = FakeProgress(), str(tmp_path / "first")
    train_for(target, options(tmp_path / "grown", features, method=method, start_from=start, epochs=1), reporter)
    gives = next(stage for stage in reporter.stages if stage.startswith(f"starting from {start}, which gives "))
    assert ("gives 100% of the head's parameters" in gives) == (method == base)
    first, *_, last = lines(tmp_path / "grown", "validation.jsonl")
    assert first["losses"] == pytest.approx(report.losses, rel=1e-2)
    assert first["tokens_per_step_chain"] == pytest.approx(report.tokens_per_step_chain, rel=1e-2)
    assert sum(last["losses"]) < sum(first["losses"])


def test_a_head_is_trained_further_after_the_layers_were_tuned(
    target: TargetModel, hydra: Path, chats: Path, tmp_path: Path
):
    tuned = chat_model()  # the embeddings are the same
    for parameter in tuned.model.model.layers.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    with pytest.warns(BaseModelWarning, match="--start-from"):
        load_head(hydra, tuned)
    settings = options(tmp_path / "out", None, data=(chats,), start_from=str(hydra), epochs=1)
    train_for(tuned, settings)  # without a warning
    heads = {"method": "hydra", "num_heads": 2, "draft_vocab_size": 36, "start_from": str(hydra)}
    joint = joint_options(tmp_path / "joint", chats, epochs=1, **heads)
    train_jointly_for(tuned, joint)
    load_head(settings.out, tuned)


def test_a_start_that_does_not_fit_fails_before_the_model_reads(
    target: TargetModel, features: Path, hydra: Path, tmp_path: Path
):
    def message(model: TargetModel = target, **changes: Any) -> str:
        reporter = FakeProgress()
        settings = options(tmp_path / "out", features, **{"start_from": str(hydra), **changes})
        with pytest.raises((InvalidSettings, CheckpointMismatch, ModelNotFound)) as raised:
            train_for(model, settings, reporter)
        assert reporter.stages == []
        return str(raised.value)

    assert message(method="medusa") == f"--start-from {hydra} is a hydra head; heads of medusa start from medusa"
    assert message(method="amphista").endswith("heads of amphista start from amphista or medusa")
    assert "no head 'nowhere'" in message(start_from="nowhere")
    wide = chat_model(hidden_size=64)
    words = f"--start-from {hydra}: trained for tiny-chat with hidden_size 32, this model, tiny-chat, has 64: start"
    assert words in message(wide)
    longer = chat_model(vocab_size=len(VOCAB) + 8)
    assert f"with vocab_size {len(VOCAB)}, this model, tiny-chat, has {len(VOCAB) + 8}" in message(longer)
    other = TargetModel(chat_model().model, chat_tokenizer("{{ messages[0]['content'] }}"), "other-chat")
    other.tokenizer.add_tokens(["w0 w1"])
    assert "with tokenizer fingerprint" in message(other)


def test_a_start_with_other_settings_is_refused(target: TargetModel, features: Path, tmp_path: Path):
    bias, other_bias = "has fusion_bias=false, the new head fusion_bias=true: give --head-options", "fusion_bias=false"
    size, own, block = "draft_vocab_size", {"lm_head": "own"}, {"head_options": ("layers=[]",)}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("medusa", {"num_layers": 2}, {}, "has 2 layers in each head, the new head 1: give --num-layers 2"),
        ("eagle", {"head_options": (other_bias,)}, {}, bias),
        (
            "medusa",
            {size: 8192, **own},  # of a model with fewer tokens
            {size: 40, **own},
            f"size is 40, .* of its own for each of {len(VOCAB)} draft tokens: give --draft-vocab-size 0",
        ),
        (
            "dspark",
            block,
            {size: 40, **block},
            "size is 40, .* of its own for each of 36 draft tokens: give --draft-vocab-size 36",
        ),
    ]
    for number, (method, first, wrong, message) in enumerate(cases):
        start = saved(target, options(tmp_path / str(number), features, method=method, **first))
        assert start.part_of_new(options(tmp_path, features, method=method, **first), target) == 1
        with pytest.raises(InvalidSettings, match=message):
            start.part_of_new(options(tmp_path, features, method=method, **wrong), target)


@pytest.mark.usefixtures("loaded")
def test_a_run_resumes_only_with_the_same_start(target: TargetModel, features: Path, hydra: Path, tmp_path: Path):
    start = shutil.copytree(hydra, tmp_path / "start")
    changes: dict[str, Any] = {"method": "hydra++", "start_from": str(start), "resume": True, "save_steps": 2}
    settings = options(tmp_path / "out", features, **changes)
    with pytest.raises(TrainingInterrupted):
        run.train(settings, FakeProgress(3, stop_by_ctrl_c, stage="training"))
    head = load_head(hydra, target, dtype=torch.float32)
    with torch.no_grad():
        next(head.parameters()).add_(0.1)
    save_head(head, start, base=target)
    with pytest.raises(InvalidSettings, match=r"start_digest was '.*' and is '.*'"):
        run.train(settings, FakeProgress())
    shutil.copytree(hydra, start, dirs_exist_ok=True)
    reporter = FakeProgress()
    assert run.train(settings, reporter) is not None
    assert reporter.stages[0].startswith("resuming from")
    assert not any(stage.startswith("starting from") for stage in reporter.stages)
    save_head(head, start, base=target)
    with pytest.raises(InvalidSettings, match=f"the weights of {start} were .* and are .*: name another --out"):
        run.train(settings, FakeProgress())
    shutil.rmtree(start)
    assert run.train(settings, FakeProgress()) is not None, "without the start, its weights are not compared"


# --- on the command line ---


def read(*arguments: str) -> TrainOptions:
    files = ("--out", "out", "--data", __file__)
    given = [*arguments, *files]
    return tyro.cli(TrainOptions, args=given, default=command.defaults(given))


def test_sizes_of_the_start_are_the_defaults():
    same = read("--method", "mlp-speculator", "--start-from", "mlp-speculator", "--recipe", "mlp-speculator")
    assert (same.num_heads, same.num_layers, same.draft_vocab_size) == (3, 1, 6144)
    assert (same.lm_head, same.head_options) == ("shared", ("inner_size=1024",)), "not the recipe's"
    assert same.betas == (0.9, 0.95), "the recipe's"
    grown = read("--method", "hydra++", "--start-from", "hydra", "--num-layers", "4")
    assert (grown.num_heads, grown.num_layers, grown.draft_vocab_size) == (3, 4, 6144)
    assert (grown.lm_head, grown.head_options) == (TrainOptions.lm_head, ())


def test_other_settings_of_the_start_are_the_defaults(target: TargetModel, features: Path, tmp_path: Path):
    own = ("fusion_bias=false", "lm_head_rank=7")
    heads = {"method": "eagle", "head_options": own, "lm_head": "low_rank"}
    first = options(tmp_path / "first", features, draft_vocab_size=0, epochs=1, **heads)
    train_for(target, first)
    found = read("--method=eagle", "--start-from", str(first.out), "--model", "owner/any")
    assert (set(found.head_options), found.draft_vocab_size, found.lm_head) == (set(own), 0, "low_rank")
    again = replace(found, out=tmp_path / "again", data=(), features=features, max_length=64, epochs=1)
    train_for(target, again)
    assert read_head(again.out).shapes == read_head(first.out).shapes


def test_a_missing_start_fails_before_training(capsys: pytest.CaptureFixture[str]):
    arguments = ["train", "--method", "hydra", "--start-from", "nowhere", "--out", "out", "--data", __file__]
    assert main(arguments) == 1
    assert "no head 'nowhere'" in capsys.readouterr().err
    resumed = read("--method", "hydra", "--start-from", "nowhere", "--resume", "--num-layers", "3")
    assert (resumed.start_from, resumed.num_layers) == ("nowhere", 3), "it may not need its start"


def test_the_draft_vocabulary_has_the_most_frequent_tokens_and_the_end_of_text(target: TargetModel, tmp_path: Path):
    records = [chat("w9 w9 w9", "w5 w5 w5 w3 w3 w8 w7", finished=False), chat("w1", "w5", finished=False)]
    texts = load_texts(target, [write_chats(tmp_path / "chats.jsonl", records)], max_length=64)
    store = build_features(target, texts, tmp_path / "features")
    vocab = frequent_tokens(target, store, [0, 1], 4)
    word = 7  # the id of w0
    assert vocab.tolist() == [EOS, word + 3, word + 5, word + 7]  # w7 before w8: as frequent, lower id
    assert frequent_tokens(target, store, [1], 3).tolist() == [0, EOS, word + 5]
    known = torch.tensor([word + 1, word + 2, word + 4])
    assert frequent_tokens(target, store, [0, 1], 3, known).tolist() == [EOS, word + 1, word + 2]


def test_options_of_one_architecture_are_trained_with_and_saved(target: TargetModel, features: Path, tmp_path: Path):
    own = ("num_auto_embedding_blocks=2", "sampled_token=false")
    config: Any = saved(target, options(tmp_path, features, method="amphista", head_options=own)).saved.config
    assert (config.num_auto_embedding_blocks, config.sampled_token) == (2, False)
    assert {name: getattr(config, name) for name in target.layer_sizes} == target.layer_sizes
    assert config.embedding_scale != 1.0
    options(tmp_path, features, method="eagle", head_options=("num_key_value_heads=9",))  # the target may have 9
    both = ("num_attention_heads=4", "num_key_value_heads=3")
    with pytest.raises(InvalidSettings, match=r"num_attention_heads is 4; it must be a multiple of .* \(3\)"):
        options(tmp_path, features, method="eagle", head_options=both)


@pytest.mark.parametrize(("part", "fits"), [(0.5, False), (0.9, True)])
def test_a_model_fits_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch, part: float, fits: bool):
    config = tiny_model("llama").config
    monkeypatch.setattr(new_head_module, "memory_bytes", lambda: int(4 * num_weights(config) / 0.8))
    assert new_head_module.fits_memory(config, torch.float32, part=part) == fits
