"""A tiny chat model, chats for it, and stores with small shards."""

from pathlib import Path

import pytest

from draftheads.data import extract
from draftheads.data.chat import EncodedChat
from draftheads.data.extract import load_texts
from draftheads.models.model import TargetModel
from training_world import chat_model, counting_chats, write_chats


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "DOCUMENTS_PER_SHARD", 4)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def texts(target: TargetModel, tmp_path: Path) -> list[EncodedChat]:
    return load_texts(target, [write_chats(tmp_path / "chats.jsonl", counting_chats(10))], max_length=64)
