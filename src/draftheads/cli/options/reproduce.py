"""Options of ``draftheads reproduce``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from draftheads.cli.options.bench import QualityOptions
from draftheads.settings import LoadSettings
from draftheads.utils.option_group import FROM_1, OptionGroup


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(OptionGroup):
    """For tables that train heads."""

    data: tuple[Path, ...] = ()
    """Chats to train on."""
    text: tuple[Path, ...] = ()
    """Plain text for a first stage."""
    max_tokens: Annotated[int | None, FROM_1] = None
    """Tokens of text, the same for all heads."""
    epochs: Annotated[int | None, FROM_1] = None
    """Passes over the text, in place of each head's own."""
    train: tuple[str, ...] = ()
    """Further settings of training for all heads. NAME=VALUE, such as batch_tokens=4096."""


@dataclass(frozen=True)
class ReproduceOptions:
    """Rebuild a table or figure of a paper for a model and its heads, beside the published numbers.

    Without a table, all of them are listed with what they need. An interrupted run continues with the same command.
    """

    BASIC: ClassVar = ("model", "heads", "quick", "data", "max_tokens", "limit", "out", "precision")

    table: tyro.conf.Positional[str | None] = None
    """The table: a name, or your own file (.toml)."""
    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads in place of the table's."""
    quick: bool = False
    """A short run. One question of each category, short answers, at most three values of each setting, and training on
    3,000 tokens of the model's own answers if there is no --data."""
    prompts: str | None = None
    """Questions in place of our own, as for `bench`. The papers use MT-Bench and Spec-Bench."""
    category: tuple[str, ...] = ()
    """Only questions of these categories. Names are those of the file, such as writing and roleplay of MT-Bench."""
    limit: int | None = None
    """Use only the first LIMIT questions of each category."""
    draft_model: str | None = None
    """A smaller model, for tables that compare one."""
    out: Path | None = None
    """Folder for trained heads, table.md and table.json. Default: the name of the table."""
    budget: tyro.conf.OmitArgPrefixes[BudgetOptions] = field(default_factory=BudgetOptions)
    quality: tyro.conf.OmitArgPrefixes[QualityOptions] = field(default_factory=QualityOptions)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
