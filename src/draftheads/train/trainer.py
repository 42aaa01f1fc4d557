"""Training steps: the Hugging Face Trainer with our batches, our losses and our log.

Only this file and ``joint/run.py`` know the Trainer. It has optimizer, clipping, checkpoints and resuming.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from draftheads.data.batches import PlannedTexts
from draftheads.errors import NonFiniteLoss, StorageError, TrainingError
from draftheads.models.pretrained import default_device, default_dtype
from draftheads.train import processes
from draftheads.train.muon import MuonAdamW
from draftheads.train.options import HardwareOptions, RunOptions
from draftheads.train.report import mean_loss
from draftheads.train.run_folder import RunFolder
from draftheads.train.schedule import Stage, staged_rate
from draftheads.utils.files import write_atomic
from draftheads.utils.progress import Progress

Rate = Callable[[int], float]  # by step, the part of the highest learning rate
Validate = Callable[[], dict[str, Any]]  # measures the head as it is now


class TrainingInterrupted(TrainingError):
    """Ctrl-C stopped a run that can be resumed."""


def fit(
    learner: nn.Module,
    batches: PlannedTexts,
    folder: RunFolder,
    *,
    stages: Sequence[Stage],
    epoch_ends: frozenset[int],
    progress: Progress,
    validate: Validate,
    trainer_class: "Callable[..., HeadTrainer]",
) -> int:
    """Trains a learner in place on all batches; with ``--resume`` from the last checkpoint.

    ``validate`` is called before the first step, every ``eval_steps``, at ``epoch_ends`` and after the last step. Its
    results go to ``validation.jsonl``. Of several processes only the first one validates and writes.

    Returns:
        The number of steps that were done before.
    """
    folder.drop_incomplete_checkpoints()
    checkpoint, options = folder.checkpoint(), folder.options
    first_step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    writer = None
    if options.report.tensorboard and processes.is_first():
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        # removes what an earlier part of the run showed after its last checkpoint
        writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=first_step + 1)
    log, validations = (
        StepLog(folder.path / f"{name}.jsonl", keep_until=first_step, writer=writer) for name in ("log", "validation")
    )
    with _interruptible() as interrupted:
        trainer = trainer_class(
            rates=partial(
                staged_rate, stages=stages, warmup=options.schedule.warmup, final=options.schedule.final_learning_rate
            ),
            model=learner,
            args=_arguments(options, folder.checkpoints),
            train_dataset=batches,
            data_collator=itemgetter(0),
            optimizer_cls_and_kwargs=_own_optimizer(options),
        )
        trainer.remove_callback(PrinterCallback)
        eval_steps = options.report.eval_steps
        trainer.add_callback(
            _Callback(trainer, log, validations, validate, eval_steps, epoch_ends, progress, interrupted)
        )
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
                raise
            folder.drop_incomplete_checkpoints()
            raise StorageError(
                f"a checkpoint cannot be saved in {folder.checkpoints}: {error}; earlier ones are kept"
            ) from error
    done, total = trainer.state.global_step, trainer.state.max_steps
    if interrupted.is_set() and done < total:
        raise TrainingInterrupted(
            f"stopped after step {done} of {total}; a checkpoint is in {folder.checkpoints}: "
            "the same command with --resume continues from there"
        )
    return first_step


def computes_in_bf16(options: HardwareOptions) -> bool:
    """Whether products are rounded to bf16: as given, or if the device computes in bf16."""
    if options.precision == "auto":
        return default_dtype(default_device()) == torch.bfloat16
    return options.precision == "bf16"


class StepLog:
    """``log.jsonl``: one JSON object per line, each written at once, so that a killed run leaves whole lines.

    Only the first process writes it. TensorBoard shows the same, if there is a writer.
    """

    def __init__(self, path: Path, *, keep_until: int, writer: Any = None) -> None:
        self.path = path
        self.writer = writer
        if not processes.is_first():
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if keep_until and _step(line) <= keep_until]
        write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def add(self, record: dict[str, Any]) -> None:
        if not processes.is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.writer is not None:
            for curve, number in _curves(self.path.stem, record):
                self.writer.add_scalar(curve, number, record["step"])
            self.writer.flush()


def _curves(name: str, record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A point for the curve of each number in a line of the log, and of each head."""
    for key, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}/{key}/{number}", part) for number, part in enumerate(value, 1))
        elif key != "step":
            yield f"{name}/{key}", value


def _step(line: str) -> float:
    """The step of a line of the log; infinite if a full disk or a power cut left only a part of the line."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


class HeadTrainer(Trainer):
    """Takes the batches of the plan in their order, checks losses, and averages what the learner reports."""

    def __init__(self, *, rates: Rate | list[Rate], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rates = rates  # of all groups of parameters, or one per group
        self._reported: dict[str, list[Tensor]] = {}  # by name, since they were last taken

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.create_optimizer(), self.rates)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The learner's loss."""
        documents = inputs.pop("documents")
        output = model(**inputs)
        loss: Tensor = output["loss"]
        if not torch.isfinite(loss):
            sources = self.train_dataset.store.sources  # type: ignore[union-attr]
            texts = ", ".join(sources[i] for i in documents.tolist())
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, on {texts}: check these texts, "
                "or lower --learning-rate"
            )
        for name in output.keys() - {"loss"}:
            self._reported.setdefault(name, []).append(output[name].detach())
        return loss

    def take_means(self) -> dict[str, Any]:
        """Means over all processes of what learners reported since the last call: ``head_losses`` and other values."""
        means = {
            name: self.accelerator.reduce(torch.stack(values).mean(0), "mean").tolist()
            for name, values in sorted(self._reported.items())
        }
        self._reported.clear()
        return means


@dataclass(eq=False)
class _Callback(TrainerCallback):
    """Logs, measures, shows progress, and stops with a checkpoint after Ctrl-C."""

    trainer: HeadTrainer
    log: StepLog
    validations: StepLog
    validate: Validate
    eval_steps: int  # between two measurements; 0 for none
    epoch_ends: frozenset[int]  # steps after which it is measured, too
    progress: Progress
    interrupted: threading.Event
    losses: dict[str, str] = field(default_factory=dict)  # what to show of the last ones, each the mean of the heads

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # a checkpoint has the --save-steps and --log-steps of the run that wrote it; this run may have others
        state.compute_steps(args, state.max_steps)
        if state.global_step == 0:
            self._validate(state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._validate(state)
        names = ("loss", "held-out loss")
        note = ", ".join(f"{name} {self.losses[name]}" for name in names if name in self.losses)
        self.progress.progress(state.global_step, state.max_steps, note)
        if processes.any_of(self.interrupted.is_set()):
            self.interrupted.set()
            control.should_save = control.should_training_stop = True
        # a resumed run does not know losses from before its checkpoint, so no line of the log may need them
        control.should_log |= control.should_save

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            record = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm")}
            means = self.trainer.take_means()
            self.losses["loss"] = f"{mean_loss(means['head_losses']):.3f}"
            self.log.add({"step": state.global_step, **record, **means})

    def _validate(self, state: TrainerState) -> None:
        step = state.global_step
        is_due = self.eval_steps and (step % self.eval_steps == 0 or step in {*self.epoch_ends, state.max_steps})
        if processes.is_first() and is_due:
            measured = self.validate()
            self.validations.add({"step": step, **measured})
            self.losses["held-out loss"] = f"{mean_loss(measured['losses']):.3f} at step {step}"


def _own_optimizer(options: RunOptions) -> tuple[Any, dict[str, Any]] | None:
    """What makes the optimizer, and its arguments; None for those that the Trainer makes by name."""
    adamw = options.optimizer
    if adamw.optimizer != "muon":
        return None
    rate, decay = options.schedule.learning_rate, adamw.weight_decay
    arguments = {"lr": rate, "weight_decay": decay, "betas": adamw.betas, "fused": True}
    # the Trainer calls the first part, and the result with the learner and the arguments
    return lambda: lambda learner, **given: MuonAdamW(learner.head, **given), arguments


def _arguments(options: RunOptions, output: Path) -> TrainingArguments:
    schedule, adamw, report = options.schedule, options.optimizer, options.report
    use_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(output),
        num_train_epochs=1,  # the plan holds all epochs
        per_device_train_batch_size=1,  # one batch of the plan
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.learning_rate,
        weight_decay=adamw.weight_decay,
        max_grad_norm=adamw.max_grad_norm,
        adam_beta1=adamw.betas[0],
        adam_beta2=adamw.betas[1],
        optim="adamw_bnb_8bit" if adamw.optimizer == "adamw-8bit" else "adamw_torch_fused",
        logging_steps=report.log_steps,
        logging_nan_inf_filter=False,
        save_steps=report.save_steps,
        save_total_limit=2,
        bf16=computes_in_bf16(options.hardware),
        seed=schedule.seed,
        data_seed=schedule.seed,
        use_cpu=use_cpu,
        dataloader_num_workers=0,
        dataloader_pin_memory=not use_cpu,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        label_names=[],
        disable_tqdm=True,
        report_to="none",
        log_level="error",
    )


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, the second interrupts at once. Only the main thread receives signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
