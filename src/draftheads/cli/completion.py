"""``draftheads completion``: a script that completes all commands, their options, and the names that they take."""

from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, dataclass, field, make_dataclass
from importlib import resources
from io import StringIO
from operator import getitem
from typing import Annotated, Any, Literal, get_args

import tyro

from draftheads.bench.settings import TreeKind
from draftheads.checkpoints.registry import zoo_heads
from draftheads.cli.help import options_of as options_in
from draftheads.cli.main import all_commands, options_of
from draftheads.heads import head_methods
from draftheads.models.chat_template import BUILT_IN
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.speculation.drafting import UNTRAINED_HEADS
from draftheads.train.recipes import RECIPES

# added to the Python code in tyro's script; it has no character that a shell would read
_NAMES = """
for name, command in COMPLETION_SPEC['subcommands'].items():
    for option in command['options']:
        if option['flags'][0] in WORDS:
            option.update(type='choice', choices=WORDS[option['flags'][0]], nargs='*')
    for place in PLACES[name]:  # offered wherever no option's value is
        words = WORDS.get('--' + place, [])
        command['options'] += [dict(flags=[word], description=place, type='flag') for word in words]
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands, options and the names of heads, methods, trees and tables in your shell.

    bash: draftheads completion bash > ~/.local/share/bash-completion/completions/draftheads
    zsh: draftheads completion zsh > _draftheads, in a folder of $fpath
    fish: draftheads completion fish > ~/.config/fish/completions/draftheads.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Your shell."""


def run(options: CompletionOptions) -> None:
    kinds = {name: _on_one_line(name) for name in all_commands()}
    with redirect_stdout(StringIO()) as made, suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(kinds, prog="draftheads", args=["--tyro-print-completion", options.shell])
    script = made.getvalue()
    places = {
        name: [option.name for option in options_in(options_of(name)[0]) if option.is_place] for name in all_commands()
    }
    line = next(line for line in script.splitlines() if line.startswith("COMPLETION_SPEC = "))
    print(script.replace(line, f"{line}\nWORDS = {_words()}\nPLACES = {places}{_NAMES}", 1), end="")


def _words() -> dict[str, list[str]]:
    """The names that are known for the value of an option."""
    heads = [*sorted({head.method for head in zoo_heads()}), *UNTRAINED_HEADS]
    tables = resources.files("draftheads").joinpath("assets", "tables").iterdir()
    return {
        "--table": sorted(table.name.removesuffix(".toml") for table in tables if table.name.endswith(".toml")),
        **dict.fromkeys(("--head", "--heads"), heads),
        "--method": head_methods(),
        "--recipe": list(RECIPES),
        "--trees": list(get_args(TreeKind)),
        "--chat-template": list(BUILT_IN),
        "--model": [SMOLLM2_135M.name],
    }


def _on_one_line(command: str) -> Any:
    """A command's options with one line of help each: a shell would take further lines for completions."""
    kind, defaults = options_of(command)
    fields = []
    for option in options_in(kind, defaults([]) if defaults else None):
        if option.is_rare:
            continue
        help_line = tyro.conf.arg(help=option.line(whole=False))
        hint = getitem(Annotated, (option.hint, help_line))
        value = MISSING if option.default is tyro.MISSING else option.default
        fields.append((option.name, hint, field(default=value, kw_only=True)))
    return make_dataclass(command.replace("-", "_"), fields)
