"""Counts of a training batch, and its page."""

from pathlib import Path

import pytest
import torch

from draftheads.data.batches import collate
from draftheads.data.features import Document
from draftheads.data.texts import EncodedChat
from draftheads.reports.batch_page import PlannedBatch, batch_page, num_read, padding_share
from draftheads.reports.page import Page, render
from html_pages import check_page
from training_world import VOCAB, chat_tokenizer

TEXTS = [
    EncodedChat((7, 8, 9), (False, True, True)),
    EncodedChat((7, 8, 9, 10, 2), (False, False, False, False, True), is_cut=True),
    EncodedChat((11, 12), (False, True)),
]


@pytest.fixture
def batch() -> PlannedBatch:
    """The second of two batches, with two of the three texts."""
    return PlannedBatch(
        index=1, texts=TEXTS, batches=[[2], [0, 1]], num_left_out=4, num_too_short=1, num_held_out=1, max_length=5
    )


def test_rows_count_the_batch_and_all_the_data(batch: PlannedBatch):
    assert batch.columns == ("", "batch 1", "all the data")
    assert {name: values for name, *values in batch.rows()} == {
        "texts": ["2", "3"],
        "tokens": ["8", "10"],
        "learned tokens": ["3 (37.5%)", "4 (40.0%)"],
        "tokens per text": ["3 to 5, mean 4", "2 to 5, mean 3"],
        "texts cut off at 5 tokens": ["1", "1"],
        "padding of whole texts": ["20.0%", "16.7%"],
        "padding without prompts": ["16.7%", "12.5%"],
        "batches": ["", "2"],
        "texts trained on": ["", "1"],
        "held-out texts": ["", "1"],
        "left out: no learned token": ["", "4"],
        "left out: no two learned tokens in a row": ["", "1"],
    }


@pytest.mark.parametrize("skips", [False, True])
def test_padding_is_what_collating_adds(skips: bool):
    documents = [
        Document(torch.ones(len(text.token_ids), 1), torch.tensor(text.token_ids), torch.tensor(text.loss_mask))
        for text in TEXTS
    ]
    sizes = [num_read(text) if skips else len(text.token_ids) for text in TEXTS]
    padded = collate(documents, skip_prompts=skips).hidden[:, :, 0]
    assert 0 < padding_share([sizes]) == pytest.approx(float((padded == 0).float().mean()))


def page_of(batch: PlannedBatch) -> Page:
    settings = {"model": "tiny", "data": (Path("some/chats.jsonl"),), "seed": 3}
    return batch_page(batch, chat_tokenizer(), settings=settings, provenance={"command": "draftheads show-batch"})


def test_the_page_shows_legend_texts_and_counts(batch: PlannedBatch):
    page = page_of(batch)
    assert page.title == "Training batch 1 of some/chats.jsonl"
    assert page.verdict == "The heads learn 3 of the 8 tokens in this batch (37.5%)."
    assert page.note.startswith("As tiny reads it.")
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


def test_model_data_and_command_are_folded(batch: PlannedBatch):
    facts = {title: dict(values) for title, values in page_of(batch).facts}
    assert facts == {
        "Model, data and settings": {"model": "tiny", "data": ["some/chats.jsonl"], "seed": 3},
        "Command and machine": {"command": "draftheads show-batch"},
    }
