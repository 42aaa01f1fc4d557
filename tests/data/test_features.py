"""Hidden states are computed once, kept, completed after a stop, and refused where they do not fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftheads.data import features
from draftheads.data.features import FeatureStore, shard_path
from draftheads.data.texts import EncodedChat
from draftheads.errors import DataError
from draftheads.models.model import TargetModel
from fake_progress import FakeProgress
from training_world import build_features, chat_model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_documents_have_the_hidden_states_of_single_texts(
    target: TargetModel, texts: list[EncodedChat], store: FeatureStore
):
    assert len(store) == len(texts)
    assert len(store.meta.shards) == 3
    assert store.lengths == [len(text.token_ids) for text in texts]
    assert store.lengths is store.lengths, "a plan asks for them once per text"
    for document, text in zip(store, texts, strict=True):
        assert document.token_ids.tolist() == list(text.token_ids)
        assert document.loss_mask.tolist() == list(text.loss_mask)
        alone = target.hidden_states(torch.tensor([text.token_ids]))[0]
        # bf16 keeps 8 bits: half a unit in the last place is 1/512 of the number
        torch.testing.assert_close(document.hidden.float(), alone, rtol=1 / 256, atol=1e-4)


def test_progress_counts_every_token_once(target: TargetModel, texts: list[EncodedChat], tmp_path: Path):
    progress = FakeProgress()
    build_features(target, texts, tmp_path / "features", progress)
    total = sum(len(text.token_ids) for text in texts)
    assert progress.last == (total, total, "")
    assert progress.done == [*accumulate((len(text.token_ids) for text in texts), initial=0)]


def test_an_interrupted_store_is_completed_to_the_same_bytes(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    build_features(target, texts, tmp_path / "whole")
    done = sum(len(text.token_ids) for text in texts[:5])

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(target, texts, tmp_path / "parts", FakeProgress(done, interrupt))
    with pytest.raises(DataError, match=r"shard-00001.bf16 is missing"):
        FeatureStore(tmp_path / "parts")
    first_made = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    progress = FakeProgress()
    build_features(target, texts, tmp_path / "parts", progress)
    assert 0 < progress.done[0] < progress.last[0], "what is there counts as done"
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == first_made
    monkeypatch.setattr(TargetModel, "hidden_states", None)  # a complete store needs no pass of the model
    build_features(target, texts, tmp_path / "parts")


def test_shards_have_a_few_thousand_tokens_and_are_not_too_many(monkeypatch: pytest.MonkeyPatch):
    def tokens_of_shards(lengths: list[int]) -> list[int]:
        firsts = features.first_of_shards(lengths)
        return [sum(lengths[first:end]) for first, end in pairwise([*firsts, len(lengths)])]

    monkeypatch.setattr(features, "TOKENS_PER_SHARD", 4096)
    assert tokens_of_shards([2048] * 5) == [4096, 4096, 2048]
    assert tokens_of_shards([5000, 10, 5000]) == [5000, 5010]
    monkeypatch.setattr(features, "_MOST_SHARDS", 10)
    assert len(tokens_of_shards([1000] * 1000)) == 10


def test_a_store_of_other_texts_is_an_error(target: TargetModel, texts: list[EncodedChat], store: FeatureStore):
    last = texts[-1]
    for changed in (
        EncodedChat((1, 2, 3), (False, True, True)),
        replace(last, token_ids=(*last.token_ids[:-1], 9)),
        replace(last, loss_mask=(*last.loss_mask[:-1], not last.loss_mask[-1])),
    ):
        with pytest.raises(DataError, match=str(store.folder)):
            build_features(target, [*texts[:-1], changed], store.folder)
    with pytest.raises(DataError, match=str(store.folder)):
        build_features(chat_model(seed=1), texts, store.folder)


def changed(key: str, value: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, key: value}))

    return change


def overwritten(name: str, value: int, kind: Any = np.int32) -> Callable[[Path], object]:
    """A value in the middle of a file."""
    return lambda folder: np.memmap(folder / name, kind, "r+").__setitem__(4, value)


def longer(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + content)


BF16_NAN = 0x7FC0
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "meta.json").unlink(), "no meta.json"),
    (lambda folder: (folder / "meta.json").write_text("{"), "Expecting"),
    *((changed("format_version", version), "format_version") for version in (1, 2, 4)),
    (changed("shards", "3"), "shards"),
    (changed("colour", 1), "colour"),
    (changed("num_documents", 11), "10 texts are there"),
    (lambda folder: shard_path(folder, 1).write_bytes(b"x" * 99), "00001.bf16 has 0 of .* not complete"),
    (longer("shard-00001.bf16", b"xx"), "damaged shard"),
    (longer("texts/loss_mask", b"\0"), "have sizes"),
    (lambda folder: (folder / "texts" / "starts").unlink(), "texts is damaged"),
    (overwritten("shard-00002.bf16", BF16_NAN, np.int16), "00002.*NaN or infinite hidden"),
    *((overwritten("texts/token_ids", token), "made of other texts or weights") for token in (-1, 7, 99_999)),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_store_is_an_error(
    target: TargetModel, store: FeatureStore, damage: Callable[[Path], object], message: str
):
    store.check(target)
    damage(store.folder)
    with pytest.raises(DataError, match=message):
        FeatureStore(store.folder).check(target)
