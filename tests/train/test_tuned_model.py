"""The adapter: which layers it adapts, the weights of the tuned model, and how far it is from the original."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftheads.errors import InvalidSettings
from draftheads.train.learner import Learner
from draftheads.train.new_head import in_float32
from draftheads.train.tuned_model import Adapter, TunedModel, compare, linear_layers
from families import tiny_model
from joint_world import harness
from training_world import VOCAB, chat_model, chat_tokenizer


def test_all_linear_layers_and_the_lm_head_are_adapted():
    target = chat_model()
    names = linear_layers(target.model)
    assert names == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    adapter = Adapter(target.model, rank=2, alpha=4, dropout=0.0)
    assert len(adapter.parameters) == 2 * (7 * 2 + 1)
    assert all(parameter.requires_grad for parameter in adapter.parameters)
    assert TunedModel(target.model, None, "").update is not None
    adapter.remove()
    assert TunedModel(target.model, None, "").update is None


def test_only_the_named_layers_are_adapted():
    target = chat_model()
    adapter = Adapter(target.model, rank=2, alpha=4, dropout=0.0, targets=("q_proj",))
    assert len(adapter.parameters) == 2 * 2
    assert TunedModel(target.model, None, "").weights.lm_head is target.model.lm_head.weight
    with pytest.raises(InvalidSettings, match="the layers no_such cannot be adapted"):
        Adapter(chat_model().model, rank=2, alpha=4, dropout=0.0, targets=("no_such",))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_that_are_no_linear_layers_are_left_out_by_name(family: str):
    """Their matrices are one tensor each, which no layer of LoRA is put around."""
    target = tiny_model(family)
    adapter = Adapter(target.model, rank=2)
    experts = [
        (name, parameter)
        for name, parameter in target.model.named_parameters()
        if (".experts." in name or name.endswith((".gate.weight", ".router.weight"))) and parameter.ndim > 1
    ]
    layers = len(target.layer_kinds)
    assert experts
    assert sum(adapter.left_out.values()) == sum(parameter.numel() for _, parameter in experts)
    assert set(adapter.left_out) == {name.replace(".0.", ".*.") for name, _ in experts if ".0." in name}
    assert len(adapter.left_out) * layers == len(experts)
    assert not Adapter(chat_model().model).left_out


def test_labels_of_the_tuned_model_have_its_soft_cap(chats: Path):
    """With an adapted lm_head, too (Gemma-2 caps its logits)."""
    gemma = tiny_model("gemma2", vocab_size=len(VOCAB), final_logit_softcapping=2.0, tie_word_embeddings=False)
    target = replace(gemma, tokenizer=chat_tokenizer())
    joint, batch = harness(target, chats)
    joint.eval()
    weights = in_float32(joint.tuned.weights)
    assert weights.logit_softcap == 2.0
    joint.learner.head.bind(weights)
    learner = Learner(joint.learner.head, weights)
    hidden = joint.tuned.hidden_states(batch["token_ids"])
    positions = torch.arange(6)
    expected = joint.tuned.logits(hidden.flatten(0, 1)[positions])[:, joint.vocab].softmax(-1)
    torch.testing.assert_close(learner.labels(hidden, batch["token_ids"])(positions).probs, expected)


def test_the_movement_equals_its_definition():
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 9, 5, generator=generator).unbind()
    next_ids = torch.randint(0, 5, (9,), generator=generator)
    kl = losses_before = losses_after = agreed = 0.0
    for row in range(9):
        p, q = before[row].softmax(-1).tolist(), after[row].softmax(-1).tolist()
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        losses_before -= math.log(p[next_ids[row]])
        losses_after -= math.log(q[next_ids[row]])
        agreed += p.index(max(p)) == q.index(max(q))
    assert 0 < agreed < 9
    assert compare(before, after, next_ids).tolist() == pytest.approx(
        [kl, losses_before, losses_after, agreed], rel=1e-5
    )
