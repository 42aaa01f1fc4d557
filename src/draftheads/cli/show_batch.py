"""``draftheads show-batch``: prints a batch as training reads it, with the learned tokens in colour.

Loads the model's tokenizer only.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch
from rich.console import Console
from rich.text import Text

from draftheads.cli.show import quiet_transformers, simple_table
from draftheads.cli.train_options import ShowBatchOptions
from draftheads.data.batches import choose_texts, plan_batches
from draftheads.data.texts import load_texts
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import ChatReader, read_template
from draftheads.models.pretrained import load_tokenizer
from draftheads.reports.batch_page import KINDS, PlannedBatch, Span, batch_page, spans
from draftheads.reports.page import render
from draftheads.train.options import TrainOptions
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import provenance

_STYLES = {  # by Span.is_learned, Span.is_special
    (False, False): "dim",
    (False, True): "bold magenta",
    (True, False): "black on green",
    (True, True): "bold bright_white on green",
}


def run(options: ShowBatchOptions) -> None:
    """Prints the batch, and writes the page if ``--html`` is given."""
    quiet_transformers()
    model = load_tokenizer(options.model, chat_template=read_template(options.chat_template))
    batch = planned_batch(model, options)
    console = Console(highlight=False)
    has_colours = console.color_system is not None and not console.no_color

    def marked(pieces: Sequence[Span]) -> Text:
        return coloured(pieces) if has_colours else Text(bracketed(pieces))

    for i in batch.text_indices:
        console.print(Text(batch.title(i), style="bold"))
        # without colours, a line of the text stays one line of output, however long
        console.print(marked(spans(model.tokenizer, batch.texts[i])), end="\n\n", soft_wrap=not has_colours)
    console.print(Text("  ").join(marked([kind]) for kind in KINDS), end="\n\n")
    console.print(simple_table(batch.columns, batch.rows()))
    if options.html is not None:
        page = batch_page(batch, model.tokenizer, settings=vars(options), provenance=provenance())
        write_atomic(options.html, render(page).encode())
        console.print(Text(f"wrote {options.html}"), soft_wrap=True)


def planned_batch(model: ChatReader, options: ShowBatchOptions) -> PlannedBatch:
    """The batch that a training run with these settings takes from the data."""
    left_out: dict[str, list[str]] = {}
    texts = load_texts(model, options.data, max_length=options.max_length, max_tokens=None, left_out=left_out)
    loss_masks = [torch.tensor(text.loss_mask) for text in texts]
    token_ids = [torch.tensor(text.token_ids) for text in texts]
    training, held_out = choose_texts(token_ids, loss_masks, held_out=options.held_out, seed=options.seed)
    batches = plan_batches(
        training,
        [len(text.token_ids) for text in texts],
        max_tokens=options.batch_tokens,
        num_epochs=TrainOptions.epochs,
        seed=options.seed,
    )
    if options.index >= len(batches):
        raise InvalidSettings(f"--index is {options.index}: the run's batches are 0 to {len(batches) - 1}")
    return PlannedBatch(
        index=options.index,
        texts=texts,
        batches=batches,
        num_left_out=sum(map(len, left_out.values())),
        num_too_short=len(texts) - len(training) - len(held_out),
        num_held_out=len(held_out),
        max_length=options.max_length,
    )


def coloured(pieces: Sequence[Span]) -> Text:
    """The pieces side by side, each in the style of its kind."""
    return Text.assemble(*((piece.visible, _STYLES[piece.is_learned, piece.is_special]) for piece in pieces))


def bracketed(pieces: Sequence[Span]) -> str:
    """The pieces without styles: learned tokens are in brackets, and special ones in others."""
    words = ""
    for is_learned, together in groupby(pieces, attrgetter("is_learned")):
        text = "".join(f"‹{piece.visible}›" if piece.is_special else piece.visible for piece in together)
        words += f"⟦{text}⟧" if is_learned else text
    return words
