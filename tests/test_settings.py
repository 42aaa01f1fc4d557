"""Sampling settings: what is valid, what is converted, and errors that name the setting and its value."""

import math
import pickle
import re
from dataclasses import fields, make_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch

import draftheads
from draftheads.bench.settings import BenchSettings
from draftheads.distill.options import DistillOptions
from draftheads.errors import InvalidSettings
from draftheads.search.settings import ReplaySettings
from draftheads.serve.options import ServeOptions
from draftheads.settings import Grammar, OptionGroup, SamplingSettings
from draftheads.train.options import TrainOptions

NAN, INFINITY = math.nan, math.inf
BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, -1, "3", 3.5, 3.0, True, None, np.float32(3), np.int64(0), [3], NAN),
    "temperature": (-0.1, NAN, INFINITY, "0.7", None, True, 1j, [0.7], 10**400, 1e-7),
    "top_k": (0, -3, 2.5, "2", True, NAN),
    "top_p": (0.0, -0.5, 1.01, NAN, "0.9", None, False),
    "repetition_penalty": (0.0, -1.0, NAN, INFINITY, "1.1", True),
    "min_p": (-0.1, 1.01, NAN, "0.1", None, True),
    "frequency_penalty": (-2.1, 2.1, NAN, INFINITY, "1", None, False),
    "presence_penalty": (-2.1, 2.1, NAN, INFINITY, "1", None, False),
    "min_new_tokens": (-1, 2.5, "3", True),
    "include_stop_str_in_output": ("yes", None, 2),
    "skip_special_tokens": ("no", None, 2),
    "seed": (2**64, -2, -(2**63), 1e23, 10**23, 1.5, "7", True),  # PyTorch's generators take no such
    "stop": ("", ("",), ("a", ""), [3], 3, b"x", ["a", None], {"a": 1}, True),
    "stop_token_ids": (7, ["a"], "7", [2.5], [True], (-1,), {7: 1}, [[7]]),
    "ignore_eos": ("no", "yes", None, 2, [], NAN, np.ones(2)),
    "logprobs": (-1, 21, 2.5, "2", True, NAN),
    "acceptance": ("greedy", "", None, 3, ["exact"]),
    "typical_epsilon": (0.0, -0.1, 1.1, NAN, "0.09", None),
    "typical_delta": (0.0, -0.1, NAN, "0.3", True),
    "grammar": ("{}", 7, True, [("type", "object")]),
    "logit_bias": (
        *(7, "7", [7], {"7": 1.0}, {7: "1"}, {7: 100.5}, {7: NAN}),
        *({-1: 1.0}, {True: 1.0}, {2.5: 1.0}, [(7, 1, 2)]),
    ),
}
WORDS = {
    "max_new_tokens": "an integer of at least 1",
    "temperature": "0 (greedy) or a number of at least 1e-06",
    "top_p": "a number above 0 and at most 1",
    "min_p": "a number from 0 to 1",
    "frequency_penalty": "a number from -2 to 2",
    "stop": "a string or a list of strings, none of them empty",
    "stop_token_ids": "a list of token ids, such as [7]",
    "ignore_eos": "True or False",
    "logprobs": "an integer from 0 to 20, or None for no log-probabilities",
    "grammar": "a Grammar, a dictionary with a JSON schema, or None",
    "logit_bias": "token ids with numbers from -100 to 100, such as {7: -100}",
    "acceptance": "'exact' or 'rejection' or 'block' or 'typical'",
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_a_bad_value_is_named_with_what_is_expected(name: str, value: Any):
    shown = repr(value) if len(repr(value)) < 30 else ""
    words = f"{name} is {shown}; it must be {WORDS.get(name, '')}" if shown else f"{name} is "
    with pytest.raises(InvalidSettings) as caught:
        SamplingSettings(**{name: value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


def test_every_setting_is_read_and_has_bad_values():
    """One that nothing reads would be accepted and have no effect: a filter is an entry of ``FILTERS``, too."""
    folder = Path(draftheads.__file__).parent
    rooms = "".join(
        path.read_text(encoding="utf-8") for room in ("decode", "speculation") for path in (folder / room).glob("*.py")
    )
    names = {field.name for field in fields(SamplingSettings)}
    assert names == BAD_VALUES.keys()
    assert not [name for name in names if not re.search(rf'(settings|\bs)\.{name}\b|Filter\("{name}"', rooms)]


def test_a_long_value_is_shortened():
    with pytest.raises(InvalidSettings, match=r"^stop is \[3, 3, 3, 3, 3, 3, \.\.\.\]; it must be a string"):
        SamplingSettings(stop=[3] * 10_000)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings, match=r"^top_p is tensor.*; it must be a number"):
        SamplingSettings(top_p=torch.ones(9, 9))  # type: ignore[arg-type]


EDGES: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (1,),
    "temperature": (0.0, 1e-6),
    "top_k": (1,),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.1,),
    "frequency_penalty": (-2.0,),
    "presence_penalty": (2.0,),
    "min_new_tokens": (256,),
    "typical_epsilon": (1.0,),
    "typical_delta": (1e-9,),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 20),
    "logit_bias": (((0, -100.0), (7, 100.0)),),
}


OF_REQUESTS = {"ReplaySettings.temperature"}  # settings of requests check them


@pytest.mark.parametrize("group", [BenchSettings, DistillOptions, ReplaySettings, ServeOptions, TrainOptions])
def test_every_number_among_options_has_a_range(group: Any):
    kinds = {int, float, int | None, float | None}
    numbers = [field for field in fields(group) if kinds & {field.type, *get_args(field.type)}]
    for field in numbers:
        if get_origin(field.type) is tuple or f"{group.__name__}.{field.name}" in OF_REQUESTS:
            continue
        for value in (-1, NAN, True, "1"):
            alone = make_dataclass("Alone", [(field.name, field.type, value)], bases=(OptionGroup,), frozen=True)
            with pytest.raises(InvalidSettings, match=f"^--{field.name.replace('_', '-')} is {value!r}: "):
                alone()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", {"a"}, ("a",)),
        ("stop", None, ()),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("stop_token_ids", [7, np.int32(8)], (7, 8)),
        ("stop_token_ids", {7}, (7,)),
        ("stop_token_ids", None, ()),
        ("max_new_tokens", np.int64(3), 3),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("seed", -1, None),
        ("logprobs", np.int8(2), 2),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", Fraction(1, 2), 0.5),
        ("ignore_eos", np.True_, True),
        ("grammar", {"type": "object"}, Grammar("json_schema", '{"type": "object"}')),
        ("logit_bias", {9: -1, np.int64(7): np.float32(0.5)}, ((7, 0.5), (9, -1.0))),
        ("logit_bias", None, ()),
        *((name, value, value) for name, values in EDGES.items() for value in values),
    ],
)
def test_what_is_converted_and_the_edges_of_what_is_allowed(name: str, given: Any, expected: Any):
    settings = SamplingSettings(**{name: given})
    found = getattr(settings, name)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(found, tuple):
        assert [type(item) in (int, str, tuple) for item in found] == [True] * len(found)
    assert settings == replace(settings) == pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own
    assert hash(settings) == hash(SamplingSettings(**{name: expected}))
