"""Losses and gradients of heads and model together are those of the definition."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from draftheads.errors import CheckpointCorrupt
from draftheads.models.model import TargetModel
from draftheads.train.joint import JointLearner
from joint_world import harness, on_disk
from training_world import chat_model


@pytest.mark.parametrize("backbone_loss", ["text", "original"])
def test_gradients_reach_the_backbone_in_the_second_stage_only(chats: Path, backbone_loss: Any):
    joint, batch = harness(chat_model(), chats, backbone_loss=backbone_loss)
    head, adapter = list(joint.learner.head.parameters()), joint.adapter.parameters
    others = [p for p in joint.backbone.parameters() if not any(p is q for q in adapter)]
    joint(**batch, only_heads=True)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in head)
    assert all(p.grad is None for p in adapter)
    joint(**batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter)
    assert all(p.grad is None and not p.requires_grad for p in others)


@pytest.mark.parametrize("method", ["medusa", "hydra", "hydra++", "eagle", "eagle3", "mlp-speculator"])
def test_the_loss_of_the_heads_alone_trains_the_adapter(chats: Path, method: str):
    target = chat_model()
    joint, batch = harness(target, chats, method=method)
    losses = {weight: joint(**batch, head_weight=weight)["loss"] for weight in (0.0, 1.0)}
    (losses[1.0] - losses[0.0]).backward()
    update = joint.tuned.update
    assert update.down.grad.abs().max() > 1e-4  # through the shared lm_head
    # EAGLE-3 reads the inputs of both layers, so the second layer changes nothing for it
    named = joint.backbone.named_parameters()
    unread = {id(p) for name, p in named if method == "eagle3" and ".layers.1." in name}
    assert all(p.grad.abs().max() > 1e-5 for p in joint.adapter.parameters if id(p) not in unread)


@pytest.mark.parametrize("only_heads", [True, False])
def test_noise_is_scaled_by_the_length_of_each_text(chats: Path, only_heads: bool):
    joint, batch = harness(chat_model(), chats)
    read: list[Tensor] = []
    joint.learner.head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    for alpha in (0.0, 75.0):
        joint.learner.noise_alpha = alpha
        joint(**batch, only_heads=only_heads)
    bounds, lengths = (read[1] - read[0]).abs().amax((1, 2)), batch["lengths"]
    assert lengths.min() < 0.9 * lengths.max()
    torch.testing.assert_close(bounds, 75 / (lengths * read[0].shape[-1]).sqrt(), rtol=0.03, atol=0.0)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("loss", ["teacher", "hard"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("backbone_loss", ["text", "original"])
def test_losses_and_gradients_are_those_of_the_definition(
    chats: Path, method: str, loss: Any, lm_head: Any, backbone_loss: Any
):
    """Medusa, equations 1 and 2: L_LM + λ0 Σ λ_k L_k, where the first head is k = 1; here λ0 = 0.3, λ_k = 0.5^k."""
    settings = {"method": method, "loss": loss, "lm_head": lm_head, "backbone_loss": backbone_loss}
    joint, batch = harness(chat_model(), chats, **settings)
    found = joint(**batch, head_weight=0.3)
    parameters = [*joint.learner.head.parameters(), *joint.adapter.parameters]
    gradients = torch.autograd.grad(found["loss"], parameters)
    expected_backbone, expected_heads = slow_twin(joint, chat_model(), batch)
    assert found["backbone_loss"].item() == pytest.approx(expected_backbone.item(), rel=1e-4)
    assert found["head_losses"].tolist() == pytest.approx([mean.item() for mean in expected_heads], rel=1e-4)
    expected = expected_backbone + 0.3 * sum(0.5**k * mean for k, mean in enumerate(expected_heads, start=1))
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        # fp32 sums in another order
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("tied", "lm_head", "draft_vocab_size"), [(False, "shared", 48), (True, "shared", 0), (True, "own", 48)]
)
@pytest.mark.parametrize("loss", ["teacher", "hard"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_losses_and_gradients_of_all_weights_are_those_of_the_definition(  # noqa: PLR0917 - pytest gives them by name
    chats: Path, method: str, loss: Any, lm_head: Any, draft_vocab_size: int, tied: bool
):
    """Also of the lm_head and the embedding that heads share, at the values of this step."""
    sizes = {"lm_head": lm_head, "draft_vocab_size": draft_vocab_size}
    joint, batch = harness(chat_model(tie_word_embeddings=tied), chats, method=method, loss=loss, full=True, **sizes)
    for parameter in joint.adapter.parameters:  # as after a step: the head was bound to other values
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    found = joint(**batch, head_weight=0.3)
    parameters = [*joint.learner.head.parameters(), *joint.adapter.parameters]
    assert len(joint.adapter.parameters) == len(list(joint.backbone.parameters())) == (20 if tied else 21)
    gradients = torch.autograd.grad(found["loss"], parameters)
    joint.learner.head.target_embedding = joint.backbone.get_input_embeddings().weight[:]
    expected_backbone, expected_heads = slow_twin(joint, chat_model(), batch)
    assert found["backbone_loss"].item() == pytest.approx(expected_backbone.item(), rel=1e-4)
    assert found["head_losses"].tolist() == pytest.approx([mean.item() for mean in expected_heads], rel=1e-4)
    expected = expected_backbone + 0.3 * sum(0.5**k * mean for k, mean in enumerate(expected_heads, start=1))
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)


def slow_twin(joint: JointLearner, original: TargetModel, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Token by token: the mean loss of the backbone, and of every head."""
    head, model = joint.learner.head, joint.backbone
    vocab = joint.vocab.tolist()
    backbone: list[Tensor] = []
    heads: list[list[Tensor]] = [[], [], []]
    for token_ids, mask in zip(batch["token_ids"], batch["loss_mask"], strict=True):
        text, is_answer = token_ids.tolist(), mask.tolist()
        hidden = model.model(input_ids=token_ids[None]).last_hidden_state
        logits = model.lm_head(hidden)[0]
        before = original.model(input_ids=token_ids[None]).logits[0].log_softmax(-1)
        features = head(hidden, token_ids[None])[:, 0]
        for p in range(len(text) - 1):
            if is_answer[p + 1]:
                after = logits[p].log_softmax(-1)
                kl = (before[p].exp() * (before[p] - after)).sum()
                backbone.append(kl if joint.backbone_loss == "original" else -after[text[p + 1]])
        for i in range(3):
            for t in range(len(text) - 2 - i):
                if is_answer[t + 1] and is_answer[t + 2 + i]:
                    is_shared = head.config.lm_head == "shared"
                    logit = model.lm_head(features[i, t])[vocab] if is_shared else head.logits(features[i, t], i)
                    log_probs = logit.log_softmax(-1)
                    if joint.learner.reads_teacher:
                        teacher = logits[t + 1 + i][vocab].softmax(-1).detach()
                        heads[i].append(-(teacher * log_probs).sum())
                    elif text[t + 2 + i] in vocab:
                        heads[i].append(-log_probs[vocab.index(text[t + 2 + i])])
    return torch.stack(backbone).mean(), [torch.stack(losses).mean() for losses in heads]


def test_at_the_start_the_tuned_model_is_the_original(chats: Path):
    joint, batch = harness(chat_model(), chats, moved=False, dropout=0.5, backbone_loss="original")
    found = joint(**batch)
    assert found["backbone_loss"].item() == pytest.approx(0.0, abs=1e-6)
    frozen = joint(**batch, only_heads=True, head_weight=0.5)
    assert torch.equal(frozen["head_losses"], found["head_losses"])
    assert frozen["loss"].item() == pytest.approx(
        0.5 * sum(0.5**k * x for k, x in enumerate(found["head_losses"].tolist(), start=1))
    )


def test_only_the_adapter_has_dropout_and_only_in_training(chats: Path):
    joint, batch = harness(chat_model(attention_dropout=0.9), chats, dropout=0.5)
    assert joint(**batch)["loss"].item() != joint(**batch)["loss"].item()
    joint.eval()
    assert joint(**batch)["loss"].item() == joint(**batch)["loss"].item()
    still, _ = harness(chat_model(attention_dropout=0.9), chats, dropout=0.0)
    assert still(**batch)["loss"].item() == still(**batch)["loss"].item()


def test_a_checkpoint_holds_only_trained_tensors(chats: Path):
    joint, _ = harness(chat_model(), chats)
    state = joint.state_dict()
    parameters = [*joint.learner.head.parameters(), *joint.adapter.parameters]
    pointers = {parameter.data_ptr() for parameter in parameters}
    assert {tensor.data_ptr() for tensor in state.values()} == pointers | {joint.learner.head.draft_vocab.data_ptr()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    joint.load_state_dict(zeros)
    assert not any(parameter.any() for parameter in parameters)
    zeros.pop(next(iter(zeros)))
    with pytest.raises(CheckpointCorrupt, match="is missing or unexpected"):
        joint.load_state_dict(zeros)


def test_gradients_through_four_bit_layers_are_those_of_the_rounded_weights(chats: Path, tmp_path: Path):
    """QLoRA: the adapter's gradients are those of the same model with the rounded weights in full."""
    base = on_disk(tmp_path / "base", hidden_size=64, intermediate_size=128)
    small = TargetModel.load(base, dtype=torch.float32, four_bit=True)
    full = TargetModel.load(base, dtype=torch.float32)
    layers = dict(full.model.named_modules())
    for name, module in small.model.named_modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            rounded = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert not torch.equal(layers[name].weight, rounded)
            layers[name].weight.data.copy_(rounded)
    gradients = []
    for target in (small, full):
        target.hidden_states(torch.tensor([[5, 6, 7]]))  # inference first, as in a run's first stage
        torch.manual_seed(0)
        joint, batch = harness(target, chats)
        joint(**batch)["loss"].backward()
        gradients.append([parameter.grad for parameter in joint.adapter.parameters])
    assert len(gradients[0]) > 20
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
