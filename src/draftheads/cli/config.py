"""``--config FILE`` gives a command's options as YAML; ``--print-config`` prints them so.

Names are those of the options in Python, without groups: ``learning_rate: 0.001``. A flag goes before the file.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from draftheads.cli.early_checks import flat
from draftheads.cli.help import options_of
from draftheads.errors import DataError, close_name
from draftheads.utils.files import user_path, write_atomic


def with_config(kind: type, arguments: Sequence[str]) -> list[str]:
    """The arguments without ``--config FILE`` and ``--print-config``, and in front of them those in the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--print-config", action="store_true")
    given, others = parser.parse_known_args(arguments)
    return [*(words_of(kind, given.config) if given.config else ()), *others]


def words_of(kind: type, path: Path) -> Iterator[str]:
    """The options in a YAML file as they are given on a command line. null is an option's default.

    Raises:
        DataError: the file cannot be read, is no mapping, or names an unknown option.
    """
    try:
        settings = yaml.safe_load(user_path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"cannot be read: {' '.join(str(error).split())}", path=path) from None
    if not isinstance(settings, dict):
        raise DataError("must have lines such as learning_rate: 0.001", path=path)
    known = {option.name for option in options_of(kind)}
    for name, value in settings.items():
        if name not in known:
            close = close_name(str(name), known)
            hint = f"did you mean {close}?" if close else f"choose among {', '.join(sorted(known))}"
            raise DataError(f"no option {name}; {hint}", path=path)
        flag = str(name).replace("_", "-")
        if isinstance(value, list):
            yield from (f"--{flag}", *map(_expanded, value))
        elif isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:  # argparse takes "--out=a b" for a value
            yield from [f"--{flag}={value}"] if str(value).startswith("-") else [f"--{flag}", _expanded(value)]


def _expanded(value: Any) -> str:
    """As a shell passes it on: ``~/`` is the home folder."""
    return str(user_path(value)) if str(value).startswith("~/") else str(value)


def as_yaml(options: Any) -> str:
    """The options as ``--config`` reads them."""
    known = {option.name for option in options_of(type(options))}
    settings = {name: value for name, value in flat(options) if name in known}
    for name, value in settings.items():
        if isinstance(value, tuple):
            settings[name] = [str(each) if isinstance(each, Path) else each for each in value]
        elif isinstance(value, Path):
            settings[name] = str(value)
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120))


def keep_config(options: Any, path: Path) -> None:
    """Writes the options beside the results of a run."""
    write_atomic(user_path(path), as_yaml(options).encode())
