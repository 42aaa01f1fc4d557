"""Fitting a head: the Hugging Face Trainer with our batches, our losses and our log.

Knows the Trainer, as the only file here. It brings optimiser, schedule, clipping, checkpoints and resuming.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.errors import NonFiniteLoss, TrainingError
from draftheads.target.pretrained import default_dtype
from draftheads.train.options import TrainOptions

OnStep = Callable[[int, int, float | None], None]  # steps done, steps in all, the last logged loss


class TrainingInterrupted(TrainingError):
    """Ctrl-C stopped a run that can go on."""


def fit(
    learner: nn.Module,
    batches: PlannedBatches | PlannedTexts,
    options: TrainOptions,
    *,
    on_step: OnStep,
    trainer_class: "Callable[..., HeadTrainer] | None" = None,
) -> None:
    """Trains a learner in place over all batches; from the last checkpoint on with ``--resume``.

    Raises:
        NonFiniteLoss: the loss became NaN or infinite; names the step and the documents of its batch.
        TrainingInterrupted: Ctrl-C; a checkpoint was saved.
    """
    folder = options.out / "checkpoints"
    checkpoint = find_checkpoint(options.out) if options.resume else None
    first_step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    with _interruptible() as interrupted:
        callback = _Callback(StepLog(options.out / "log.jsonl", keep_until=first_step), on_step, interrupted)
        trainer = (trainer_class or HeadTrainer)(
            model=learner,
            args=_arguments(options, folder, len(batches)),
            train_dataset=batches,
            data_collator=_only,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        callback.take_means = trainer.take_means
        trainer.train(resume_from_checkpoint=checkpoint)
    done, total = trainer.state.global_step, trainer.state.max_steps
    if interrupted.is_set() and done < total:
        raise TrainingInterrupted(
            f"stopped after step {done} of {total}; a checkpoint is in {folder}: "
            "the same command with --resume goes on from there"
        )


def find_checkpoint(out: Path) -> str | None:
    """The newest checkpoint of a run that is not complete, if it left one."""
    folder = out / "checkpoints"
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


class StepLog:
    """``log.jsonl``: a JSON object a line, each written at once, so that a killed run leaves whole lines."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= keep_until]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        """Appends a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class HeadTrainer(Trainer):
    """Batches come ready from the plan, in its order; losses are checked, and what the learner reports is averaged."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reported: dict[str, list[Tensor]] = {}  # by name, since they were last taken

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        batches: PlannedBatches | PlannedTexts = self.train_dataset if train_dataset is None else train_dataset  # type: ignore[assignment]
        return SequentialSampler(batches)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The learner's loss; one that is no number ends the run."""
        documents = inputs.pop("documents")
        output = model(**inputs)
        loss: Tensor = output["loss"]
        if not torch.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, on the texts with the "
                f"numbers {documents.tolist()} in the data: look at them, or lower --learning-rate"
            )
        for name in output.keys() - {"loss"}:
            self._reported.setdefault(name, []).append(output[name].detach())
        return loss

    def take_means(self) -> dict[str, Any]:
        """Means of what the learner reported since the last call: ``head_losses``, and what else it names."""
        means = {name: torch.stack(values).mean(0).tolist() for name, values in sorted(self._reported.items())}
        self._reported.clear()
        return means


class _Callback(TrainerCallback):
    """Log lines, progress, and a stop with a checkpoint."""

    def __init__(self, log: StepLog, on_step: OnStep, interrupted: threading.Event) -> None:
        self.log = log
        self.on_step = on_step
        self.interrupted = interrupted
        self.loss: float | None = None
        self.take_means: Callable[[], dict[str, Any]] = dict

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.on_step(state.global_step, state.max_steps, self.loss)
        if self.interrupted.is_set():
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            record = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm")}
            self.log.add({"step": state.global_step, **record, **self.take_means()})


def _arguments(options: TrainOptions, folder: Path, num_steps: int) -> TrainingArguments:
    use_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # the plan holds all epochs
        per_device_train_batch_size=1,  # one batch of the plan
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=int(options.warmup * num_steps),
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        optim="adamw_torch_fused",
        logging_steps=options.log_steps,
        logging_nan_inf_filter=False,
        save_steps=options.save_steps,
        save_total_limit=2,
        bf16=computes_in_bf16(options, "cpu" if use_cpu else "cuda"),
        seed=options.seed,
        data_seed=options.seed,
        use_cpu=use_cpu,
        dataloader_num_workers=0,
        dataloader_pin_memory=not use_cpu,
        remove_unused_columns=False,
        label_names=[],
        disable_tqdm=True,
        report_to="none",
        log_level="error",
    )


def computes_in_bf16(options: TrainOptions, device: str) -> bool:
    """Whether a run's products are rounded to bf16: as asked, or where the device multiplies bf16 natively."""
    if options.precision == "auto":
        return default_dtype(device) == torch.bfloat16
    return options.precision == "bf16"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, the second interrupts at once. Only the main thread hears signals."""
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


def _only(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return dict(items[0])
