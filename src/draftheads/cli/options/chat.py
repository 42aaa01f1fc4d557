"""Options of ``draftheads chat``."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro

from draftheads.cli.options.generate import DraftOptions
from draftheads.errors import InvalidSettings
from draftheads.settings import Effort, LoadSettings, SamplingOptions, SamplingSettings


@dataclass(frozen=True)
class ChatOptions:
    """Chat with a model on the terminal."""

    BASIC: ClassVar = ("model", "head", "system", "max_new_tokens", "temperature", "seed", "precision")

    model: Annotated[str, tyro.conf.Positional] = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    head: str | None = None
    """The draft head: a name, a folder or a Hugging Face id. `draftheads info` lists the installed ones. prompt-lookup
    copies from the text so far; lookahead refines draft tokens of the model itself. Plain decoding when left out."""
    system: str | None = None
    """System prompt: what the model is told before the conversation."""
    reasoning_effort: Effort | None = None
    """How much the model thinks before it answers, as far as its chat template knows it. none: not at all."""
    settings: tyro.conf.OmitArgPrefixes[SamplingOptions] = field(
        default_factory=lambda: SamplingOptions(max_new_tokens=512)
    )
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = field(default_factory=DraftOptions)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
    plain_text: bool = False
    """Do not colour draft tokens."""

    def __post_init__(self) -> None:
        if self.settings.logprobs is not None:
            raise InvalidSettings(f"--logprobs {self.settings.logprobs}: a chat shows none; use `draftheads generate`")
        _ = SamplingSettings(**vars(self.settings))  # raises what is impossible
