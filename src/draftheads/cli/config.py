"""Options that were given: from YAML (``--config FILE``), as YAML (``--print-config``), and checked early.

Names in YAML are those of the options in Python, without groups: ``learning_rate: 0.001``. A flag goes before the file.
Wrong names and missing files are refused before anything slow is imported: torch takes seconds, weights take longer.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from draftheads.checkpoints.registry import check_head
from draftheads.cli.help import MODELS, options_of
from draftheads.errors import DataError, no_such
from draftheads.models.chat_template import read_template
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.models.model_names import check_model
from draftheads.utils.files import user_path, write_atomic
from draftheads.utils.provenance import as_json_values

# options by their names, which mean the same in every command
_HEADS = ("head", "heads", "start_from")
_INPUTS = ("prompts", "data", "text", "documents", "json_schema", "costs", "corpus")


def flat(options: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, of groups, too."""
    for name, value in vars(options).items():
        yield from flat(value) if is_dataclass(value) else [(name, value)]


def with_config(kind: type, arguments: Sequence[str]) -> list[str]:
    """The arguments without ``--config FILE`` and ``--print-config``, and in front of them those in the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--print-config", action="store_true")
    given, others = parser.parse_known_args(arguments)
    return [*(words_of(kind, given.config) if given.config else ()), *others]


def in_order(kind: type, words: Sequence[str], places: Sequence[str] = ()) -> list[str]:
    """The words with all values of an option that takes several behind its first flag, where it is given twice.

    Words that belong to no flag, wherever they are, become the options with the names in ``places``. SystemExit: one of
    these is also given by its name.
    """
    options, endless = [*options_of(kind)], len(words)
    several = {
        option.name
        for option in options
        if any(get_origin(each) is tuple for each in (option.hint, *get_args(option.hint)))  # or None
    }
    switches = {f"{no}{option.name}" for option in options if option.hint is bool for no in ("", "no_")}
    parts: list[list[str]] = [[]]  # what is before the first flag; then each flag with its values
    found: dict[str, list[str]] = {}  # flags by their names
    free: list[str] = []
    part, room = parts[0], 0 if places else endless
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not word.startswith("--"):
            (part if room else free).append(word)
            room = max(room - 1, 0)
            continue
        room = endless if name in several or not places else int(not equals and name not in {*switches, "print_config"})
        if name in several and name in found:
            part = found[name]
        else:
            parts.append(part := [flag if name in several else word])
        found[name] = part
        part += [value] if name in several and equals else []
    for name, value in zip(places, free, strict=False):
        if name in found:
            print(f"error: {name} is {value} and --{name} is given, too: give one of them", file=sys.stderr)
            raise SystemExit(2)
        parts[0].append(f"--{name}={value}")
    return [word for part in (*parts, free[len(places) :]) for word in part]


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
            raise DataError(str(no_such("option", str(name), known)), path=path)
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
    settings = as_json_values({name: value for name, value in flat(options) if name in known})
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120))


def keep_config(options: Any, path: Path) -> None:
    """Writes the options beside the results of a run."""
    write_atomic(user_path(path), as_yaml(options).encode())


def check_names(given: Iterable[tuple[str, Any]]) -> None:
    """Checks names and files among options (names and values), as far as that needs no torch and no network."""
    pairs = [(name, each) for name, value in given for each in (value if isinstance(value, tuple) else (value,))]
    for name, value in pairs:
        is_file = isinstance(value, Path) or (name == "corpus" and value is not None)
        if name in _INPUTS and is_file and not user_path(value).exists():
            raise DataError("cannot be read: there is no such file or folder", path=value)
    is_remote = dict(pairs).get("endpoint") is not None  # then no model is loaded here
    for name, value in pairs:
        if name in MODELS and value is not None and not is_remote:
            check_model(value)
        elif name == "chat_template":
            read_template(value)
    model = dict(pairs).get("model") or SMOLLM2_135M
    for name, value in [] if ("resume", True) in pairs else pairs:  # its head may be gone
        if name in _HEADS and value is not None:
            check_head(str(value), model)
