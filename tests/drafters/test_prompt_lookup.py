"""Prompt lookup copies what followed the text's last tokens, and changes no text."""

import pytest
import torch

from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.drafters.text_index import TextIndex
from draftheads.speculation.draft import Context
from draftheads.speculation.shapes import ROOT_ONLY


def copy_of(text: list[int], max_ngram: int) -> list[int]:
    """Five tokens, if there is a match, from an index that is made anew."""
    index = TextIndex(max_ngram=max_ngram)
    index.read(text)
    return index.copy(5)[0]


@pytest.mark.parametrize(("seed", "max_ngram"), [(0, 1), (1, 3), (2, 5)])
def test_prompt_lookup_copies_what_followed_the_last_time(seed: int, max_ngram: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, 4, (2, 60), generator=chance)
    lookup = PromptLookup(num_tokens=5, max_ngram=max_ngram).start()
    read = 0
    while read < 50:
        count = 1 + int(torch.randint(0, 4, (1,), generator=chance))
        part = texts[:, read : read + count]
        context = Context(torch.zeros(2, count, 1), part, torch.full((2,), count), texts[:, read + count])
        read += count
        draft = lookup.propose(context, ROOT_ONLY)
        copies = [copy_of(texts[row, : read + 1].tolist(), max_ngram) for row in range(2)]
        for row, copied in enumerate(copies):
            assert draft.token_ids[row, 0] == texts[row, read]
            assert draft.token_ids[row, 1 : 1 + len(copied)].tolist() == copied
        assert draft.num_nodes == 1 + max(map(len, copies))
