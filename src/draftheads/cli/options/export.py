"""Options of ``draftheads export``."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ExportOptions:
    """Write an eagle3 head in the layout that vLLM, SGLang and other engines read.

    The folder has config.json and model.safetensors, in bf16. The engine takes the embedding from the model.
    """

    head: tyro.conf.Positional[str]
    """An eagle3 head. A name, a folder or a Hugging Face id."""
    out: Path
    """Folder to make."""
    model: str = "smollm2-135m"
    """The model of the head. A name, a folder or a Hugging Face id."""
