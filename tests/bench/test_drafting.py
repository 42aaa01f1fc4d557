"""What drafting costs, by a timer whose times are known."""

from typing import Any

import pytest

from draftheads.bench import drafting
from draftheads.bench.drafting import DraftingCost, drafting_cost
from draftheads.decode.step_costs import STEP_TOKENS, StepTimer
from draftheads.speculation.tree import Tree
from families import tiny_head, tiny_model


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("medusa", DraftingCost(0.0, (11.0, 2.0, 0.0))),
        ("small-llama", DraftingCost(8.0, (3.0, 2.0, 0.0))),  # a head that reads the text first
    ],
)
def test_a_head_costs_what_its_depth_adds_to_a_chain(
    monkeypatch: pytest.MonkeyPatch, method: str, expected: DraftingCost
):
    calls: list[Tree | None] = []

    class Timer:
        """Reading takes 8 ms, chains 11, 13 and 12.5, the first two times far more, and later now and then, too."""

        def __init__(self, *_: Any) -> None: ...

        def read(self, rows: int) -> float:
            return self.draft(rows, None)

        def draft(self, rows: int, shape: Tree | None) -> float:
            assert rows == 1
            calls.append(shape)
            repeat = calls.count(shape)
            times = {None: 8.0, Tree.chain(1): 11.0, Tree.chain(2): 13.0, Tree.chain(3): 12.5}
            return times[shape] + (1e3 if repeat < 3 or repeat % 10 == 0 else 0.0)

    monkeypatch.setattr(drafting, "StepTimer", Timer)
    target = tiny_model("llama")
    assert drafting_cost(target, tiny_head(method, target)) == expected


def test_the_prefix_is_the_time_of_layers_that_read_the_text(monkeypatch: pytest.MonkeyPatch):
    """On a CPU, tokens of steps without a draft are only put aside; here they must be read."""
    target = tiny_model("llama")
    head = tiny_head("hydra++", target)
    read: list[int] = []
    counts = head.read
    monkeypatch.setattr(head, "read", lambda context, *args: read.append(max(context.counts)) or counts(context, *args))
    timer = StepTimer(target, head)
    assert timer.read(1) > 0
    before = len(read)
    timer.read(1)
    assert read[before:] == [STEP_TOKENS]
    timer.draft(1, Tree.chain(1))
    assert read[before:] == [STEP_TOKENS] * 2, "nothing was left to read"
