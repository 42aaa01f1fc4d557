"""Settings that papers trained their heads with, by name; every value can be overridden.

A recipe is the defaults of :class:`TrainOptions` with some values changed: what is given on the command line wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.train.options import TrainOptions


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets, and where it is from."""

    source: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        unknown = set(self.settings) - {field.name for field in fields(TrainOptions)}
        assert not unknown, f"no such options: {sorted(unknown)}"


_MEDUSA = {"method": "medusa", "loss": "hard", "depth_decay": 0.8, "learning_rate": 1e-3, "warmup": 0.1}
_HYDRA = {"method": "hydra", "num_heads": 4, "num_layers": 1, "learning_rate": 1e-3, "epochs": 1, "depth_decay": 1.0}
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "medusa-1": Recipe(
            "Medusa, appendix B: five heads of one layer on a frozen model",
            {**_MEDUSA, "num_heads": 5, "num_layers": 1, "epochs": 2},
        ),
        "hydra": Recipe("Hydra, section 5: four grounded heads, one epoch on the text", {**_HYDRA, "loss": "hard"}),
        "hydra-teacher": Recipe(
            "Hydra, appendix A: the same with the model's own distribution as the label", {**_HYDRA, "loss": "teacher"}
        ),
        "small": Recipe(
            "what the bundled hydra head was trained with: small batches, a low rate; give --method beside it",
            {"learning_rate": 5e-4, "batch_tokens": 1024, "draft_vocab_size": 6144, "epochs": 4, "loss": "teacher"},
        ),
    }
)


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        InvalidSettings: there is none.
    """
    if name not in RECIPES:
        raise InvalidSettings(f"no recipe {name!r}; choose among {', '.join(RECIPES)}")
    return RECIPES[name]
