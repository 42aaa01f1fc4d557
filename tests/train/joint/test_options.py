"""Options of joint training: which values are refused, and λ0."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import InvalidSettings
from draftheads.train.options import TrainOptions
from joint_world import joint_options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "--data FILE"),
        ({"features": Path("x")}, "--features .* not for --joint"),
        ({"feature_weight": 2.0}, "not for --joint"),
        ({"text": (Path("x"),)}, "--text.* not for --joint"),
        ({"joint": False}, "need --joint"),
        ({"heads_first": 1.0}, "--heads-first is 1.0"),
        ({"lora_dropout": -0.1}, "--lora-dropout is -0.1"),
        ({"head_weight": 0.0}, "--head-weight is 0.0"),
        ({"head_rate_factor": float("nan")}, "--head-rate-factor is nan"),
        ({"lora_alpha": 0}, "--lora-alpha is 0"),
        ({"lora_rank": 0}, "--lora-rank is 0"),
        ({"backbone_loss": "kl"}, "--backbone-loss is 'kl'"),
        ({"optimizer": "muon"}, "--optimizer muon is not for --joint"),
        ({"head_weight_rise": "cosine"}, "--head-weight-rise is 'cosine'"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = {**joint_options(tmp_path, tmp_path).flat(), **changes}
    with pytest.raises(InvalidSettings, match=message):
        TrainOptions.of(**values)


def test_the_default_weights_of_the_heads_loss_are_those_of_the_paper(tmp_path: Path) -> None:
    for changes, weight in (({}, 0.2), ({"backbone_loss": "original"}, 0.01), ({"head_weight": 0.7}, 0.7)):
        assert joint_options(tmp_path, tmp_path, **changes).tuning.peak_head_weight == weight
