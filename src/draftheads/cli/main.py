"""The command line: finds the command, reads its options with tyro, runs it, and prints an error in one line."""

import gc
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache, partial
from io import StringIO
from itertools import takewhile
from typing import Any, NamedTuple

from draftheads.errors import DraftHeadsError, DraftHeadsWarning, close_name


class Command(NamedTuple):
    """A command: draftheads.cli.NAME has its function ``run(options)``, which is imported only when it is called.

    The function may return the process's exit code; None is 0.

    Another package adds a command by an entry point of the group ``draftheads.commands`` that points to a Command with
    ``module``. Its name is that of the command.
    """

    summary: str
    options: str  # module in draftheads with NAMEOptions; next to it may be a function ``defaults(arguments)``
    function: str = ""  # MODULE.FUNCTION in draftheads.cli, if it is not NAME.run
    error_code: int = 1  # the exit code after an error
    continues: bool = False  # the same command continues what was interrupted
    module: str = ""  # PACKAGE.MODULE with ``run``, in another package; then ``options`` is a full path, too
    first: str = ""  # options that may come first, without their names
    config: bool = False  # --config FILE and --print-config


_OTHERS = {"audit": "./packages/audit", "reproduce": "./packages/papers"}  # commands that may not be installed
COMMANDS = {
    "bench": Command(
        "compare draft heads, and drafters without a head", "bench.settings", config=True, continues=True, first="model"
    ),
    "cache": Command("show what is in the cache, or clear it", "cli.options", "commands.cache"),
    "chat": Command("chat with a model on the terminal", "cli.options", first="model"),
    "demo": Command("answer prompts with and without draft heads, and compare", "bench.settings", "bench.demo"),
    "distill": Command("let a model answer prompts, to get training data", "distill.options", config=True),
    "doctor": Command("show what was found on this machine, with advice", "cli.doctor", first="model"),
    "export": Command("write a head in the layout of other engines", "cli.options", "commands.export", first="head"),
    "generate": Command("answer prompts", "cli.options"),
    "import": Command("read a head of another project", "cli.options", "commands.import_"),
    "info": Command("describe a head, or list those for a model or all installed ones", "cli.info", first="head"),
    "merge": Command("merge a model and its adapter into one model", "train.options", "commands.merge"),
    "serve": Command(
        "serve a model to many users, with OpenAI's HTTP interface",
        "serve.options",
        "commands.serve",
        config=True,
        first="model",
    ),
    "show-batch": Command("show which tokens of a batch are learned", "cli.train_options", "train.show_batch"),
    "train": Command("train draft heads for a model, or together with it", "cli.train_options", config=True),
    "tune": Command(
        "measure a head's acceptance profile on your prompts",
        "search.settings",
        "bench.tune",
        continues=True,
        first="model head",
    ),
}


@cache
def all_commands() -> dict[str, Command]:
    """Those of other packages, too; reading them takes longer than a start. None replaces one of draftheads."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import

    others = {point.name: point.load() for point in entry_points(group="draftheads.commands")}
    return dict(sorted({**others, **COMMANDS}.items()))


def commands_for(name: str) -> dict[str, Command]:
    """Where a command of that name would be: only an unknown one is searched for in other packages."""
    return COMMANDS if name in COMMANDS else all_commands()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():  # restores what is set here
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code = _command(given)
        sys.stdout.flush()  # raises BrokenPipeError if the reader has gone
    except DraftHeadsError as error:
        print(f"error: {error}", file=sys.stderr)
        return commands_for(given[0])[given[0]].error_code
    except KeyboardInterrupt:
        command = commands_for(given[0]).get(given[0]) if given else None
        hint = ": the same command continues" if command is not None and command.continues else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # not an error: `draftheads … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would print an error at exit
        return 0
    return code


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Prints our own warnings as one line, without the line of code that Python adds; others as usual."""
    if issubclass(category, DraftHeadsWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        others(message, category, *where)


def _show_notes() -> None:
    """Prints our own log lines on standard error, each once: what takes seconds without an output."""
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(shown)
        shown.add(record.getMessage())
        return len(shown) > count

    handler = logging.StreamHandler()
    handler.addFilter(is_new)
    logger = logging.getLogger("draftheads")
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [handler]


def _command(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        shown = _usage()
    elif name == "--version":
        from importlib.metadata import version  # noqa: PLC0415 - only this option needs it

        shown = version("draftheads")
    elif name == "--tyro-print-completion":
        shown = _completion(arguments)
    elif name in (commands := commands_for(name)):
        return _run(name, arguments[1:])
    else:
        close = close_name(name, commands)
        hint = f"; did you mean {close}?" if close else ""
        if name in _OTHERS:
            hint = f": it is in a package of its own, pip install {_OTHERS[name]} (in a checkout of draftheads)"
        print(f"draftheads: no command {name!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    print(shown)
    return 0


def _completion(arguments: Sequence[str]) -> str:
    """Tyro's script for a shell. Its descriptions get one line each: a shell takes further ones for completions."""
    import tyro  # noqa: PLC0415 - slow to import

    kinds: dict[str, Callable[..., Any]] = {name: options_of(name)[0] for name in all_commands()}
    with redirect_stdout(StringIO()) as made, suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(kinds, prog="draftheads", args=arguments)
    return re.sub(
        "^COMPLETION_SPEC = .*$", lambda line: line[0].replace(r"\n", " "), made.getvalue(), flags=re.MULTILINE
    )


def _run(name: str, arguments: Sequence[str]) -> int:
    command, given = commands_for(name)[name], list(takewhile(lambda word: word != "--", arguments))
    if {"-h", "--help"}.intersection(given):
        from draftheads.cli.help import print_help  # noqa: PLC0415

        print_help(name, command, *options_of(name, arguments))
        return 0
    options = read_options(name, arguments)
    from draftheads.cli.config import as_yaml, check_names, flat  # noqa: PLC0415

    if command.config and "--print-config" in given:
        print(as_yaml(options), end="")
        return 0
    if name != "info":  # which loads nothing: a head may be of any model
        check_names(flat(options))
    _show_notes()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs missing libraries on import
    module, _, function = (command.function or f"{command.module or name}.run").rpartition(".")
    return getattr(import_quickly(module), function)(options) or 0


def read_options(name: str, arguments: Sequence[str]) -> Any:
    """The options of a command in these words. SystemExit: they are not valid."""
    import tyro  # noqa: PLC0415 - slow to import

    command = commands_for(name)[name]
    from draftheads.cli.config import in_order, with_config  # noqa: PLC0415 - slow to import

    kind = options_of(name)[0]
    words = in_order(kind, arguments, command.first.split())
    if command.config:
        words = with_config(kind, words)
    kind, default = options_of(name, words)
    changed = {} if default is None else {"default": default}
    marks = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
    return tyro.cli(kind, args=words, prog=f"draftheads {name}", config=marks, compact_help=True, **changed)


def import_quickly(name: str) -> Any:
    """A command's module by name or path; its imports make 600,000 objects that stay: searching for garbage is slow."""
    from rich.console import Console  # noqa: PLC0415

    gc.disable()
    try:
        with Console(stderr=True, quiet=not sys.stderr.isatty()).status("starting"):
            return importlib.import_module(name if "." in name else f"draftheads.cli.{name.replace('-', '_')}")
    finally:
        gc.freeze()
        gc.enable()


def options_of(name: str, arguments: Sequence[str] = ()) -> tuple[type, Any]:
    """The class of a command's options, and an instance with their defaults, where these depend on other options."""
    command = commands_for(name)[name]
    module: Any = importlib.import_module(command.options if command.module else f"draftheads.{command.options}")
    kind = getattr(module, f"{name.title().replace('-', '')}Options")
    return kind, module.defaults(arguments) if hasattr(kind, "of") else None


def _usage() -> str:
    lines = "\n".join(f"  {name:<12} {command.summary}" for name, command in all_commands().items())
    return (
        "usage: draftheads COMMAND [options]\n\n"
        "Draft heads: a language model answers faster, with exactly the same text.\n\n"
        f"{lines}\n\ndraftheads COMMAND --help explains a command's options."
    )
