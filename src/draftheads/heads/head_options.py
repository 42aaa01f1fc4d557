"""Options that only some architectures have."""

import json
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.heads import head_classes
from draftheads.heads.base import HeadConfig
from draftheads.utils.strict_json import in_words, matches


def parse_head_options(method: str, options: Sequence[str]) -> dict[str, Any]:
    """Options that only this method has, from texts NAME=VALUE with JSON values.

    >>> parse_head_options("amphista", ["num_adaptation_layers=1", "sampled_token=false"])
    {'num_adaptation_layers': 1, 'sampled_token': False}
    """
    config_class, _ = head_classes(method)
    hints = typing.get_type_hints(config_class)
    common = {field.name for field in fields(HeadConfig)} | {"embedding_scale"}
    common.remove("lm_head_rank")
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
