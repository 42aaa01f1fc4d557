"""A whole Medusa-2 run: chats to an adapter and heads that were tuned together, measured and saved.

Extends the run of ``train/run.py``. The output folder also holds ``adapter/`` (peft's format, and ``base.json``, which
names the model that it is for) and ``movement.json``, and the head in ``head/``.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.optim import Optimizer

from draftheads.checkpoints.checkpoint import load_head, read_head
from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.data.batches import PlannedTexts
from draftheads.data.features import LiveStore
from draftheads.data.texts import check_known, load_texts
from draftheads.errors import BaseModelWarning
from draftheads.heads.base import DraftHead
from draftheads.models.adapter import FORMAT_VERSION, Adapter, is_tied, require_peft
from draftheads.models.model import TargetModel
from draftheads.models.model_names import ADAPTER_FOLDER, BASE_FILE
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.train.joint.learner import JointLearner
from draftheads.train.joint.tuned_model import Movement, TunedModel, measure_movement
from draftheads.train.learner import Learner, head_learner
from draftheads.train.memory import check_sizes
from draftheads.train.new_head import in_float32, layers_read
from draftheads.train.report import Report
from draftheads.train.run import Run
from draftheads.train.run_folder import as_json, chat_template_text
from draftheads.train.schedule import JointSchedule
from draftheads.train.trainer import Steps, computes_in_bf16, make_optimizer
from draftheads.train.training_data import TrainingData, plan_training
from draftheads.utils.files import atomic_directory, write_atomic


@dataclass(frozen=True)
class JointReport(Report):
    """The heads as measured with the tuned model, and how far the model moved."""

    movement: Movement

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Self:
        """The report in the content of a ``metrics.json``."""
        return super().of({**metrics, "movement": Movement(**metrics["movement"])})


class JointRun(Run):
    """Trains a LoRA adapter in the model together with heads that read the model's live hidden states."""

    head_folder = HEAD_FOLDER
    report_class = JointReport

    adapter: Adapter | None = None
    tuned: TunedModel
    learner: JointLearner

    def check_packages(self) -> None:
        super().check_packages()
        require_peft()

    def load_target(self) -> TargetModel:
        """The model; in bf16 if training computes in bf16."""
        hardware = self.options.hardware
        return TargetModel.load(
            self.options.model,
            dtype=torch.bfloat16 if computes_in_bf16(hardware) else torch.float32,
            four_bit=hardware.four_bit,
            chat_template=chat_template_text(self.options),
            check=None if self.options.tuning.head else partial(check_sizes, self.options),
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
        if is_tied(self.target.model) and not self.options.adapter.lora_targets:
            self.progress.stage("the lm_head is not adapted: its matrix is the embedding's, too")
        self.progress.stage("reading data")
        chats, head = self.options.chats, self.options.tuning.head
        limits: dict[str, Any] = {"max_length": chats.max_length, "max_tokens": chats.max_tokens}
        texts = load_texts(self.target, chats.data, **limits, left_out=self.left_out)
        check_known(texts, self.target.vocab_size)
        layers = read_head(head).config.hidden_layers if head else layers_read(self.options.heads, self.target)
        return self.claim(plan_training(LiveStore(self.target, texts, layers), self.options))

    def make_head(self) -> DraftHead:
        """The head of ``--head`` in fp32, or a new one."""
        path = self.options.tuning.head
        if path is None:
            return super().make_head()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BaseModelWarning)  # it advises to train the head further, as this run does
            return load_head(path, self.target, dtype=torch.float32).requires_grad_(requires_grad=True)

    def module(self) -> JointLearner:
        options, target, lora = self.options, self.target, self.options.adapter
        torch.manual_seed(options.schedule.seed)
        self.adapter = Adapter.attach(
            target.model,
            rank=lora.lora_rank,
            alpha=lora.lora_alpha,
            dropout=lora.lora_dropout,
            targets=lora.lora_targets,
        )
        self.tuned = TunedModel(target.model, target.tokenizer, f"{target.model_id} (tuned)", target.chat_template)
        learner = head_learner(options.objective, self.head, in_float32(target.weights))
        self.learner = JointLearner(learner, self.tuned, self.adapter, backbone_loss=options.tuning.backbone_loss)
        return self.learner

    def optimizer(self) -> Optimizer:
        """Heads (group 0) and adapter (group 1), each with its learning rate."""
        rate = self.options.schedule.learning_rate
        heads = {"params": list(self.head.parameters()), "lr": rate * self.options.tuning.head_rate_factor}
        assert self.adapter is not None
        return make_optimizer(self.options, [heads, {"params": self.adapter.parameters}])

    def steps(self) -> Steps:
        """The schedule of two stages. In the first one the adapter has no gradients, so it does not change."""
        tuning, rates, num_steps = self.options.tuning, self.options.schedule, self.data.num_steps
        schedule = JointSchedule(
            num_steps=num_steps,
            num_head_steps=int(tuning.heads_first * num_steps),
            peak=tuning.peak_head_weight,
            rise=tuning.head_weight_rise,
            warmup=rates.warmup,
            final=rates.final_learning_rate,
        )

        def inputs(step: int) -> dict[str, Any]:
            return {"head_weight": schedule.head_weight(step), "only_heads": schedule.only_heads(step)}

        return Steps([schedule.head_rate, schedule.model_rate], inputs, all_are_trained=False)

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
        return head_learner(self.options.objective, self.head, weights)

    @property
    def decoding_model(self) -> TargetModel:
        return self.tuned

    def save(self, report: Report, profile: AcceptanceProfile) -> JointReport:
        """Also the adapter, and how far the model moved."""
        assert self.adapter is not None
        out = self.folder.path
        movement = measure_movement(self.tuned, self.adapter, self.data.store, self.data.held_out)
        whole = JointReport(**vars(report), movement=movement)
        write_atomic(out / "movement.json", as_json({**asdict(movement), **self.folder.made_from(self.start_head)}))
        with atomic_directory(out / ADAPTER_FOLDER, replace=True) as staged:
            self.adapter.save(staged)
            base = {"model_id": self.target.model_id, "fingerprints": asdict(self.target.fingerprints)}
            (staged / BASE_FILE).write_bytes(as_json({"format_version": FORMAT_VERSION, "base": base}))
        super().save(whole, profile)
        return whole
