"""Which prompts the core reads in one pass."""

from collections.abc import Sequence
from typing import Any

import pytest

from draftheads.decode.engine import Engine
from draftheads.decode.prompt_reader import PromptReader
from draftheads.models.model import TargetModel
from families import tiny_model
from scheduler_world import plain_answer, request_of

SHORT = [[3, 4, 5], [9, 8, 7, 6], [11, 5]]
LONG = [5 + n % 13 for n in range(140)]  # two blocks of the cache


def groups_of(model: TargetModel, prompts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the prompts of each reader; the answers are plain ones."""
    groups: list[list[int]] = []
    make = PromptReader.__init__

    def noted(reader: PromptReader, model: TargetModel, requests: Any, *arguments: Any) -> None:
        groups.append([len(request.prompt_ids) for request in requests])
        make(reader, model, requests, *arguments)

    engine = Engine(model)
    expected = [plain_answer(engine, prompt) for prompt in prompts]
    requests = [request_of(engine, prompt) for prompt in prompts]
    monkeypatch.setattr(PromptReader, "__init__", noted)
    list(engine.run(requests))
    assert [request.result().token_ids for request in requests] == expected
    return groups


def test_short_prompts_are_read_together_and_those_of_other_blocks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's rows are as long as its longest one, and each request reserves the blocks of its own prompt."""
    model = tiny_model("llama")
    assert groups_of(model, [SHORT[0], LONG, *SHORT[1:]], monkeypatch) == [[3, 4, 2], [140]]


def test_with_batch_invariance_each_prompt_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").sped_up(batch_invariant=True)
    assert groups_of(model, SHORT, monkeypatch) == [[3], [4], [2]]
