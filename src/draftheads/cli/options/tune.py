"""Options of ``draftheads tune``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import tyro

from draftheads.search.settings import ReplaySettings
from draftheads.settings import LoadSettings


@dataclass(frozen=True)
class TuneOptions:
    """Measure how many tokens per step a head gains on your prompts and at your temperature.

    Optional: every head already has such a profile. Writes acceptance.json, which is used when the head is loaded, and
    tune.html, which shows it. An interrupted run continues with the same command. To check the predicted speeds,
    run `draftheads bench MODEL --heads HEAD --prompts FILE` with other prompts.
    """

    BASIC: ClassVar = ("prompts", "out", "temperature", "num_prompts", "precision")

    model: tyro.conf.Positional[str]
    """The model: a name, a folder or a Hugging Face id."""
    head: tyro.conf.Positional[str]
    """Its draft head: a name, a folder or a Hugging Face id."""
    out: Path | None = None
    """Folder to write to. Default: the head's own folder; for an installed or downloaded head, the user's cache."""
    prompts: Path | None = None
    """A JSONL file of prompts like those that you will use. Default: 64 built-in ones."""
    settings: tyro.conf.OmitArgPrefixes[ReplaySettings] = field(default_factory=ReplaySettings)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
