"""Options: which values are refused, and how they are grouped and named."""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from draftheads.cli.main import main
from draftheads.errors import InvalidSettings
from draftheads.heads import HEADS
from draftheads.settings import Range
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import RECIPES
from training_world import train_options

JOINT = {"joint": "text", "data": (Path("x"),), "features": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_options": ("lm_head_rank=0",)}, "lm_head_rank is 0; it must be at least 1"),
        ({"warmup": 1.5}, "--warmup is 1.5: give a part of the steps, at least 0 and below 1, or a whole number of st"),
        ({"betas": (0.9, 1.0)}, r"--betas is 0\.9 1\.0: both must be at least 0 and below 1"),
        ({"loss": "soft"}, "--loss is 'soft'"),
        ({"seed": 1e23}, r"--seed is 1e\+23"),
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
    with pytest.raises(InvalidSettings, match=message):
        train_options(tmp_path / "out", **{"features": tmp_path, **changes})


SIZES, PARTS, ABOVE_0, FROM_0 = ((0, 65), (1, 64)), ((-0.1, 1.0), (0.0, 0.99)), ((0.0,), (1e-9,)), ((-0.1,), (0.0,))
TOKENS, FROM_1 = ((0, 2**20 + 1), (1, 2**20)), ((0,), (1,))
LIMITS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # values that are refused, and the nearest others
    **dict.fromkeys(("num_heads", "num_layers"), SIZES),
    **dict.fromkeys(("max_length", "batch_tokens"), TOKENS),
    **dict.fromkeys(("max_tokens", "save_steps"), FROM_1),
    **dict.fromkeys(("held_out", "final_learning_rate"), PARTS),
    **dict.fromkeys(("depth_decay", "learning_rate", "max_grad_norm"), ABOVE_0),
    **dict.fromkeys(("noise_alpha", "weight_decay"), FROM_0),
    "draft_vocab_size": ((-1,), (0,)),
    "epochs": ((0, 10_001), (1, 10_000)),
    "warmup": ((-0.1, 1.5, math.inf), (0.0, 0.99, 40)),
    "seed": ((-1, 2**32), (0, 2**32 - 1)),
}


def test_numbers_have_their_limits(tmp_path: Path):
    kinds = {field.name: getattr(field.type, "__metadata__", ()) for field in fields(TrainOptions)}
    assert LIMITS.keys() == {name for name, kind in kinds.items() if any(isinstance(one, Range) for one in kind)}
    for name, (refused, allowed) in LIMITS.items():
        for value in allowed:
            train_options(tmp_path / "out", tmp_path, **{name: value})
        for value in refused:
            with pytest.raises(InvalidSettings, match=re.escape(f"--{name.replace('_', '-')} is {value}: ")):
                train_options(tmp_path / "out", tmp_path, **{name: value})


def test_help_fits_a_screen_and_lists_methods_and_recipes(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--recipe", "hydra++", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 60
    words = shown.replace(",", " ").split()
    assert {*HEADS, *RECIPES} <= set(words)
    assert {f"--{field.name.replace('_', '-')}" for field in fields(TrainOptions)} <= set(words)
