"""Counts of a training batch, and its page."""

from pathlib import Path

import pytest
import torch

from draftheads.data.batches import collate
from draftheads.data.features import Document
from draftheads.data.texts import EncodedChat
from draftheads.reports.page import Page, render
from draftheads.reports.record_pages import batch_page, num_read, padding_share
from html_pages import check_page
from training_world import VOCAB, chat_tokenizer

TEXTS = [
    EncodedChat((7, 8, 9), (False, True, True)),
    EncodedChat((7, 8, 9, 10, 2), (False, False, False, False, True), is_cut=True),
    EncodedChat((11, 12), (False, True)),
]


def page_of(**more: int) -> Page:
    """Of the second of two batches, with two of the three texts."""
    settings = {"model": "tiny", "data": (Path("some/chats.jsonl"),), "index": 1, "max_length": 5, **more}
    numbers = {"held-out texts": 1, "left out: no learned token": 4}
    batches = [[2], [0, 1]]
    given = {"settings": settings, "provenance": {"command": "draftheads show-batch"}}
    return batch_page(chat_tokenizer(), TEXTS, batches, numbers, **given)


def test_rows_count_the_batch_and_all_the_data():
    (table,) = page_of().tables
    assert table.columns == ("", "batch 1", "all the data")
    assert {name: values for name, *values in table.rows} == {
        "texts": ["2", "3"],
        "tokens": ["8", "10"],
        "learned tokens": ["3 (37.5%)", "4 (40.0%)"],
        "tokens per text": ["3 to 5, mean 4", "2 to 5, mean 3"],
        "texts cut off at 5 tokens": ["1", "1"],
        "padding of whole texts": ["20.0%", "16.7%"],
        "padding without prompts": ["16.7%", "12.5%"],
        "batches": ["", "2"],
        "held-out texts": ["", "1"],
        "left out: no learned token": ["", "4"],
    }


@pytest.mark.parametrize("skips", [False, True])
def test_padding_is_what_collating_adds(skips: bool):
    documents = [
        Document(torch.ones(len(text.token_ids), 1), torch.tensor(text.token_ids), torch.tensor(text.loss_mask))
        for text in TEXTS
    ]
    padded = collate(documents, skip_prompts=skips).hidden[:, :, 0]
    share = padding_share([TEXTS], num_read if skips else lambda text: len(text.token_ids))
    assert 0 < share == pytest.approx(float((padded == 0).float().mean()))


def test_the_page_shows_legend_texts_and_counts_and_folds_model_data_and_command():
    page = page_of(seed=3)
    settings = {"model": "tiny", "data": ["some/chats.jsonl"], "index": 1, "max_length": 5, "seed": 3}
    made = {"Model, data and settings": settings, "Command and machine": {"command": "draftheads show-batch"}}
    assert {title: dict(values) for title, values in page.facts} == made
    assert page.title == "Training batch 1 of some/chats.jsonl"
    assert page.verdict == "The heads learn 3 of the 8 tokens in this batch (37.5%)."
    assert page.note.startswith("As tiny reads it: 2 texts.")
    assert [title for title, _ in page.texts] == [
        "Legend",
        "text 0: 3 tokens, 2 learned",
        "text 1: 5 tokens, 1 learned, cut off at 5",
    ]
    classes = [[classes for _, classes in pieces] for _, pieces in page.texts[1:]]
    assert classes == [["", "learned", "learned"], ["", "", "", "", "learned special"]]
    assert [piece.strip() for piece, _ in page.texts[1][1]] == [VOCAB[token] for token in (7, 8, 9)]
    html = render(page)
    check_page(html)
    assert "<div>left out: no learned token</div></th><td></td><td>4</td>" in html
    assert '<span class="learned special">' in html
