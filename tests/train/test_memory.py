"""Sizes of heads are checked against the model and the memory before the model's weights are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftheads.errors import InvalidSettings
from draftheads.heads import HEADS
from draftheads.train import new_head as memory
from draftheads.train.new_head import check_sizes, memory_bytes, new_head, num_parameters, reading_dtype
from draftheads.train.run import train
from draftheads.utils.machine import Memory
from fake_progress import FakeProgress
from families import fitting
from joint_world import joint_options, on_disk
from training_world import chat_model, chat_options, counting_chats, train_options, write_chats


@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
@pytest.mark.parametrize("method", HEADS)
def test_parameters_are_counted_without_the_head(method: str, lm_head: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftheads.train.new_head.embedding_scale", lambda *_: 1.0)
    target = chat_model()
    sizes = fitting(method, num_heads=3, num_layers=2)
    own = {"lm_head": lm_head, "head_options": ("lm_head_rank=5",)}
    options = train_options(Path("out"), Path("x"), **{"method": method, **own, "draft_vocab_size": 0, **sizes})
    head = new_head(options, target, [], [])  # type: ignore[arg-type]  # its draft vocabulary needs no texts
    assert num_parameters(options, target.config) == sum(parameter.numel() for parameter in head.parameters())


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 16), ("muon", 16), ("adamw-8bit", 10)])
def test_too_little_memory_is_an_error_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, each: int
):
    config = chat_model().config
    options = train_options(tmp_path / "out", tmp_path, optimizer=optimizer, draft_vocab_size=0)
    needed = 3 * (32 * 32 + 32) * each
    monkeypatch.setattr(memory, "memory_bytes", lambda: needed)
    check_sizes(options, config)
    monkeypatch.setattr(memory, "memory_bytes", lambda: needed - 1)
    words = rf"heads of 3\.2 k parameters need about {needed / 1e3:.1f} kB of memory to train, but this machine has "
    with pytest.raises(InvalidSettings, match=words) as caught:
        check_sizes(options, config)
    assert ("--optimizer adamw-8bit" in str(caught.value)) == (optimizer != "adamw-8bit")
    assert "--num-heads" in str(caught.value)


def test_sizes_beyond_the_model_are_named(tmp_path: Path):
    def check(**changes: Any) -> None:
        check_sizes(train_options(tmp_path, tmp_path, **changes), chat_model().config)

    check(draft_vocab_size=64)
    check(draft_vocab_size=8192)  # the default
    check(draft_vocab_size=6144, recipe="small")  # the recipe's
    with pytest.raises(InvalidSettings, match="--draft-vocab-size is 65, but tiny-chat has 64 tokens"):
        check(draft_vocab_size=65)
    check(head_options=("lm_head_rank=65",))  # without a low_rank lm_head it is not used
    with pytest.raises(InvalidSettings, match="lm_head_rank is 65, but the hidden size of tiny-chat is 32"):
        check(lm_head="low_rank", head_options=("lm_head_rank=65",))


def test_both_commands_check_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = on_disk(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(9))
    monkeypatch.setattr(memory, "memory_bytes", lambda: 1000)
    heads, joint = chat_options(tmp_path, model=model, data=(data,)), joint_options(tmp_path, data, model=model)
    for options in (heads, joint):
        with pytest.raises(InvalidSettings, match=r"this machine has 1\.0 kB"):
            train(options, FakeProgress())


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch):
    assert memory_bytes() > 1 << 28
    monkeypatch.setattr(memory, "find_memory", lambda: Memory(total=1 << 40, available=None, limit=1 << 30))
    assert memory_bytes() == 1 << 30


@pytest.mark.parametrize(
    ("precision", "memory_for", "dtype"),
    [("fp32", 2.0, torch.float32), ("fp32", 1.99, torch.bfloat16), ("auto", 2.0, torch.bfloat16)],
)
def test_texts_are_read_in_fp32_where_that_is_asked_for_and_fits(
    monkeypatch: pytest.MonkeyPatch, precision: str, memory_for: float, dtype: torch.dtype
):
    target = chat_model()
    size = 4 * sum(weight.numel() for weight in target.model.parameters())
    monkeypatch.setattr(memory, "default_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(memory, "memory_bytes", lambda: int(memory_for * size))
    options = train_options(Path("out"), Path("features"), precision=precision)
    assert reading_dtype(options, target.config) == dtype
