"""The Trainer for heads and backbone together: two learning rates, two stages, and λ0 by the step."""

from typing import Any

import torch
from torch import Tensor

from draftheads.train.joint_learner import JointLearner
from draftheads.train.joint_schedule import JointSchedule
from draftheads.train.trainer import HeadTrainer


class JointTrainer(HeadTrainer):
    """Group 0 is the heads, group 1 the adapter; before the second stage its gradients are None and it stays."""

    def __init__(self, *, schedule: JointSchedule, head_rate_factor: float, **arguments: Any) -> None:
        arguments["args"].ddp_find_unused_parameters = True  # the adapter's, before the second stage
        super().__init__(**{**arguments, "rates": [schedule.head_rate, schedule.backbone_rate]})
        self.schedule = schedule
        self.head_rate_factor = head_rate_factor

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """One optimiser with a learning rate per group."""
        if self.optimizer is None:
            learner: JointLearner = self.model  # type: ignore[assignment]
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            rate = self.args.learning_rate
            groups = [
                {"params": list(learner.learner.head.parameters()), "lr": rate * self.head_rate_factor},
                {"params": learner.adapter.parameters, "lr": rate},
            ]
            self.optimizer = kind(groups, **{"weight_decay": self.args.weight_decay, **settings})
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The combined loss of the step's stage."""
        step = self.state.global_step
        stage = {"head_weight": self.schedule.head_weight(step), "only_heads": self.schedule.only_heads(step)}
        return super().compute_loss(model, {**inputs, **stage})

    def take_means(self) -> dict[str, Any]:
        """Also λ0 of the last step."""
        return {**super().take_means(), "head_weight": self.schedule.head_weight(max(0, self.state.global_step - 1))}
