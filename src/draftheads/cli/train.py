"""``draftheads train``: trains, and shows the results."""

from rich.console import Console
from rich.table import Table

from draftheads.cli.config import keep_config
from draftheads.cli.show import ProgressDisplay, quiet_transformers, write_page
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import recipe
from draftheads.train.report import BEST
from draftheads.train.run import train


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
    write_page(console, options.out, "training", show=True)
    best = "" if report.best_step is None else f" (step {report.num_steps})"
    for out, which in {options.out: best, options.out / BEST: f" (step {report.best_step}, the best)"}.items():
        use = f"--head {out}"
        if report.movement is not None:
            use = f"`draftheads merge --model {options.model} --adapter {out} --out …` makes one model of it"
        if report.best_step is not None or out == options.out:
            console.print(f"saved in {out}{which}; {use}", soft_wrap=True)
    keep_config(options, options.out / "config.yaml")


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
