"""Settings of papers by name. They replace the defaults of the options; options that are given replace them.

Also gives the defaults that follow from a recipe and from a head to start from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from draftheads.errors import InvalidSettings, ModelNotFound
from draftheads.train.new_head import settings_of


@dataclass(frozen=True)
class Recipe:
    """Settings and their source."""

    source: str
    settings: Mapping[str, Any]
    tunes_model: bool = False  # for train-joint


# As in the papers, each head has its own lm_head. Batches are smaller than in the papers, which use 64 and more texts:
# --batch-tokens and --accumulate change that. AdamW keeps its moments in full: --optimizer changes that.
_MEDUSA_HEADS = {
    "method": "medusa",
    "num_heads": 5,
    "num_layers": 1,
    "lm_head": "own",
    "draft_vocab_size": 0,
    "loss": "hard",
    "depth_decay": 0.8,
    "epochs": 2,
}
_MEDUSA = {**_MEDUSA_HEADS, "learning_rate": 1e-3, "warmup": 0.1}
_MEDUSA_2 = {
    **_MEDUSA_HEADS,
    "head_rate_factor": 4.0,
    "lora_rank": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
}
_HYDRA = {
    "method": "hydra",
    "num_heads": 4,
    "num_layers": 1,
    "lm_head": "own",
    "draft_vocab_size": 0,
    "learning_rate": 1e-3,
    "epochs": 1,
    "depth_decay": 1.0,
}
_HYDRA_PLUS_PLUS = {
    **_HYDRA,
    "method": "hydra++",
    "loss": "teacher",
    "learning_rate": 5e-4,
    "final_learning_rate": 0.33,
    "weight_decay": 0.1,
    "dropout": 0.2,
    "epochs": 10,
}
_AMPHISTA = {
    "method": "amphista",
    "num_heads": 4,
    "lm_head": "own",
    "draft_vocab_size": 0,
    "loss": "amphista",
    "depth_decay": 1.0,
    "learning_rate": 1e-3,
    "epochs": 4,
}
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "medusa-1": Recipe(
            "Medusa, appendix B: five heads of one layer on a frozen model",
            _MEDUSA,
        ),
        "medusa-2": Recipe(
            "Medusa, section 4.1 and appendix B: heads first, then heads and model together, on the text",
            {**_MEDUSA_2, "learning_rate": 5e-4, "backbone_loss": "text", "head_weight": 0.2, "heads_first": 0.5},
            tunes_model=True,
        ),
        "medusa-2-self": Recipe(
            "Medusa, section 4.2: self-distillation of the model, the weight of the heads rises along a sine",
            {
                **_MEDUSA_2,
                "learning_rate": 1e-4,
                "backbone_loss": "original",
                "head_weight": 0.01,
                "head_weight_rise": "sine",
                "heads_first": 0.0,
            },
            tunes_model=True,
        ),
        "hydra": Recipe("Hydra, section 5: four grounded heads, one epoch on the text", {**_HYDRA, "loss": "hard"}),
        "hydra-teacher": Recipe(
            "Hydra, appendix A: the same with the model's own distribution as the label", {**_HYDRA, "loss": "teacher"}
        ),
        "prefix-mlp": Recipe(
            "Hydra, appendix A.2: as hydra-teacher, with a prefix attention layer",
            {**_HYDRA, "method": "hydra++", "loss": "teacher"},
        ),
        "hydra++": Recipe(
            "Hydra, section 3.1, with the rates, dropout and epochs of its code: a prefix layer, four layers per head",
            {**_HYDRA_PLUS_PLUS, "num_layers": 4},
        ),
        "amphista": Recipe("Amphista, section 4.1 and equation 7: four heads, four epochs", _AMPHISTA),
        "amphista-alpha": Recipe(
            "Amphista, A.2.3: the same with two auto-embedding blocks",
            {**_AMPHISTA, "head_options": ("num_auto_embedding_blocks=2",)},
        ),
        "mlp-speculator": Recipe(
            "MLP Speculator, section 4: own embeddings and lm_heads, first on plain text (--text), then on the model's "
            "own answers",
            {
                "method": "mlp-speculator",
                "num_heads": 3,
                "lm_head": "own",
                "draft_vocab_size": 0,
                "head_options": ('embeddings="own"',),
                "loss": "hard",
                "depth_decay": 1.0,
                "learning_rate": 1e-3,
                "final_learning_rate": 0.1,
                "betas": (0.9, 0.95),
                "weight_decay": 0.1,
            },
        ),
        "eagle": Recipe(
            "EAGLE's loss at every depth: smooth L1 on features, a tenth of its weight on tokens; the rest is ours",
            {
                "method": "eagle",
                "draft_vocab_size": 0,
                "loss": "teacher",
                "feature_weight": 10.0,
                "learning_rate": 3e-4,
                "betas": (0.9, 0.95),
                "max_grad_norm": 5.0,
                "epochs": 20,
            },
        ),
        "blockwise": Recipe(
            "Blockwise parallel decoding (Stern et al. 2018): Medusa's heads, chains of draft tokens, on the text",
            {**_MEDUSA, "depth_decay": 1.0, "chain": True},
        ),
        "small": Recipe(
            "for a small model on a CPU: small batches, a low rate, a small draft vocabulary; needs --method",
            {"learning_rate": 5e-4, "batch_tokens": 1024, "draft_vocab_size": 6144, "epochs": 4, "loss": "teacher"},
        ),
    }
)


def recipe(name: str, *, tunes_model: bool = False) -> Recipe:
    """The recipe of that name, for ``train`` or (``tunes_model``) for ``train-joint``.

    Raises:
        InvalidSettings: no such recipe, or it is for the other command.
    """
    fitting = [known for known, found in RECIPES.items() if found.tunes_model == tunes_model]
    if name not in RECIPES:
        raise InvalidSettings(f"no recipe {name!r}; choose among {', '.join(fitting)}")
    if name not in fitting:
        other = "train" if tunes_model else "train-joint"
        what = "does not tune the model" if tunes_model else "also tunes the model"
        raise InvalidSettings(f"recipe {name} {what}: draftheads {other} --recipe {name} …")
    return RECIPES[name]


def defaults_from(given: Mapping[str, Any], *, tunes_model: bool = False) -> dict[str, Any]:
    """Settings by name that follow from a recipe, and from a head to start from, which goes first.

    Args:
        given: settings of the user by name. Only recipe, start_from, model, method and resume are read. With resume, a
            missing head to start from is no error: a resumed run does not need it.
        tunes_model: whether the recipe is for ``train-joint``.

    Raises:
        DraftHeadsError: no such recipe, or no such head.
    """
    name, start = given.get("recipe"), given.get("start_from")
    settings = {} if name is None else dict(recipe(name, tunes_model=tunes_model).settings)
    method = given.get("method") or settings.get("method")
    if start is not None and method:
        try:
            settings |= settings_of(start, given["model"], method)
        except ModelNotFound:
            if not given.get("resume"):
                raise
    return settings
