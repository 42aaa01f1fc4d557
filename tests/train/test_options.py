"""Options: which values are refused, and how they are grouped and named."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.heads import HEADS
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import RECIPES
from training_world import train_options

JOINT = {"joint": "text", "data": (Path("x"),), "features": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"num_heads": 1_000_000}, "--num-heads is 1000000: must lie in 1 … 64"),
        ({"head_options": ("lm_head_rank=0",)}, "lm_head_rank is 0; it must be at least 1"),
        ({"held_out": 1.0}, "--held-out is 1.0"),
        ({"warmup": -0.1}, "--warmup is -0.1"),
        ({"warmup": 1.5}, "--warmup is 1.5: give a part of the steps, at least 0 and below 1, or a whole number of st"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"draft_vocab_size": -1}, "--draft-vocab-size is -1"),
        ({"betas": (0.9, 1.0)}, r"--betas is 0\.9 1\.0: both must be at least 0 and below 1"),
        ({"loss": "soft"}, "--loss is 'soft'"),
        ({"seed": -1}, "--seed is -1: must be at least 0 and below"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"seed": 1e23}, r"--seed is 1e\+23"),
        ({"features": None}, "--data FILE"),
        ({"method": "medussa"}, "'medussa'"),
        ({"method": "mlp-speculator", "loss": "eagle"}, r"--loss is eagle, but the features of mlp-"),
        ({"method": "small-llama", "noise_alpha": 75.0}, r"--noise-alpha is 75\.0, but small-llama heads"),
        ({"joint": "both"}, "--joint is 'both': choose among text, original, direct"),
        ({"joint": "text", "features": None}, "give --data FILE… to train on"),
        ({**JOINT, "features": Path("x")}, "--text and --features are not for --joint"),
        ({**JOINT, "optimizer": "muon"}, "--optimizer muon is not for"),
        ({**JOINT, "method": "eagle", "loss": "eagle"}, "--loss eagle is not for --joint"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UnknownMethod if "medussa" in message else InvalidSettings, match=message):
        train_options(tmp_path / "out", **{"features": tmp_path, **changes})


def test_help_fits_a_screen_and_lists_methods_and_recipes(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--recipe", "hydra++", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 60
    words = shown.replace(",", " ").split()
    assert {*HEADS, *RECIPES} <= set(words)
    assert {f"--{field.name.replace('_', '-')}" for field in fields(TrainOptions)} <= set(words)
