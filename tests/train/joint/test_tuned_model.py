"""The adapter: which layers it adapts, and the weights of the tuned model."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from draftheads.errors import InvalidSettings
from draftheads.models.adapter import Adapter, linear_layers
from draftheads.models.model import TargetModel
from draftheads.train.joint.tuned_model import TunedModel
from draftheads.train.learner import head_learner
from draftheads.train.new_head import in_float32
from joint_world import harness, joint_options
from training_world import EOS, VOCAB, chat_model, chat_tokenizer


def test_all_linear_layers_and_the_lm_head_are_adapted() -> None:
    target = chat_model()
    names = linear_layers(target.model)
    assert names == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    adapter = Adapter.attach(target.model, rank=2, alpha=4, dropout=0.0)
    assert len(adapter.parameters) == 2 * (7 * 2 + 1)
    assert all(parameter.requires_grad for parameter in adapter.parameters)
    assert TunedModel(target.model, None, "").update is not None
    adapter.remove()
    assert TunedModel(target.model, None, "").update is None


def test_only_the_named_layers_are_adapted() -> None:
    target = chat_model()
    adapter = Adapter.attach(target.model, rank=2, alpha=4, dropout=0.0, targets=("q_proj",))
    assert len(adapter.parameters) == 2 * 2
    assert TunedModel(target.model, None, "").weights.lm_head is target.model.lm_head.weight
    with pytest.raises(InvalidSettings, match="--lora-targets no_such"):
        Adapter.attach(chat_model().model, rank=2, alpha=4, dropout=0.0, targets=("no_such",))


def test_labels_of_the_tuned_model_have_its_soft_cap(data: Path) -> None:
    """With an adapted lm_head, too (Gemma-2 caps its logits)."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=EOS,
        initializer_range=0.4,
        final_logit_softcapping=2.0,
    )
    model = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    target = TargetModel(model, chat_tokenizer(), "tiny-gemma")
    joint, batch = harness(target, data)
    joint.eval()
    weights = in_float32(joint.tuned.weights)
    assert weights.logit_softcap == 2.0
    joint.learner.head.bind(weights)
    learner = head_learner(joint_options(data.parent, data).objective, joint.learner.head, weights)
    hidden = joint.tuned.hidden_states(batch["token_ids"])
    positions = torch.arange(6)
    expected = joint.tuned.logits(hidden.flatten(0, 1)[positions])[:, joint.vocab].softmax(-1)
    torch.testing.assert_close(learner.labels(hidden, batch["token_ids"])(positions).probs, expected)
