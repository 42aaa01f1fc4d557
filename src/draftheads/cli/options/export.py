"""Options of ``draftheads export``."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ExportOptions:
    """Write a head in the layout that another engine reads, in bf16, and print the engine's command.

    Engines take the embedding from the model, and the lm_head where the head shares it.
    """

    head: tyro.conf.Positional[str]
    """A head. A name, a folder or a Hugging Face id."""
    out: Path
    """Folder to make."""
    to: str | None = None
    """The layout, by default that of the head's own project. For eagle3 heads eagle3 (vLLM, SGLang, llama.cpp,
    OpenVINO) or speculators; for eagle heads eagle (vLLM), or eagle-sglang, which those with a bias of fc get; for
    medusa heads medusa, vllm-medusa (up to 0.32) or hydra; for Hydra's hydra; for MLP speculators mlp-speculator
    (IBM's) or arctic; for small-llama heads small-llama, an ordinary Llama."""
    with_embedding: bool = False
    """Write the model's embedding into eagle3 and eagle heads. vllm-project/speculators trains them further from it."""
    model: str = "smollm2-135m"
    """The model of the head. A name, a folder or a Hugging Face id."""
