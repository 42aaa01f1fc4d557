"""Options of ``draftheads bench``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import tyro

from draftheads.bench.settings import BenchSettings
from draftheads.settings import LoadSettings


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and drafters without a head, on the same prompts with trees of the same size.

    Each head drafts on the tree of that size with the most tokens per step, found on built-in prompts. An interrupted
    comparison continues with the same command.
    """

    BASIC: ClassVar = ("heads", "prompts", "limit", "out", "json", "num_nodes", "max_new_tokens", "precision")

    model: tyro.conf.Positional[str] = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: names, folders or Hugging Face ids. prompt-lookup and lookahead need no training. Default: these two
    and all installed heads of the model."""
    draft_model: str | None = None
    """Also compare a smaller model that drafts. With the same tokenizer, on growing trees: a folder or a Hugging Face
    id."""
    corpus: Path | None = None
    """Also compare each head with copies, without and with this corpus. Texts or earlier answers: a .txt or .jsonl
    file, or a folder of such files."""
    prompts: Path | None = None
    """A JSONL file of prompts, in place of six built-in ones. "prompt", "messages" or "turns" in each line."""
    limit: int | None = None
    """Use only the first LIMIT prompts."""
    out: Path | None = None
    """Write bench.json, bench.md and bench.html here. The numbers, the table, and a page with plots."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
    fresh: bool = False
    """Ignore what an earlier comparison saved. Needed after a change of the code: the saved tokens per step
     are found again by model, drafter, settings, machine and versions only."""
