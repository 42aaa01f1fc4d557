"""``draftheads train-joint``: tunes a model and its heads together and shows the results."""

from rich.table import Table

from draftheads.cli.train import run_and_print
from draftheads.train.joint.options import JointOptions
from draftheads.train.joint.run import train_jointly
from draftheads.train.joint.tuned_model import Movement
from draftheads.utils.counts import counted


def run(options: JointOptions) -> None:
    """Trains, then prints the heads' accuracy and how far the model moved."""
    merge = f"draftheads merge --model {options.model} --adapter {options.out} --out …"
    saved = f"saved in {options.out}; `{merge}` makes one model of it"
    run_and_print(options, train_jointly, lambda report: [movement_table(report.movement), saved])


def movement_table(movement: Movement) -> Table:
    """How far the tuned model is from the original."""
    title = f"how far the model moved, on {counted(movement.num_tokens, 'held-out token')}"
    table = Table("", "original", "tuned", title=title)
    table.add_row("perplexity", f"{movement.original_perplexity:.3f}", f"{movement.tuned_perplexity:.3f}")
    table.add_row("KL(original || tuned) per token", "", f"{movement.kl:.4f}")
    table.add_row("same greedy token", "", f"{movement.agreement:.1%}")
    return table
