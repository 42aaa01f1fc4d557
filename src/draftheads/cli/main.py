"""The command line: finds the command, reads its options with tyro, runs it, and prints an error in one line."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from draftheads.errors import CacheWarning, ChatTemplateWarning, DraftHeadsError

# Each command has a module of its name with a function ``run(options)``; it is imported only if the command is called.
COMMANDS = {
    "bench": "compare draft heads, and drafters without a head",
    "demo": "answer prompts with and without draft heads, and compare",
    "distill": "let a model answer prompts, to get training data",
    "generate": "answer prompts",
    "info": "describe a head, list the bundled ones, or draw a tree",
    "merge": "merge a model and its tuned adapter into one model",
    "report": "write the pages of a train, tune or bench folder again",
    "show-batch": "show which tokens of a batch are learned",
    "train": "train draft heads for a model",
    "tune": "measure a head's acceptance profile on your prompts",
    "train-joint": "tune a model and its draft heads together",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit code."""
    try:
        with warnings.catch_warnings():  # restores what is set here
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code = _command(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # raises BrokenPipeError if the reader has gone
    except DraftHeadsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # not an error: `draftheads … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would print an error at exit
        return 0
    return code


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Prints our own warnings as one line, without the line of code that Python adds; others as usual."""
    if issubclass(category, CacheWarning | ChatTemplateWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        others(message, category, *where)


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version  # noqa: PLC0415 - only this option needs it

        print(version("draftheads"))
        return 0
    if arguments[0] not in COMMANDS:
        print(f"draftheads: no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    _run(arguments[0], arguments[1:])
    return 0


def _run(name: str, arguments: Sequence[str]) -> None:
    import tyro  # noqa: PLC0415 - slow to import; the list of commands does not need it

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs missing libraries on import
    module: Any = importlib.import_module(f"draftheads.cli.{name.replace('-', '_')}")
    # some commands have defaults that depend on other options, such as --recipe
    default = {"default": module.defaults(arguments)} if hasattr(module, "defaults") else {}
    options_class = module.run.__annotations__["options"]
    module.run(tyro.cli(options_class, args=arguments, prog=f"draftheads {name}", **default))


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: draftheads COMMAND [options]",
            "",
            "Draft heads: a language model answers faster, with exactly the same text.",
            "",
            *lines,
            "",
            "draftheads COMMAND --help explains a command's options.",
        ]
    )
