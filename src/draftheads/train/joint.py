"""A whole Medusa-2 run: chats to an adapter and heads that were tuned together, measured and saved.

Knows the order of the work and the output folder; shows nothing: progress goes to a :class:`Progress`.

The output folder holds ``adapter/`` (peft's format, and ``base.json``: which model it is for), ``head/`` (see
``checkpoint``), ``movement.json``, ``metrics.json`` and ``log.jsonl``; while the run is not complete ``run.json`` and
``checkpoints/``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftheads.acceptance_profile import AcceptanceProfile
from draftheads.chat_template import read_template
from draftheads.checkpoint import load_head, save_head
from draftheads.data.batches import PlannedTexts
from draftheads.data.extract import load_texts
from draftheads.data.live import LiveStore
from draftheads.data.records import check_readable
from draftheads.draft import TargetWeights
from draftheads.files import atomic_directory, write_atomic
from draftheads.heads.base import DraftHead
from draftheads.models.fingerprint import Fingerprints
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import default_device
from draftheads.progress import Progress
from draftheads.train import processes
from draftheads.train.card import model_card
from draftheads.train.folder import (
    alone_in,
    already_found,
    as_json,
    check_out,
    check_place,
    how_it_was_made,
    remember,
    say_where_it_starts,
    tidy_up,
)
from draftheads.train.joint_learner import JointLearner
from draftheads.train.joint_options import JointOptions
from draftheads.train.joint_schedule import JointSchedule
from draftheads.train.joint_trainer import JointTrainer
from draftheads.train.learner import Learner
from draftheads.train.lora import Adapter, TunedModel, require_peft
from draftheads.train.material import Material, arrange
from draftheads.train.measure import Measurement, measure
from draftheads.train.movement import Movement, measure_movement
from draftheads.train.new_head import in_float32, new_head, read_start
from draftheads.train.report import Report
from draftheads.train.run import Speedometer, acceptance, chosen_tree, in_between, new_learner, report_on
from draftheads.train.start import Start
from draftheads.train.trainer import computes_in_bf16, fit

ADAPTER_FOLDER, HEAD_FOLDER, BASE_FILE = "adapter", "head", "base.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class JointReport:
    """What a run found; ``metrics.json`` holds the heads' part and, under ``movement``, the other."""

    heads: Report  # as measured with the tuned model
    movement: Movement  # of the tuned model


def train_jointly(options: JointOptions, reporter: Progress) -> JointReport | None:
    """Tunes a model and its heads as the options say and leaves adapter and heads in ``options.out``.

    Returns:
        What was found; None in every process but the first, where there are several and the run was not complete.

    Raises:
        DraftHeadsError: bad data or settings, a missing package, a loss that is not finite, a full disk, Ctrl-C.
    """
    check_place(options)
    with alone_in(options.out):
        if metrics := already_found(options, options.out / HEAD_FOLDER):
            reporter.stage(f"{options.out} is complete already: nothing is left to do")
            if processes.is_first():
                _tidy_up(options)
            return JointReport(Report.of(metrics), Movement(**metrics["movement"]))
        check_out(options, options.out / HEAD_FOLDER)
        check_readable((*options.data, *options.text))
        processes.wait()  # nobody writes before all have looked
        require_peft()
        say_where_it_starts(options, reporter)
        reporter.stage(f"loading {options.model}")
        dtype = torch.bfloat16 if computes_in_bf16(options, default_device().type) else torch.float32
        target = TargetModel.load(
            options.model, dtype=dtype, four_bit=options.four_bit, chat_template=read_template(options.chat_template)
        )
        return train_jointly_for(target, options, reporter)


def train_jointly_for(target: TargetModel, options: JointOptions, reporter: Progress) -> JointReport | None:
    """:func:`train_jointly` for a loaded model; its weights stay as they are, the adapter is gone at the end."""
    start = read_start(options, target, reporter)
    reporter.stage("reading data")
    texts = load_texts(target, options.data, max_length=options.max_length, max_tokens=options.max_tokens)
    store = LiveStore(target, texts)
    material = arrange(store, options)
    head = _starting_head(target, options, store, material.training, start)
    torch.manual_seed(options.seed)
    adapter = Adapter.attach(
        target.model,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        targets=options.lora_targets,
    )
    try:
        tuned = TunedModel(target.model, target.tokenizer, f"{target.model_id} (tuned)", target.chat_template)
        return _Run(options, target, tuned, adapter, head, material, store, reporter, start).go()
    finally:
        adapter.remove()


@dataclass(frozen=True)
class _Run:
    """What the parts of a run work on."""

    options: JointOptions
    target: TargetModel  # as it was; its modules are the tuned one's
    tuned: TunedModel
    adapter: Adapter
    head: DraftHead
    material: Material
    store: LiveStore  # the material's: of the target
    reporter: Progress
    start: Start | None

    def go(self) -> JointReport | None:
        """Trains; in the first process measures and saves."""
        training, held_out = self.material.training, self.material.held_out
        speed = self._train(training, held_out)
        if not processes.is_first():
            processes.wait()
            return None
        self.reporter.stage(f"measuring on {len(held_out)} texts kept apart")
        movement = measure_movement(self.tuned, self.adapter, self.store, held_out)
        found = self._measure(held_out)
        heads = report_on(
            self.head,
            found,
            tree=chosen_tree(found, self.options),
            model_id=self.tuned.model_id,
            num_training_texts=len(training),
            num_held_out_texts=len(held_out),
            num_steps=self.material.num_steps,
            seconds=speed.seconds,
            tokens_per_second=speed.tokens_per_second,
        )
        profile = acceptance(
            self.tuned,
            self.head,
            material=self.material,
            found=found,
            options=self.options,
            reporter=self.reporter,
        )
        self._save(JointReport(heads, movement), profile)
        processes.wait()
        return JointReport(heads, movement)

    def _train(self, training: list[int], held_out: list[int]) -> Speedometer:
        """Fits adapter and head."""
        options, num_steps = self.options, self.material.num_steps
        remember(options, self.material, model=self.target.model_id, start=self.start)
        schedule = JointSchedule(
            num_steps=num_steps,
            num_head_steps=int(options.heads_first * num_steps),
            peak=options.peak_head_weight,
            rise=options.head_weight_rise,
            warmup=options.warmup,
            final=options.final_learning_rate,
        )
        joint = JointLearner(
            self._learner(self.target.weights), self.tuned, self.adapter, backbone_loss=options.backbone_loss
        )
        self.reporter.stage(f"training {self.head.config.method} and its backbone on {len(training)} texts")
        trainer_class = partial(JointTrainer, schedule=schedule, head_rate_factor=options.head_rate_factor)
        batches = PlannedTexts(self.store, self.material.plan)
        speed = Speedometer(self.material.tokens_per_step)
        some = held_out[: options.eval_texts]

        def validate() -> dict[str, Any]:
            joint.eval()
            found = in_between(self._measure(some), options)
            self.head.bind(in_float32(self.target.weights))
            joint.train()
            return found

        fit(
            joint,
            batches,
            options,
            stages=self.material.stages,
            on_step=speed.counting(self.reporter),
            validate=validate,
            trainer_class=trainer_class,
        )
        joint.eval()
        return speed

    def _measure(self, held_out: list[int]) -> Measurement:
        """The heads on the tuned model: its hidden states, its lm_head where they share it."""
        weights = in_float32(self.tuned.weights)
        self.head.bind(weights)
        return measure(self._learner(weights), self.store, held_out, batch_tokens=self.options.batch_tokens)

    def _learner(self, weights: TargetWeights) -> Learner:
        options = self.options
        return new_learner(options, self.head, in_float32(weights))

    def _save(self, report: JointReport, profile: AcceptanceProfile) -> None:
        """The head last of all: where it is, the run is complete."""
        options, out = self.options, self.options.out
        made = how_it_was_made(options, self.start)
        write_atomic(out / "movement.json", as_json({**asdict(report.movement), **made}))
        write_atomic(
            out / "metrics.json", as_json({**asdict(report.heads), "movement": asdict(report.movement), **made})
        )
        with atomic_directory(out / ADAPTER_FOLDER, replace=True) as staged:
            self.adapter.save(staged)
            base = {"model_id": self.target.model_id, "fingerprints": asdict(Fingerprints.of(self.target))}
            (staged / BASE_FILE).write_bytes(as_json({"format_version": FORMAT_VERSION, "base": base}))
        card = model_card(report.heads, made["options"], made["provenance"])
        save_head(self.head, out / HEAD_FOLDER, base=self.tuned, card=card, profile=profile)
        _tidy_up(options)


def _tidy_up(options: JointOptions) -> None:
    tidy_up(options, "movement.json", ADAPTER_FOLDER, HEAD_FOLDER)


def _starting_head(
    target: TargetModel, options: JointOptions, store: LiveStore, training: Sequence[int], start: Start | None
) -> DraftHead:
    """The head that ``--head`` names, in fp32, or a new one."""
    if options.head is not None:
        return load_head(Path(options.head), target, dtype=torch.float32).requires_grad_(requires_grad=True)
    weights = in_float32(target.weights)
    return new_head(options, weights, store, training, target.eos_ids, layer_sizes=target.layer_sizes, start=start)
