"""Training of heads that read hidden states of several layers: stores, losses, runs."""

from pathlib import Path

import pytest
import torch

from draftheads.checkpoints.checkpoint import load_head
from draftheads.data.features import FeatureStore, LiveStore, shard_path
from draftheads.data.texts import load_texts
from draftheads.decode.engine import Engine
from draftheads.errors import DataError, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.train.learner import Learner
from draftheads.train.new_head import new_head
from draftheads.train.training_data import needed_bytes, read_texts
from training_world import build_features, chat, chat_tokenizer, lines, train_for, train_options, write_chats


def options(out: Path, features: Path | None = None, **changes: object):
    return train_options(out, features, **{"method": "eagle3", "num_heads": 2, "epochs": 6, **changes})


def test_a_run_stores_the_layers_and_lowers_the_loss(target: TargetModel, chats: Path, tmp_path: Path):
    out = tmp_path / "out"
    train_for(target, options(out, tmp_path / "features", data=(chats,), max_length=64))
    store = FeatureStore(tmp_path / "features")
    assert store.meta.layers == [0, 1]
    text = store.token_ids[0][None]
    states = target.model(text, output_hidden_states=True).hidden_states
    expected = torch.cat(states, -1)[0].to(torch.bfloat16)  # the input of both layers, and h_t
    torch.testing.assert_close(store[0].hidden, expected)
    log = [line["loss"] for line in lines(out) if "loss" in line]
    assert sum(log[-3:]) < 0.7 * sum(log[:3])
    head = load_head(out, target)
    assert head.hidden_layers == (0, 1)
    prompts = [[1, 4, 3, 7 + i, 2, 3, 1, 5, 3] for i in range(8)]
    drafted, plain = (engine.generate(prompts, max_new_tokens=12) for engine in (Engine(target, head), Engine(target)))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.tokens_per_step for result in drafted) / len(drafted) > 1.3


@pytest.mark.parametrize(
    ("more", "lm_head"),
    [((), "own"), (("lm_head_rank=8",), "low_rank"), (("own_embedding=true", "inner_size=24"), "own")],
)
def test_every_parameter_gets_a_gradient(
    more: tuple[str, ...], lm_head: str, target: TargetModel, chats: Path, tmp_path: Path
):
    texts = load_texts(target, [chats], max_length=64)
    flags = ("fc_norm=true", "norm_output=true", *more)
    settings = options(tmp_path, data=(chats,), head_options=flags, lm_head=lm_head)
    store = LiveStore(target, texts, (0, 1))
    head = new_head(settings, target, store, range(len(store)))
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    document = store[0]
    learner = Learner(head, target.weights)
    batch = document.hidden[None].float(), document.token_ids[None], document.loss_mask[None]
    learner(*batch)["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


def test_a_text_with_a_token_that_the_model_does_not_have_is_left_out(target: TargetModel, tmp_path: Path):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>", "<other>"])
    larger = TargetModel(target.model, tokenizer, "tiny-chat")
    data = write_chats(tmp_path / "new.jsonl", [chat("w1", "w2 w3"), chat("w1", "w2 <other> w3")])
    (tmp_path / "plain.txt").write_text("w1 w2 <new> " * 20)
    reason, left_out = "a token is not one of the model, which has the tokens 0 … 63", {}
    assert len(read_texts(larger, options(tmp_path / "out", data=(data,)), left_out)) == 1
    assert left_out == {reason: [f"{data}:2"]}
    with pytest.raises(DataError, match=reason):
        read_texts(larger, options(tmp_path / "out", text=(tmp_path / "plain.txt",)))


def test_a_store_serves_heads_that_read_some_of_its_layers(
    target: TargetModel, chats: Path, features: Path, tmp_path: Path
):
    texts = load_texts(target, [chats], max_length=64)
    folder = tmp_path / "features"
    build_features(target, texts, folder, layers=(0, 1))
    shard = shard_path(folder, 0)
    size, content = shard.stat().st_size, shard.read_bytes()
    assert size == pytest.approx(needed_bytes(target, texts, (0, 1)), rel=0.2)
    shard.unlink()
    build_features(target, texts, folder, layers=(1,))  # completed as it was begun
    assert shard.read_bytes() == content
    both = FeatureStore(folder)[0].hidden.split(target.hidden_size, -1)
    for layers in ((1,), (1, 0), ()):
        expected = torch.cat([both[i] for i in (*layers, 2)], -1)
        assert torch.equal(FeatureStore(folder, layers)[0].hidden, expected)
    train_for(target, options(tmp_path / "one", folder, epochs=1, head_options=("layers=[1]",)))
    for changes in ({}, {"data": (chats,), "max_length": 64}):
        with pytest.raises(DataError, match=r"of the last layer alone, but the head reads those of layers \[0, 1\]"):
            train_for(target, options(tmp_path / "out", features, **changes))


def test_layers_can_be_chosen(target: TargetModel, features: Path, tmp_path: Path):
    train_for(target, options(tmp_path / "h", features, epochs=1, head_options=("layers=[]",)))
    assert load_head(tmp_path / "h", target).hidden_layers == ()
    with pytest.raises(InvalidSettings, match=r"layer 7 .* tiny-chat has 2 layers: choose among 0 … 2"):
        train_for(target, options(tmp_path / "out", features, head_options=("layers=[0, 7]",)))


def test_a_new_head_starts_near_the_last_hidden_state(target: TargetModel, chats: Path, tmp_path: Path):
    store = LiveStore(target, load_texts(target, [chats], max_length=64), (0, 1))
    for head_options in ((), ("fc_norm=true",)):
        settings = options(tmp_path, data=(chats,), head_options=head_options, draft_vocab_size=0)
        head = new_head(settings, target, store, range(len(store)))
        read, last = head.split(torch.cat([document.hidden.float() for document in store]))
        features = head(read[None], torch.zeros(1, len(read), dtype=torch.long))[0, 0].detach()
        assert torch.cosine_similarity(features, last, dim=-1).median() > 0.8
        assert features.square().mean().sqrt() == pytest.approx(float(last.square().mean().sqrt()), rel=0.05)
