"""Options: which values are refused, and how they are grouped and named."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.train.options import TrainOptions
from training_world import train_options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"tree_nodes": 0}, "--tree-nodes is 0"),
        ({"num_heads": 1_000_000}, "--num-heads is 1000000: must lie in 1 … 64"),
        ({"num_layers": 65}, "--num-layers is 65: must lie in 1 … 64"),
        ({"lm_head_rank": 0}, "--lm-head-rank is 0: must be at least 1"),
        ({"batch_tokens": 10**9}, "--batch-tokens is 1000000000: must lie in 1 … 1048576"),
        ({"max_length": 10**9}, "--max-length is 1000000000: must lie in 1 … 1048576"),
        ({"epochs": 10**6}, "--epochs is 1000000: must lie in 1 … 10000"),
        ({"accumulate": 10**6}, "accumulate is 1000000: must lie in 1 … 10000"),
        ({"tree_nodes": 10**6}, "--tree-nodes is 1000000: must lie in 1 … 1024"),
        ({"held_out": 1.0}, "--held-out is 1.0"),
        ({"warmup": -0.1}, "warmup is -0.1"),
        ({"warmup": 1.5}, "warmup is 1.5: give a part of the steps, at least 0 and below 1, or a whole number of st"),
        ({"warmup": float("inf")}, "warmup is inf"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"depth_decay": -1.0}, "--depth-decay is -1.0"),
        ({"draft_vocab_size": -1}, "--draft-vocab-size is -1"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"loss": "soft"}, "--loss is 'soft'"),
        ({"seed": -1}, "--seed is -1: must be at least 0 and below"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"seed": 10**23}, "--seed is 1000"),
        ({"seed": 1e23}, r"--seed is 1e\+23"),
        ({"features": None}, "--data FILE"),
        ({"method": "medussa"}, "'medussa'"),
        ({"method": "mlp-speculator", "feature_weight": 2.0}, r"feature_weight is 2\.0, but the features of mlp-"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownMethod if "medussa" in message else InvalidSettings, match=message):
        train_options(tmp_path / "out", **{"features": tmp_path, **changes})


def test_options_are_found_without_their_groups() -> None:
    given = {"method": "hydra", "data": (Path("chats.jsonl"),), "out": Path("out"), "epochs": 7, "betas": (0.8, 0.9)}
    options = TrainOptions.of(**given)
    assert {name: options.flat()[name] for name in given} == given
    assert options.schedule.epochs == 7
    assert options.changed(epochs=8, seed=1).flat() == {**options.flat(), "epochs": 8, "seed": 1}


def test_no_two_groups_have_an_option_of_the_same_name() -> None:
    groups = [field.type for field in fields(TrainOptions) if is_dataclass(field.type)]
    names = [inner.name for group in groups for inner in fields(group)]
    names += [field.name for field in fields(TrainOptions) if not is_dataclass(field.type)]
    assert len(names) == len(set(names)) == len(train_options(Path("out"), Path("x")).flat())


def test_help_has_a_section_for_each_group_and_flags_without_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    shown = capsys.readouterr().out
    for field in fields(TrainOptions):
        if is_dataclass(field.type):
            assert f"\n{field.type.__doc__.rstrip('.')}\n" in shown
            for inner in fields(field.type):
                assert re.search(rf"^  --(\[no-\])?{inner.name.replace('_', '-')} ", shown, re.MULTILINE), inner.name


def test_help_with_a_recipe_shows_its_values_as_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "hydra++", "--help"]) == 0
    assert "[hydra++]" in capsys.readouterr().out
