"""``draftheads train``: trains, and shows the results; ``show-batch``: a batch with the learned tokens in colour."""

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.cli.config import keep_config
from draftheads.cli.show import ProgressDisplay, quiet_transformers, show_page, write_page
from draftheads.cli.train_options import ShowBatchOptions
from draftheads.data.batches import choose_texts, plan_batches
from draftheads.data.texts import EncodedChat, load_texts
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import ChatReader, read_template
from draftheads.models.model_names import TUNED_FOLDER
from draftheads.models.pretrained import load_tokenizer
from draftheads.reports.page import render
from draftheads.reports.record_pages import batch_page
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import recipe
from draftheads.train.report import BEST
from draftheads.train.run import train
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import provenance


def run(options: TrainOptions) -> None:
    """Trains, prints the results and writes the page; of several processes only the first one prints."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(f"recipe {options.recipe}: {recipe(options.recipe).description}")
        console.print(recipe_table(options))
    with ProgressDisplay(console) as display:
        report = train(options, display)
    if report is None or not processes.is_first():
        return
    write_page(console, options.out, "training", show=True)
    best = "" if report.best_step is None else f" (step {report.num_steps})"
    for out, which in {options.out: best, options.out / BEST: f" (step {report.best_step}, the best)"}.items():
        use = f"--head {out}"
        if options.joint == "full":
            use = f"--model {out / TUNED_FOLDER} --head {out / TUNED_FOLDER / HEAD_FOLDER}"
        elif report.movement is not None:
            use = f"`draftheads merge --model {options.model} --adapter {out} --out …` makes one model of it"
        if report.best_step is not None or out == options.out:
            console.print(f"saved in {out}{which}; {use}", soft_wrap=True)
    keep_config(options, options.out / "config.yaml")


def recipe_table(options: TrainOptions) -> Table:
    """All settings of the recipe with their sources, and the values that replace them."""
    assert options.recipe is not None
    chosen = recipe(options.recipe)
    table = Table("option", "value", "source")
    values = vars(options)
    for name, value in chosen.settings.items():
        now = values[name]
        table.add_row(name, str(value) if now == value else f"{now} (the recipe has {value})", chosen.sources[name])
    return table


def show_batch(options: ShowBatchOptions) -> None:
    """Prints a batch as training reads it, and writes the page if ``--html`` is given. Loads the tokenizer only."""
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
