"""A tiny chat model, chats for it, and stores with small shards."""

from pathlib import Path

import pytest

from draftheads.data import features
from draftheads.data.features import FeatureStore
from draftheads.data.texts import EncodedChat, load_texts
from draftheads.models.model import TargetModel
from training_world import build_features, chat_model, counting_chats, write_chats


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "TOKENS_PER_SHARD", 60)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def texts(target: TargetModel, tmp_path: Path) -> list[EncodedChat]:
    return load_texts(target, [write_chats(tmp_path / "chats.jsonl", counting_chats(10))], max_length=64)


@pytest.fixture
def store(target: TargetModel, texts: list[EncodedChat], tmp_path: Path) -> FeatureStore:
    return build_features(target, texts, tmp_path / "features")
