"""Options: which values are refused, and how they are grouped and named."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.train.joint.options import JointOptions
from draftheads.train.options import RunOptions, TrainOptions
from training_world import train_options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"tree_nodes": 0}, "--tree-nodes is 0"),
        ({"held_out": 1.0}, "--held-out is 1.0"),
        ({"warmup": -0.1}, "--warmup is -0.1"),
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
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        train_options(tmp_path / "out", **{"features": tmp_path, **changes})


def test_an_unknown_method_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownMethod, match="'medussa'"):
        train_options(tmp_path / "out", tmp_path, method="medussa")


def test_the_feature_loss_needs_a_head_that_predicts_hidden_states(features: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"--feature-weight is 2\.0, but the features of mlp-"):
        train_options(tmp_path, features, method="mlp-speculator", feature_weight=2.0)
    with pytest.raises(InvalidSettings, match="no setting 'feature_weight'"):
        JointOptions.of(out=tmp_path, data=(tmp_path,), feature_weight=2.0)


@pytest.mark.parametrize("cls", [TrainOptions, JointOptions])
def test_options_are_found_without_their_groups(cls: type[RunOptions]) -> None:
    given = {"method": "hydra", "data": (Path("chats.jsonl"),), "out": Path("out"), "epochs": 7, "betas": (0.8, 0.9)}
    options = cls.of(**given)
    assert {name: options.flat()[name] for name in given} == given
    assert options.schedule.epochs == 7
    assert options.changed(epochs=8, seed=1).flat() == {**options.flat(), "epochs": 8, "seed": 1}


@pytest.mark.parametrize("cls", [TrainOptions, JointOptions])
def test_no_two_groups_have_an_option_of_the_same_name(cls: type[RunOptions]) -> None:
    groups = [field.type for field in fields(cls) if is_dataclass(field.type)]
    names = [inner.name for group in groups for inner in fields(group)]
    names += [field.name for field in fields(cls) if not is_dataclass(field.type)]
    assert len(names) == len(set(names)) == len(cls.of(out=Path("out"), method="hydra", data=(Path("x"),)).flat())


@pytest.mark.parametrize(("command", "cls"), [("train", TrainOptions), ("train-joint", JointOptions)])
def test_help_has_a_section_for_each_group_and_flags_without_prefixes(
    command: str, cls: type[RunOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for field in fields(cls):
        if is_dataclass(field.type):
            section = shown[shown.index(f"{field.name.replace('_', '-')} options") :]
            for inner in fields(field.type):
                flag = f"--{inner.name.replace('_', '-')}"
                assert re.search(rf" {flag}[ ,]", section), flag


def test_help_with_a_recipe_shows_its_values_as_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "hydra++", "--help"])
    assert "(default: hydra++)" in capsys.readouterr().out
