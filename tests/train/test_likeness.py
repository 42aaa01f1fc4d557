"""The share of held-out answers in other texts equals that of a slow count, and near-copies have a high one."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from draftheads.train.likeness import PHRASE, Text, share_in_other_texts
from draftheads.train.summary import _ALIKE


def random_texts(count: int, *, vocab: int, seed: int) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [
        (
            torch.randint(vocab, (length,), generator=generator, dtype=torch.int32),
            torch.rand(length, generator=generator) < 0.97,
        )
        for length in lengths
    ]


def runs(text: Text) -> set[tuple[int, ...]]:
    ids, mask = text[0].tolist(), text[1].tolist()
    starts = range(len(ids) - PHRASE + 1)
    return {tuple(ids[start : start + PHRASE]) for start in starts if all(mask[start : start + PHRASE])}


def slow_share(held_out: Sequence[Text], training: Sequence[Text]) -> float:
    others = set().union(*map(runs, training))
    counts = Counter(run for text in held_out for run in runs(text))
    return sum(count for run, count in counts.items() if run in others or count > 1) / counts.total()


@pytest.mark.parametrize("seed", range(5))
def test_it_is_that_of_a_slow_count(seed: int) -> None:
    held_out, training = random_texts(10, vocab=2, seed=seed), random_texts(6, vocab=2, seed=100 + seed)
    share = share_in_other_texts(held_out, training)
    assert share == pytest.approx(slow_share(held_out, training))
    assert 0.1 < share < 0.9


def test_near_copies_are_alike_and_different_texts_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.ones(100, dtype=torch.bool)
    first = torch.randint(1000, (100,), generator=generator)
    copies: list[Text] = []
    for _ in range(10):
        copy = first.clone()
        copy[::12] = torch.randint(1000, (9,), generator=generator)  # other words at the same places
        copies.append((copy, whole))
    different = [(torch.randint(1000, (100,), generator=generator), whole) for _ in range(10)]
    assert share_in_other_texts(copies[:4], copies[4:]) > _ALIKE
    assert share_in_other_texts(different[:4], different[4:]) == 0.0


def test_near_copies_among_the_held_out_texts_count_and_repetitions_in_one_text_do_not() -> None:
    text = (torch.arange(20), torch.ones(20, dtype=torch.bool))
    assert share_in_other_texts([text, text], []) == 1.0
    repeated = (torch.arange(10).repeat(3), torch.ones(30, dtype=torch.bool))
    assert share_in_other_texts([repeated], []) == 0.0


def test_prompts_do_not_count() -> None:
    prompt = torch.arange(20) < 12
    text = (torch.arange(20), ~prompt)
    other = (torch.cat([torch.arange(12), torch.arange(50, 58)]), ~prompt)
    assert share_in_other_texts([text], [other]) == 0.0


def test_short_answers_say_nothing() -> None:
    text = (torch.arange(7), torch.ones(7, dtype=torch.bool))
    assert share_in_other_texts([text, text], [text]) is None
