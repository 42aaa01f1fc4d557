"""Chats for joint training."""

from pathlib import Path

import pytest

from training_world import chat_model, counting_chats, distilled_chats, write_chats


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = distilled_chats(chat_model()) + counting_chats(20)
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", records)
