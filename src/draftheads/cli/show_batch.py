"""``draftheads show-batch``: shows a batch as training reads it, with the learned tokens in colour.

Loads the model's tokenizer only.
"""

import torch
from rich.console import Console
from rich.text import Text

from draftheads.cli.show import quiet_transformers, show_page
from draftheads.cli.train_options import ShowBatchOptions
from draftheads.data.batches import choose_texts, plan_batches
from draftheads.data.texts import EncodedChat, load_texts
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import ChatReader, read_template
from draftheads.models.pretrained import load_tokenizer
from draftheads.reports.batch_page import batch_page
from draftheads.reports.page import render
from draftheads.train.options import TrainOptions
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import provenance


def run(options: ShowBatchOptions) -> None:
    """Prints the batch, and writes the page if ``--html`` is given."""
    quiet_transformers()
    model = load_tokenizer(options.model, chat_template=read_template(options.chat_template))
    batch = planned_batch(model, options)
    page = batch_page(model.tokenizer, *batch, settings=vars(options), provenance=provenance())
    console = Console(highlight=False)
    show_page(console, page)
    if options.html is not None:
        write_atomic(options.html, render(page).encode())
        console.print(Text(f"wrote {options.html}"), soft_wrap=True)


def planned_batch(
    model: ChatReader, options: ShowBatchOptions
) -> tuple[list[EncodedChat], list[list[int]], dict[str, int]]:
    """The texts and the batches of a training run with these settings, and numbers of texts."""
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
    numbers = {
        "texts trained on": len(training),
        "held-out texts": len(held_out),
        "left out: no learned token": sum(map(len, left_out.values())),
        "left out: no two learned tokens in a row": len(texts) - len(training) - len(held_out),
    }
    return texts, batches, numbers
