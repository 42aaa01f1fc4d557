"""Models that read more than text: their classes in ``transformers``, made without what reads images and sounds."""

from functools import cache
from typing import Any

from draftheads.errors import UnsupportedModel


def wrapper_class(config: Any, *, whole: bool = False) -> Any:
    """The class of a model whose configuration has a text model in it; None for other models.

    It leaves the towers out unless the ``whole`` model is asked for.
    """
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING  # noqa: PLC0415 - slow to import

    is_text = config.get_text_config() is config or config.is_encoder_decoder
    kind = None if is_text else MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    return kind if whole or kind is None else _without_towers(kind)


@cache
def _without_towers(kind: Any) -> Any:
    """On the meta device, where models are made before their weights are read, towers take no memory."""

    def make(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        self.towers = _drop_towers(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def _drop_towers(model: Any) -> tuple[str, ...]:
    """Removes the models inside a model that hold no part of its text model. Returns their names."""
    from transformers import PreTrainedModel  # noqa: PLC0415 - slow

    if (lm_head := model.get_output_embeddings()) is None:
        raise UnsupportedModel(f"{type(model).__name__} has no lm_head: give the folder of its text model")
    text = {*model.get_decoder().modules(), lm_head}
    models = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    apart = [name for name, part in models.items() if text.isdisjoint(part.modules())]
    towers = tuple(name for name in apart if not name.startswith(tuple(f"{other}." for other in apart)))
    for name in towers:
        parent, _, own = name.rpartition(".")
        delattr(model.get_submodule(parent), own)
    return towers


def put_back_towers(model: Any, whole: Any) -> None:
    """Gives a model without towers those of a whole one, so that all of it can be written."""
    for name in model.towers:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, whole.get_submodule(name))
