"""Ablation studies of the papers: variants of a head, trained with the same settings on the same text.

A study is a list of variants, each a few options of :class:`TrainOptions` beside those that all share. Every variant
has a folder of its own and goes on where it was stopped; those that are complete are not trained again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.run import Reporter, train

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """Variants by name, the one that others are compared with first."""

    source: str
    variants: Mapping[str, Changes]


def _switch(name: str, value: str) -> Changes:
    return {"method": "amphista", "head_options": (f"{name}={value}",)}


_TEACHER = {"loss": "teacher"}
STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "amphista": Study(
            "Amphista, tables 4 and 5, and A.2.3: what each part is worth",
            {
                "medusa": {"method": "medusa"},
                "hydra++": {"method": "hydra++"},
                "amphista without auto-embedding": _switch("num_auto_embedding_blocks", "0"),
                "amphista without positions": _switch("head_positions", "false"),
                "amphista without staged adaptation": _switch("num_adaptation_layers", "0"),
                "amphista with one adaptation layer": _switch("num_adaptation_layers", "1"),
                "amphista without sampled token": _switch("sampled_token", "false"),
                "amphista": {"method": "amphista"},
                "amphista-α": _switch("num_auto_embedding_blocks", "2"),
            },
        ),
        "hydra": Study(
            "Hydra, appendix A and section 3.1: what each step towards Hydra++ is worth",
            {
                "hydra": {"method": "hydra", "num_layers": 1, "loss": "hard"},
                "hydra, noise": {"method": "hydra", "num_layers": 1, "loss": "hard", "noise_alpha": 75.0},
                "hydra, teacher": {"method": "hydra", "num_layers": 1, **_TEACHER},
                "hydra, teacher and noise": {"method": "hydra", "num_layers": 1, **_TEACHER, "noise_alpha": 75.0},
                "hydra, teacher, 4 layers": {"method": "hydra", "num_layers": 4, **_TEACHER},
                "PrefixMLP, teacher": {"method": "hydra++", "num_layers": 1, **_TEACHER},
                "hydra++ (PrefixMLP, teacher, 4 layers)": {"method": "hydra++", "num_layers": 4, **_TEACHER},
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


def variants_of(chosen: Study, options: TrainOptions) -> dict[str, TrainOptions]:
    """The options of each run: those given, but for what makes the variant; hidden states are shared."""
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
    chosen: Study, options: TrainOptions, reporter: Reporter, *, count_parameters: Callable[[TrainOptions], int]
) -> list[Finding] | None:
    """Trains all variants, one after the other; None in every process but the first."""
    reports: dict[str, tuple[TrainOptions, Report]] = {}
    for number, (name, own) in enumerate(variants_of(chosen, options).items(), 1):
        reporter.stage(f"variant {number} of {len(chosen.variants)}: {name}")
        report = train(own, reporter)
        if report is not None:
            reports[name] = (own, report)
    if not reports:
        return None
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
    shared = {key: value for key, value in asdict(options).items() if key not in ("recipe", "resume")}
    return {"source": chosen.source, "options": shared, "findings": [asdict(finding) for finding in findings]}
