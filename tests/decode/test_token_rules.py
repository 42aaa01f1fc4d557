"""Logit biases of a batch, as transformers adds them."""

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from draftheads.decode.engine import Engine
from draftheads.decode.token_rules import BatchRules
from draftheads.settings import SamplingSettings
from families import VOCAB, tiny_model

BIAS = {3: 0.013, 5: -0.4, 9: 7.77}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_biases_are_added_in_fp32_in_every_type(dtype: torch.dtype) -> None:
    """In bf16 small biases would be lost."""
    engine = Engine(tiny_model("llama", dtype=dtype))
    requests = [engine.request([4], SamplingSettings(logit_bias=bias)) for bias in (BIAS, {})]
    rules = BatchRules(requests, vocab_size=VOCAB, device=engine.model.device)
    logits = (3 * torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = logits.float().clone()
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in BIAS.items()])
    expected[0] = processor(torch.tensor([[4]] * 4), expected[0])
    assert torch.equal(rules.verified(logits, [[0] * 4] * 2, torch.zeros(1, 4)), expected)
    few = torch.tensor([9, 3])
    assert torch.equal(rules.drafted(logits[..., few], [[0] * 4] * 2, few), expected[..., few])
