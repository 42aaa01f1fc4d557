"""The settings of a measurement of tokens per step, and the options of ``draftheads tune``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.settings import FROM_1, LoadSettings, OptionGroup, at_least


@dataclass(frozen=True)
class ReplaySettings(OptionGroup):
    """Which answers are recorded, and which trees are measured on them."""

    num_prompts: Annotated[int, at_least(2)] = 64
    """Prompts that the model answers."""
    max_new_tokens: Annotated[int, at_least(2)] = 128
    """Tokens of each answer."""
    temperature: float = 0.0
    """Temperature of the answers. Above 0 the model's probabilities of draft tokens count, not only its choice."""
    max_nodes: Annotated[int, at_least(2)] = 64
    """Nodes of the largest tree, root included."""
    top_k: Annotated[int, FROM_1] = 10
    """Draft tokens of each head, the best ones, for trees."""
    beam: Annotated[int, FROM_1] = 6
    """In growing trees: nodes of a depth that get children. For heads that read the draft tokens above them."""


@dataclass(frozen=True)
class TuneOptions:
    """Measure how many tokens per step a head gains on your prompts and at your temperature.

    Optional: every head already has such a profile. Writes acceptance.json, which is used when the head is loaded, and
    tune.html, which shows it. An interrupted run continues with the same command. --measure checks the
    predicted speeds; `draftheads bench MODEL --heads HEAD --prompts FILE` compares heads on other prompts.
    """

    model: str
    """The model: a name, a folder or a Hugging Face id."""
    head: str
    """Its draft head: a name, a folder or a Hugging Face id."""
    out: Path | None = None
    """Folder to write to. Default: the head's own folder; for an installed or downloaded head, the user's cache."""
    prompts: Path | None = None
    """A file or folder of prompts like those that you will use. Default: 64 built-in ones."""
    features: Path | None = None
    """Hidden states that `train --features` stored, in place of prompts. The model's layers are not loaded, and nothing
    is timed. Texts are those that the head's training held out."""
    num_prompts: Annotated[int, at_least(2)] = ReplaySettings.num_prompts
    """Prompts that the model answers."""
    temperature: float = ReplaySettings.temperature
    """Temperature of the answers. Above 0 the model's probabilities of draft tokens count, not only its choice."""
    measure: tuple[int, ...] | None = None
    """Also time static trees of 2 to 64 nodes with so many prompts at a time. Without a number: 1. The fastest is
    written to static-N.json, which --tree takes. A model of 135 million parameters takes minutes on two cores."""
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)

    def __post_init__(self) -> None:
        _ = self.settings  # raises what is impossible
        require_at_least(1, measure=min(self.measure or (1,)))
        if self.features is not None and (self.prompts or self.measure is not None):
            other = "--prompts" if self.prompts else "--measure"
            raise InvalidSettings(f"--features is for stored texts, of which nothing is timed: leave {other} out")

    @property
    def settings(self) -> ReplaySettings:
        """The settings of the measurement."""
        return ReplaySettings(num_prompts=self.num_prompts, temperature=self.temperature)
