"""A small joint run, and heads with a model and an adapter in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftheads.data.batches import PlannedTexts
from draftheads.data.features import LiveStore
from draftheads.data.texts import load_texts
from draftheads.models.model import TargetModel
from draftheads.train.joint import JointLearner, JointRun
from draftheads.train.learner import Learner
from draftheads.train.new_head import layers_read, new_head
from draftheads.train.options import TrainOptions
from draftheads.train.tuned_model import Adapter, AllWeights, TunedModel
from draftheads.utils.progress import NoProgress
from training_world import chat_model, train_options


def joint_options(out: Path, data: Path, **changes: Any) -> TrainOptions:
    """Of a small run."""
    return train_options(out, None, **{"data": (data,), "learning_rate": 0.005, "joint": "text", **changes})


def train_jointly_for(target: TargetModel, options: TrainOptions, progress: Any = None) -> Any:
    """A run with a model that is loaded already. The adapter is removed at the end."""
    return JointRun(options, progress or NoProgress()).run_for(target)


def harness(
    target: TargetModel,
    data: Path,
    *,
    moved: bool = True,
    dropout: float = 0.0,
    backbone_loss: Any = "text",
    targets: Sequence[str] = (),
    full: bool = False,
    **changes: Any,
) -> tuple[JointLearner, dict[str, Tensor]]:
    """A learner with an adapter that says something (or nothing), or with all weights trained; and a batch."""
    settings = joint_options(data.parent, data, **changes)
    store = LiveStore(target, load_texts(target, [data], max_length=64), layers_read(settings, target))
    head = new_head(settings, target, store, range(len(store)))
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    low_rank = {"rank": 4, "alpha": 8, "dropout": dropout, "targets": targets}
    adapter: Any = AllWeights(target.model) if full else Adapter(target.model, **low_rank)
    for parameter in adapter.parameters if moved else ():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tuned = TunedModel(target.model, target.tokenizer, target.model_id)
    learner = Learner(head, target.weights, loss=settings.loss, depth_decay=0.5)
    joint = JointLearner(learner, tuned, adapter, backbone_loss=backbone_loss)
    batch = PlannedTexts(store, [[0, 1, 2, 60, 61]])[0]
    del batch["documents"]
    return joint.train(), batch


def on_disk(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """The tiny model as an ordinary folder."""
    target = chat_model(**changes)
    target.model.to(dtype)
    target.model.generation_config.temperature = 0.7
    target.model.generation_config.do_sample = True
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)
