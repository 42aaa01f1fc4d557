"""Ablation studies of the papers: variants of a head, trained with the same settings on the same text.

A study is a list of variants, each a few options of :class:`TrainOptions` beside those that all share. Every variant
has a folder of its own and goes on where it was stopped; those that are complete are not trained again.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.progress import Progress
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.run import train

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """Variants by name, the one that others are compared with first."""

    source: str
    variants: Mapping[str, Changes]


def _amphista(*head_options: str) -> Changes:
    return {"method": "amphista", "num_layers": 1, "head_options": head_options}


def _hydra(method: str, num_layers: int, loss: str, noise_alpha: float = 0.0) -> Changes:
    return {"method": method, "num_layers": num_layers, "loss": loss, "noise_alpha": noise_alpha}


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "amphista": Study(
            "Amphista, tables 4 and 5, and A.2.3: what each part is worth",
            {
                "medusa": {"method": "medusa", "num_layers": 1},
                "hydra++": {"method": "hydra++", "num_layers": 4},
                # the positions are the block's: without it nobody reads them
                "amphista without auto-embedding": _amphista("num_auto_embedding_blocks=0", "head_positions=false"),
                "amphista without positions": _amphista("head_positions=false"),
                "amphista without staged adaptation": _amphista("num_adaptation_layers=0"),
                "amphista with one adaptation layer": _amphista("num_adaptation_layers=1"),
                "amphista without sampled token": _amphista("sampled_token=false"),
                "amphista": _amphista(),
                "amphista-α": _amphista("num_auto_embedding_blocks=2"),
            },
        ),
        "hydra": Study(
            "Hydra, appendix A and section 3.1: what each step towards Hydra++ is worth",
            {
                "hydra": _hydra("hydra", 1, "hard"),
                "hydra, noise": _hydra("hydra", 1, "hard", 75.0),
                "hydra, teacher": _hydra("hydra", 1, "teacher"),
                "hydra, teacher and noise": _hydra("hydra", 1, "teacher", 75.0),
                "hydra, teacher, 4 layers": _hydra("hydra", 4, "teacher"),
                "PrefixMLP, teacher": _hydra("hydra++", 1, "teacher"),
                "hydra++ (PrefixMLP, teacher, 4 layers)": _hydra("hydra++", 4, "teacher"),
            },
        ),
    }
)


@dataclass(frozen=True)
class Finding:
    """What came of a variant."""

    variant: str
    num_parameters: int
    tokens_per_step_chain: float  # expected on text kept apart
    tokens_per_step_tree: float  # the same, with the best tree of --tree-nodes nodes
    over_first: float  # the latter over the first variant's
    top1: list[float]  # per head
    training_seconds: float


def study(name: str) -> Study:
    """The study of that name.

    Raises:
        InvalidSettings: there is none.
    """
    if name not in STUDIES:
        raise InvalidSettings(f"no study {name!r}; choose among {', '.join(STUDIES)}")
    return STUDIES[name]


def set_by(chosen: Study) -> frozenset[str]:
    """Names of the options that its variants set."""
    return frozenset(key for changes in chosen.variants.values() for key in changes)


def variants_of(chosen: Study, options: TrainOptions) -> dict[str, TrainOptions]:
    """The options of each run: those given, but for what makes the variant; hidden states are shared.

    Raises:
        InvalidSettings: an option was given that the study sets, or one that a variant cannot do with.
    """
    if options.start_from is not None:
        raise InvalidSettings(
            f"--start-from is {options.start_from!r}, but a study's variants all start untrained: leave it out"
        )
    for field in fields(TrainOptions):
        if field.name in set_by(chosen) - {"method"} and (value := getattr(options, field.name)) != field.default:
            flag = "--" + field.name.replace("_", "-")
            raise InvalidSettings(f"{flag} is {value!r}, but the variants of this study set it: leave it out")
    return {
        name: replace(
            options,
            **changes,
            recipe=None,
            out=options.out / folder_name(name),
            features=options.features or options.out / "features",
            resume=True,
        )
        for name, changes in chosen.variants.items()
    }


def folder_name(variant: str) -> str:
    """Of a variant.

    >>> folder_name("hydra++ (PrefixMLP, teacher, 4 layers)"), folder_name("amphista-α")
    ('hydra++-PrefixMLP-teacher-4-layers', 'amphista-α')
    """
    return re.sub(r"[^\w+-]+", "-", variant).strip("-")


def run_study(
    chosen: Study, options: TrainOptions, reporter: Progress, *, count_parameters: Callable[[TrainOptions], int]
) -> list[Finding] | None:
    """Trains all variants, one after the other; None in every process but the first."""
    reports: dict[str, tuple[TrainOptions, Report]] = {}
    for number, (name, own) in enumerate(variants_of(chosen, options).items(), 1):
        reporter.stage(f"variant {number} of {len(chosen.variants)}: {name}")
        report = train(own, reporter)
        if report is not None:
            reports[name] = (own, report)
    processes.wait()
    if not processes.is_first():
        return None
    if options.features is None and not options.keep_features:
        shutil.rmtree(options.out / "features", ignore_errors=True)
    first = next(iter(reports.values()))[1].tokens_per_step_tree
    return [
        Finding(
            variant=name,
            num_parameters=count_parameters(own),
            tokens_per_step_chain=report.tokens_per_step_chain,
            tokens_per_step_tree=report.tokens_per_step_tree,
            over_first=report.tokens_per_step_tree / first,
            top1=report.top1,
            training_seconds=report.training_seconds,
        )
        for name, (own, report) in reports.items()
    ]


def markdown(findings: Sequence[Finding], num_nodes: int) -> str:
    """The table as documents hold it."""
    heads = max(len(finding.top1) for finding in findings)
    headings = ["variant", "parameters", "chain", f"tree of {num_nodes}", f"× {findings[0].variant}"]
    headings += [f"top-1 of head {i + 1}" for i in range(heads)]
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for finding in findings:
        cells = [
            finding.variant,
            f"{finding.num_parameters / 1e6:.1f} M",
            f"{finding.tokens_per_step_chain:.3f}",
            f"{finding.tokens_per_step_tree:.3f}",
            f"{finding.over_first:.3f}",
            *(f"{share:.1%}" for share in finding.top1),
            *([""] * (heads - len(finding.top1))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def record(chosen: Study, options: TrainOptions, findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it as JSON values."""
    shared = {key: value for key, value in asdict(options).items() if key not in ("method", "recipe", "resume")}
    return {"source": chosen.source, "options": shared, "findings": [asdict(finding) for finding in findings]}
