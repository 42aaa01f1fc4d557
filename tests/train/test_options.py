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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"num_heads": 1_000_000}, "--num-heads is 1000000: must lie in 1 … 64"),
        ({"num_layers": 65}, "--num-layers is 65: must lie in 1 … 64"),
        ({"head_options": ("lm_head_rank=0",)}, "lm_head_rank is 0; it must be at least 1"),
        ({"batch_tokens": 10**9}, "--batch-tokens is 1000000000: must lie in 1 … 1048576"),
        ({"max_length": 10**9}, "--max-length is 1000000000: must lie in 1 … 1048576"),
        ({"epochs": 10**6}, "--epochs is 1000000: must lie in 1 … 10000"),
        ({"held_out": 1.0}, "--held-out is 1.0"),
        ({"warmup": -0.1}, "--warmup is -0.1"),
        ({"warmup": 1.5}, "--warmup is 1.5: give a part of the steps, at least 0 and below 1, or a whole number of st"),
        ({"warmup": float("inf")}, "--warmup is inf"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"depth_decay": -1.0}, "--depth-decay is -1.0"),
        ({"draft_vocab_size": -1}, "--draft-vocab-size is -1"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"betas": (0.9, 1.0)}, r"--betas is 0\.9 1\.0: both must be at least 0 and below 1"),
        ({"loss": "soft"}, "--loss is 'soft'"),
        ({"seed": -1}, "--seed is -1: must be at least 0 and below"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"seed": 10**23}, "--seed is 1000"),
        ({"seed": 1e23}, r"--seed is 1e\+23"),
        ({"features": None}, "--data FILE"),
        ({"method": "medussa"}, "'medussa'"),
        ({"method": "mlp-speculator", "loss": "eagle"}, r"--loss is eagle, but the features of mlp-"),
        (
            {"method": "small-llama", "noise_alpha": 75.0},
            r"--noise-alpha is 75\.0, but small-llama heads",
        ),
        ({"joint": "both"}, "--joint is 'both': choose among text, original, direct"),
        ({"joint": "text", "features": None}, "give --data FILE… to train on"),
        ({"joint": "text", "data": (Path("x"),)}, "--text and --features are not for --joint"),
        ({"joint": "text", "data": (Path("x"),), "features": None, "optimizer": "muon"}, "--optimizer muon is not for"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownMethod if "medussa" in message else InvalidSettings, match=message):
        train_options(tmp_path / "out", **{"features": tmp_path, **changes})


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(InvalidSettings, match=r"no setting 'epoch'; did you mean epochs\?"):
        TrainOptions.of(method="hydra", out=Path("out"), data=(Path("x"),), epoch=3)


def test_help_fits_a_screen_and_lists_methods_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "hydra++", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 60
    words = shown.replace(",", " ").split()
    assert {*HEADS, *RECIPES} <= set(words)
    assert len(fields(TrainOptions)) <= 35
    assert {f"--{field.name.replace('_', '-')}" for field in fields(TrainOptions)} <= set(words)
