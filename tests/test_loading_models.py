"""What a model can be loaded from: a loaded model, an adapter, 4 bits, code of its own; and what is refused."""

import copy
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
)

import draftheads
from draftheads import loading
from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.checkpoints.registry import zoo_heads
from draftheads.cli.main import main
from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.optimise import kernels_of
from draftheads.decode.engine import Engine
from draftheads.errors import (
    CheckpointCorrupt,
    DraftHeadsError,
    InvalidSettings,
    InvalidTree,
    MissingDependency,
    ModelNotFound,
    SpeedWarning,
    TextOnlyWarning,
    UnsupportedModel,
)
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.models.model_config import _drop_towers, put_back_towers
from draftheads.models.model_names import base_of
from draftheads.models.pretrained import load_pretrained, load_tokenizer, stored_dtype
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from draftheads.train.options import MergeOptions
from draftheads.train.tuned_model import merge
from families import ALL_FAMILIES, HAS_RECURRENT, SMALL, tiny_head, tiny_model, tiny_profile
from training_world import VOCAB, chat_tokenizer

pytestmark = pytest.mark.usefixtures("cheap_nodes", "own_cache")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMPTS = ["w1 w2", "w5"]
TEXT = torch.tensor([[5, 6, 7, 8, 9]])
CAUSAL = "CAUSAL_LM"  # the task of adapters


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a head for it, and a LoRA adapter."""
    place = tmp_path_factory.mktemp("models")
    write_model(place / "model")
    base = TargetModel.load(place / "model", dtype="fp32", device="cpu")
    save_head(tiny_head("medusa", base), place / "head", base=base, dtype="fp32", profile=tiny_profile(Tree.chain(3)))
    write_adapter(place / "lora", place / "model")
    return place


def write_model(folder: Path, **changes: Any) -> None:
    sizes = {"vocab_size": len(VOCAB), "hidden_size": 64, **changes}
    tiny_model("llama", seed=3, **sizes).model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(str(folder))


def lora(**changes: Any) -> peft.PeftConfig:
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": CAUSAL, **changes}
    return peft.LoraConfig(**options)


def write_adapter(
    folder: Path, model: Path, config: peft.PeftConfig | None = None, *, num_tokens: int | None = None
) -> torch.Tensor:
    """An adapter with random values, for more tokens than the model has if asked to; returns the logits with it."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if num_tokens is not None:
        base.resize_token_embeddings(num_tokens)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # peft's, of tied weights and of names that transformers drops
        adapted = peft.get_peft_model(base, config or lora())
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)  # noqa: PLW2901 - in place
        adapted.save_pretrained(str(folder))
        logits: torch.Tensor = adapted.eval()(input_ids=TEXT).logits
    return logits


def hf_model(world: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32, **options)


def ids(engine: Engine) -> list[tuple[int, ...]]:
    return [tuple(result.token_ids) for result in engine.generate(PROMPTS, max_new_tokens=20)]


# --- a loaded model ---


@pytest.mark.parametrize("fast", [True, False])
def test_a_loaded_model_decodes_with_a_head_and_does_not_change(world: Path, fast: bool) -> None:
    model = hf_model(world).train()
    expected = model(input_ids=TEXT).logits.detach()
    before = {name: (id(module), module.training) for name, module in model.named_modules()}
    weights = {name: (id(weight), weight.requires_grad) for name, weight in model.named_parameters()}
    assert all(required for _, required in weights.values())
    engine = draftheads.load(model, world / "head", tokenizer=chat_tokenizer(), fast=fast)
    assert ids(engine) == ids(draftheads.load(world / "model", **FP32))
    assert {name: (id(module), module.training) for name, module in model.named_modules()} == before
    assert {name: (id(weight), weight.requires_grad) for name, weight in model.named_parameters()} == weights
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=TEXT).logits, expected)
    assert any(isinstance(module, PackedLinear) for module in engine.model.model.modules()) == fast
    assert not engine.model.model.training


def test_the_name_of_a_loaded_model_finds_its_heads(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    names = []

    def found(name: str, base: str) -> Path:
        names.append((name, base))
        return world / "head"

    monkeypatch.setattr(loading, "find_head", found)
    engine = draftheads.load(model, "medusa", tokenizer="model", tree="static:10")
    assert names == [("medusa", str(world / "model"))], "it is found once"
    assert engine.model.model_id == str(world / "model")
    assert engine.encode("w1") == draftheads.load(world / "model", **FP32).encode("w1")
    made = LlamaForCausalLM(model.config.__class__(**SMALL))
    assert TargetModel.of(made, chat_tokenizer()).model_id == "LlamaForCausalLM"


def test_a_tokenizer_replaces_the_one_of_a_named_model(world: Path, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    assert load_target(world / "model", tokenizer=tokenizer, **FP32).tokenizer is tokenizer
    write_model(tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    assert load_target(tmp_path / "bare", tokenizer=str(world / "model"), **FP32).tokenizer.eos_token


def test_a_loaded_model_drafts(world: Path) -> None:
    engine = draftheads.load(world / "model", draft_model=hf_model(world), tree=[[0], [0, 0]], **FP32)
    found = engine.generate(PROMPTS, max_new_tokens=20)
    assert min(result.tokens_per_step for result in found) > 2
    with pytest.raises(InvalidSettings, match=r"head .*head and draft_model .*model: give one"):
        draftheads.load(world / "model", world / "head", draft_model=hf_model(world))


def _unchanged(model: Any) -> Any:
    return model


def _with_adapter(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, lora())


REFUSED_LOADED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "no tokenizer": (_unchanged, {"tokenizer": None}, "needs its tokenizer: give tokenizer=AutoTok"),
    "a wrong tokenizer": (_unchanged, {"tokenizer": 3}, "tokenizer is of type int; give a transformers"),
    "another precision": (_unchanged, {"precision": "bf16"}, r"precision is bf16 and .* in fp32: .*model.to\("),
    "four_bit": (_unchanged, {"four_bit": True}, "four_bit is for a model given by its name"),
    "device_map": (_unchanged, {"device_map": "auto"}, "device_map is for a model given by its name"),
    "an adapter inside": (_with_adapter, {}, r"has an adapter in it: .*merge_and_unl"),
    "no lm_head": (lambda model: model.model, {}, "LlamaModel has no lm_head: load it with AutoModelForCausalLM"),
    "no weights": (lambda model: model.to("meta"), {}, "has weights on meta"),
    "flash attention": (
        lambda model: setattr(model.config, "_attn_implementation", "flash_attention_2") or model,
        {},
        r"attn_implementation='flash_attention_2'; .*sdpa and eager take",
    ),
}


@pytest.mark.parametrize("case", REFUSED_LOADED)
def test_a_loaded_model_that_does_not_fit_is_refused(world: Path, case: str) -> None:
    change, options, message = REFUSED_LOADED[case]
    with pytest.raises(DraftHeadsError, match=message):
        draftheads.load(change(hf_model(world)), **{"tokenizer": chat_tokenizer(), **options})


def test_a_loaded_model_on_other_devices_is_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model(world)
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match="has weights on cpu, meta; drafts are verified on one device"):
        draftheads.load(model, tokenizer=chat_tokenizer())
    monkeypatch.setattr(loading, "device_named", torch.device)
    with pytest.raises(InvalidSettings, match=r"device is cuda:1 and the loaded model is on cpu: .*model.to\('cuda:1"):
        draftheads.load(hf_model(world), tokenizer=chat_tokenizer(), device="cuda:1")


# --- what is passed to transformers ---


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
M_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
ROTARY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}  # for three positions
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # text and images; text models of all kinds of wrappers
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 16, **TOWER}),
    "qwen2_5_vl": ({**ROTARY, "rope_parameters": M_ROPE}, {**BLOCKS, "fullatt_block_indexes": [0]}),
    "aya_vision": (  # leaves the factor of the text model's logits out
        {"model_type": "cohere2", "sliding_window": 4, "logit_scale": 0.25, "num_key_value_heads": 2},
        {"model_type": "siglip_vision_model", **TOWER},
    ),
    "qwen3_5": (ALL_FAMILIES.get("qwen3_5_text", {}), {**BLOCKS, "patch_size": 4}),  # of a newer transformers
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.skipif(kind == "qwen3_5" and not HAS_RECURRENT, reason="no Qwen3.5 here"))
     for kind in WRAPPERS],
)  # fmt: skip
def test_a_model_of_text_and_images_is_its_text_model(kind: str, tmp_path: Path) -> None:
    """Its text has the same logits, hybrid layers follow trees, and the tensors that are not read are counted."""
    text, images = WRAPPERS[kind]
    texts = {**SMALL, "vocab_size": len(VOCAB), **text}
    config = CONFIG_MAPPING[kind](text_config=texts, vision_config=images)  # type: ignore[call-arg]
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    for weight in whole.parameters():
        weight.data.add_(torch.randn(weight.shape), alpha=0.2)
    whole.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    unread = [name for name in stored if any(part in name for part in ("visual.", "vision_tower."))]
    with pytest.warns(TextOnlyWarning, match=rf"images are not read \({len(unread)} tensors left out: .*vis"):
        target = load_target(str(tmp_path), precision="fp32")
    assert not any("vis" in name for name, _ in target.model.named_parameters())
    assert target.native is not None or kind == "qwen3_5"
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = whole(input_ids=ids).logits
    torch.testing.assert_close(target.logits(target.hidden_states(ids)), expected, rtol=1e-4, atol=1e-4)
    plain = Engine(target).generate([[3, 4, 5]], max_new_tokens=12, ignore_eos=True)
    drafted = Engine(target, tiny_head("hydra", target)).generate([[3, 4, 5]], max_new_tokens=12, ignore_eos=True)
    assert drafted[0].token_ids == plain[0].token_ids
    with pytest.warns(TextOnlyWarning):
        text_only, again = (
            load_pretrained(tmp_path, dtype="fp32", device="cpu", whole=is_whole)[0] for is_whole in (False, True)
        )
    put_back_towers(text_only, again)  # as merged models are written
    assert {*text_only.state_dict()} == {*whole.state_dict()}
    whole.model.sounds = copy.deepcopy(whole.get_submodule(text_only.towers[0]))
    assert _drop_towers(whole) == (*text_only.towers, "model.sounds"), "each of them"
    last = next(name for name in stored if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({name: stored[name] for name in stored if name != last}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"missing \(1 tensor\): .*layers.1.mlp.up_proj.weight"):
        load_target(str(tmp_path), precision="fp32")


def test_a_model_that_reads_prompts_in_both_directions_is_refused(tmp_path: Path) -> None:
    """PaliGemma's text depends on later tokens of the prompt."""
    text = {**SMALL, "vocab_size": len(VOCAB), "model_type": "gemma"}
    images = {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32}
    parts = {"text_config": text, "vision_config": images}
    config = CONFIG_MAPPING["paligemma"](**parts, projection_dim=32)  # type: ignore[arg-type, call-arg]
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    with (
        pytest.warns(TextOnlyWarning),
        pytest.raises(UnsupportedModel, match=r"reads prompts in both directions \(use_bidirectional_attention\)"),
    ):
        load_target(str(tmp_path), precision="fp32")


def test_options_of_transformers(world: Path) -> None:
    plain = ids(draftheads.load(world / "model", **FP32))
    mapped = draftheads.load(world / "model", precision="fp32", device_map={"": "cpu"})
    assert ids(mapped) == plain
    eager = draftheads.load(world / "model", attn_implementation="eager", **FP32)
    assert eager.model.config._attn_implementation == "eager"
    assert ids(eager) == plain
    for options in ({"four_bit": True}, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}):
        quantised = draftheads.load(world / "model", world / "head", tree=Tree.chain(2), **options, **FP32)
        assert quantised.model.is_quantised
        assert ids(quantised) == ids(draftheads.load(world / "model", **options, **FP32))


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"four_bit": True, "quantization_config": BitsAndBytesConfig()}, "four_bit is True and quantization_config is a"),
    ({"four_bit": True, "precision": "int4"}, "precision int4 and four_bit=True: give one of them"),
    ({"quantization_config": 3}, "quantization_config is 3; give one of transformers"),
    ({"device": "cpu", "device_map": "auto"}, "device is 'cpu' and device_map is 'auto': give one of them"),
    ({"device_map": "nowhere"}, "device is 'nowhere'; give cpu, cuda"),
    ({"attn_implementation": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'; .*sdpa and eager"),
    ({"device": True}, "device is True; give cpu"),
    ({"device": "meta"}, "device is 'meta', which holds no weights"),
    ({"device": "cuda"}, r"device is 'cuda', and PyTorch .* finds no CUDA devices: leave device out"),
    ({"precision": "fp8"}, "precision is 'fp8'; choose among auto, fp32"),
    ({"copy": "yes"}, "copy is 'yes'; it must be True or False"),
    ({"fast": None}, "fast is None; it must be True or False"),
    ({"trust_remote_code": "no"}, "trust_remote_code is 'no'; it must be"),
    ({"max_batch_size": "4"}, "max_batch_size is '4'; it must be an integer of at least 1"),
    ({"max_batch_size": 0}, "max_batch_size is 0; it must be at least 1"),
    ({"head": 3}, "head is 3; give a name, a path or None"),
    ({"head": ""}, "head is ''; give a name"),
    ({"draft_model": 3}, "draft_model is 3; give smollm2-135m, a folder"),
    ({"head": "medusa", "tree": 3.5}, "tree is 3.5; give a Tree"),
    ({"head": "medusa", "tree": [0, 1]}, r"tree is \[0, 1\]; give a Tree"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_arguments_are_checked_before_anything_is_loaded(
    world: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr(loading, "find_drafts", lambda *_: None)
    with pytest.raises((InvalidSettings, InvalidTree), match=message):
        draftheads.load(world / "model", **options)


@pytest.mark.parametrize("model", [None, "", "  ", 3, chat_tokenizer()])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(InvalidSettings, match=r"model is .*; give smollm2-135m, a folder, a Hugging Face id, or a loa"):
        draftheads.load(model)
    with pytest.raises(InvalidSettings, match="model is "):
        TargetModel.load(model)


def test_names_of_types(world: Path) -> None:
    for name in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        assert TargetModel.load(world / "model", dtype=name, device="cpu").dtype == torch.bfloat16
    for name in ("fp8", "int8", "int4", "int32", torch.int8, 3, "nn"):
        with pytest.raises(InvalidSettings, match=r"dtype is .*; choose auto, fp32, bf16, fp16 or a floating-point"):
            TargetModel.load(world / "model", dtype=name)


def test_without_bitsandbytes_four_bits_name_the_extra(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match=r"4-bit weights need bitsandbytes; .*\.\[quantised\]"):
        draftheads.load(world / "model", four_bit=True)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_if_it_is_trusted(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_model(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config |= {"model_type": "own-llama", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    config["auto_map"]["AutoModelForCausalLM"] = "own.OwnModel"
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "own.py").write_text(REMOTE)
    with pytest.raises(UnsupportedModel, match=r"own has code of its own, .*give trust_remote_code=True"):
        draftheads.load(tmp_path / "own", **FP32)
    engine = draftheads.load(tmp_path / "own", trust_remote_code=True, **FP32)
    assert type(engine.model.model).__name__ == "OwnModel"
    assert ids(engine) == ids(draftheads.load(world / "model", **FP32))


# --- adapters ---


@pytest.mark.parametrize("fast", [True, False])
def test_an_adapter_is_a_model_for_which_the_head_of_its_base_drafts(world: Path, fast: bool) -> None:
    expected = write_adapter(world / "again", world / "model")
    target = load_target(world / "lora", fast=fast, **FP32)
    with torch.no_grad():
        assert not torch.allclose(expected, hf_model(world)(input_ids=TEXT).logits, atol=1e-2)
    torch.testing.assert_close(target.logits(target.hidden_states(TEXT)), expected, rtol=1e-4, atol=1e-4)
    assert target.model_id == str(world / "lora")
    assert (stored_dtype(str(world / "lora")), base_of(str(world / "lora"))) == (torch.float32, str(world / "model"))
    assert load_tokenizer(str(world / "lora")).eos_ids == target.eos_ids
    headed = draftheads.load(world / "lora", world / "head", tree=Tree.chain(3), fast=fast, **FP32)
    assert ids(headed) == ids(draftheads.load(world / "lora", fast=fast, **FP32))


KINDS: dict[str, tuple[peft.PeftConfig, bool]] = {
    "LoRA, and a trained lm_head": (lora(modules_to_save=["lm_head"]), True),
    "LoRA, and a trained embedding": (lora(modules_to_save=["embed_tokens"]), True),
    "LoRA of the embedding": (lora(target_modules=["embed_tokens", "q_proj"]), True),
    "DoRA": (lora(use_dora=True), False),
    "IA3": (peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_peft_can_merge(tmp_path: Path, kind: str) -> None:
    config, tied = KINDS[kind]
    write_model(tmp_path / "model", tie_word_embeddings=tied)
    expected = write_adapter(tmp_path / "adapter", tmp_path / "model", config)
    merge(MergeOptions(adapter=tmp_path / "adapter", out=tmp_path / "merged"))
    assert not (tmp_path / "merged" / "head").exists()
    for place in ("adapter", "merged"):
        target = load_target(tmp_path / place, **FP32)
        torch.testing.assert_close(target.logits(target.hidden_states(TEXT)), expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_with_more_tokens_than_its_base(tmp_path: Path) -> None:
    write_model(tmp_path / "model", tie_word_embeddings=False)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>", "<other>"])
    config = lora(modules_to_save=["embed_tokens", "lm_head"])
    expected = write_adapter(tmp_path / "adapter", tmp_path / "model", config, num_tokens=len(tokenizer))
    tokenizer.save_pretrained(str(tmp_path / "adapter"))
    target = load_target(tmp_path / "adapter", **FP32)
    assert target.vocab_size == len(tokenizer) == expected.shape[-1]
    torch.testing.assert_close(target.logits(target.hidden_states(TEXT)), expected, rtol=1e-3, atol=1e-3)


def test_adapters_that_cannot_be_loaded(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"four_bit": True}, {"device_map": "auto", "device": None}):
        with pytest.raises(InvalidSettings, match=r"lora is an adapter.* for whole models: .*draftheads merge --adapt"):
            draftheads.load(world / "lora", **{**FP32, **options})
    shutil.copytree(world / "lora", tmp_path / "other")
    config = json.loads((world / "lora" / "adapter_config.json").read_text())
    for change, error, message in (
        ({"peft_type": "PROMPT_TUNING"}, UnsupportedModel, "an adapter of kind PROMPT_TUNING cannot be merged"),
        ({"task_type": "SEQ_CLS"}, UnsupportedModel, "adapter for SEQ_CLS; it must be for CAUSAL_LM"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, ModelNotFound, "other is an adapter for .*gone, which"),
        ({"base_model_name_or_path": None}, CheckpointCorrupt, "base_model_name_or_path is None; it must be the name"),
    ):
        (tmp_path / "other" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(error, match=message):
            draftheads.load(tmp_path / "other", **FP32)
    (tmp_path / "other" / "adapter_config.json").write_text(f'{json.dumps(config)[:-1]}, "r": 2}}')
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json .*: the key 'r' is there twice"):
        draftheads.load(tmp_path / "other", **FP32)
    with pytest.raises(ModelNotFound, match=r"model is a model; give the folder of a PEFT adapter"):
        merge(MergeOptions(adapter=world / "model", out=tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependency, match=r"the adapter .*lora needs peft; .*\.\[lora\]"):
        draftheads.load(world / "lora", **FP32)


def test_the_base_of_a_joint_run_is_found_on_another_machine(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/model"}))
    (folder / "base.json").write_text(json.dumps({"base": {"model_id": "HuggingFaceTB/SmolLM2-135M-Instruct"}}))
    assert base_of(str(tmp_path / "run")) == base_of(str(folder)) == "smollm2-135m"


# --- heads ---


def test_folders_of_another_kind_are_named(world: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "head").symlink_to(world / "head")
    for given, words in (
        ((world / "head",), r"head is a draft head \(medusa for .*model\), not a model: load\('.*', head='"),
        ((world / "model", world / "lora"), "lora is an adapter, not a draft head: give the folder of a trained head"),
        ((world / "model", world / "model"), "model is a whole model, not a draft head: use it as a draft model"),
        ((world / "model", tmp_path / "merged"), r"merged is not a draft head, but has one in .*head: give that"),
    ):
        with pytest.raises(ModelNotFound, match=words):
            draftheads.load(*given)
    with pytest.raises(ModelNotFound, match="no such folder; the bundled heads are loaded by name"):
        load_head("medusa", load_target(world / "model", **FP32))


def test_the_command_line_warns_of_a_tuned_base_in_one_line(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hf_model(world)
    for weight in model.model.layers.parameters():
        weight.data += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "tuned")
    chat_tokenizer().save_pretrained(str(tmp_path / "tuned"))
    arguments = ["generate", "w1", "--model", str(tmp_path / "tuned"), "--head", str(world / "head")]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*arguments, "--max-new-tokens", "3", "--precision", "fp32"]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert said.startswith(f"warning: the layers of {tmp_path / 'tuned'} differ by ")
    assert f"`draftheads train --method medusa --start-from {world / 'head'} --model {tmp_path / 'tuned'}" in said


@pytest.mark.real
def test_the_bundled_heads_have_the_print_of_their_base() -> None:
    layers = TargetModel.load("smollm2-135m", dtype="fp32", device="cpu").layers_fingerprint
    assert {read_head(head.folder).fingerprints.layers for head in zoo_heads() if head.base_name == "smollm2-135m"} == {
        layers
    }


def test_arguments_of_heads_and_engines(world: Path, tmp_path: Path) -> None:
    target = load_target(world / "model", **FP32)
    head = load_head(world / "head", target, dtype="bf16")
    assert head.dtype == torch.bfloat16
    for call, message in (
        (lambda: load_head(3, target), "folder is 3; give the path"),
        (lambda: load_head(world / "head", target.model), "base is of type LlamaForCausalLM; give a TargetModel"),
        (lambda: load_head(world / "head", target, dtype="int8"), "dtype is 'int8'; choose"),
        (lambda: save_head(target, tmp_path, base=target), "head is of type TargetModel; save_head takes a DraftHead"),
        (lambda: save_head(head, tmp_path, base="model"), "base is of type str"),
        (lambda: Engine(target.model), "model is of type LlamaForCausalLM; an Engine takes a TargetModel"),
        (lambda: Engine(target, "hydra"), "drafter is of type str; give a Drafter"),
        (lambda: Engine(target, max_batch_size=2.5), "max_batch_size is 2.5; it must be an integer"),
        (lambda: Engine(target, head, shape=Tree.chain(4)), "the tree is 4 deep but the head has 3 heads"),
        (lambda: Engine(target, loading.Mixed(head), shape=Tree.chain(4)), "the tree is 4 deep but the head has 3"),
        (lambda: Engine(target, head, shape=3.5), "tree is 3.5; give a Tree"),
        (lambda: draftheads.load(world / "model", head), r"head is of type MedusaHead.*use Engine\(target, head\)"),
    ):
        with pytest.raises((InvalidSettings, InvalidTree), match=message):
            call()
    assert Engine(target, head, shape=[(0,), (0, 0)]).shape == Tree.chain(2)
    assert Engine(target, head, shape=BestFirst(4)).shape == BestFirst(4)
    assert draftheads.load(world / "model", world / "head", tree="[[0]]", **FP32).shape == Tree.chain(1)


# --- faster modules that do not fit ---


def test_without_any_faster_module_the_model_is_stock(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(draftheads.load(world / "model", **FP32, fast=False))
    monkeypatch.setattr(PackedLinear, "rows", lambda self, rows: self.product(rows) + 1.0)
    with pytest.warns(SpeedWarning, match=r"PyTorch's own are used, .* differ from those of the stock modules by"):
        engine = draftheads.load(world / "model", **FP32)
    assert ids(engine) == expected
    assert kernels_of(engine.model.model) == "stock"
