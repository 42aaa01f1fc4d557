"""Which texts are held out, and how the others form batches."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftheads.data.batches import collate, padded_length, plan_batches, split_held_out
from draftheads.data.features import Document, FeatureStore
from draftheads.data.texts import EncodedChat


def test_skipping_prompts_keeps_answers_and_the_position_before_them(texts: list[EncodedChat], store: FeatureStore):
    whole = collate(list(store), skip_prompts=False)
    short = collate(list(store), skip_prompts=True)
    for row, text in enumerate(texts):
        first = text.loss_mask.index(True) - 1
        length = len(text.token_ids)
        for name in ("hidden", "token_ids", "loss_mask"):
            expected = getattr(whole, name)[row, first:length]
            assert torch.equal(getattr(short, name)[row, : length - first], expected)
        assert not short.loss_mask[row, length - first :].any()
    assert torch.equal(short.lengths, whole.lengths)  # which scale the noise of whole texts


@pytest.mark.parametrize(("lengths", "padded"), [((3, 31), 32), ((32,), 32), ((1, 33, 5), 40), ((500, 9), 512)])
def test_texts_are_padded_to_the_rounded_length_of_the_longest(lengths: tuple[int, ...], padded: int):
    texts = [Document(torch.ones(n, 4), torch.ones(n, dtype=torch.long), torch.ones(n) > 0) for n in lengths]
    batch = collate(texts, skip_prompts=False)
    assert batch.hidden.shape == (len(lengths), padded, 4)
    assert batch.token_ids.shape == batch.loss_mask.shape == (len(lengths), padded)
    for row, length in enumerate(lengths):
        for part in (batch.hidden, batch.token_ids, batch.loss_mask):
            assert part[row, :length].all()
            assert not part[row, length:].any()
    assert batch.lengths.tolist() == list(lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 5))
def test_a_plan_has_every_document_once_an_epoch(lengths: list[int], size: int, seed: int):
    documents = list(range(0, len(lengths), 2))
    plan = plan_batches(documents, lengths, max_tokens=size, num_epochs=2, seed=seed)
    again = plan_batches(documents, lengths, max_tokens=size, num_epochs=2, seed=seed)
    assert plan == again
    widest = [padded_length(max(lengths[i] for i in batch)) for batch in plan]  # as collate pads them
    assert all(len(batch) == 1 or len(batch) * width <= size for batch, width in zip(plan, widest, strict=True))
    flat = [i for batch in plan for i in batch]
    assert sorted(flat[: len(documents)]) == sorted(flat[len(documents) :]) == documents


def test_epochs_and_seeds_differ():
    lengths = [5] * 50
    plan = plan_batches(range(50), lengths, max_tokens=10, num_epochs=2, seed=0)
    assert {tuple(batch) for batch in plan[:25]} != {tuple(batch) for batch in plan[25:]}
    assert plan != plan_batches(range(50), lengths, max_tokens=10, num_epochs=2, seed=1)


def texts_of(numbers: Sequence[int], *, answers: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Texts of a prompt of two tokens and an answer of one, with their loss masks."""
    ids = [torch.tensor([number // 50, number % 50, answer]) for number in numbers for answer in range(answers)]
    return ids, [torch.tensor([False, False, True])] * len(ids)


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_that_share_of_the_texts_is_held_out(fraction: float):
    training, held_out = split_held_out(*texts_of(range(2500)), fraction=fraction, seed=3)
    assert sorted(training + held_out) == list(range(2500))
    assert training == sorted(training)
    assert abs(len(held_out) - 2500 * fraction) < 4 * (2500 * fraction * (1 - fraction)) ** 0.5


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 1), (1 - 1e-9, 4)])
def test_both_sides_have_a_text(fraction: float, number: int):
    training, held_out = split_held_out(*texts_of(range(5)), fraction=fraction, seed=3)
    assert (len(training), len(held_out)) == (5 - number, number)
    assert split_held_out(*texts_of(range(1)), fraction=fraction, seed=3) == ([], [0])


def test_another_seed_holds_out_others():
    found = {tuple(split_held_out(*texts_of(range(400)), fraction=0.1, seed=n)[1]) for n in range(20)}
    assert len(found) == 20
    often = torch.bincount(torch.tensor([index for texts in found for index in texts]), minlength=400)
    assert often.max() <= 9, "2 are expected, and no text is held out by all seeds"


@pytest.mark.parametrize("number", [100, 400, 1999])
def test_a_part_of_the_texts_is_split_like_all_of_them(number: int):
    def held_out(numbers: Sequence[int]) -> list[int]:
        return [numbers[i] for i in split_held_out(*texts_of(numbers), fraction=0.05, seed=1)[1]]

    of_all = held_out(list(reversed(range(2000))))
    of_some = held_out(list(range(number)))
    assert len(of_some) > 0
    assert of_some == [n for n in of_all if n < number], "the same texts, in the same order"


def test_answers_to_one_prompt_are_on_one_side():
    token_ids, loss_masks = texts_of(range(50), answers=4)
    training, held_out = split_held_out(token_ids, loss_masks, fraction=0.2, seed=0)
    assert len(training) > 100
    assert len(held_out) > 20
    assert {i // 4 for i in held_out}.isdisjoint(i // 4 for i in training)


def test_answers_without_a_prompt_are_on_both_sides():
    token_ids, _ = texts_of(range(400))
    with_prompt, without = torch.tensor([False, False, True]), torch.tensor([True, True, True])
    loss_masks = [with_prompt, without] * 200
    for seed in range(5):
        _, held_out = split_held_out(token_ids, loss_masks, fraction=0.1, seed=seed)
        assert 5 < sum(index % 2 for index in held_out) < 35
