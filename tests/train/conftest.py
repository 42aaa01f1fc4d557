"""The tiny chat model, chats that it can learn from, stored hidden states of them, and trained heads."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from draftheads.data.texts import load_texts
from draftheads.models.model import TargetModel
from joint_world import joint_options, train_jointly_for
from training_world import (
    build_features,
    chat_model,
    counting_chats,
    distilled_chats,
    train_for,
    train_options,
    write_chats,
)


@pytest.fixture(scope="package", autouse=True)
def _few_texts() -> Iterator[None]:
    """Acceptance profiles are measured on few texts: they take longer than the trainings here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftheads.train.training.NUM_TEXTS", 3)
        yield


@pytest.fixture(scope="session")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def loaded(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """That model is loaded, whatever the name."""
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)


@pytest.fixture(scope="session")
def chats(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", distilled_chats(target) + counting_chats(20))


@pytest.fixture(scope="session")
def features(target: TargetModel, chats: Path) -> Path:
    build_features(target, load_texts(target, [chats], max_length=64), chats.parent / "features")
    return chats.parent / "features"


@pytest.fixture(scope="session")
def trained(target: TargetModel, features: Path) -> Callable[[str], Path]:
    """The folder of a small run of a method, which no test may change."""

    @cache
    def folder(method: str) -> Path:
        settings = train_options(features.parent / f"trained-{method}", features, method=method, save_steps=4)
        train_for(target, settings)
        return settings.out

    return folder


@pytest.fixture(scope="session")
def tuned(chats: Path) -> Path:
    """The folder of a small joint run, which no test may change."""
    settings = joint_options(chats.parent / "tuned", chats, epochs=1)
    train_jointly_for(chat_model(), settings)
    return settings.out
