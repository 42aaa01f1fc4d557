"""Hidden states in vLLM's files: the same as the model's own, or an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftheads.cpu.optimise import TYPICAL_TEXT
from draftheads.data import vllm_features
from draftheads.data.features import LiveStore
from draftheads.data.texts import EncodedChat
from draftheads.data.vllm_features import ExtractedStore
from draftheads.errors import DataError, DataWarning
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from families import FAMILIES, tiny_model
from vllm_files import extract_as_vllm


def texts_of(target: TargetModel, number: int = 5, length: int = 40) -> list[EncodedChat]:
    """Random texts of several lengths."""
    torch.manual_seed(3)
    sizes = [length - 3 * i for i in range(number)]
    ids = [tuple(torch.randint(3, target.vocab_size, (size,)).tolist()) for size in sizes]
    return [EncodedChat(one, (False, *[True] * (len(one) - 1)), f"chats.jsonl:{i}") for i, one in enumerate(ids, 1)]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_are_the_models_own(family: str, tmp_path: Path):
    """In files that also have other layers, and further tokens."""
    target = tiny_model(family)
    texts = texts_of(target)
    extract_as_vllm(target, texts, tmp_path / "states", [1, 2, 0], further=2)
    for layers in ((), (0, 1)):
        own = LiveStore(target, texts, layers)
        found = ExtractedStore(target, texts, tmp_path / "states", layers)
        assert found.fingerprint == own.fingerprint
        for expected, document in zip(own, found, strict=True):
            assert torch.equal(document.token_ids, expected.token_ids)
            assert torch.equal(document.loss_mask, expected.loss_mask)
            assert document.hidden.dtype == torch.bfloat16
            torch.testing.assert_close(document.hidden, expected.hidden, rtol=0.03, atol=0.06)


def test_texts_that_training_cuts_have_their_files(tmp_path: Path):
    target = tiny_model("llama")
    texts = texts_of(target)
    extract_as_vllm(target, texts, tmp_path / "states", [2])
    cut = [EncodedChat(text.token_ids[:30], text.loss_mask[:30]) for text in texts]
    found = ExtractedStore(target, cut, tmp_path / "states")
    assert [len(document.hidden) for document in found] == [min(30, len(text.token_ids)) for text in texts]


IDS = torch.arange(40)


@pytest.mark.parametrize(
    ("layer_ids", "tensors", "named"),
    [
        ([1], {}, r"logits .*\d+\.\d%.* add 2 "),
        ([2], {}, r"inputs of layer 1 .* add 1 "),
        ([1, 2], {"token_ids": IDS}, "0-.*hidden_states"),
        ([1, 2], {"token_ids": IDS, "hidden_states": torch.ones(40, 2, 32)}, r"1 text of 5, .*chats\.jsonl:1"),
        ([1, 2], None, "0-.*safetensors"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, layer_ids: list[int], tensors: dict[str, Any] | None, named: str):
    target = tiny_model("llama")
    extract_as_vllm(target, texts_of(target), tmp_path / "states", layer_ids)
    path = min((tmp_path / "states").glob("*.safetensors"))
    if tensors is None:
        path.write_bytes(path.read_bytes()[:-100])
    elif tensors:
        save_file(tensors, path)
    with pytest.raises(DataError, match=f"{tmp_path / 'states'}.*{named}"):
        ExtractedStore(target, texts_of(target), tmp_path / "states", (1,) if layer_ids != [1] else ())


@pytest.mark.parametrize(
    ("other", "named"),
    [({"seed": 1}, "nearest differs"), ({"hidden_size": 64}, r"\[\d+, 2, 64\].*\[\d+, layers, 32\]"), (None, "")],
)
def test_files_of_another_model_or_size_are_refused(tmp_path: Path, other: dict[str, int] | None, named: str):
    target, folder = tiny_model("llama"), tmp_path / "states"
    if other:
        extract_as_vllm(tiny_model("llama", **other), texts_of(target), folder, [1, 2])
    with pytest.raises(DataError, match=f"{folder}.*{named}"):
        ExtractedStore(target, texts_of(target), folder)


def test_each_file_is_compared_and_what_is_not_read_is_named(tmp_path: Path):
    target, folder = tiny_model("llama"), tmp_path / "states"
    first, *_ = same = texts_of(target)
    ids = [(*first.token_ids[:9], *text.token_ids) for text in same]
    texts = [EncodedChat(one, (False, *[True] * (len(one) - 1))) for one in ids]
    extract_as_vllm(target, texts, folder, [2])
    *_, last = sorted(folder.glob("*.safetensors"))
    tensors = load_file(last)
    other = load_file(min(folder.glob("*.safetensors")))["hidden_states"][: len(tensors["token_ids"])]
    for changed, named in (
        ({"hidden_states": other}, "not those of the tokens: the logits differ by"),
        ({"hidden_states": tensors["hidden_states"][:-1]}, r"\[\d+, 1, 32\], expected"),
        ({"hidden_states": tensors["hidden_states"].long()}, "I64"),
        ({"hidden_states": tensors["hidden_states"].repeat(1, 2, 1)}, "has 2 layers"),
        ({"hidden_states": tensors["hidden_states"] * float("nan")}, "nan"),
    ):
        save_file({**tensors, **changed}, last)
        with pytest.raises(DataError, match=f"{folder}.*{named}"):
            ExtractedStore(target, texts, folder)
    tensors["hidden_states"][-1, :, 3] = float("inf")
    save_file({**tensors, "loss_mask": tensors["token_ids"].clone()}, last)
    with pytest.warns(DataWarning, match=f"{folder}: tensors loss_mask are not read"):
        store = ExtractedStore(target, texts, folder)
    with pytest.raises(DataError, match=f"{last}: hidden_states have NaN"):
        list(store)


def test_a_file_serves_all_texts_that_begin_it(tmp_path: Path):
    """Two texts that part at token 20 have a file each; others begin both or one of them, or are there twice."""
    target = tiny_model("llama")
    ids = texts_of(target, 1)[0].token_ids
    other = (*ids[:20], 3 + (ids[20] - 2) % 5, *ids[25:])
    written, read = (ids, other), (ids[:9], other[:30], ids, ids[:9], other, ids[:24], ids[:20])
    of_files, texts = ([EncodedChat(one, (True,) * len(one)) for one in part] for part in (written, read))
    extract_as_vllm(target, of_files, tmp_path / "states", [2])
    found = ExtractedStore(target, texts, tmp_path / "states")
    for expected, document in zip(LiveStore(target, texts), found, strict=True):
        torch.testing.assert_close(document.hidden, expected.hidden, rtol=0.03, atol=0.06)
    missing = EncodedChat((*ids[:9], *other[20:]), (True,) * len(other[11:]), "chats.jsonl:7")
    with pytest.raises(DataError, match=r"1 text of 8, the first is chats\.jsonl:7"):
        ExtractedStore(target, [*texts, missing], tmp_path / "states")


def test_of_many_files_the_likelihood_decides_which_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that was trained finds the next tokens likely; for this one the limit stands for that."""
    target, compared = tiny_model("llama"), dict[int, int]()
    texts = texts_of(target, 7)
    texts[5] = EncodedChat((*texts[6].token_ids[:11], 3, *texts[5].token_ids[:20]), (True,) * 32)
    extract_as_vllm(target, texts, tmp_path / "states", [2])
    monkeypatch.setattr(vllm_features, "_MOST_FILES", 2)
    monkeypatch.setattr(ExtractedStore, "_compare", lambda _, index, shared: compared.update({index: shared}))
    for likelier, expected in ((-100.0, [0, 4]), (100.0, [*range(7)])):
        monkeypatch.setattr(vllm_features, "LIKELIER", likelier)
        compared.clear()
        ExtractedStore(target, texts, tmp_path / "states")
        assert list(compared) == expected
    assert compared[5] == compared[6] == 11


@pytest.mark.thorough
@pytest.mark.real
def test_layers_of_the_real_model_are_told_apart(tmp_path: Path):
    """The stock model in fp32 writes, as vLLM in another type would; the packed one reads."""
    stock = load_target("smollm2-135m", precision="fp32", fast=False)
    ids = [tuple(stock.tokenizer(text)["input_ids"]) for text in (TYPICAL_TEXT, TYPICAL_TEXT[300:])]
    texts = [EncodedChat(one, (True,) * len(one)) for one in ids]
    extract_as_vllm(stock, texts, tmp_path / "states", [27, 2, 30, 15])
    target = load_target("smollm2-135m", precision="bf16")
    for layers in ((), (2, 15, 27)):
        found = ExtractedStore(target, texts, tmp_path / "states", layers)
        for expected, document in zip(LiveStore(target, texts, layers), found, strict=True):
            for own, states in zip(
                expected.hidden.float().split(576, -1), document.hidden.float().split(576, -1), strict=True
            ):
                assert float(((states - own).norm(dim=-1) / own.norm(dim=-1)).median()) < 0.03
    extract_as_vllm(stock, texts, tmp_path / "others", [1, 14, 16, 29])
    for layers, words in (((), "logits"), ((2,), "inputs of layer 2"), ((15,), "inputs of layer 15")):
        with pytest.raises(DataError, match=f"the {words} of .* are in none of 4 layers"):
            ExtractedStore(target, texts, tmp_path / "others", layers)
