"""``draftheads.testing``: a head of another package passes the check, and one that is wrong in some way does not."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import draftheads
from draftheads import heads
from draftheads.errors import InvalidSettings
from draftheads.heads.base import DraftHead, HeadSession, Root
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.heads.small_llama import SmallLlamaConfig, SmallLlamaHead
from draftheads.heads.stateful import StatefulSession
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import Shape
from draftheads.testing import check_head
from families import needs_library


@dataclass(frozen=True)
class MineConfig(HydraConfig):
    """Hydra's."""

    method: ClassVar[str] = "mine"


@dataclass(frozen=True)
class MineLlamaConfig(SmallLlamaConfig):
    """That of a head that reads the text."""

    method: ClassVar[str] = "mine"


class WrongParents(HydraHead):
    """Children go on from other nodes than their parents."""

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return super().descend(state, depth, parents.flip(1), token_ids)


class WrongTokens(HydraHead):
    """The children's tokens are those beside them."""

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return super().descend(state, depth, parents, token_ids.roll(1, 1))


class Later(HydraHead):
    """Training shows the hidden state of the next token."""

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return super().forward(hidden.roll(-1, 1), token_ids)


class LaterToken(HydraHead):
    """Training shows one token too many."""

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return super().forward(hidden, token_ids.roll(-1, 1))


class Swapped(HydraHead):
    """Training returns rows before heads."""

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return super().forward(hidden, token_ids).transpose(0, 1)


class Idle(HydraHead):
    """A layer that nothing uses."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.extra = nn.Linear(3, 3)


class Blind(HydraHead):
    """It says that it does not read the path."""

    reads_path = False


class Unsaved(HydraHead):
    """A number that is neither a setting nor a weight."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.factor = float(torch.rand(()))

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        return super().logits(features * self.factor, head_index)


class ForgetsRows(StatefulSession):
    def keep(self, rows: Tensor) -> None:
        super().keep(rows.flip(0))


class ForgetsSteps(StatefulSession):
    def observe(self, context: Any) -> None:
        del context


class Rows(SmallLlamaHead):
    """Its session mixes rows up when one leaves."""

    def start(self) -> StatefulSession:
        return ForgetsRows(self)


class Steps(SmallLlamaHead):
    """Its session does not read what was decoded without a draft."""

    def start(self) -> StatefulSession:
        return ForgetsSteps(self)


class SecondRow(HydraHead):
    """Right in the first row of a batch only."""

    def predict(self, state: Any, depth: int) -> Tensor:
        logits = super().predict(state, depth)
        return torch.cat([logits[:1], logits[1:].roll(1, -1)])


class OtherRoot(HeadSession):
    def propose(self, context: Context, shape: Shape) -> Draft:
        draft = super().propose(context, shape)
        draft.token_ids[:, 0].add_(1).remainder_(24)
        return draft


class Roots(HydraHead):
    """Its session writes over the token that is decided already."""

    def start(self) -> HeadSession:
        return OtherRoot(self)


class WrongLayers(HydraHead):
    """What it names as its layers computes something else."""

    def layers_of_depths(self) -> Any:
        return [[(linear, linear) for linear, _ in layers] for layers in super().layers_of_depths()]


class Halved(HydraHead):
    """A right one, which does not compute what its parent class does."""

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        return 0.5 * super().logits(features, head_index)


class Shared(HydraHead):
    """It changes the model's own text: what it drafts is written over."""

    def begin(self, root: Root, depth: int) -> Any:
        root.token_ids.add_(1).remainder_(24)
        return super().begin(root, depth)


def check(monkeypatch: pytest.MonkeyPatch, head: type[DraftHead]) -> None:
    monkeypatch.setattr(heads, "HEADS", dict(heads.HEADS))
    draftheads.register(MineLlamaConfig if issubclass(head, SmallLlamaHead) else MineConfig, head)
    check_head("mine")


@pytest.mark.parametrize("head", [HydraHead, SmallLlamaHead, Halved])
def test_a_right_head_passes(monkeypatch: pytest.MonkeyPatch, head: type[DraftHead]) -> None:
    check(monkeypatch, type("Mine", (head,), {}))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (WrongParents, "node 0 at depth 2: predict gives other logits"),
        (WrongTokens, "node 0 at depth 1: predict gives other logits"),
        (Later, "head 0 at t reads a later state than h_t"),
        (LaterToken, "head 0 at t reads a later state than h_t, or token than x_(t+1)"),
        (Swapped, "forward returns (2, 3, 30, 32), not (K, B, T, F) = (3, 2, 30, '…')"),
        (Idle, "training does not reach extra.weight, extra.bias"),
        (Blind, "predict(1) returns (2, 2, 24), not (2, 1, 24)"),
        (SecondRow, "node 0 at depth 0: predict gives other logits"),
        (Unsaved, "a head of the saved options and weights gives other logits"),
        (Rows, "step 6: a session that has read the text in steps drafts otherwise"),
        (Steps, "step 4: a session that has read the text in steps drafts otherwise"),
        (Shared, "predict gives other logits"),
        (Roots, "is not that of plain decoding"),
        pytest.param(WrongLayers, "after speed_up() (", marks=needs_library),
    ],
)
def test_a_wrong_head_is_told_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, head: type[DraftHead], message: str
) -> None:
    with pytest.raises(AssertionError) as error:
        check(monkeypatch, head)
    assert message in str(error.value)


def test_an_option_that_the_head_does_not_have() -> None:
    with pytest.raises(InvalidSettings, match=r"MedusaConfig cannot be made: .* 'scale'"):
        check_head("medusa", scale=0.5)
