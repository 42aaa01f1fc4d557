"""Tiny random models of many families, an integer tokenizer and a random drafter: the world of the tests."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftheads.target.model import TargetModel

VOCAB = 96
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # far above the usual 0.02, so that logits are well apart and greedy text is not one token for ever
    "initializer_range": 0.4,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "mistral": {**SMALL, "sliding_window": 8},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": SMALL,
    "olmo2": SMALL,
    "granite": {**SMALL, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "gpt2": GPT2,
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SMALL, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
}


class IntegerTokenizer:
    """Token 65 is the text "⟨65⟩"; enough of a tokenizer for the engine."""

    eos_token_id = None
    chat_template = None

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCAB - 3) for letter in text]}


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> TargetModel:
    """A random model of the family, a few thousand parameters."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    return TargetModel(model, IntegerTokenizer(), f"tiny-{family}")
