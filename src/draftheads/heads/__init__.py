"""Draft heads, one architecture per file. ``HEADS`` is the only list of them.

A head from another package joins the list in one of two ways. The program calls :func:`register`. Or the package has
an entry point in the group ``draftheads.heads``: a function without arguments that calls :func:`register`. Entry points
are loaded when a method is not in the list, or when all methods are listed.
"""

import json
import typing
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import metadata
from typing import Any

import torch

from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.heads.amphista import AmphistaConfig, AmphistaHead
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.eagle import EagleConfig, EagleHead
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.heads.hydra_plus_plus import HydraPlusPlusConfig, HydraPlusPlusHead
from draftheads.heads.layers import Block
from draftheads.heads.markov_medusa import MarkovMedusaConfig, MarkovMedusaHead
from draftheads.heads.medusa import MedusaConfig, MedusaHead
from draftheads.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from draftheads.heads.small_llama import SmallLlamaConfig, SmallLlamaHead
from draftheads.strict_json import in_words, matches

HEADS: dict[str, tuple[type[HeadConfig], type[DraftHead]]] = {
    "amphista": (AmphistaConfig, AmphistaHead),
    "eagle": (EagleConfig, EagleHead),
    "hydra": (HydraConfig, HydraHead),
    "hydra++": (HydraPlusPlusConfig, HydraPlusPlusHead),
    "markov-medusa": (MarkovMedusaConfig, MarkovMedusaHead),
    "medusa": (MedusaConfig, MedusaHead),
    "mlp-speculator": (MlpSpeculatorConfig, MlpSpeculatorHead),
    "small-llama": (SmallLlamaConfig, SmallLlamaHead),
}


ENTRY_POINTS = "draftheads.heads"


def register(config_class: type[HeadConfig], head_class: type[DraftHead]) -> None:
    """Adds an architecture, so that ``train``, ``load``, ``bench`` and ``info`` accept its method.

    To register the same classes again does nothing.

    Args:
        config_class: a frozen dataclass with the class variable ``method``, the architecture's name.
        head_class: its module, which is built by ``head_class(config)``.

    Raises:
        InvalidSettings: a class is of the wrong kind, the name is missing, or another architecture has it.
    """
    for given, base in ((config_class, HeadConfig), (head_class, DraftHead)):
        if not (isinstance(given, type) and issubclass(given, base)):
            raise InvalidSettings(f"{given!r} cannot be registered; it must be a subclass of {base.__name__}")
    method = getattr(config_class, "method", None)
    if not isinstance(method, str) or not method:
        raise InvalidSettings(f"{config_class.__name__}.method is {method!r}; it must be the architecture's name")
    if HEADS.setdefault(method, (config_class, head_class)) != (config_class, head_class):
        raise InvalidSettings(f"the method {method!r} is taken by {HEADS[method][1]}; choose another name")


def head_methods() -> list[str]:
    """The names of all architectures, sorted; those of other packages included."""
    _load_entry_points()
    return sorted(HEADS)


def head_classes(method: str) -> tuple[type[HeadConfig], type[DraftHead]]:
    """The configuration and module of a method.

    Raises:
        UnknownMethod: no architecture has that name.
    """
    if method not in HEADS:
        _load_entry_points()
    try:
        return HEADS[method]
    except KeyError:
        raise UnknownMethod(f"unknown method {method!r}; choose one of {', '.join(sorted(HEADS))}") from None


@cache
def _load_entry_points() -> None:
    """Lets other packages register their heads. A package that fails costs a warning, not the command."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()()
        except Exception as error:  # noqa: BLE001 - code of another package
            warnings.warn(f"the heads of {point.value} cannot be used: {error}", RuntimeWarning, stacklevel=2)


def has_blocks(method: str) -> bool:
    """Whether a method's heads have MLPs of :class:`Block`, whose inputs may be dropped out."""
    config_class, head_class = head_classes(method)
    with torch.device("meta"):
        head = head_class(config_class(hidden_size=2, vocab_size=2))
    return any(isinstance(module, Block) for module in head.modules())


def parse_head_options(method: str, options: Sequence[str]) -> dict[str, Any]:
    """Options that only this method has, from texts NAME=VALUE with JSON values.

    >>> parse_head_options("amphista", ["num_adaptation_layers=1", "sampled_token=false"])
    {'num_adaptation_layers': 1, 'sampled_token': False}

    Raises:
        InvalidSettings: no such option of the method, or not a value of its type.
    """
    config_class, _ = head_classes(method)
    hints = typing.get_type_hints(config_class)
    common = {field.name for field in fields(HeadConfig)} | {"embedding_scale"}
    known = {field.name: hints[field.name] for field in fields(config_class) if field.name not in common}
    found: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InvalidSettings(f"head option {option!r}: {method} has {names}; give NAME=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # a word
        if not matches(value, known[name]):
            raise InvalidSettings(f"head option {option!r}: it must be {in_words(known[name])}")
        found[name] = value
    return found
