"""A Medusa-2 run: chats to an adapter and heads that were tuned together, measured and saved.

The output folder also holds ``adapter/`` (peft's format, and ``base.json``, which names the model that it is for), and
the head in ``head/``.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.data.batches import PlannedTexts
from draftheads.data.features import LiveStore
from draftheads.models.adapter import FORMAT_VERSION, is_tied, require_peft
from draftheads.models.model import TargetModel
from draftheads.models.model_names import ADAPTER_FOLDER, BASE_FILE
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.train.joint.learner import JointLearner
from draftheads.train.joint.model import Adapter, TunedModel, measure_movement
from draftheads.train.learner import Learner
from draftheads.train.new_head import check_sizes, in_float32, layers_read
from draftheads.train.report import Report
from draftheads.train.run_folder import as_json, chat_template_text
from draftheads.train.schedule import rise_and_cosine
from draftheads.train.trainer import Steps, computes_in_bf16, make_optimizer
from draftheads.train.training import Run
from draftheads.train.training_data import TrainingData, plan_training, read_texts
from draftheads.utils.files import atomic_directory


@dataclass(frozen=True)
class Tuning:
    """How heads and model are trained together (Medusa, sections 3.2.2, 4.1 and 4.2)."""

    towards: Literal["text", "original"]  # what the model learns: the text's tokens, or its own distribution
    head_weight: float  # λ0, of the heads' loss relative to the model's
    rises: bool  # λ0 rises along a quarter sine while both are trained
    heads_first: float  # part of the steps in which only the heads are trained; none where they are trained already
    head_rate_factor: float  # of the heads' learning rate, relative to the model's


TUNINGS = {
    "text": Tuning("text", 0.2, rises=False, heads_first=0.5, head_rate_factor=4.0),
    "original": Tuning("original", 0.01, rises=True, heads_first=0.0, head_rate_factor=4.0),
    "direct": Tuning("text", 1.0, rises=False, heads_first=0.0, head_rate_factor=1.0),  # of table 2
}


class JointRun(Run):
    """Trains a LoRA adapter in the model together with heads that read the model's live hidden states."""

    head_folder = HEAD_FOLDER

    adapter: Adapter | None = None
    tuned: TunedModel
    learner: JointLearner

    @property
    def tuning(self) -> Tuning:
        assert self.options.joint is not None
        return TUNINGS[self.options.joint]

    def check_packages(self) -> None:
        super().check_packages()
        require_peft()

    def load_target(self) -> TargetModel:
        """The model; in bf16 if training computes in bf16."""
        return TargetModel.load(
            self.options.model,
            dtype=torch.bfloat16 if computes_in_bf16(self.options) else torch.float32,
            four_bit=self.options.precision == "4bit",
            chat_template=chat_template_text(self.options),
            check=partial(check_sizes, self.options),
        )

    def run_for(self, target: TargetModel) -> Any:
        """As of every run; the model gets its own layers back."""
        try:
            return super().run_for(target)
        finally:
            if self.adapter is not None:
                self.adapter.remove()

    def read_data(self) -> TrainingData:
        """Chats; the model changes, so hidden states are not stored."""
        if is_tied(self.target.model):
            self.progress.stage("the lm_head is not adapted: its matrix is the embedding's, too")
        self.progress.stage("reading data")
        texts = read_texts(self.target, self.options, self.left_out)
        layers = layers_read(self.options, self.target)
        return self.claim(plan_training(LiveStore(self.target, texts, layers), self.options))

    def module(self) -> JointLearner:
        target = self.target
        torch.manual_seed(self.options.seed)
        self.adapter = Adapter(target.model)
        self.tuned = TunedModel(target.model, target.tokenizer, f"{target.model_id} (tuned)", target.chat_template)
        learner = self.learner_on(in_float32(target.weights))
        self.learner = JointLearner(learner, self.tuned, self.adapter, backbone_loss=self.tuning.towards)
        return self.learner

    def optimizer(self) -> Optimizer:
        """Heads (group 0) and adapter (group 1), each with its learning rate."""
        rate = self.options.learning_rate * self.tuning.head_rate_factor
        assert self.adapter is not None
        return make_optimizer(
            self.options, [{"params": list(self.head.parameters()), "lr": rate}, {"params": self.adapter.parameters}]
        )

    def steps(self) -> Steps:
        """Two stages. In the first one the adapter has no gradients, so it does not change."""
        num_steps = self.data.num_steps
        first = 0 if self.start_head else int(self.tuning.heads_first * num_steps)
        rate = partial(rise_and_cosine, warmup=self.options.warmup, final=self.options.final_learning_rate)

        def model_rate(step: int) -> float:
            return 0.0 if step < first else rate(step - first, num_steps - first)

        def inputs(step: int) -> dict[str, Any]:
            return {"head_weight": head_weight(self.tuning, step, first, num_steps), "only_heads": step < first}

        return Steps([partial(rate, num_steps=num_steps), model_rate], inputs, all_are_trained=False)

    def batches(self) -> PlannedTexts:
        return PlannedTexts(self.data.store, self.data.plan)

    def validate(self) -> dict[str, Any]:
        """As of every run; then the head is ready for training again."""
        line = super().validate()
        self.head.bind(in_float32(self.target.weights))
        self.learner.train()
        return line

    def measured_learner(self) -> Learner:
        """The head on the tuned model: its hidden states, and its lm_head if the head shares it."""
        self.learner.eval()
        weights = in_float32(self.tuned.weights)
        self.head.bind(weights)
        return self.learner_on(weights)

    @property
    def decoding_model(self) -> TargetModel:
        return self.tuned

    def save(self, report: Report, profile: AcceptanceProfile) -> Report:
        """Also the adapter, and how far the model moved."""
        assert self.adapter is not None
        movement = measure_movement(self.tuned, self.adapter, self.data.store, self.data.held_out)
        with atomic_directory(self.folder.path / ADAPTER_FOLDER, replace=True) as staged:
            self.adapter.save(staged)
            base = {"model_id": self.target.model_id, "fingerprints": asdict(self.target.fingerprints)}
            (staged / BASE_FILE).write_bytes(as_json({"format_version": FORMAT_VERSION, "base": base}))
        return super().save(replace(report, movement=movement), profile)


def head_weight(tuning: Tuning, step: int, num_head_steps: int, num_steps: int) -> float:
    """λ0 of a step, the weight of the heads' loss.

    In the first stage it scales the whole loss. Adam's steps do not depend on that scale, so its moments still fit when
    the second stage starts.

    >>> [round(head_weight(TUNINGS["original"], step, 2, 5), 4) for step in range(5)]
    [0.01, 0.01, 0.005, 0.0087, 0.01]
    """
    if step < num_head_steps or not tuning.rises:
        return tuning.head_weight
    return tuning.head_weight * math.sin(math.pi / 2 * (step + 1 - num_head_steps) / (num_steps - num_head_steps))
