"""Options of ``draftheads push``."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class PushOptions:
    """Upload a head to the Hugging Face Hub, for draftheads and for generate of transformers.

    With the head go its card, its acceptance profile, and code by which transformers decodes with it.
    """

    head: tyro.conf.Positional[str]
    """The head. A name, a folder or a Hugging Face id."""
    repo: tyro.conf.Positional[str]
    """Where it goes on the Hub: owner/name. It is made if it is not there."""
    private: bool = False
    """Only you and your organisation may see it."""
    to_folder: Path | None = None
    """Write the files to this folder in place of the Hub. The folder is made."""
    model: str = "smollm2-135m"
    """The model of a head that is given by its name."""
