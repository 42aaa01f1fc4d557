"""The feature store gives back what the target computed, survives being killed and refuses what does not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftheads.data.chat_tokens import EncodedChat
from draftheads.data.features import FeatureStore, shard_path
from draftheads.data.live_features import LiveStore
from draftheads.errors import DataError
from draftheads.models.model import TargetModel


def damages() -> Iterator[Any]:
    yield pytest.param(lambda folder: (folder / "meta.json").unlink(), "no meta.json", id="no meta")
    yield pytest.param(lambda folder: (folder / "meta.json").write_text("{"), "Expecting", id="no json")
    for key, value in [
        ("format_version", 1),
        ("format_version", 3),
        ("num_shards", "3"),
        ("colour", 1),
        ("num_documents", 11),
    ]:

        def change(folder: Path, key: str = key, value: object = value) -> None:
            meta = json.loads((folder / "meta.json").read_text())
            (folder / "meta.json").write_text(json.dumps({**meta, key: value}))

        message = "10 texts in the shards" if key == "num_documents" else key
        yield pytest.param(change, message, id=key)
    yield pytest.param(lambda folder: shard_path(folder, 1).write_bytes(b"x" * 99), "damaged shard", id="shard")

    def shorten(folder: Path) -> None:
        tensors = load_file(shard_path(folder, 1))
        short = {**tensors, "loss_mask": tensors["loss_mask"][1:].clone()}
        save_file(short, shard_path(folder, 1), metadata={"sources": '["", "", "", ""]'})

    yield pytest.param(shorten, "have sizes", id="short mask")


@pytest.mark.parametrize(("damage", "message"), list(damages()))
def test_a_damaged_store_is_an_error(store: FeatureStore, damage: Any, message: str):
    damage(store.folder)
    with pytest.raises(DataError, match=message):
        FeatureStore(store.folder)


def test_lengths_are_counted_once(target: TargetModel, texts: list[EncodedChat], store: FeatureStore):
    """A plan asks for them once per text: counting them all each time takes hours for a hundred thousand texts."""
    for documents in (store, LiveStore(target, texts)):
        assert documents.lengths is documents.lengths
        assert documents.lengths == [len(text.token_ids) for text in texts]
