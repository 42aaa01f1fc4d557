"""``draftheads completion``: a script that completes all commands and their options."""

from dataclasses import MISSING, dataclass, field, make_dataclass
from operator import getitem
from typing import Annotated, Any, Literal

import tyro

from draftheads.cli.help import options_of as options_in
from draftheads.cli.main import COMMANDS, options_of


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands and options in your shell.

    bash: draftheads completion bash > ~/.local/share/bash-completion/completions/draftheads
    zsh: draftheads completion zsh > _draftheads, in a folder of $fpath
    fish: draftheads completion fish > ~/.config/fish/completions/draftheads.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Your shell."""


def run(options: CompletionOptions) -> None:
    """Prints the script."""
    kinds = {name: _on_one_line(name) for name in COMMANDS}
    tyro.extras.subcommand_cli_from_dict(kinds, prog="draftheads", args=["--tyro-print-completion", options.shell])


def _on_one_line(command: str) -> Any:
    """A command's options with one line of help each: a shell would take further lines for completions."""
    kind, defaults = options_of(command)
    fields = []
    for option in options_in(kind, defaults([]) if defaults else None):
        help_line = tyro.conf.arg(help=option.line(whole=False))
        hint = getitem(Annotated, (option.hint, help_line))
        value = MISSING if option.default is tyro.MISSING else option.default
        fields.append((option.name, hint, field(default=value, kw_only=True)))
    return make_dataclass(command.replace("-", "_"), fields)
