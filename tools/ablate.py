"""Ablation studies of the papers: trains variants of a head with the same settings on the same text, and compares them.

``python tools/ablate.py STUDY --out FOLDER --data chats.jsonl …`` with options of ``draftheads train``. The studies:

* ``amphista``: the parts of Amphista one by one, beside Medusa and Hydra++ (Amphista, tables 4 and 5, and A.2.3)
* ``hydra``: the steps from Hydra to Hydra++ (Hydra, appendix A and section 3.1)

Each variant has its own folder below --out, which `draftheads bench` can compare, too. The same command resumes a study
that was stopped; complete variants are not trained again. ablation.json and ablation.md have the results.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftheads.checkpoints.checkpoint import read_head
from draftheads.cli.options.train import defaults
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.errors import DraftHeadsError, InvalidSettings
from draftheads.train import processes
from draftheads.train.options import RunOptions, TrainOptions
from draftheads.train.report import Report
from draftheads.train.run import train
from draftheads.utils.files import write_atomic
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import provenance

RECORD, TABLE = "ablation.json", "ablation.md"
Changes = Mapping[str, Any]  # settings of a variant


def _amphista(*head_options: str) -> Changes:
    return {"method": "amphista", "num_layers": 1, "head_options": head_options}


def _hydra(method: str, num_layers: int, loss: str, noise_alpha: float = 0.0) -> Changes:
    return {"method": method, "num_layers": num_layers, "loss": loss, "noise_alpha": noise_alpha}


# variants by name; the others are compared with the first one
STUDIES: Mapping[str, Mapping[str, Changes]] = MappingProxyType(
    {
        "amphista": {
            "medusa": {"method": "medusa", "num_layers": 1},
            "hydra++": {"method": "hydra++", "num_layers": 4},
            # only the auto-embedding block reads the positions
            "amphista without auto-embedding": _amphista("num_auto_embedding_blocks=0", "head_positions=false"),
            "amphista without positions": _amphista("head_positions=false"),
            "amphista without staged adaptation": _amphista("num_adaptation_layers=0"),
            "amphista with one adaptation layer": _amphista("num_adaptation_layers=1"),
            "amphista without sampled token": _amphista("sampled_token=false"),
            "amphista": _amphista(),
            "amphista-α": _amphista("num_auto_embedding_blocks=2"),
        },
        "hydra": {
            "hydra": _hydra("hydra", 1, "hard"),
            "hydra, noise": _hydra("hydra", 1, "hard", 75.0),
            "hydra, teacher": _hydra("hydra", 1, "teacher"),
            "hydra, teacher and noise": _hydra("hydra", 1, "teacher", 75.0),
            "hydra, teacher, 4 layers": _hydra("hydra", 4, "teacher"),
            "PrefixMLP, teacher": _hydra("hydra++", 1, "teacher"),
            "hydra++ (PrefixMLP, teacher, 4 layers)": _hydra("hydra++", 4, "teacher"),
        },
    }
)


@dataclass(frozen=True)
class Finding:
    """The result of a variant."""

    variant: str
    num_parameters: int
    tokens_per_step_chain: float  # expected on held-out text
    tokens_per_step_tree: float  # the same, with the best tree of --tree-nodes nodes
    over_first: float  # the latter, divided by the first variant's
    top1: list[float]  # per head
    training_seconds: float


def set_by(study: str) -> frozenset[str]:
    """Names of the settings that the variants of a study set."""
    return frozenset(name for changes in STUDIES[study].values() for name in changes)


def plain_settings(study: str) -> dict[str, Any]:
    """The usual values of the settings that the variants of a study set."""
    first = next(iter(STUDIES[study].values()))
    settings = TrainOptions.of(out=tyro.MISSING, method=first["method"]).flat()
    return {name: settings[name] for name in sorted(set_by(study))}


def study_defaults(study: str, arguments: Sequence[str]) -> RunOptions:
    """Default values of the shared options: a recipe's, without the settings that the variants set."""
    return defaults(arguments).changed(**plain_settings(study))


def variants_of(study: str, options: TrainOptions) -> dict[str, TrainOptions]:
    """The options of each run: the shared ones with the variant's changes. Hidden states are shared.

    Raises:
        InvalidSettings: an option is given that the study sets, or one that does not fit a variant.
    """
    if options.heads.start_from is not None:
        raise InvalidSettings(
            f"--start-from is {options.heads.start_from!r}, but all variants of a study start untrained: leave it out"
        )
    for name, usual in plain_settings(study).items():
        value = options.flat()[name]
        if value != usual:
            flag = "--" + name.replace("_", "-")
            raise InvalidSettings(f"{flag} is {value!r}, but the variants of this study set it: leave it out")
    return {
        name: options.changed(
            **changes,
            recipe=None,
            out=options.out / folder_name(name),
            features=options.hidden_states.features or options.out / "features",
            resume=True,
        )
        for name, changes in STUDIES[study].items()
    }


def folder_name(variant: str) -> str:
    """The name of a variant's folder.

    >>> folder_name("hydra++ (PrefixMLP, teacher, 4 layers)"), folder_name("amphista-α")
    ('hydra++-PrefixMLP-teacher-4-layers', 'amphista-α')
    """
    return re.sub(r"[^\w+-]+", "-", variant).strip("-")


def run_study(study: str, options: TrainOptions, progress: Progress) -> list[Finding] | None:
    """Trains all variants, one after the other; None in every process but the first."""
    reports: dict[str, tuple[TrainOptions, Report]] = {}
    variants = variants_of(study, options)
    for number, (name, own) in enumerate(variants.items(), 1):
        progress.stage(f"variant {number} of {len(variants)}: {name}")
        report = train(own, progress)
        if report is not None:
            reports[name] = (own, report)
    processes.wait()
    if not processes.is_first():
        return None
    if options.hidden_states.features is None and not options.hidden_states.keep_features:
        shutil.rmtree(options.out / "features", ignore_errors=True)
    first = next(iter(reports.values()))[1].tokens_per_step_tree
    return [
        Finding(
            variant=name,
            num_parameters=read_head(own.out).num_parameters,
            tokens_per_step_chain=report.tokens_per_step_chain,
            tokens_per_step_tree=report.tokens_per_step_tree,
            over_first=report.tokens_per_step_tree / first,
            top1=report.top1,
            training_seconds=report.training_seconds,
        )
        for name, (own, report) in reports.items()
    ]


def markdown(findings: Sequence[Finding], num_nodes: int) -> str:
    """A Markdown table of the results."""
    heads = max(len(finding.top1) for finding in findings)
    headings = ["variant", "parameters", "chain", f"tree of {num_nodes}", f"× {findings[0].variant}"]
    headings += [f"top-1 of head {i + 1}" for i in range(heads)]
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for finding in findings:
        cells = [*_cells(finding), *(f"{share:.1%}" for share in finding.top1), *[""] * (heads - len(finding.top1))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(finding: Finding) -> list[str]:
    numbers = (finding.tokens_per_step_chain, finding.tokens_per_step_tree, finding.over_first)
    return [finding.variant, f"{finding.num_parameters / 1e6:.1f} M", *(f"{number:.3f}" for number in numbers)]


def print_table(console: Console, findings: Sequence[Finding], num_nodes: int) -> None:
    """The results on a terminal."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("variant", overflow="fold")
    for heading in ("parameters", "chain", f"tree of {num_nodes}", "× first", "top-1 of heads"):
        table.add_column(heading, justify="right")
    for finding in findings:
        table.add_row(*_cells(finding), " ".join(f"{100 * share:.0f}" for share in finding.top1))
    console.print(table)
    console.print("expected tokens per step on held-out text")


def run(study: str, options: TrainOptions) -> None:
    """Trains what is not trained yet, prints a table, and writes it to the folder."""
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    variants = variants_of(study, options)  # raises before hours of work
    with ProgressDisplay(console) as display:
        findings = run_study(study, options, display)
    if findings is None:
        return
    num_nodes = options.report.tree_nodes
    print_table(console, findings, num_nodes)
    shared = {name: value for name, value in options.flat().items() if name not in ("method", "recipe", "resume")}
    record = {"study": study, "options": shared, "findings": [asdict(finding) for finding in findings]}
    text = json.dumps({**record, "provenance": provenance()}, indent=1, default=str)
    write_atomic(options.out / RECORD, text.encode())
    write_atomic(options.out / TABLE, markdown(findings, num_nodes).encode())
    console.print(f"wrote {options.out / TABLE}", soft_wrap=True)
    for variant in variants.values():
        write_pages(console, variant.out, "training")


def main(arguments: Sequence[str]) -> int:
    """Returns the process's exit code."""
    study, *others = arguments or ["--help"]
    if study in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
        return 0
    if study not in STUDIES:
        sys.stderr.write(f"no study {study!r}; choose among {', '.join(STUDIES)}\n")
        return 2
    try:
        given = study_defaults(study, others)
        options = tyro.cli(TrainOptions, args=others, default=given, prog=f"tools/ablate.py {study}")
        run(study, options)
    except DraftHeadsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
