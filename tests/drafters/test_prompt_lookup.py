"""Prompt lookup copies what followed the text's last tokens, and changes no text."""

from typing import Any

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.draft import Context
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import InvalidSettings
from draftheads.shapes import ROOT_ONLY
from families import PROMPTS, tiny_model


def naive_copy(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """What followed the latest earlier place of the longest end of the text that there is."""
    for size in range(longest, shortest - 1, -1):
        if size > len(text):
            continue
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                period = text[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("shortest", "longest"), [(1, 3), (2, 2), (1, 1), (2, 5)])
def test_prompt_lookup_copies_what_followed_the_last_time(seed: int, shortest: int, longest: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, 4, (2, 60), generator=chance)
    lookup = PromptLookup(num_tokens=5, min_ngram=shortest, max_ngram=longest).start()
    read = 0
    while read < 50:
        count = 1 + int(torch.randint(0, 4, (1,), generator=chance))
        part = texts[:, read : read + count]
        context = Context(torch.zeros(2, count, 1), part, torch.full((2,), count), texts[:, read + count])
        read += count
        draft = lookup.propose(context, ROOT_ONLY)
        for row in range(2):
            expected = naive_copy(texts[row, : read + 1].tolist(), 5, shortest, longest)
            assert draft.token_ids[row, 1 : 1 + len(expected)].tolist() == expected
            assert draft.token_ids[row, 0] == texts[row, read]
        longest_copy = max(len(naive_copy(texts[row, : read + 1].tolist(), 5, shortest, longest)) for row in range(2))
        assert draft.num_nodes == 1 + longest_copy


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gemma3_text"])
def test_prompt_lookup_changes_nothing(family: str) -> None:
    target = tiny_model(family)
    prompts = [*PROMPTS, [4, 5], [22, 3, 9, 4]]
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    expected = Engine(target).generate(prompts, **options)
    for batch_size in (1, 3):
        found = Engine(target, PromptLookup(), max_batch_size=batch_size).generate(prompts, **options)
        assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert max(result.tokens_per_step for result in found) > 1.2, "tiny models repeat themselves"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_tokens": 0}, "num_tokens is 0; it must be at least 1"),
        ({"max_ngram": 0}, "max_ngram is 0"),
        ({"min_ngram": 0}, "min_ngram is 0"),
        ({"min_ngram": 4}, "min_ngram is 4 and max_ngram 3: it must not be larger"),
    ],
)
def test_impossible_lookups(options: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        PromptLookup(**options)
