"""A head with its objective: losses of the definition; noise only in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.data.batches import collate
from draftheads.data.features import FeatureStore
from draftheads.errors import DataError
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.train.learner import FEATURE_WEIGHT, Learner, with_noise
from draftheads.train.losses import NUM_ROWS
from draftheads.train.new_head import new_head
from draftheads.train.options import TrainOptions
from draftheads.train.report import measure
from training_world import train_options


def untrained(target: TargetModel, features: Path, **changes: Any) -> tuple[FeatureStore, DraftHead, TrainOptions]:
    """The store of the features, a new head for all its texts, and the options."""
    if changes.get("method") in (
        "eagle3",
        "dflash",
        "dflash2",
        "dspark",
    ):  # these features are of the last hidden state
        changes["head_options"] = ("layers=[]",)
    settings, store = train_options(Path("out"), features, **changes), FeatureStore(features)
    return store, new_head(settings, target, store, range(len(store))), settings


@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("loss", ["teacher", "hard"])
def test_losses_do_not_depend_on_prompts_and_are_those_that_are_measured(
    target: TargetModel, features: Path, method: str, loss: Any
):
    """They are those of the definition, as the tests of joint training show."""
    store, head, _ = untrained(target, features, method=method, draft_vocab_size=20)
    for block in head.parameters():
        torch.nn.init.normal_(block, std=0.1)
    learner = Learner(head, target.weights, loss=loss, depth_decay=0.5)
    means = measure(learner, store, range(6), batch_tokens=100).losses.tolist()
    for skip_prompts in (False, True):
        found = learner(**vars(collate(list(store)[:6], skip_prompts=skip_prompts)))
        assert found["head_losses"].tolist() == pytest.approx(means, rel=1e-5)
        assert found["loss"].item() == pytest.approx(means[0] + means[1] / 2 + means[2] / 4, rel=1e-5)


def test_a_head_that_is_the_same_at_all_depths_is_trained_at_the_first_depth(target: TargetModel, features: Path):
    losses = {}
    for depth in (1, 3):
        store, head, _ = untrained(target, features, method="small-llama", num_heads=depth)
        learner = Learner(head, target.weights)
        losses[depth] = learner(**vars(collate(list(store)[:6], skip_prompts=False)))
    assert losses[1]["loss"].item() == pytest.approx(losses[3]["loss"].item(), rel=1e-6)
    for found in losses.values():
        assert found["head_losses"].tolist() == pytest.approx([losses[1]["loss"].item()], rel=1e-6)


@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_a_batch_without_a_token_that_can_be_predicted_changes_nothing(
    target: TargetModel, features: Path, method: str, lm_head: Any
):
    store, head, _ = untrained(target, features, method=method, lm_head=lm_head, draft_vocab_size=2)
    learner = Learner(head, target.weights, loss="hard")
    batch = vars(collate([store[0], store[1]], skip_prompts=False))
    unknown = next(i for i in range(10) if not learner.in_vocab[i])
    found = learner(**{**batch, "token_ids": torch.full_like(batch["token_ids"], unknown)})
    assert found["loss"].item() == 0
    assert found["head_losses"].tolist() == [0, 0, 0]
    found["loss"].backward()
    gradients = [parameter.grad for parameter in learner.parameters()]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    with pytest.raises(DataError, match="no two assistant tokens in a row"):
        learner(**{**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})


def test_products_have_few_numbers_of_rows(target: TargetModel, features: Path, monkeypatch: pytest.MonkeyPatch):
    """oneDNN makes a kernel for each number."""
    rows: list[int] = []
    store, head, _ = untrained(target, features)
    logits = type(head).logits

    def counted(self: DraftHead, inputs: Tensor, head_index: int) -> Tensor:
        rows.append(len(inputs))
        return logits(self, inputs, head_index)

    monkeypatch.setattr(type(head), "logits", counted)
    learner = Learner(head, target.weights)
    learner(**vars(collate([store[0], store[1]], skip_prompts=False)))
    assert rows
    assert all(number % NUM_ROWS == 0 for number in rows)


def test_noise_is_for_training_only(target: TargetModel, features: Path):
    store, head, _ = untrained(target, features)
    batch = vars(collate([store[0], store[1]], skip_prompts=False))
    losses = {}
    for alpha in (0.0, 75.0):
        learner = Learner(head, target.weights, loss="hard", noise_alpha=alpha)
        losses[alpha] = [learner.train(mode)(**batch)["loss"].item() for mode in (False, True, True)]
    assert len({*losses[0.0], losses[75.0][0]}) == 1
    assert len(set(losses[75.0])) == 3, "drawn anew each time"


@pytest.mark.parametrize(("lengths", "bounds"), [(None, [2.5, 2.5]), ([18, 2], [2.5, 7.5])])
def test_noise_is_uniform_and_scaled_by_the_length_of_each_text(lengths: list[int] | None, bounds: list[float]):
    """Hydra, appendix A.1: α / √(L·d). With α = 75 and d = 50: 75 / √(18·50) = 2.5, 75 / √(2·50) = 7.5."""
    torch.manual_seed(0)
    noise = with_noise(torch.zeros(2, 18, 50), 75.0, None if lengths is None else torch.tensor(lengths))
    largest, expected = noise.abs().amax((1, 2)), torch.tensor(bounds)
    assert all(largest <= expected)
    assert all(largest > 0.99 * expected)
    assert all((noise.var((1, 2)) - expected**2 / 3).abs() < 0.05 * expected**2), "of a uniform distribution"


def test_the_feature_loss_is_the_distance_to_the_next_hidden_states(target: TargetModel, features: Path):
    store, head, _ = untrained(target, features, method="eagle", num_heads=2)
    document = store[0]
    hidden, text, mask = document.hidden[None].float(), document.token_ids[None], document.loss_mask[None]
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)

    @torch.no_grad()
    def loss(kind: Any) -> float:
        return float(Learner(head, target.weights, loss=kind, depth_decay=0.5).eval()(hidden, text, mask)["loss"])

    found = head(hidden, text).detach()
    expected = 0.0
    for i, decay in enumerate((1.0, 0.5)):
        places = [t for t in range(text.shape[1] - 2 - i) if mask[0, t + 1 : t + 3 + i][[0, -1]].all()]
        gaps = [F.smooth_l1_loss(found[i, 0, t], hidden[0, t + 1 + i]) for t in places]
        expected += decay * float(torch.stack(gaps).mean())
    assert loss("eagle") - loss("teacher") == pytest.approx(FEATURE_WEIGHT * expected, rel=1e-3)
