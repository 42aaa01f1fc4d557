"""``draftheads train-joint``: tunes a model and its heads together and shows how it goes."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.cli.train import accuracy_table, recipe_table, speed_line
from draftheads.cli.train import expanded as expanded_for_heads
from draftheads.train import processes
from draftheads.train.joint import train_jointly
from draftheads.train.joint_options import JointOptions
from draftheads.train.movement import Movement


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with those of ``--recipe`` before them."""
    return expanded_for_heads(arguments, tunes_model=True)


def run(options: JointOptions) -> None:
    """Trains, then prints what the heads can do and how far the model moved."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(recipe_table(options, tunes_model=True))
    with ProgressDisplay(console) as display:
        report = train_jointly(options, display)
    if report is None:  # of several processes the first one tells
        return
    heads = report.heads
    console.print(accuracy_table(heads))
    console.print(
        f"expected tokens per step on text kept apart: chain {heads.tokens_per_step_chain:.2f}, "
        f"tree of {len(heads.tree) + 1} nodes {heads.tokens_per_step_tree:.2f}"
    )
    console.print(movement_table(report.movement))
    console.print(speed_line(heads))
    merge = f"draftheads merge --model {options.model} --adapter {options.out} --out …"
    console.print(f"saved in {options.out}; `{merge}` makes one model of it", soft_wrap=True)
    if processes.is_first():
        write_pages(console, options.out, "training")


def movement_table(movement: Movement) -> Table:
    """How far the tuned model is from the original."""
    table = Table(
        "", "original", "tuned", title=f"how far the model moved, on {movement.num_tokens:,} tokens kept apart"
    )
    table.add_row("perplexity", f"{movement.original_perplexity:.3f}", f"{movement.tuned_perplexity:.3f}")
    table.add_row("KL(original || tuned) per token", "", f"{movement.kl:.4f}")
    table.add_row("same greedy token", "", f"{movement.agreement:.1%}")
    return table
