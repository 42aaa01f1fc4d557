"""Checks of a loaded model: real statistics are no error, an error of structure is one in every precision."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import draftheads
from cli_world import letters_tokenizer
from draftheads.checkpoints.checkpoint import save_head
from draftheads.cpu import native_step
from draftheads.cpu.native_library import load_library
from draftheads.errors import RoundingWarning, SpeedWarning, UnsupportedModel
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.runners import transformers_runner
from draftheads.runners.structure import check_numbers, check_trees, checked, own_numbers, probe_of
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.settings import ROUNDED_BITS
from families import ALL_FAMILIES, FAMILIES, IntegerTokenizer, tiny_head, tiny_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= dict.fromkeys(ROUNDED_BITS, torch.float32)
SIZES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
GEMMA = {**SIZES, **HEADS, "head_dim": 256, "sliding_window": 16, "query_pre_attn_scalar": 256}
REAL: dict[str, dict[str, Any]] = {
    "gemma3_text": {**GEMMA, "tie_word_embeddings": True},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "qwen2": {**SIZES, **HEADS},
    "phi3": {**SIZES, **HEADS, "eos_token_id": 2, "bos_token_id": 1},
}


def with_real_statistics(family: str, seed: int = 0) -> Any:
    """Random weights whose norms have gains up to 50, biases of about 50, and three channels a matrix × 100."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**REAL[family]), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name:
                weight.copy_(50.0 * torch.randn(weight.shape, generator=generator))
            elif weight.dim() == 1:
                weight.copy_(4.0 * torch.rand(weight.shape, generator=generator))
                weight[torch.rand(weight.shape, generator=generator) > 0.98] = 50.0
            else:
                weight.normal_(0.0, 0.04, generator=generator)
                if "embed" not in name:
                    weight[:, torch.randint(0, weight.shape[1], (3,), generator=generator)] *= 100.0
    return model.requires_grad_(requires_grad=False)


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", REAL)
def test_models_with_real_statistics_load(family: str, precision: str, seed: int):
    if precision in ROUNDED_BITS and load_library() is None:
        pytest.skip(f"{precision} needs the native library")
    model = with_real_statistics(family, seed).to(DTYPES[precision])
    with warnings.catch_warnings():
        if precision == "fp16":  # whose numbers end at 65,504: Gemma's grow beyond
            warnings.filterwarnings("ignore", ".* hidden states are not finite in fp16", RoundingWarning)
        target = load_target(model, tokenizer=IntegerTokenizer(), precision=precision)
    if load_library() is not None and family == "qwen2" and precision != "fp16":
        assert target.native is not None, "rounding is no reason for slower passes"
    if precision != "fp32":
        return
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    expected = model(text).logits
    gap = (target.logits(target.hidden_states(text)) - expected).abs().max() / expected.abs().max()
    assert gap < 1e-3


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_head_of_such_a_model_is_exported_and_imported_again(family: str, tmp_path: Path):
    """Both load the model in bf16."""
    with_real_statistics(family).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    letters_tokenizer().save_pretrained(str(tmp_path / "model"))
    base = TargetModel.load(tmp_path / "model", dtype="bf16", device="cpu")
    save_head(tiny_head("medusa", base, lm_head="own"), tmp_path / "head", base=base, dtype="bf16")
    draftheads.export_head(tmp_path / "head", tmp_path / "exported", model=tmp_path / "model")
    draftheads.import_head(tmp_path / "exported", tmp_path / "again", model=tmp_path / "model")


# --- errors of structure ---


# parts of ours: where each is, its name, and a wrong one in the place of its own
BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "window": (transformers_runner, "within_window", lambda own: lambda *given: own(*given[:-1], given[-1] + 1)),
    "positions": (TransformersRunner, "_positions", lambda own: lambda *given: own(*given) + (given[2] > 1).long()),
    "final cap": (TargetModel, "_softcap", lambda _: None),
    "logit scale": (TargetModel, "_logit_scale", lambda _: 1.0),
    "native turns": (native_step._Turns, "_computed", lambda own: lambda *given: own(*given) * 1.01),
    "norms of queries": (
        native_step,
        "parts_of",
        lambda own: lambda *given: replace(own(*given), head_norms=(None, None)),
    ),
}


def break_part(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong = BROKEN[part]
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("part", "family", "changes"),
    [
        ("window", "mistral", {"sliding_window": 40}),
        ("window", "gemma3_text", {"sliding_window": 300}),
        ("positions", "gpt_neox", {}),
        ("positions", "gemma2", {}),
        ("final cap", "gemma2", {"final_logit_softcapping": 30.0}),
        ("logit scale", "granite", {"logits_scaling": 1.05}),
    ],
)
def test_an_error_of_structure_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: str, family: str, changes: dict[str, Any], precision: str
):
    """As small as they are, and after a text that is shorter than the window."""
    target = tiny_model(family, dtype=DTYPES[precision], **changes)
    load_target(target.model, tokenizer=target.tokenizer)
    break_part(part, monkeypatch)
    with pytest.raises(UnsupportedModel, match="differ"):
        load_target(target.model, tokenizer=target.tokenizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("part", "family"), [("native turns", "llama"), ("norms of queries", "qwen3")])
def test_a_wrong_fast_part_is_not_used(monkeypatch: pytest.MonkeyPatch, part: str, family: str, precision: str):
    target = tiny_model(family, dtype=DTYPES[precision])
    if load_library() is not None:
        assert load_target(target.model, tokenizer=target.tokenizer).native is not None
    break_part(part, monkeypatch)
    slower = load_target(target.model, tokenizer=target.tokenizer)
    assert slower.native is None
    check_trees(slower, stock=check_trees(target))


def test_numbers_of_the_model_itself_are_compared(monkeypatch: pytest.MonkeyPatch):
    """A damaged weight is no error of structure: in fp32 it is refused, in bf16 there is a warning."""
    own_pass = TargetModel.sped_up

    def damaged(self: TargetModel, **options: Any) -> TargetModel:
        made = own_pass(self, **options)
        if self.vocab_size != 64:  # of a probe
            made = replace(made, native=None)
            made.decoder.norm = deepcopy(made.decoder.norm)
            made.decoder.norm.weight.mul_(3.0)
        return made

    monkeypatch.setattr(TargetModel, "sped_up", damaged)
    for dtype, found in ((torch.float32, SpeedWarning), (torch.bfloat16, RoundingWarning)):
        stock = tiny_model("llama", dtype=dtype, vocab_size=100)
        with pytest.warns(found):
            checked(stock.twin(), stock.twin, fast=True)


def test_sums_that_are_too_large_for_fp16_are_a_warning():
    model = tiny_model("llama").model.half()
    model.get_input_embeddings().weight.data[:] = 6e4
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:] = 6e4
    with pytest.warns(RoundingWarning, match="not finite in fp16: use bf16 or fp32"):
        load_target(model, tokenizer=IntegerTokenizer())


# --- probes ---


@pytest.mark.few(12)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_has_a_probe_with_all_its_layers(family: str):
    target = tiny_model(family, dtype=torch.bfloat16)
    state = torch.get_rng_state()
    probe = probe_of(target)
    assert torch.equal(torch.get_rng_state(), state)
    assert probe is not None
    assert set(probe.layer_kinds) == set(target.layer_kinds)
    assert probe.precision == "fp32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(probe.twin(), probe.twin, fast=family in FAMILIES)


LARGE: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3": {"vocab_size": 151936, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3_moe": {"num_experts": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
    "gemma2": {"hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 4096},
    "phi3": {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "pad_token_id": 0},
    "gpt2": {"n_embd": 1600, "n_head": 25, "n_layer": 4},
    "smollm3": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", LARGE)
def test_probes_of_large_models_are_small(family: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{"num_hidden_layers": 8, **LARGE[family]}))
    target = TargetModel.__new__(TargetModel)
    target.__dict__.update(model=model, tokenizer=IntegerTokenizer(), model_id="large")
    probe = probe_of(target)
    assert probe is not None
    assert sum(weight.numel() for weight in probe.model.parameters()) < 2e7
    if family != "gpt2":
        groups = (each.config.num_attention_heads / each.config.num_key_value_heads for each in (probe, target))
        assert len({*groups}) == 1
    check_trees(probe)


def test_layers_without_positions_are_in_the_probe():
    target = tiny_model("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    probe = probe_of(target)
    assert probe is not None
    assert 0 in probe.config.no_rope_layers


def test_a_model_with_changed_modules_has_no_probe_and_is_checked_itself():
    target = tiny_model("llama")
    target.decoder.layers[0].register_forward_hook(lambda *_: None)
    assert probe_of(target) is None
    assert load_target(target.model, tokenizer=target.tokenizer).native is None


def test_noise_is_that_of_the_precision():
    noise = {name: own_numbers(tiny_model("llama", dtype=dtype)).noise for name, dtype in DTYPES.items()}
    assert 0.0 < noise["fp32"] < 1e-4 < noise["fp16"] < noise["bf16"] < 0.5
    stock = tiny_model("llama")
    check_numbers(stock, own_numbers(stock))
