"""The command line: finds the command, reads its options with tyro, runs it, and prints an error in one line."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from draftheads.errors import CacheWarning, ChatTemplateWarning, DraftHeadsError


class Command(NamedTuple):
    """A command. Its module has a function ``run`` and is imported only if the command is called."""

    module: str
    options: str  # the options' dataclass
    summary: str


COMMANDS = {
    "bench": Command("draftheads.cli.bench", "BenchOptions", "compare draft heads, and drafters without a head"),
    "demo": Command("draftheads.cli.demo", "DemoOptions", "answer prompts with and without draft heads, and compare"),
    "distill": Command("draftheads.cli.distill", "DistillOptions", "let a model answer prompts, to get training data"),
    "generate": Command("draftheads.cli.generate", "GenerateOptions", "answer prompts"),
    "info": Command("draftheads.cli.info", "InfoOptions", "describe a head, list the bundled ones, or draw a tree"),
    "merge": Command("draftheads.cli.merge", "MergeOptions", "merge a model and its tuned adapter into one model"),
    "report": Command(
        "draftheads.cli.report", "ReportOptions", "write the pages of a train, tune or bench folder again"
    ),
    "show-batch": Command("draftheads.cli.show_batch", "ShowBatchOptions", "show which tokens of a batch are learned"),
    "train": Command("draftheads.cli.train", "TrainOptions", "train draft heads for a model"),
    "tune": Command("draftheads.cli.tune", "TuneOptions", "measure a head's acceptance profile on your prompts"),
    "train-joint": Command("draftheads.cli.train_joint", "JointOptions", "tune a model and its draft heads together"),
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
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"draftheads: no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    _run(arguments[0], command, arguments[1:])
    return 0


def _run(name: str, command: Command, arguments: Sequence[str]) -> None:
    import tyro  # noqa: PLC0415 - slow to import; the list of commands does not need it

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs missing libraries on import
    module: Any = importlib.import_module(command.module)
    # some commands have defaults that depend on other options, such as --recipe
    default = {"default": module.defaults(arguments)} if hasattr(module, "defaults") else {}
    options = tyro.cli(getattr(module, command.options), args=arguments, prog=f"draftheads {name}", **default)
    module.run(options)


def _usage() -> str:
    lines = [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
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
