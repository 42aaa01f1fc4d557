"""Options that only some architectures have."""

import json
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from draftheads.errors import InvalidSettings
from draftheads.heads import head_classes
from draftheads.heads.base import HeadConfig
from draftheads.heads.layers import Block
from draftheads.utils.strict_json import in_words, matches


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
    """
    config_class, _ = head_classes(method)
    hints = typing.get_type_hints(config_class)
    common = {field.name for field in fields(HeadConfig)} | {"embedding_scale"}
    known = {field.name: hints[field.name] for field in fields(config_class) if field.name not in common}
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if name not in known:
            others = f"choose among {', '.join(sorted(known))}" if known else "it has no further options"
            raise InvalidSettings(f"--head-options {option}: {method} has no option {name!r}; {others}")
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
