"""Options of ``bench`` and ``demo``; the sentence under a field is its help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from draftheads.bench.settings import BenchSettings
from draftheads.settings import Precision


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and drafters without a head, on the same prompts.

    Each head drafts on the tree of --num-nodes nodes with the most tokens per step, found on built-in prompts, and with
    the defaults. Options with several values measure each of them. An interrupted comparison continues with the same
    command.
    """

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: names, folders or Hugging Face ids. prompt-lookup and lookahead need no training. Default: these two
    and all installed heads of the model."""
    draft_model: str | None = None
    """Also compare a smaller model that drafts. With the same tokenizer, on growing trees: a folder or a Hugging Face
    id."""
    corpus: str | None = None
    """A text file from which heads with the tree "defaults" copy, too."""
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
    quality: tuple[Literal["agreement", "perplexity"], ...] = ()
    """Measure quality. agreement with plain decoding, and perplexity under the model."""
    out: Path | None = None
    """Folder for bench.json, bench.md, answers.jsonl and bench.html. The numbers, the tables, all answers, and a page
    with plots."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    precision: Precision = "auto"
    """Number format, as for `draftheads generate`."""
    fresh: bool = False
    """Ignore what an earlier comparison saved. Needed after a change of the code: saved trees and answers of a stopped
    comparison are found again by model, drafter, settings, machine and versions only."""


@dataclass(frozen=True)
class DemoOptions:
    """Answer prompts by transformers, by our plain decoding, and with draft heads; compare speed and text.

    A short `draftheads bench` in a time box.
    """

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ("hydra", "medusa")
    """Draft heads: names, folders or Hugging Face ids."""
    prompts: Path | None = None
    """A JSONL file of at least three prompts, in place of six built-in ones. "prompt", "messages" or "turns" in each
    line."""
    limit: int | None = None
    """Use only the first LIMIT prompts."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    seconds: float = 60.0
    """Time for all answers together. On a slow machine, answers get shorter (at least 32 tokens), then fewer. inf: no
    limit."""
    precision: Precision = "auto"
    """Number format, as for `draftheads generate`."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
