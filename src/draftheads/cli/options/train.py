"""Options of ``train`` and ``train-joint``, which are in :mod:`draftheads.train`; here are their defaults."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import tyro

from draftheads.cli.early_checks import check_names
from draftheads.train.joint.options import JointOptions
from draftheads.train.options import RunOptions, TrainOptions
from draftheads.train.recipes import defaults_from


def defaults(arguments: Sequence[str], options: type[RunOptions] = TrainOptions) -> RunOptions:
    """Default values of the options, which depend on the recipe and the head to start from in these arguments.

    >>> defaults(["--recipe=hydra", "--epochs", "3"]).heads.method
    'hydra'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("recipe", "start-from", "method", "model", "head"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="?")
    for name in ("data", "text"):
        parser.add_argument(f"--{name}", nargs="*", type=Path, default=[])
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_known_args(arguments)[0]
    model = given.model or options.model
    if not {"-h", "--help", "--help-all"}.intersection(arguments):  # the options themselves import torch
        named = {**vars(given), "model": model, "data": tuple(given.data), "text": tuple(given.text)}
        check_names(named.items())
    settings = defaults_from({**vars(given), "model": model}, tunes_model=options is JointOptions)
    required = {} if options is JointOptions else {"method": tyro.MISSING}
    return options.of(**{"out": tyro.MISSING, **required, **settings})
