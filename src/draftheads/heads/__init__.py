"""Draft heads, an architecture with its variants per file. ``HEADS`` is the only list of them.

A head from another package joins the list in one of two ways. The program calls :func:`register`. Or the package has
an entry point in the group ``draftheads.heads``: a function without arguments that calls :func:`register`. Entry points
are loaded when a method is not in the list, or when all methods are listed.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, get_type_hints

from draftheads.errors import InvalidSettings, UnknownMethod, close_name
from draftheads.utils.strict_json import in_words, matches

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead, HeadConfig

# a method's file in this folder and the start of its two classes' names, until they are imported: then the classes
HEADS: "dict[str, str | tuple[type[HeadConfig], type[DraftHead]]]" = {
    "amphista": "amphista.Amphista",
    "dflash": "dflash.DFlash",
    "dflash2": "dflash2.DFlash2",
    "dspark": "dspark.DSpark",
    "eagle": "eagle.Eagle",
    "eagle3": "eagle3.Eagle3",
    "hydra": "hydra.Hydra",
    "hydra++": "hydra.HydraPlusPlus",
    "markov-medusa": "markov_medusa.MarkovMedusa",
    "medusa": "medusa.Medusa",
    "mlp-speculator": "mlp_speculator.MlpSpeculator",
    "mtp": "mtp.Mtp",
    "p-eagle": "p_eagle.PEagle",
    "small-llama": "small_llama.SmallLlama",
}
ENTRY_POINTS = "draftheads.heads"


def register(config_class: "type[HeadConfig]", head_class: "type[DraftHead]") -> None:
    """Adds an architecture, so that ``train``, ``load``, ``bench`` and ``info`` accept its method.

    To register the same classes again does nothing.

    Args:
        config_class: a frozen dataclass with the class variable ``method``, the architecture's name.
        head_class: its module, which is built by ``head_class(config)``.

    Raises:
        InvalidSettings: a class is of the wrong kind, the name is missing, or another architecture has it.
    """
    from draftheads.heads.base import DraftHead, HeadConfig  # noqa: PLC0415 - slow to import

    for given, base in ((config_class, HeadConfig), (head_class, DraftHead)):
        if not (isinstance(given, type) and issubclass(given, base)):
            raise InvalidSettings(f"{given!r} cannot be registered; it must be a subclass of {base.__name__}")
    method = getattr(config_class, "method", None)
    if not isinstance(method, str) or not method:
        raise InvalidSettings(f"{config_class.__name__}.method is {method!r}; it must be the architecture's name")
    HEADS.setdefault(method, (config_class, head_class))
    if (known := head_classes(method)) != (config_class, head_class):
        raise InvalidSettings(f"the method {method!r} is taken by {known[1]}; choose another name")


def head_methods() -> list[str]:
    """The names of all architectures, sorted; those of other packages included."""
    _load_entry_points()
    return sorted(HEADS)


def head_classes(method: str) -> "tuple[type[HeadConfig], type[DraftHead]]":
    """The configuration and module of a method.

    Raises:
        UnknownMethod: no architecture has that name.
    """
    check_method(method)
    classes = HEADS[method]
    if isinstance(classes, str):
        file, name = classes.split(".")
        module: Any = import_module(f"draftheads.heads.{file}")
        classes = HEADS[method] = getattr(module, f"{name}Config"), getattr(module, f"{name}Head")
    return classes


def check_method(method: str) -> None:
    """Is there an architecture of that name? Does not import it.

    Raises:
        UnknownMethod: no.
    """
    if method not in HEADS:
        _load_entry_points()
    if method not in HEADS:
        close = close_name(method, HEADS)
        hint = f" (did you mean {close}?)" if close else ""
        raise UnknownMethod(f"unknown method {method!r}{hint}; choose one of {', '.join(sorted(HEADS))}")


@cache
def _load_entry_points() -> None:
    """Lets other packages register their heads. A package that fails costs a warning, not the command."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()()
        except Exception as error:  # noqa: BLE001 - code of another package
            warnings.warn(f"the heads of {point.value} cannot be used: {error}", RuntimeWarning, stacklevel=2)


def parse_head_options(method: str, options: Sequence[str]) -> dict[str, Any]:
    """Options that only this method has, from texts NAME=VALUE with JSON values.

    >>> parse_head_options("amphista", ["num_adaptation_layers=1", "sampled_token=false"])
    {'num_adaptation_layers': 1, 'sampled_token': False}
    """
    from draftheads.heads.base import HeadConfig  # noqa: PLC0415 - slow to import

    config_class, _ = head_classes(method)
    hints = get_type_hints(config_class)
    common = {field.name for field in fields(HeadConfig)} - {"lm_head_rank"} | {"embedding_scale"}
    known = {field.name: hints[field.name] for field in fields(config_class) if field.name not in common}
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if name not in known:
            others = ", ".join(sorted(known))
            raise InvalidSettings(f"--head-options {option}: {method} has no option {name!r}; choose among {others}")
        if not equals:
            raise InvalidSettings(f"--head-options {option}: it has no value; give {name}=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # a word
        if not matches(value, known[name]):
            raise InvalidSettings(f"--head-options {option}: {name} must be {in_words(known[name])}")
        values[name] = value
    return values
