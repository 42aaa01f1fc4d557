"""The gradient of a step that is several batches is that of one large batch: each prediction weighs the same."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.data.features import Document, Documents, Texts
from draftheads.data.texts import EncodedChat
from draftheads.heads import HEADS
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.settings import LossKind
from draftheads.train import learner as learning
from draftheads.train import trainer
from draftheads.train.learner import Learner
from draftheads.train.new_head import new_head
from joint_world import harness
from training_world import chat_model, train_options

LENGTHS = (3, 400, 41, 130)
PLANS = ([[0, 1, 2, 3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]])  # one batch, two and four; some are shorter


class RandomTexts(Documents):
    """Random tokens, of which all or two thirds are the assistant's, and random hidden states."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        token_ids = [torch.randint(64, (length,), generator=generator) for length in LENGTHS]
        loss_masks = [torch.rand(n, generator=generator) < (1 if n < 100 else 0.7) for n in LENGTHS]
        self.hidden = [torch.randn(length, size, generator=generator) for length in LENGTHS]
        texts = zip(token_ids, loss_masks, strict=True)
        self.texts = Texts.of(EncodedChat(tuple(ids.tolist()), tuple(mask.tolist()), "x:1") for ids, mask in texts)

    def __getitem__(self, index: int) -> Document:
        return Document(self.hidden[index], self.token_ids[index], self.loss_masks[index])


def gradients_of(module: nn.Module, batches: PlannedTexts, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """What a step reports, and its gradients in one vector."""
    module.zero_grad()
    order = range(len(batches))
    found = trainer._gradients(module, batches, map(batches.__getitem__, order), 1, order, inputs=inputs, bf16=False)
    return found, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def assert_equal_in_all_plans(module: nn.Module, batches: Any, **inputs: Any) -> None:
    (report, whole), *others = [gradients_of(module, batches(plan), inputs) for plan in PLANS]
    assert whole.norm() > 0
    for found, parts in others:
        assert float((parts - whole).norm() / whole.norm()) < 1e-5
        for name, value in report.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def options(method: str, **changes: Any) -> Any:
    if method in ("eagle3", "dflash", "dflash2", "dspark", "p-eagle"):  # the hidden states are those of the last layer
        changes["head_options"] = ("layers=[]",)
    return train_options(Path("out"), Path("x"), **{"method": method, "draft_vocab_size": 40, **changes})


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        *((method, "teacher") for method in HEADS if method != "mtp"),
        *(("hydra", loss) for loss in get_args(LossKind) if loss not in ("teacher", "eagle")),
        ("eagle", "eagle"),
    ],
)
def test_batches_of_a_step_have_the_gradient_of_one_batch(
    target: TargetModel, method: str, loss: Any, monkeypatch: pytest.MonkeyPatch
):
    every_place = lambda mask, _: torch.arange(mask.shape[1]).expand(len(mask), -1)  # noqa: E731 - none is drawn
    monkeypatch.setattr(learning, "random_places", every_place)
    monkeypatch.setattr(DraftHead, "place_numbers", lambda _, count: [count] * 4)
    store = RandomTexts(target.hidden_size)
    head = new_head(options(method), target, store, range(4))
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    learner = Learner(head, target.weights, loss=loss, depth_decay=0.5)
    assert_equal_in_all_plans(learner, lambda plan: PlannedBatches(store, plan, skip_prompts=not head.needs_history))


@pytest.mark.parametrize(("backbone_loss", "only_heads"), [("text", False), ("original", False), ("text", True)])
def test_joint_training_has_it_too(chats: Path, backbone_loss: Any, only_heads: bool):
    joint, _ = harness(chat_model(), chats, backbone_loss=backbone_loss)
    assert_equal_in_all_plans(
        joint, lambda plan: PlannedTexts(RandomTexts(32), plan), head_weight=0.3, only_heads=only_heads
    )


def test_drawn_places_are_those_that_were_counted(target: TargetModel):
    """Nothing is drawn anew between the count of a step's predictions and its losses."""
    head = new_head(options("dflash"), target, RandomTexts(32), range(4))
    learner = Learner(head, target.weights, loss="hard")
    batch = {"loss_mask": RandomTexts(32).loss_masks[1][None], "token_ids": RandomTexts(32).token_ids[1][None]}
    counts = learner.train().count(**batch)
    torch.rand(7)  # whatever is drawn in between
    found = learner(RandomTexts(32).hidden[1][None], **batch, **counts)
    again = learner(RandomTexts(32).hidden[1][None], **batch, **counts)
    assert torch.equal(found["head_losses"], again["head_losses"])
    assert counts["places"].shape[1] == LENGTHS[1] // 4
    assert int(counts["numbers"][0]) <= LENGTHS[1] // 4
