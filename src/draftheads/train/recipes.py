"""Settings of papers by name. They replace the defaults of the options; options that are given replace them.

Also gives the defaults that follow from a recipe and from a head to start from.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from draftheads.errors import InvalidSettings, ModelNotFound

OURS = "ours"


class Recipe:
    """Settings by where they are from: a place in the paper, its code, or ours."""

    def __init__(self, description: str, *parts: Mapping[str, Mapping[str, Any]]) -> None:
        """The description is one line; of several parts with the same place, each adds its settings."""
        self.description = description
        self.parts: dict[str, dict[str, Any]] = {}
        for place, settings in chain.from_iterable(part.items() for part in parts):
            self.parts.setdefault(place, {}).update(settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for part in self.parts.values() for name, value in part.items()}

    @property
    def sources(self) -> dict[str, str]:
        return {name: place for place, part in self.parts.items() for name in part}


def _from(place: str, /, **settings: Any) -> dict[str, dict[str, Any]]:
    return {place: settings}


# As in the papers, each head has its own lm_head. Batches are smaller than in the papers, which use 64 and more texts:
# --batch-tokens changes that. AdamW keeps its moments in full, in place of 8 bits as in Medusa: --optimizer does.
_OWN_LM_HEADS: Mapping[str, Any] = {"lm_head": "own", "draft_vocab_size": 0}
_MEDUSA_HEADS: Mapping[str, Any] = {"method": "medusa", **_OWN_LM_HEADS}
_MEDUSA = (
    _from("section 3.1.1", **_MEDUSA_HEADS)
    | _from("equation 1", loss="hard")
    | _from("section 4", num_heads=5, num_layers=1, depth_decay=0.8)
)
_JOINT: Mapping[str, Any] = {"method": "medusa", "learning_rate": 2.5e-4}  # of --joint without a recipe
_FULL_RATE = 2e-5  # of all weights of a model, with any recipe: Vicuna's own. The paper's rates are those of adapters
_HYDRA = (
    _from("section 3", num_layers=1)
    | _from("section 5", learning_rate=1e-3, betas=(0.9, 0.999), epochs=1)
    | _from("table 1", num_heads=4)
    | _from("its code", **_OWN_LM_HEADS, depth_decay=1.0)
)
_HYDRA_PLUS_PLUS = (
    _from("section 3.1", method="hydra++", num_layers=4, loss="teacher")
    | _from("section 5", betas=(0.9, 0.999), epochs=10)
    | _from("table 1", num_heads=4)
    | _from("its code", **_OWN_LM_HEADS, depth_decay=1.0)
)
_AMPHISTA = (
    _from("section 3", method="amphista", loss="amphista")
    | _from("equation 6", **_OWN_LM_HEADS)
    | _from("section 4.1", num_heads=4, learning_rate=1e-3, betas=(0.9, 0.999), epochs=4)
    | _from(OURS, depth_decay=1.0)
)
# the decay is exp(-1/γ), γ = 4 for blocks of eight
_BLOCKS_CODE = _from("its code", depth_decay=0.779, learning_rate=6e-4, warmup=0.04, epochs=10)
RECIPES: Mapping[str, Recipe] = {
    "medusa-1": Recipe(
        "Medusa: five heads of one layer on a frozen model",
        _MEDUSA,
        _from("section 4.1", learning_rate=2e-3, warmup=40, epochs=2),
    ),
    "medusa-2": Recipe(
        "Medusa: heads first, then heads and model together, on the text",
        _MEDUSA,
        _from("section 3.2", joint="text"),
        _from("section 4.1", learning_rate=5e-4, warmup=40, epochs=2),
    ),
    "medusa-2-self": Recipe(
        "Medusa: self-distillation of the model, the weight of the heads rises along a sine",
        _MEDUSA,
        _from("section 3.3.2", joint="original"),
        _from("section 4.2", learning_rate=1e-4, warmup=20, max_length=2048),
        _from(OURS, epochs=2),
    ),
    "hydra": Recipe(
        "Hydra: four grounded heads, one epoch on the text",
        _HYDRA,
        _from("section 3", method="hydra"),
        _from("appendix A.1", loss="hard"),
    ),
    "hydra-teacher": Recipe(
        "Hydra: the same with the model's own distribution as the label",
        _HYDRA,
        _from("section 3", method="hydra"),
        _from("appendix A.1", loss="teacher"),
    ),
    "prefix-mlp": Recipe(
        "Hydra: as hydra-teacher, with a prefix attention layer",
        _HYDRA,
        _from("appendix A.1", loss="teacher"),
        _from("appendix A.2", method="hydra++"),
    ),
    "hydra++": Recipe(
        "Hydra: a prefix layer, four layers per head; rates and decay of its code, without its dropout",
        _HYDRA_PLUS_PLUS,
        _from("its code", learning_rate=5e-4, final_learning_rate=0.33, warmup=100, weight_decay=0.1),
    ),
    "hydra++-paper": Recipe(
        "Hydra: as hydra++, with the paper's learning rate of 1e-3 and no weight decay",
        _HYDRA_PLUS_PLUS,
        _from("section 5", learning_rate=1e-3),
    ),
    "amphista": Recipe("Amphista: four heads, four epochs", _AMPHISTA),
    "amphista-alpha": Recipe(
        "Amphista-alpha: the same with two auto-embedding blocks",
        _AMPHISTA,
        _from("appendix A.2.3", head_options=("num_auto_embedding_blocks=2",)),
    ),
    "mlp-speculator": Recipe(
        "MLP Speculator: own embeddings and lm_heads, first on plain text (--text), then on the model's answers",
        _from("section 3.1", method="mlp-speculator", **_OWN_LM_HEADS, head_options=('embeddings="own"',)),
        _from("section 3.2", loss="hard", max_length=4096),
        _from("section 4", num_heads=3, learning_rate=1e-3, warmup=0.05, final_learning_rate=0.1),
        _from("its code", depth_decay=1.0, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    "eagle": Recipe(
        "EAGLE's loss at every depth: smooth L1 on features, a tenth of its weight on tokens",
        _from("the paper", method="eagle", draft_vocab_size=0, loss="eagle"),
        _from("its code", betas=(0.9, 0.95), epochs=20),
        _from(OURS, learning_rate=3e-4, max_grad_norm=5.0),
    ),
    "eagle3": Recipe(
        "EAGLE-3: hidden states of three layers, seven depths, no loss on features",
        _from("section 3.1", method="eagle3", lm_head="own", loss="teacher"),
        _from("its code", num_heads=7, depth_decay=0.8, draft_vocab_size=32000, learning_rate=5e-5),
        _from("its code", betas=(0.9, 0.95), warmup=0.015, max_grad_norm=0.5, max_length=2048, epochs=40),
    ),
    "dflash": Recipe(
        "DFlash: blocks of eight, a body of two layers, on the text",
        _from("the paper", method="dflash", loss="hard"),
        _BLOCKS_CODE,
        _from(OURS, num_heads=7, num_layers=2),  # five layers in the paper
    ),
    "dflash2": Recipe(
        "DFlash2: blocks of seven drafts with convolutions, and a choice among the best 16 tokens of each place",
        _from("its code", method="dflash2", num_heads=7, loss="hard", head_options=("markov_rank=256",)),
        _BLOCKS_CODE,
        _from(OURS, num_layers=2),  # five layers there
    ),
    "dspark": Recipe(
        "DSpark: shifted blocks of seven, two layers, on the text and the model's distribution",
        _from("the paper", method="dspark", num_heads=7, loss="dspark"),
        _BLOCKS_CODE,
        _from("its code", head_options=("markov_rank=256",)),
        _from(OURS, num_layers=2),
    ),
    "p-eagle": Recipe(
        "P-EAGLE: four layers, eight tokens in one pass, on the model's distribution",
        _from("the paper", method="p-eagle", lm_head="own", loss="teacher"),
        _from("its code", num_heads=8, num_layers=4, head_options=("own_embedding=true",)),
        # its loss is one mean over all rows, of which each depth has 0.7 times as many as the one above
        _from(OURS, depth_decay=0.7, learning_rate=2e-4, warmup=0.04, epochs=10),
    ),
    "mtp": Recipe(
        "FastMTP: the model's own MTP layer (--start-from), trained further for three depths on the text",
        _from("the paper", method="mtp", num_heads=3, draft_vocab_size=0, loss="hard"),
        _from("equation 2", depth_decay=0.6),  # .51, .31 and .18 of the loss
        _from(OURS, learning_rate=5e-5),
    ),
    "blockwise": Recipe(
        "Blockwise parallel decoding (Stern et al. 2018): Medusa's heads with equal weights, on the text",
        _from("the paper", **_MEDUSA_HEADS, loss="hard", depth_decay=1.0),
        _from(OURS, num_heads=5, num_layers=1, learning_rate=1e-3, warmup=0.1, epochs=2),
    ),
    "small": Recipe(
        "for a small model on a CPU: small batches, a low rate, a small draft vocabulary; needs --method",
        _from(OURS, learning_rate=5e-4, batch_tokens=1024, draft_vocab_size=6144, epochs=4, loss="teacher"),
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise InvalidSettings(f"no recipe {name!r}; choose among {', '.join(RECIPES)}")
    return RECIPES[name]


def defaults_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name that follow from a recipe, and from a head to start from, which goes first.

    Of the user's settings, recipe, joint, start_from, model, method and resume are read. With resume, a missing head to
    start from is no error: a resumed run does not need it.
    """
    name, start = given.get("recipe"), given.get("start_from")
    settings = dict(_JOINT if given.get("joint") else {}) if name is None else recipe(name).settings
    if given.get("joint") == "full":
        settings["learning_rate"] = _FULL_RATE
    method = given.get("method") or settings.get("method")
    if start is not None and method:
        from draftheads.train.new_head import settings_of  # noqa: PLC0415 - slow to import; few runs start from a head

        try:
            settings |= settings_of(start, given["model"], method)
        except ModelNotFound:
            if not given.get("resume"):
                raise
    return settings
