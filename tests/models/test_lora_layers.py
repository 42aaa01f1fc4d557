"""Adapters beside their base: each equals its merged model, the base does not change, and the weights are shared."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import draftheads
from adapter_world import change_config, merged, saved_adapter
from draftheads.cpu.kernels import PackedLinear
from draftheads.decode.engine import Engine
from draftheads.errors import AdapterWarning, CheckpointCorrupt, CheckpointMismatch, ModelNotFound, UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.models.model_layers import with_lora
from draftheads.runners import runner_for
from draftheads.settings import ROUNDED_BITS
from families import FAMILIES, GROWING, HAS_RECURRENT, PROMPTS, needs_library, tiny_head, tiny_model
from joint_world import on_disk
from training_world import chat_model

TEXT = torch.tensor([[5, 6, 7, 8, 9, 20, 11, 3]])
KINDS = {"stock": None, "fast": {}, "int8": {"bits": 8}, "int4": {"bits": 4}}


def logits_of(target: TargetModel) -> torch.Tensor:
    return target.logits(target.hidden_states(TEXT)).float()


def answers(engine: Engine, prompts: Sequence[Any] = PROMPTS, **options: Any) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(prompts, max_new_tokens=24, **options)]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(FAMILIES, ["stock", "fast"]),
        pytest.param("llama", "int8", marks=needs_library),
        pytest.param("llama", "int4", marks=needs_library),
    ],
)
def test_an_adapter_equals_its_merged_model_and_its_base_does_not_change(
    family: str, kind: str, tmp_path: Path
) -> None:
    base = tiny_model(family)
    for name, parameter in base.model.named_parameters():
        if name.endswith("bias"):  # zeros in new models
            parameter.data.normal_(std=0.3)
    folders = [saved_adapter(base, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    expected = [merged(base, folder) for folder in folders]
    if KINDS[kind] is not None:
        base = base.sped_up(**KINDS[kind])
        if family == "granite":  # as the check at loading finds: its parts are multiplied before they are added
            base = replace(base, native=None)
    before = logits_of(base)
    adapted = [with_lora(base, folder) for folder in folders]
    assert torch.equal(logits_of(base), before)
    for one, whole in zip(adapted, expected, strict=True):
        assert float((logits_of(one) - before).abs().max()) > 0.1
        if kind not in ROUNDED_BITS:  # which rounds the weights, merged or not
            torch.testing.assert_close(logits_of(one), logits_of(whole), rtol=1e-4, atol=1e-4)
            assert answers(Engine(one), ignore_eos=True) == answers(Engine(whole), ignore_eos=True)
        drafted = Engine(one, tiny_head("hydra", base), shape=GROWING["best first"])
        assert answers(drafted, ignore_eos=True) == answers(Engine(one), ignore_eos=True)


def test_static_steps_have_the_adapter_too(tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = saved_adapter(base, tmp_path / "a")
    expected = answers(Engine(merged(base, folder)), ignore_eos=True)
    base.step_mode.graphs = True  # as on CUDA, without capturing
    adapted = with_lora(base, folder)
    assert adapted.has_static_steps
    drafted = Engine(adapted, tiny_head("medusa", base), shape=GROWING["best first"])
    assert answers(drafted, ignore_eos=True) == expected


@pytest.mark.thorough
@pytest.mark.real
def test_an_adapter_of_the_real_model_equals_the_merged_one(tmp_path: Path) -> None:
    base = TargetModel.load("smollm2-135m", dtype=torch.float32)
    folder = saved_adapter(base, tmp_path / "a", rank=8, scale=0.01)
    plain = draftheads.load("smollm2-135m", precision="fp32")
    prompts = ["Why is the sky blue?", "Write a function that adds two numbers."]
    alone = answers(draftheads.load(folder, precision="fp32"), prompts)
    assert answers(plain.with_adapter(folder), prompts) == alone != answers(plain, prompts)
    hydra = draftheads.load("smollm2-135m", "hydra", precision="fp32").with_adapter(folder)
    assert answers(hydra, prompts) == alone


def test_the_weights_are_shared_and_adapters_differ(tmp_path: Path) -> None:
    base = tiny_model("llama", tie_word_embeddings=True)
    folder, second = (saved_adapter(base, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    base = base.sped_up()
    adapted, other = with_lora(base, folder), with_lora(base, second)
    ours, theirs = (dict(target.model.named_parameters()) for target in (adapted, base))
    assert ours.keys() == theirs.keys()
    assert all(weight is theirs[name] for name, weight in ours.items())
    packed = [m for m in adapted.model.modules() if isinstance(m, PackedLinear)]
    originals = [m for m in base.model.modules() if isinstance(m, PackedLinear)]
    assert packed
    assert all(m.product.base is o.product for m, o in zip(packed, originals, strict=True))
    assert len({base.weights_fingerprint, adapted.weights_fingerprint, other.weights_fingerprint}) == 3
    assert (adapted.dtype, adapted.precision) == (base.dtype, base.precision)
    # the adapter changes the lm_head, and not the embedding that it is tied to
    assert torch.equal(adapted.weights.embedding, base.weights.embedding)
    assert not torch.allclose(adapted.lm_head.weight, adapted.weights.embedding, atol=0.01)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *({"targets": targets} for targets in (("q_proj", "v_proj"), ("v_proj",), ("up_proj", "o_proj"), ("lm_head",))),
        {"alpha_pattern": {"q_proj": 9}, "use_rslora": True},
    ],
    ids=str,
)
def test_adapters_of_some_layers_or_with_ranks_and_factors_of_single_layers(
    options: dict[str, Any], fast: bool, tmp_path: Path
) -> None:
    base = tiny_model("llama")
    folder = saved_adapter(base, tmp_path / "a", **options)
    expected = logits_of(merged(base, folder))
    base = base.sped_up() if fast else base
    torch.testing.assert_close(logits_of(with_lora(base, folder)), expected, rtol=1e-4, atol=1e-4)


def test_an_engine_with_an_adapter_equals_loading_the_adapter(tmp_path: Path) -> None:
    name = on_disk(tmp_path / "base")
    base = chat_model()
    folder = saved_adapter(base, tmp_path / "adapter", base_model_name_or_path=name)
    prompts = [f"w{i} w{i + 1}" for i in range(8)]
    alone, engine = draftheads.load(folder, precision="fp32"), draftheads.load(name, precision="fp32")
    assert answers(engine.with_adapter(folder), prompts) == answers(alone, prompts) != answers(engine, prompts)
    # its own chat template is used, as if it were loaded alone
    base.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w9 {% endfor %}"
    base.tokenizer.save_pretrained(folder)
    alone, beside = draftheads.load(folder, precision="fp32"), engine.with_adapter(folder)
    assert beside.encode("w3") == alone.encode("w3") != engine.encode("w3")
    base.tokenizer.add_tokens(["w99"])
    base.tokenizer.save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match=r"adds tokens: its tokenizer has 65 .* 64"):
        engine.with_adapter(folder)


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = tiny_model("llama")
    with pytest.raises(ModelNotFound, match="no adapter at"):
        with_lora(base, tmp_path)
    folder = saved_adapter(base, tmp_path / "a")
    change_config(folder, base_model_name_or_path="other/model")
    with pytest.raises(CheckpointMismatch, match="for other/model, and this model is tiny-llama"):
        with_lora(base, folder)
    change_config(folder, base_model_name_or_path="tiny-llama")
    with pytest.raises(CheckpointCorrupt, match=r"lora_A.weight has shape \(2, 32\); the model needs \(2, 40\)"):
        with_lora(tiny_model("llama", hidden_size=40, head_dim=8), folder)
    change_config(folder, use_dora=True)
    with pytest.raises(UnsupportedModel, match=r"is DoRA.*draftheads merge"):
        with_lora(base, folder)
    change_config(folder, use_dora=False)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "base_model.model.model.norm.weight": torch.ones(32)}, weights)
    with pytest.raises(UnsupportedModel, match=r"norm.weight.*does not belong to a linear layer"):
        with_lora(base, folder)
    missing = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, weights)
    with pytest.raises(CheckpointCorrupt, match=f"{missing} is missing"):
        with_lora(base, folder)
    weights.write_bytes(b"no safetensors")
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        with_lora(base, folder)
    weights.unlink()
    with pytest.raises(ModelNotFound, match=r"has no adapter_model\.safetensors"):
        with_lora(base, folder)


def test_the_record_of_a_joint_run_decides_about_the_base(tmp_path: Path) -> None:
    base = chat_model()
    folder = saved_adapter(base, tmp_path / "a", base_model_name_or_path="moved/elsewhere")
    record = {"model_id": "moved/elsewhere", "fingerprints": asdict(base.fingerprints)}
    (folder / "base.json").write_text(json.dumps({"format_version": 1, "base": record}))
    assert with_lora(base, folder).vocab_size == 64
    with pytest.raises(CheckpointMismatch, match="embedding and lm_head are those of another model"):
        with_lora(chat_model(seed=1), folder)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [4]},
        {"target_parameters": ["weight"]},
        {"layer_replication": [[0, 2], [0, 1]]},
        {"alora_invocation_tokens": [5]},
        {"use_qalora": True},
        {"megatron_config": {"a": 1}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
    ],
    ids=str,
)
def test_fields_that_are_not_used_beside_a_base_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = saved_adapter(base, tmp_path / "a", **config)
    with pytest.raises(UnsupportedModel, match=rf"has {next(iter(config))}=.*draftheads merge"):
        with_lora(base, folder)


def test_biases_of_an_adapter_are_merged_only_into_layers_that_have_one(tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = saved_adapter(base, tmp_path / "a", targets=("q_proj",), lora_bias=True)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    of_b = [key for key in tensors if "lora_B" in key]
    save_file({**tensors, **{key.replace(".weight", ".bias"): tensors[key][:, 0].clone() for key in of_b}}, weights)
    with pytest.raises(UnsupportedModel, match=r"cannot be merged: .*lora_bias"):
        merged(base, folder)


@given(name=st.from_regex(r"[a-z]{3,9}_new", fullmatch=True), value=st.sampled_from([True, 3, "x", [1], False, None]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unknown_keys_and_tensors_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = saved_adapter(base, tmp_path / name, targets=("q_proj",))
    for read in (with_lora, merged):
        change_config(folder, **{name: value})
        wanted = pytest.raises(UnsupportedModel, match=name) if value else pytest.warns(AdapterWarning, match=name)
        with wanted:
            read(base, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    del config[name]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "adapter_model.safetensors"
    save_file({**load_file(weights), f"base_model.model.{name}.weight": torch.ones(2)}, weights)
    for read in (with_lora, merged):
        with pytest.raises((UnsupportedModel, CheckpointCorrupt), match=name):
            read(base, folder)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "phi3", *(["qwen3_5_text", "falcon_h1"] if HAS_RECURRENT else [])])
def test_an_adapter_has_native_passes_whose_bits_depend_on_no_other_token(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    more = {"ssm_multipliers": [1.2, 0.8, 1.1, 0.7, 1.5], "key_multiplier": 0.8} if family == "falcon_h1" else {}
    base = tiny_model(family, hidden_size=64, intermediate_size=64, dtype=dtype, **more)
    targets = ("in_proj", "k_proj", "down_proj", "lm_head") if family == "falcon_h1" else ()  # peft takes no out_proj
    folder = saved_adapter(base, tmp_path / "a", rank=20, targets=targets)
    expected = merged(base, folder)
    adapted = with_lora(base.sped_up(), folder)
    assert adapted.native is not None
    runner = runner_for(adapted)
    texts = [TEXT[0, :length].tolist() for length in (8, 5, 1)]
    together, _, hidden = runner.prefill(texts)
    one_by_one = torch.cat([runner.read(together[2:], [[token]])[0][0] for token in texts[0][1:]])
    assert torch.equal(one_by_one, hidden[0][1:])
    assert torch.equal(hidden[1], hidden[0][:5])
    whole = expected.hidden_states(TEXT)[0]
    rounding = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(hidden[0], whole, rtol=rounding, atol=rounding)
