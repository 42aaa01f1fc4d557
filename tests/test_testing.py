"""``draftheads.testing``: a head of another package passes the check, and one that is wrong in some way does not."""

from collections.abc import Callable
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


def wrong(name: str, change: Callable[..., Any]) -> type[DraftHead]:
    """Hydra with one method that is wrong: ``change`` gets the right one, bound."""

    def method(self: HydraHead, *arguments: Any) -> Any:
        return change(getattr(super(own, self), name), *arguments)

    own = type("Wrong", (HydraHead,), {name: method})
    return own


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


class OtherRoot(HeadSession):
    def propose(self, context: Context, shape: Shape) -> Draft:
        draft = super().propose(context, shape)
        draft.token_ids[:, 0].add_(1).remainder_(24)
        return draft


class Roots(HydraHead):
    """Its session writes over the token that is decided already."""

    def start(self) -> HeadSession:
        return OtherRoot(self)


def check(monkeypatch: pytest.MonkeyPatch, head: type[DraftHead]) -> None:
    monkeypatch.setattr(heads, "HEADS", dict(heads.HEADS))
    draftheads.register(MineLlamaConfig if issubclass(head, SmallLlamaHead) else MineConfig, head)
    check_head("mine")


HALVED = wrong("logits", lambda logits, features, i: 0.5 * logits(features, i))  # a right one, with logits of its own


@pytest.mark.parametrize("head", [HydraHead, SmallLlamaHead, HALVED])
def test_a_right_head_passes(monkeypatch: pytest.MonkeyPatch, head: type[DraftHead]) -> None:
    check(monkeypatch, type("Mine", (head,), {}))


def first_row_only(predict: Any, state: Any, depth: int) -> Tensor:
    logits = predict(state, depth)
    return torch.cat([logits[:1], logits[1:].roll(1, -1)])


def writing_over(begin: Any, root: Root, depth: int) -> Any:
    """Over the model's own text."""
    root.token_ids.add_(1).remainder_(24)
    return begin(root, depth)


OTHER_LOGITS = "predict gives other logits"
WRONG: list[tuple[str, Callable[..., Any], str]] = [
    # children go on from other nodes than their parents, or have the tokens beside theirs
    ("descend", lambda own, *args: own(*args[:2], args[2].flip(1), args[3]), f"node 0 at depth 2: {OTHER_LOGITS}"),
    ("descend", lambda own, *args: own(*args[:3], args[3].roll(1, 1)), f"node 0 at depth 1: {OTHER_LOGITS}"),
    # training shows the hidden state of the next token, one token too many, or rows before heads
    ("forward", lambda own, hidden, ids: own(hidden.roll(-1, 1), ids), "head 0 at t reads a later state than h_t"),
    ("forward", lambda own, hidden, ids: own(hidden, ids.roll(-1, 1)), "than h_t, or token than x_(t+1)"),
    ("forward", lambda own, *args: own(*args).transpose(0, 1), "forward returns (2, 3, 30, 32), not (K, B, T, F)"),
    ("predict", first_row_only, f"node 0 at depth 0: {OTHER_LOGITS}"),
    ("begin", writing_over, OTHER_LOGITS),
]
# what it names as its layers computes something else
WRONG_LAYERS = wrong("layers_of_depths", lambda own: [[(one, one) for one, _ in layers] for layers in own()])


@pytest.mark.parametrize(
    ("head", "message"),
    [
        *((wrong(name, change), message) for name, change, message in WRONG),
        (Idle, "training does not reach extra.weight, extra.bias"),
        (Blind, "predict(1) returns (2, 2, 24), not (2, 1, 24)"),
        (Unsaved, "a head of the saved options and weights gives other logits"),
        (Rows, "step 6: a session that has read the text in steps drafts otherwise"),
        (Steps, "step 4: a session that has read the text in steps drafts otherwise"),
        (Roots, "is not that of plain decoding"),
        pytest.param(WRONG_LAYERS, "after speed_up() (", marks=needs_library),
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
