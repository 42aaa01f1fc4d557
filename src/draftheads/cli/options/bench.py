"""Options of ``draftheads bench``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from draftheads.bench.settings import BenchSettings
from draftheads.settings import LoadSettings
from draftheads.utils.option_group import OptionGroup

MeasureName = Literal["agreement", "perplexity", "rouge", "gsm8k", "judge"]


@dataclass(frozen=True, kw_only=True)
class QualityOptions(OptionGroup):
    """Quality of the answers."""

    quality: tuple[MeasureName, ...] = ()
    """Measure quality. Of all answers."""
    judge: str | None = None
    """OpenAI-compatible endpoint that judges the answers."""
    judge_model: str | None = None
    """The model that judges there."""
    judge_prompts: Path | None = None
    """Prompts of the judge. In the form of FastChat's judge_prompts.jsonl; default: our own words."""
    api_key_env: str | None = None
    """Environment variable with the judge's key. Default: OPENAI_API_KEY if it is https://api.openai.com, else none."""
    original_model: str | None = None
    """What the model was tuned from. Perplexity is under this model; default: the model itself."""


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and drafters without a head, on the same prompts.

    Each head drafts on the tree of --num-nodes nodes with the most tokens per step, found on built-in prompts, and with
    the defaults. Options with several values measure each of them. An interrupted comparison continues with the same
    command.
    """

    BASIC: ClassVar = (
        *("heads", "prompts", "category", "limit", "quick", "out", "json", "num_nodes", "batch_sizes", "temperatures"),
        *("max_new_tokens", "quality", "precision"),
    )

    model: tyro.conf.Positional[str] = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: names, folders or Hugging Face ids. prompt-lookup and lookahead need no training. Default: these two
    and all installed heads of the model."""
    draft_model: str | None = None
    """Also compare a smaller model that drafts. With the same tokenizer, on growing trees: a folder or a Hugging Face
    id."""
    transformers: bool = False
    """Also time transformers' own generate. One prompt at a time."""
    prompts: str | None = None
    """Questions: a file, a folder or a Hugging Face dataset. Or our own: tasks (six categories, some with two turns;
    the default), demo or calibration. MT-Bench, Spec-Bench, SPEED-Bench, GSM8K, HumanEval, AlpacaEval, CNN/DM, XSUM and
    ShareGPT are known by their fields."""
    category: tuple[str, ...] = ()
    """Use only questions of these categories."""
    limit: int | None = None
    """Use only the first LIMIT questions of each category. Default: 4 of our own."""
    quick: bool = False
    """A short comparison of about five minutes. Six questions, the defaults of each head, answers of 64 tokens."""
    quality: tyro.conf.OmitArgPrefixes[QualityOptions] = field(default_factory=QualityOptions)
    out: Path | None = None
    """Folder for bench.json, bench.md, answers.jsonl and bench.html. The numbers, the tables, all answers, and a page
    with plots."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
    fresh: bool = False
    """Ignore what an earlier comparison saved. Needed after a change of the code: saved trees and answers of a stopped
    comparison are found again by model, drafter, settings, machine and versions only."""
