"""``draftheads train-joint``: tunes a model and its heads together and shows the results."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.cli.train import defaults as defaults_of
from draftheads.cli.train import print_results, recipe_table
from draftheads.train import processes
from draftheads.train.joint.options import JointOptions
from draftheads.train.joint.run import Movement, train_jointly
from draftheads.train.options import RunOptions


def defaults(arguments: Sequence[str]) -> RunOptions:
    """Default values of the options, which depend on a recipe and on a head to start from."""
    return defaults_of(arguments, JointOptions)


def run(options: JointOptions) -> None:
    """Trains, then prints the heads' accuracy and how far the model moved."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(recipe_table(options))
    with ProgressDisplay(console) as display:
        report = train_jointly(options, display)
    if report is None:  # of several processes only the first one prints
        return
    print_results(console, report)
    console.print(movement_table(report.movement))
    merge = f"draftheads merge --model {options.model} --adapter {options.out} --out …"
    console.print(f"saved in {options.out}; `{merge}` makes one model of it", soft_wrap=True)
    if processes.is_first():
        write_pages(console, options.out, "training")


def movement_table(movement: Movement) -> Table:
    """How far the tuned model is from the original."""
    title = f"how far the model moved, on {movement.num_tokens:,} held-out tokens"
    table = Table("", "original", "tuned", title=title)
    table.add_row("perplexity", f"{movement.original_perplexity:.3f}", f"{movement.tuned_perplexity:.3f}")
    table.add_row("KL(original || tuned) per token", "", f"{movement.kl:.4f}")
    table.add_row("same greedy token", "", f"{movement.agreement:.1%}")
    return table
