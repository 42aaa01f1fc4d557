"""``draftheads train``: runs a training and shows how it goes."""

import argparse
import itertools
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.errors import ModelNotFound
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import recipe
from draftheads.train.report import Report
from draftheads.train.run import train
from draftheads.train.start import settings_of


def expanded(
    arguments: Sequence[str], *, tunes_model: bool = False, without: Collection[str] = frozenset()
) -> list[str]:
    """The arguments, and before them those that a recipe or a head to start from stands for: the last one counts.

    Args:
        arguments: of the command line.
        tunes_model: of recipes, those that tune the model along with its heads.
        without: settings of the recipe that are left out.

    Raises:
        DraftHeadsError: there is no such recipe, or no such head to start from.

    >>> expanded(["--recipe=hydra", "--epochs", "3"])[:2]
    ['--method', 'hydra']
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("recipe", "start-from", "method"):
        parser.add_argument(f"--{option}", nargs="?")
    parser.add_argument("--model", nargs="?", default=TrainOptions.model)
    given = parser.parse_known_args(arguments)[0]
    settings = dict(recipe(given.recipe, tunes_model=tunes_model).settings) if given.recipe is not None else {}
    method = given.method or settings.get("method")
    if given.start_from is not None and given.model and method:
        try:
            settings |= settings_of(given.start_from, given.model, method)
        except ModelNotFound:  # a run that goes on needs it no more
            if "--resume" not in arguments:
                raise
    # an option that takes several values must not stand last: it would take what stands behind it, too
    ordered = sorted(settings.items(), key=lambda setting: not isinstance(setting[1], tuple))
    words = itertools.chain.from_iterable(as_arguments(*setting) for setting in ordered if setting[0] not in without)
    return [*words, *arguments]


def as_arguments(name: str, value: object) -> list[str]:
    """A setting as it is given on the command line.

    >>> as_arguments("num_heads", 4), as_arguments("chain", True), as_arguments("betas", (0.9, 0.95))
    (['--num-heads', '4'], ['--chain'], ['--betas', '0.9', '0.95'])
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]


def run(options: TrainOptions) -> None:
    """Trains, then prints a table of what the heads can do."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(recipe_table(options))
    with ProgressDisplay(console) as display:
        report = train(options, display)
    if report is None:  # of several processes the first one tells
        return
    console.print(accuracy_table(report))
    console.print(
        f"expected tokens per step on text kept apart: chain {report.tokens_per_step_chain:.2f}, "
        f"tree of {len(report.tree) + 1} nodes {report.tokens_per_step_tree:.2f}"
    )
    console.print(speed_line(report))
    console.print(f"saved in {options.out}")
    if processes.is_first():
        write_pages(console, options.out, "training")


def speed_line(report: Report) -> str:
    """How fast the heads learned."""
    return (
        f"{report.num_steps:,} steps; {report.tokens_per_second:,.0f} tokens of text a second "
        f"in the {report.training_seconds:,.0f} s of this process"
    )


def recipe_table(options: TrainOptions, *, tunes_model: bool = False) -> Table:
    """All that the recipe sets, and what was asked for instead."""
    assert options.recipe is not None
    chosen = recipe(options.recipe, tunes_model=tunes_model)
    table = Table("option", "value", title=f"recipe {options.recipe}: {chosen.source}")
    for name, value in chosen.settings.items():
        now = getattr(options, name)
        table.add_row(name, str(value) if now == value else f"{now} (the recipe has {value})")
    return table


def accuracy_table(report: Report) -> Table:
    """Loss and accuracies, a row per head."""
    title = f"{report.method} for {report.model_id}: accuracy on text kept apart"
    table = Table("head", "loss", "top-1", "top-3", "top-10", title=title)
    rows = zip(report.losses, report.top1, report.top3, report.top10, strict=True)
    for i, (loss, *accuracies) in enumerate(rows):
        table.add_row(str(i + 1), f"{loss:.3f}", *(f"{accuracy:.1%}" for accuracy in accuracies))
    return table
