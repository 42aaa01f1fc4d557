"""The command line: finds the verb, lets tyro read its options, calls it, and says in one line what is wrong."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from draftheads.errors import CacheWarning, ChatTemplateWarning, DraftHeadsError


class Verb(NamedTuple):
    """Where a command lives. Its module has ``run`` and is imported only when it is asked for."""

    module: str
    options: str  # the options' dataclass
    summary: str


VERBS = {
    "ablate": Verb("draftheads.cli.ablate", "AblateOptions", "train the variants of an ablation study, and compare"),
    "bench": Verb("draftheads.cli.bench", "BenchOptions", "compare draft heads, and what drafts without one"),
    "demo": Verb("draftheads.cli.demo", "DemoOptions", "answer prompts with and without draft heads, and compare"),
    "distill": Verb("draftheads.cli.distill", "DistillOptions", "let a model answer prompts, as data to train on"),
    "generate": Verb("draftheads.cli.generate", "GenerateOptions", "answer prompts"),
    "info": Verb("draftheads.cli.info", "InfoOptions", "describe a head, list the bundled ones, or draw a tree"),
    "merge": Verb("draftheads.cli.merge", "MergeOptions", "make one model of a model and its tuned adapter"),
    "report": Verb(
        "draftheads.cli.report", "ReportOptions", "make the page of a training run, search or comparison once more"
    ),
    "show-batch": Verb("draftheads.cli.show_batch", "ShowBatchOptions", "show what is learned of a training batch"),
    "train": Verb("draftheads.cli.train", "TrainOptions", "train draft heads for a model"),
    "tune": Verb("draftheads.cli.tune", "TuneOptions", "find the trees that make a head fast on this machine"),
    "train-joint": Verb("draftheads.cli.train_joint", "JointOptions", "tune a model and its draft heads together"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit code."""
    try:
        with warnings.catch_warnings():  # puts back what is set here
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code = _command(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # a reader that has gone shows here at the latest
    except DraftHeadsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `draftheads … | head` is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains on its way out
        return 0
    return code


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Our own as one clear line, without the line of code that Python adds; others as ever."""
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
    verb = VERBS.get(arguments[0])
    if verb is None:
        print(f"draftheads: no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    _run(arguments[0], verb, arguments[1:])
    return 0


def _run(name: str, verb: Verb, arguments: Sequence[str]) -> None:
    import tyro  # noqa: PLC0415 - the list of commands must not wait for it

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells what it lacks wherever it is only imported
    module: Any = importlib.import_module(verb.module)
    expanded = getattr(module, "expanded", list)  # a verb's own, where an argument stands for several
    options = tyro.cli(getattr(module, verb.options), args=expanded(arguments), prog=f"draftheads {name}")
    module.run(options)


def _usage() -> str:
    lines = [f"  {name:<12} {verb.summary}" for name, verb in VERBS.items()]
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
