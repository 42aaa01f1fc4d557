"""Medusa-2: chats to an adapter and heads that are tuned together, measured and saved.

The output folder also holds ``adapter/`` (peft's format, and ``base.json``, which names the model that it is for), and
the head in ``head/``; ``best/`` has the same two folders.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.data.batches import PlannedTexts
from draftheads.data.features import LiveStore
from draftheads.errors import CheckpointCorrupt
from draftheads.models.adapter import FORMAT_VERSION, is_tied, require_peft
from draftheads.models.model import TargetModel
from draftheads.models.model_names import ADAPTER_FOLDER, BASE_FILE
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.train.learner import Learner
from draftheads.train.losses import Labels, Predictions, head_losses, precedes_answer, teacher_loss, text_loss
from draftheads.train.new_head import in_float32, layers_read
from draftheads.train.report import Movement, Report
from draftheads.train.run_folder import as_json
from draftheads.train.trainer import Steps, computes_in_bf16, make_optimizer
from draftheads.train.training import Run
from draftheads.train.training_data import TrainingData, plan_training, read_texts, rise_and_cosine
from draftheads.train.tuned_model import Adapter, AllWeights, TunedModel, measure_movement
from draftheads.utils.counts import counted
from draftheads.utils.files import atomic_directory

BackboneLoss = Literal["text", "original"]


class JointLearner(nn.Module):
    """Heads and model in one module: a batch of tokens goes in, L = L_LM + λ0 Σ λ_k L_k comes out.

    λ_k = decay^k, k from 1 (Medusa, equations 1 and 2). The heads read the live hidden states of the backbone, which is
    the model under the heads, as in the paper. The state dict has only what is trained: the head, and the adapter or
    all weights.
    """

    def __init__(
        self, learner: Learner, tuned: TunedModel, adapter: Adapter | AllWeights, *, backbone_loss: BackboneLoss
    ) -> None:
        super().__init__()
        self.learner = learner
        self.backbone = tuned.model
        self.tuned = tuned
        self.adapter = adapter
        self.backbone_loss = backbone_loss
        config = learner.head.config
        self.vocab = learner.head.to_target_ids(torch.arange(config.num_draft_tokens, device=tuned.device))  # (V',)

    def forward(
        self,
        token_ids: Tensor,
        loss_mask: Tensor,
        *,
        lengths: Tensor | None = None,
        numbers: Tensor | None = None,
        places: Tensor | None = None,
        head_weight: float = 1.0,
        only_heads: bool = False,
    ) -> dict[str, Tensor]:
        """Losses of a batch; other results and errors as of :meth:`~draftheads.train.learner.Learner.forward`.

        Args:
            token_ids: (B, T) int64.
            loss_mask: (B, T) bool, False on padding.
            lengths: (B,) tokens of each text.
            numbers: (K+1,) of the whole step, the sum of those of :meth:`count`; this batch's when left out.
            places: as of :meth:`count`.
            head_weight: λ0.
            only_heads: the backbone is the original model and is not trained.

        Returns:
            Also ``backbone_loss`` without gradients, unless ``only_heads``.
        """
        head_weight = head_weight * self.learner.depth_decay  # λ0 λ_1: the learner's first head weighs 1
        if numbers is None:
            places, numbers = map(self.count(token_ids, loss_mask).get, ("places", "numbers"))
        assert numbers is not None, "a count has numbers"
        given = {"lengths": lengths, "numbers": numbers[:-1], "places": places}
        layers = self.learner.head.hidden_layers
        if only_heads:
            with torch.no_grad(), self.adapter.off():
                hidden = self.tuned.live_states(token_ids, layers)
            losses = self.learner(hidden, token_ids, loss_mask, **given)
            return {**losses, "loss": head_weight * losses["loss"]}
        hidden = self.tuned.live_states(token_ids, layers)  # (B, T, D or (n+1)·D), with gradients
        backbone_loss = self._backbone(self.learner.head.split(hidden)[1], token_ids, loss_mask, numbers[-1:])
        if isinstance(self.adapter, AllWeights):
            self.learner.follow(self.tuned.weights)
        update = self.tuned.update
        rows = update.rows(self.vocab) if update else None
        losses = self.learner(hidden, token_ids, loss_mask, rows, **given)
        loss = backbone_loss + head_weight * losses["loss"]
        return {**losses, "loss": loss, "backbone_loss": backbone_loss.detach()}

    def count(self, token_ids: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
        """As :meth:`draftheads.train.learner.Learner.count`; the last number is of tokens that the backbone learns."""
        counts = self.learner.count(token_ids, loss_mask)
        own = loss_mask[:, 1:].sum()  # as of precedes_answer
        return {**counts, "numbers": torch.cat([counts["numbers"], own[None]])}

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own signature
        """Only the adapter has dropout: with its own, the backbone would not be the model that decodes."""
        super().train(mode)
        self.backbone.eval()
        self.adapter.set_dropout(on=mode)
        return self

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """The tensors of the head, and what is trained of the model."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole: dict[str, Any] = super().state_dict(*arguments, **options)
        return {name: value for name, value in whole.items() if name.startswith("learner.") or name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's own signature
        """Loads what :meth:`state_dict` returned; the backbone's own tensors are not in it."""
        if differing := sorted(self.state_dict().keys() ^ state_dict.keys()):
            raise CheckpointCorrupt(
                f"a checkpoint of another run, or a damaged one: {differing[0]} is missing or unexpected"
            )
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys.clear()
        return result

    def _backbone(self, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor, numbers: Tensor) -> Tensor:
        """L_LM per assistant token: cross-entropy with the text, or KL(original || tuned) (section 3.3.2).

        The lm_head predicts x_{p+1} from h_p, as head 0 predicts x_{q+1} from h_{q-1}: it is head 0 at q = p + 1.
        KL is the cross-entropy with the distributions of the model with its adapter off, less their entropies.
        """
        flat = token_ids.flatten()  # (S,), S = B·T flat positions
        positions = precedes_answer(loss_mask)  # (P,)
        of_text = self.backbone_loss == "text"
        entropies: list[Tensor] = []  # of each chunk
        if not of_text:
            with torch.no_grad(), self.adapter.off():
                original = self.tuned.live_states(token_ids).flatten(0, 1)  # (S, D)

        @torch.no_grad()
        def labels(q: Tensor) -> Labels:
            if of_text:
                return Labels(token_ids=flat[q])
            with self.adapter.off():
                log_probs = self.tuned.logits(original[q - 1]).float().log_softmax(-1)
            probs = log_probs.exp()
            entropies.append(-(probs * log_probs).sum())
            return Labels(probs)

        loss, _ = head_losses(
            hidden.flatten(0, 1)[None],  # (1, S, D)
            Predictions(positions + 1, torch.ones_like(positions, dtype=torch.bool)[None]),
            labels=labels,
            row_loss=text_loss if of_text else teacher_loss,
            logits=lambda features, _: self.tuned.logits(features),
            weights=torch.ones(1),
            numbers=numbers,
            parameters=[parameter for parameter in self.tuned.lm_head.parameters() if parameter.requires_grad],
        )
        return loss if of_text else loss - sum(entropies) / numbers[0].clamp_min(1)


@dataclass(frozen=True)
class Tuning:
    """How heads and model are trained together (Medusa, sections 3.2.2, 4.1 and 4.2)."""

    towards: BackboneLoss  # what the model learns: the text's tokens, or its own distribution
    head_weight: float  # λ0, of the heads' loss relative to the model's
    rises: bool  # λ0 rises along a quarter sine while both are trained
    heads_first: float  # part of the steps in which only the heads are trained; none where they are trained already
    head_rate_factor: float  # of the heads' learning rate, relative to the model's


TUNINGS = {
    "text": Tuning("text", 0.2, rises=False, heads_first=0.5, head_rate_factor=4.0),
    "original": Tuning("original", 0.01, rises=True, heads_first=0.0, head_rate_factor=4.0),
    "direct": Tuning("text", 1.0, rises=False, heads_first=0.0, head_rate_factor=1.0),  # of table 2
    # all weights have a rate of a tenth or less of an adapter's, heads the same
    "full": Tuning("text", 0.2, rises=False, heads_first=0.5, head_rate_factor=50.0),
}


class JointRun(Run):
    """Trains a LoRA adapter in the model together with heads that read the model's live hidden states."""

    head_folder = HEAD_FOLDER

    adapter: Any = None  # an Adapter, as soon as it is in the model, or AllWeights
    tuned: TunedModel
    joint: JointLearner

    @property
    def tuning(self) -> Tuning:
        return TUNINGS[str(self.options.joint)]

    def check_packages(self) -> None:
        super().check_packages()
        require_peft()

    def has_states(self) -> bool:
        return False  # they change with the model

    def dtype(self, config: Any) -> torch.dtype:
        return torch.bfloat16 if computes_in_bf16(self.options) else torch.float32

    def run_for(self, target: TargetModel) -> Any:
        """As of every run; the model gets its own layers back."""
        try:
            return super().run_for(target)
        finally:
            if self.adapter is not None:
                self.adapter.remove()

    def read_data(self) -> TrainingData:
        """Chats; the model changes, so hidden states are not stored."""
        self.progress.stage("reading data")
        texts = read_texts(self.target, self.options, self.left_out, self.progress)
        self.scripts = texts.facts.get("scripts", {})
        layers = layers_read(self.options, self.target)
        return self.claim(plan_training(LiveStore(self.target, texts, layers), self.options))

    def module(self) -> JointLearner:
        target = self.target
        torch.manual_seed(self.options.seed)
        self.adapter = self.make_adapter()
        self.tuned = TunedModel(target.model, target.tokenizer, f"{target.model_id} (tuned)", target.chat_template)
        self.learner = self.learner_on(in_float32(target.weights))
        self.joint = JointLearner(self.learner, self.tuned, self.adapter, backbone_loss=self.tuning.towards)
        return self.joint

    def make_adapter(self) -> Adapter | AllWeights:
        """What is trained of the model; says what is not."""
        if is_tied(self.target.model):
            self.progress.stage("the lm_head is not adapted: its matrix is the embedding's, too")
        adapter = Adapter(self.target.model)
        if left_out := adapter.left_out:
            names, number = ", ".join(sorted(left_out)), sum(left_out.values())
            self.progress.stage(f"not adapted, as they are no linear layers: {names} ({counted(number, 'parameter')})")
        return adapter

    def optimizer(self) -> Optimizer:
        """Heads (group 0) and model (group 1), each with its learning rate."""
        rate = self.options.learning_rate * self.tuning.head_rate_factor
        heads = {"params": list(self.head.parameters()), "lr": rate}
        return make_optimizer(self.options, [heads, {"params": self.adapter.parameters}])

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
        self.joint.train()
        return line

    def measured_learner(self) -> Learner:
        """The head on the tuned model: its hidden states, and its lm_head if the head shares it."""
        self.joint.eval()
        weights = in_float32(self.tuned.weights)
        self.head.bind(weights)
        return self.learner_on(weights)

    @property
    def decoding_model(self) -> TargetModel:
        return self.tuned

    def save(self, report: Report, profile: AcceptanceProfile, folder: Path) -> Report:
        """Also what was trained of the model, and how far it moved."""
        movement = self.movement()
        self.write_model(folder)
        return super().save(replace(report, movement=movement), profile, folder)

    def movement(self) -> Movement:
        texts = self.data.store, self.data.held_out
        return measure_movement(self.tuned, self.tuned, *texts, off=self.adapter.off)

    def write_model(self, folder: Path) -> None:
        with atomic_directory(folder / ADAPTER_FOLDER, replace=True) as staged:
            self.adapter.save(staged)
            base = {"model_id": self.target.model_id, "fingerprints": asdict(self.target.fingerprints)}
            (staged / BASE_FILE).write_bytes(as_json({"format_version": FORMAT_VERSION, "base": base}))


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
