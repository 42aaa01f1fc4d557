"""The longest text: scaled rotary positions count, and a length by hand wins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings, LengthWarning, PromptTooLong
from draftheads.loading import load
from draftheads.models.model import TargetModel
from draftheads.models.model_config import long_rope_start, max_positions_of, rope_kinds
from families import IntegerTokenizer, tiny_model

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 10.0]}
BY_KIND = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def of_transformers(model: TargetModel, prompt: list[int], length: int) -> tuple[int, ...]:
    """Its answer to the prompt, up to a text of that length."""
    options = {"max_length": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return tuple(model.model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (rope("yarn", factor=4.0, original_max_position_embeddings=96), 384),  # Qwen's cards: the length as it was
        (rope("yarn", factor=4.0, original_max_position_embeddings=24), 96),  # DeepSeek: scaled already
        (rope("yarn", factor=2.0), 192),
        (rope("linear", factor=4.0), 384),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, 288),  # of a model's own code
        (rope("llama3", factor=32.0, original_max_position_embeddings=64), 96),  # Llama's are scaled
        (rope("dynamic", factor=4.0), 96),
        (rope("longrope", **FACTORS, original_max_position_embeddings=48), 96),
        (rope("default"), 96),
        ({"rope_parameters": BY_KIND}, 96),  # Gemma-3: scaled
        ({}, 96),
    ],
)
def test_the_longest_text(config: dict[str, Any], limit: int) -> None:
    assert max_positions_of(SimpleNamespace(max_position_embeddings=96, **config)) == limit
    assert max_positions_of(SimpleNamespace(**config)) is None


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"rope_parameters": {**FACTORS, "original_max_position_embeddings": 48}}, 48),
        ({"rope_parameters": FACTORS, "original_max_position_embeddings": 48}, 48),
        ({"rope_scaling": FACTORS, "original_max_position_embeddings": 48, "rope_parameters": None}, 48),
        ({"rope_parameters": {"full": {**FACTORS, "original_max_position_embeddings": 48}, "sliding": None}}, 48),
        ({"rope_parameters": FACTORS}, None),
        (rope("yarn", original_max_position_embeddings=48), None),
        ({"rope_parameters": {"rope_type": "default"}, "original_max_position_embeddings": 48}, None),
    ],
)
def test_the_original_length_of_longrope_is_found(config: dict[str, Any], start: int | None) -> None:
    """Wherever a version of transformers, or a model's own code, stores it."""
    assert long_rope_start(SimpleNamespace(**config)) == start
    assert ("longrope" in rope_kinds(SimpleNamespace(**config))) == ("short_factor" in str(config))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize(
    "config", [rope("yarn", factor=3.0, original_max_position_embeddings=32), rope("linear", factor=2.5)]
)
def test_texts_beyond_the_unscaled_length_are_transformers(family: str, config: dict[str, Any]) -> None:
    model = tiny_model(family, max_position_embeddings=32, **config)
    prompts, length = [[3 + n * n % 19 for n in range(40)], [5, 6, 7]], max_positions_of(model.config) or 0
    engine = load(model.model, "prompt-lookup", tokenizer=IntegerTokenizer())
    results = engine.generate(prompts, max_new_tokens=1000, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == of_transformers(model, prompt, length)
        assert len(prompt) + len(result.token_ids) == length


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
@pytest.mark.parametrize("length", [40, 130])
def test_a_length_by_hand(kind: str, length: int) -> None:
    """Shorter and longer than what the configuration says."""
    more = {"factor": 2.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", max_position_embeddings=64, **rope(kind, **({} if kind == "default" else more)))
    engine = load(model.model, tokenizer=IntegerTokenizer(), max_length=length)
    prompt = [3 + n * n % 19 for n in range(30)]
    [result] = engine.generate([prompt], max_new_tokens=1000, ignore_eos=True)
    assert result.token_ids == of_transformers(model, prompt, length)
    assert engine.model.twin().max_positions == length
    with pytest.raises(PromptTooLong, match=f"takes at most {length - 1}"):
        engine.generate([[3] * length])


@pytest.mark.parametrize(
    ("family", "config"), [("gpt2", {}), ("llama", rope("dynamic", factor=4.0)), ("phi3", rope("longrope", **FACTORS))]
)
def test_lengths_for_which_there_are_no_positions(family: str, config: dict[str, Any]) -> None:
    if family == "phi3":
        config["rope_parameters"]["original_max_position_embeddings"] = 64
    model = tiny_model(family, **config)
    with pytest.raises(InvalidSettings, match=r"max_length is 257; .* takes at most 256 tokens"):
        TargetModel.of(model.model, model.tokenizer, max_length=257)
    assert TargetModel.of(model.model, model.tokenizer, max_length=256).max_positions == 256


@pytest.mark.parametrize("length", [0, -4, 2.5, True])
def test_impossible_lengths(length: Any) -> None:
    with pytest.raises(InvalidSettings, match="max_length is"):
        load(tiny_model("llama").model, tokenizer=IntegerTokenizer(), max_length=length)


def test_dynamic_positions_end_at_the_original_length_and_a_warning_says_why() -> None:
    model = tiny_model("llama", max_position_embeddings=64, **rope("dynamic", factor=4.0))
    with pytest.warns(LengthWarning, match=r"dynamic rotary positions: .* at most 64 tokens") as told:
        loaded = TargetModel.of(model.model, model.tokenizer)
    assert len(told) == 1
    prompt = [3 + n * n % 19 for n in range(30)]
    [result] = Engine(loaded).generate([prompt], max_new_tokens=1000, ignore_eos=True)
    assert result.token_ids == of_transformers(model, prompt, 64)
