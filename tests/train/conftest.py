"""The tiny chat model and stored hidden states of its chats."""

from pathlib import Path

import pytest

from draftheads.data.compute_features import load_texts
from draftheads.models.model import TargetModel
from training_world import build_features, chat_model, counting_chats, distilled_chats, write_chats


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture(scope="module")
def features(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    records = distilled_chats(target) + counting_chats(20)
    texts = load_texts(target, [write_chats(folder / "chats.jsonl", records)], max_length=64)
    build_features(target, texts, folder / "features")
    return folder / "features"


@pytest.fixture(scope="module")
def chats(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", distilled_chats(target) + counting_chats(20))
