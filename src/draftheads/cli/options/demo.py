"""Options of ``draftheads demo``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import tyro

from draftheads.settings import LoadSettings


@dataclass(frozen=True)
class DemoOptions:
    """Answer prompts in several ways: transformers, our plain decoding, and draft heads; compare speed and text."""

    BASIC: ClassVar = ("model", "heads", "prompts", "limit", "max_new_tokens", "seconds", "precision", "json")

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ("hydra", "medusa")
    """Draft heads, the best one first. Names, folders or Hugging Face ids."""
    prompts: Path | None = None
    """A JSONL file of prompts, in place of six built-in ones. "prompt", "messages" or "turns" in each line."""
    limit: int | None = None
    """Use only the first LIMIT prompts."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    seconds: float = 100.0
    """Time for all answers together. On a slow machine, answers get shorter (at least 32 tokens), then fewer. inf: no
    limit."""
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
    copy: bool = True
    """Also draft copies from the text so far. That is what followed an earlier occurrence of its last tokens."""
    transformers: bool = True
    """Measure transformers' own generate, too."""
    stream: bool = True
    """Show one answer as it is decoded."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
