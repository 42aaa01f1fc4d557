"""``draftheads ablate``: trains the variants of a paper's ablation study and compares them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftheads.checkpoint import read_head
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.cli.train import expanded as with_recipe
from draftheads.errors import InvalidSettings
from draftheads.files import write_atomic
from draftheads.provenance import provenance
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.studies import STUDIES, Finding, markdown, record, run_study, set_by, study, variants_of

RECORD, TABLE = "ablation.json", "ablation.md"


@dataclass(frozen=True)
class AblateOptions:
    """Train the variants of a paper's ablation study with the same settings, and compare them on text kept apart.

    amphista: its parts one by one, beside Medusa and Hydra++ (Amphista, table 5). hydra: the steps from Hydra to
    Hydra++ (Hydra, appendix A). Each variant is trained into a folder of its own below --out, and can be compared by
    `draftheads bench`, too. Stopped or killed and started again, it goes on where it was.
    """

    study: tyro.conf.Positional[Literal["amphista", "hydra"]]
    """Whose variants."""
    training: tyro.conf.OmitArgPrefixes[TrainOptions]


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with a recipe's before them; of an option that comes twice the last one counts.

    What the variants of a study set is no part of the recipe here; of the method, nothing but a place is left.

    >>> expanded(["hydra", "--epochs", "1"])
    ['--method', 'hydra', 'hydra', '--epochs', '1']

    Raises:
        InvalidSettings: a method was given, or there is no such recipe.
    """
    if any(argument == "--method" or argument.startswith("--method=") for argument in arguments):
        raise InvalidSettings("--method: the variants of a study have methods of their own: leave it out")
    pairs = zip(["", *arguments], arguments, strict=False)  # a recipe may have a study's name
    chosen = next((argument for before, argument in pairs if argument in STUDIES and before != "--recipe"), None)
    return ["--method", "hydra", *with_recipe(arguments, without=set_by(STUDIES[chosen]) if chosen else frozenset())]


def run(options: AblateOptions) -> None:
    """Trains what is not trained yet, prints a table, and leaves it in the folder."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    chosen, training = study(options.study), options.training
    variants = variants_of(chosen, training)  # what cannot be is said before hours of work
    with ProgressDisplay(console) as display:
        findings = run_study(chosen, training, display, count_parameters=lambda own: read_head(own.out).num_parameters)
    if findings is None:
        return
    _show(console, findings, training.tree_nodes)
    console.print(f"tokens per step expected on text kept apart; {chosen.source}")
    found = {**record(chosen, training, findings), "provenance": provenance()}
    write_atomic(training.out / RECORD, json.dumps(found, indent=1, default=str).encode())
    write_atomic(training.out / TABLE, markdown(findings, training.tree_nodes).encode())
    console.print(f"wrote {training.out / TABLE}", soft_wrap=True)
    for variant in variants.values():
        write_pages(console, variant.out, "training")


def _show(console: Console, findings: Sequence[Finding], num_nodes: int) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("variant", overflow="fold")
    for heading in ("parameters", "chain", f"tree of {num_nodes}", "× first", "top-1 of heads"):
        table.add_column(heading, justify="right")
    for finding in findings:
        table.add_row(
            finding.variant,
            f"{finding.num_parameters / 1e6:.1f} M",
            f"{finding.tokens_per_step_chain:.3f}",
            f"{finding.tokens_per_step_tree:.3f}",
            f"{finding.over_first:.3f}",
            " ".join(f"{100 * share:.0f}" for share in finding.top1),
        )
    console.print(table)
