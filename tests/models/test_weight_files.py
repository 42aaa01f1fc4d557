"""A model's files hold its weights, all of them and no others, in types that can be read; anything else is refused."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import draftheads
from cli_world import letters_tokenizer
from draftheads.errors import CheckpointCorrupt, UnsupportedModel
from draftheads.models.file_checks import check_config
from draftheads.models.model import TargetModel
from draftheads.models.model_layers import with_lora
from draftheads.models.pretrained import load_pretrained
from families import ALL_FAMILIES, tiny_model
from test_loading_models import write_adapter, write_model

WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]
KINDS = {"one too many": "left over", "one too few": "missing"}
KINDS |= {kind: f"of {kind}" for kind in ("another shape", "another type")}
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]


def written(folder: Path, family: str = "llama", **save: Any) -> Path:
    """A tiny model with a tokenizer, as an ordinary folder."""
    tiny_model(family).model.save_pretrained(folder, **save)
    letters_tokenizer().save_pretrained(str(folder))
    return folder


def change(folder: Path, damage: Callable[[Tensors], Any], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})


def change_config(folder: Path, quantisation: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


def ask(folder: Path, **options: Any) -> list[int]:
    engine = draftheads.load(folder, precision="fp32", device="cpu", fast=False, **options)
    return list(engine.generate([[5, 6, 7]], max_new_tokens=8)[0].token_ids)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_does_not_fit_is_named(kind: str, family: str, tmp_path: Path) -> None:
    folder, draw = written(tmp_path / "model", family), Random(f"{kind} {family}")  # noqa: S311 - a test
    key = draw.choice(sorted(load_file(folder / WEIGHTS)))
    named, dtype = key, draw.choice(TYPES)

    def damage(tensors: Tensors) -> None:
        nonlocal named
        tensor = tensors[key]
        if kind == "one too many":
            named = key + draw.choice(["_scale", "_scale_inv", "x", ".weight_packed"])
            tensors[named] = torch.ones(3)
        elif kind == "one too few":
            del tensors[key]
        else:
            tensors[key] = tensor[:-1] if kind == "another shape" else tensor.to(dtype)

    change(folder, damage)
    part = named.split("block_sparse_moe")[0]  # transformers gives another name to experts, and one to all of them
    with pytest.raises(
        UnsupportedModel, match=rf"its text would be wrong: {KINDS[kind]} \(1 tensor\): {part}"
    ) as found:
        ask(folder)
    assert kind != "another type" or str(dtype) in str(found.value)


def test_many_are_counted_and_three_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")

    def damage(tensors: Tensors) -> None:
        for key in [key for key in tensors if "_proj" in key]:
            tensors[key.replace("_proj", "_project")] = tensors.pop(key)

    change(folder, damage)
    three = r"model\.layers\.0\.mlp\.down_{}\.weight, .*gate_{}\.weight, .*up_{}\.weight and 11 more"
    missing, surplus = (three.replace("{}", name) for name in ("proj", "project"))
    found = rf"missing \(14 tensors\): {missing}; left over \(14 tensors\): {surplus}$"
    with pytest.raises(UnsupportedModel, match=found):
        load_pretrained(folder, device="cpu")


@pytest.mark.parametrize("kind", ["shards", "pickle"])
def test_all_files_count(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", **({"max_shard_size": "20KB"} if kind == "shards" else {}))
    ask(folder)
    if kind == "shards":
        file = max(folder.glob("*.safetensors"))
        key = min(load_file(file))
        change(folder, lambda tensors: tensors.update({key: tensors[key].to(torch.int8)}), file.name)
    else:
        tensors, key = load_file(folder / WEIGHTS), "model.layers.1.mlp.up_proj.weight"
        torch.save({**tensors, key: tensors[key].to(torch.int8)}, folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match=rf"of another type \(1 tensor\): {key} \(torch.int8\)"):
        ask(folder)


MASK = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
KNOWN: dict[str, tuple[str, Tensors]] = {
    "frequencies of old Llamas": ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "masks of GPT-2": ("gpt2", {"transformer.h.0.attn.bias": MASK, "transformer.h.1.attn.masked_bias": torch.ones(())}),
    "masks of GPT-NeoX": ("gpt_neox", {"gpt_neox.layers.0.attention.bias": MASK.bool()}),
    "masks of GPT-J": ("gptj", {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.ones(())}),
    "masks of CodeGen": ("codegen", {"transformer.h.0.attn.causal_mask": MASK}),
    "Medusa heads": ("llama", {"medusa_head.0.0.linear.weight": torch.ones(2, 2)}),
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_models_compute_themselves_may_be_there(case: str, tmp_path: Path) -> None:
    family, more = KNOWN[case]
    folder = written(tmp_path / "model", family)
    expected = ask(folder)
    change(folder, lambda tensors: tensors.update(more))
    assert ask(folder) == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_an_lm_head_that_is_the_embedding_may_be_there_or_not(family: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**ALL_FAMILIES[family], "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(str(tmp_path))
    expected, weight = ask(tmp_path), model.get_input_embeddings().weight.detach().clone()
    if tied:
        change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": weight}))
    assert ask(tmp_path) == expected


def test_names_without_the_models_prefix_and_other_float_types_are_read(tmp_path: Path) -> None:
    """As in the files of GPT-2 on the Hub."""
    folder = written(tmp_path / "model", "gpt2")
    expected = ask(folder)

    def shorten(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key).double()
        tensors["h.0.attn.bias"] = MASK

    change(folder, shorten)
    assert ask(folder) == expected
    change(folder, lambda tensors: tensors.update({"h.1.ln_1.weight": torch.ones(32, dtype=torch.int16)}))
    with pytest.raises(UnsupportedModel, match=r"of another type .*: transformer\.h\.1\.ln_1\.weight \(torch"):
        ask(folder)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e5m2])
def test_integers_in_experts_which_are_joined_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "mixtral")
    key = next(key for key in load_file(folder / WEIGHTS) if ".layers.1." in key and "experts" in key)
    change(folder, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=r"of another type .*experts"):
        ask(folder)


@pytest.mark.filterwarnings("ignore")  # of transformers, that FP8 is for GPUs
@pytest.mark.parametrize("damaged", [None, "norm.weight", "1.self_attn.q_proj.weight_scale_inv", "_scale_inv"])
def test_what_is_not_undone_in_a_quantised_file_is_named(damaged: str | None, tmp_path: Path) -> None:
    """FP8 without a scale, and a norm in 8 bits."""
    folder = tmp_path / "model"
    tiny_model("llama", hidden_size=128, intermediate_size=128, num_key_value_heads=4).model.save_pretrained(folder)
    letters_tokenizer().save_pretrained(str(folder))

    def quantise(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            scale = tensors[key].abs().max() / 448
            tensors |= {key: (tensors[key] / scale).to(torch.float8_e4m3fn), f"{key}_scale_inv": scale.view(1, 1)}
        for key in [key for key in tensors if damaged is not None and key.endswith(damaged)]:
            tensor = tensors.pop(key)
            if not key.endswith("_inv"):
                tensors[key] = tensor.to(torch.int8)

    change(folder, quantise)
    change_config(folder, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
    if damaged is None:
        load_pretrained(folder, device="cpu")
        return
    with pytest.raises(UnsupportedModel, match=r"of another type .*\.weight \(torch\."):
        load_pretrained(folder, device="cpu")


@pytest.mark.parametrize("text", ["{}", "[]", '{"quantization": null}', '{"quantization": []}', "{"])
def test_a_damaged_description_of_a_quantisation_is_named(text: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    (folder / "hf_quant_config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json does not say how"):
        load_pretrained(folder, device="cpu")


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        ("config.json", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ("config.json", {"quant_method": "my-own"}, "my-own"),
        ("config.json", {"bits": 4}, "unknown"),
        ("hf_quant_config.json", {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": None}, "modelopt W4A8_AWQ"),
    ],
)
def test_an_unknown_quantisation_is_refused_before_weights_are_read(
    file: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "model")
    (folder / WEIGHTS).unlink()
    if file == "config.json":
        change_config(folder, settings)
    else:
        (folder / file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    with pytest.raises(UnsupportedModel, match=rf"quantised weights \({named}\), which transformers .* does not undo"):
        load_pretrained(folder, device="cpu")


def test_whole_weights_with_a_quantised_cache_are_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    expected = ask(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert ask(folder) == expected


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
def test_stored_4_bits_are_read(tmp_path: Path) -> None:
    options = {"device": "cpu", "dtype": torch.float32, "four_bit": True}
    folder = written(tmp_path / "model")
    model, _, _ = load_pretrained(folder, **options)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "quantised")
    letters_tokenizer().save_pretrained(str(tmp_path / "quantised"))
    again, _, _ = load_pretrained(tmp_path / "quantised", device="cpu", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "bits", [{"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}]
)
def test_whole_weights_that_are_called_quantised_are_refused(bits: dict[str, Any], family: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", family)
    change_config(folder, {"quant_method": "bitsandbytes", "llm_int8_threshold": 0.0, **bits})
    with pytest.raises(UnsupportedModel, match=r"hold whole weights, such as .*\.weight \(.*four_bit=True"):
        ask(folder)


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
@pytest.mark.parametrize("place", ["argument", "dictionary", "config.json", "loaded"])
def test_8_bits_of_bitsandbytes_are_refused_unless_each_row_is_for_itself(place: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    if place == "argument":
        apart = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        assert ask(folder, quantization_config=apart, head="prompt-lookup") == ask(folder, quantization_config=apart)
    quantisation: Any = BitsAndBytesConfig(load_in_8bit=True)
    options: dict[str, Any] = {}
    if place == "config.json":
        change_config(folder, quantisation.to_dict())
    elif place == "dictionary":
        options["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    else:
        options["quantization_config"] = quantisation
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options) if place == "loaded" else folder
    options = {"tokenizer": letters_tokenizer()} if place == "loaded" else options
    reason = r"LLM\.int8\(\).* depends on the rows .*: use precision int8 or four_bit"
    with pytest.raises(UnsupportedModel, match=reason):
        draftheads.load(model, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_read_as_strictly(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "lora", tmp_path / "model")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"

    def damage(tensors: Tensors) -> None:
        if kind == "one too many":
            tensors[name.replace("down", "up")] = tensors[name].clone()
        elif kind == "one too few":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:1] if kind == "another shape" else tensors[name].to(torch.float8_e5m2)

    change(tmp_path / "lora", damage, "adapter_model.safetensors")
    part = r"layers\.0\.mlp\.(down|up)_proj\.lora_A"
    with pytest.raises(CheckpointCorrupt, match=part):
        load_pretrained(tmp_path / "lora", device="cpu")
    base = TargetModel.load(tmp_path / "model", dtype="fp32", device="cpu")
    with pytest.raises((CheckpointCorrupt, UnsupportedModel), match=part):
        with_lora(base, tmp_path / "lora")


NOT_FINITE = [("shards", float("nan")), ("pickle", float("inf")), ("lora", float("-inf"))]


@pytest.mark.parametrize(("kind", "number"), NOT_FINITE)
def test_a_number_that_is_not_finite_is_named(kind: str, number: float, tmp_path: Path):
    folder = written(tmp_path / "model", **({"max_shard_size": "20KB"} if kind == "shards" else {}))
    asked, file = folder, max(folder.glob("*.safetensors"))
    if kind == "lora":
        write_adapter(asked := tmp_path / "lora", folder)
        file = asked / "adapter_model.safetensors"
    key = min(load_file(file))
    change(file.parent, lambda tensors: tensors[key].view(-1)[-1].fill_(number), file.name)
    if kind == "pickle":
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
        file = folder / "pytorch_model.bin"
    with pytest.raises(UnsupportedModel, match=rf"the tensor {key} in .*{file.name} has a NaN or infinite number"):
        ask(asked)


def test_a_number_that_is_too_large_for_fp16_is_refused(tmp_path: Path):
    folder, key = written(tmp_path / "model"), "model.norm.weight"
    change(folder, lambda tensors: tensors[key].view(-1)[0].fill_(1e30))
    load_pretrained(folder, device="cpu", dtype="fp32")
    with pytest.raises(UnsupportedModel, match=f"{key} has numbers that are too large for torch.float16: use bf16 or"):
        load_pretrained(folder, device="cpu", dtype="fp16")


ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "wide": ({"hidden_size": 10**9}, "hidden_size is 1,000,000,000; at most 16,384 is possible: no tensor of"),
    "deep": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000; at most 1,024 is possible: its files"),
    "words": ({"vocab_size": 10**12}, "vocab_size is 1,000,000,000,000; at most"),
    "inner": ({"text_config": {"moe_intermediate_size": 1e9}}, "moe_intermediate_size is 1,000,000,000.0; at most"),
    "experts": ({"num_local_experts": 10**7}, "num_local_experts is 10,000,000; at most"),
    "positions": ({"max_position_embeddings": 10**12}, "max_position_embeddings is .*; at most 16,777,216"),
    "infinity": ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a finite number"),
    "not a number": ({"rope_parameters": {"factor": [float("nan")]}}, "factor is nan; it must be a finite number"),
    "nested": ({"extra": json.loads("[" * 500 + "]" * 500)}, "is nested 501 deep; 64 is allowed"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_a_configuration_beyond_its_tensors_is_refused_before_the_model_is_made(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, (changes, message) = written(tmp_path / "model"), ABSURD[case]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("made the model"))
    with pytest.raises(UnsupportedModel, match=rf"config\.json:? (is )?.*{message.removeprefix('is ')}"):
        ask(folder)


UNREADABLE = [
    ("config.json", '{"model_type": "llama", "a": ' + "[" * 10**6, "nested too deep"),
    ("config.json", "5", r"config\.json is 5; it must be an object"),
    ("config.json", "null", r"config\.json is None; it must be an object"),
    ("config.json", "{", r"config\.json cannot be read as JSON: Expecting"),
    ("config.json", '{"model_type": "llama", "model_type": "gpt2"}', "the key 'model_type' is there twice"),
    ("config.json", '{"model_type": "llama"}', "num_hidden_layers 32 and hidden_size 4,096"),  # 27 GB in fp32
    ("generation_config.json", "{", r"generation_config\.json cannot be read as JSON: Expecting"),
    ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id is 'a'; it must be the number of a token"),
]


@pytest.mark.parametrize(("file", "text", "message"), UNREADABLE)
def test_a_configuration_that_cannot_be_read_is_refused(file: str, text: str, message: str, tmp_path: Path):
    (written(tmp_path / "model") / file).write_text(text)
    with pytest.raises(UnsupportedModel, match=message):
        ask(tmp_path / "model")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@given(name=st.from_regex(r"[a-z]{3,9}_new", fullmatch=True), value=st.sampled_from([True, 3, "x", [1], False, None]))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_that_nothing_reads_are_named(file: str, name: str, value: Any, tmp_path: Path):
    path = written(tmp_path / name) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.warns() if value else contextlib.nullcontext([]) as told:  # type: ignore[attr-defined]
        ask(path.parent)
    assert [f"no {name}, so it is not read" in str(each.message) for each in told] == [True] * bool(value)


def test_one_whole_file_is_read_and_checked_in_place_of_shards(tmp_path: Path):
    folder = written(tmp_path / "model", max_shard_size="20KB")
    whole = written(tmp_path / "whole") / WEIGHTS
    whole.rename(folder / WEIGHTS)
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight in .*model\.safetensors has a NaN"):
        ask(folder)


def test_the_endless_time_steps_of_mamba_are_read(tmp_path: Path):
    folder = written(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    check_config(folder)
