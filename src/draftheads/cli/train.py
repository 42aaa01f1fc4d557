"""``draftheads train``: trains, and shows the results."""

from statistics import fmean

from rich.console import Console
from rich.table import Table

from draftheads.cli.config import keep_config
from draftheads.cli.show import ProgressDisplay, quiet_transformers, write_page
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import recipe
from draftheads.train.report import Movement, Report, verdict_of
from draftheads.train.run import train
from draftheads.utils.counts import counted


def run(options: TrainOptions) -> None:
    """Trains, prints the results and writes the page; of several processes only the first one prints."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(recipe_table(options))
    with ProgressDisplay(console) as display:
        report = train(options, display)
    if report is None or not processes.is_first():
        return
    print_results(console, report)
    merge = ""
    if report.movement is not None:
        console.print(movement_table(report.movement))
        merge = f"; `draftheads merge --model {options.model} --adapter {options.out} --out …` makes one model of it"
    console.print(f"saved in {options.out}{merge}", soft_wrap=True)
    keep_config(options, options.out / "config.yaml")
    write_page(console, options.out, "training")


def movement_table(movement: Movement) -> Table:
    """How far the tuned model is from the original."""
    title = f"how far the model moved, on {counted(movement.num_tokens, 'held-out token')}"
    table = Table("", "original", "tuned", title=title)
    table.add_row("perplexity", f"{movement.original_perplexity:.3f}", f"{movement.tuned_perplexity:.3f}")
    table.add_row("KL(original || tuned) per token", "", f"{movement.kl:.4f}")
    table.add_row("same greedy token", "", f"{movement.agreement:.1%}")
    return table


def print_results(console: Console, report: Report) -> None:
    """Loss, accuracy and expected tokens per step on held-out text, speed of the training, and what to make of it."""
    title = f"{report.method} for {report.model_id}: held-out text"
    table = Table("head", "held-out loss", "top-1", "top-3", "top-10", title=title)
    rows = zip(report.losses, report.top1, report.top3, report.top10, strict=True)
    for i, (loss, *accuracies) in enumerate(rows):
        table.add_row(str(i + 1), f"{loss:.3f}", *(f"{accuracy:.1%}" for accuracy in accuracies))
    if len(report.losses) > 1:
        table.add_section()
        table.add_row("mean", f"{fmean(report.losses):.3f}", "", "", "")
    console.print(table)
    console.print(
        f"expected tokens per step on held-out text: chain {report.tokens_per_step_chain:.2f}, "
        f"tree of {counted(len(report.tree) + 1, 'node')} {report.tokens_per_step_tree:.2f}"
    )
    reading, training = report.reading_seconds, report.training_seconds
    console.print(
        f"{counted(report.num_steps, 'step')}; {report.tokens_per_second:,.0f} tokens of text per second; this run "
        f"took {reading + training:,.0f} s: {reading:,.0f} s for hidden states, {training:,.0f} s for training",
        soft_wrap=True,
    )
    for line in report.left_out:
        console.print(line, soft_wrap=True, markup=False)
    console.print(verdict_of(vars(report)), soft_wrap=True)


def recipe_table(options: TrainOptions) -> Table:
    """All settings of the recipe with their sources, and the values that replace them."""
    assert options.recipe is not None
    chosen = recipe(options.recipe)
    table = Table("option", "value", "source", title=f"recipe {options.recipe}: {chosen.description}")
    values = vars(options)
    for name, value in chosen.settings.items():
        now = values[name]
        table.add_row(name, str(value) if now == value else f"{now} (the recipe has {value})", chosen.sources[name])
    return table
