"""The tiny chat model, chats that it can learn from, and stored hidden states of them."""

from pathlib import Path

import pytest

from draftheads.data.texts import load_texts
from draftheads.models.model import TargetModel
from training_world import build_features, chat_model, counting_chats, distilled_chats, write_chats


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def loaded(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """That model is loaded, whatever the name."""
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)


@pytest.fixture(scope="module")
def chats(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", distilled_chats(target) + counting_chats(20))


@pytest.fixture(scope="module")
def features(target: TargetModel, chats: Path) -> Path:
    build_features(target, load_texts(target, [chats], max_length=64), chats.parent / "features")
    return chats.parent / "features"
