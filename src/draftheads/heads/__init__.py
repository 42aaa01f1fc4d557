"""Draft heads, one architecture a file; this table is the only place that lists them."""

import json
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.heads.amphista import AmphistaConfig, AmphistaHead
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.eagle import EagleConfig, EagleHead
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.heads.hydra_plus_plus import HydraPlusPlusConfig, HydraPlusPlusHead
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


def head_classes(method: str) -> tuple[type[HeadConfig], type[DraftHead]]:
    """The configuration and module of a method.

    Raises:
        UnknownMethod: no architecture of that name.
    """
    try:
        return HEADS[method]
    except KeyError:
        raise UnknownMethod(f"unknown method {method!r}; choose one of {', '.join(HEADS)}") from None


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
