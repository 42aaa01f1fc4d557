"""Options of ``draftheads completion``."""

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands and options in your shell.

    bash: draftheads completion bash > ~/.local/share/bash-completion/completions/draftheads
    zsh: draftheads completion zsh > _draftheads, in a folder of $fpath
    fish: draftheads completion fish > ~/.config/fish/completions/draftheads.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Your shell."""
