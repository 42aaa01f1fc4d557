"""Options of ``draftheads show-batch``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from draftheads.errors import InvalidSettings
from draftheads.train.options import ChatOptions, RunOptions, ScheduleOptions


@dataclass(frozen=True, kw_only=True)
class ShowBatchOptions:
    """Show a batch of `draftheads train` with the learned tokens in colour, to check the chat template."""

    BASIC: ClassVar = ("data", "model", "chat_template", "index", "max_texts", "html", "plain_text")

    data: tuple[Path, ...]
    """Chat files (.jsonl, .jsonl.gz). One {"messages": [...]} a line."""
    model: str = RunOptions.model
    """The model: a name, a folder or a Hugging Face id. Its tokenizer and chat template are used."""
    chat_template: str | None = RunOptions.chat_template
    """Chat template in place of the tokenizer's own. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    index: int = 0
    """Which batch. A training run with the same settings takes batch 0 in its first step."""
    max_texts: int = 3
    """Number of texts of the batch to show; 0 for all."""
    html: Path | None = None
    """Write the same as a page of HTML into this file."""
    plain_text: bool = False
    """Mark learned tokens with brackets. The default where the terminal has no colours."""
    batch_tokens: int = ScheduleOptions.batch_tokens
    """Tokens in a batch, padding included."""
    max_length: int = ChatOptions.max_length
    """Cut texts after this number of tokens."""
    max_tokens: int | None = ChatOptions.max_tokens
    """Stop reading data after this number of tokens."""
    epochs: int = ScheduleOptions.epochs
    """Passes over the training text."""
    held_out: float = ChatOptions.held_out
    """Share of held-out texts."""
    seed: int = ScheduleOptions.seed
    """Seed of the batches and their order."""

    def __post_init__(self) -> None:
        for name, least in (("batch_tokens", 1), ("max_length", 1), ("epochs", 1), ("index", 0), ("max_texts", 0)):
            if getattr(self, name) < least:
                raise InvalidSettings(f"--{name.replace('_', '-')} is {getattr(self, name)}: must be at least {least}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidSettings(f"--max-tokens is {self.max_tokens}: must be at least 1")
        if not 0 <= self.held_out < 1:
            raise InvalidSettings(f"--held-out is {self.held_out}: must be at least 0 and below 1")
