"""Fitting a head: the Hugging Face Trainer with our batches, our losses and our log.

Knows the Trainer, as the only file here. It brings optimiser, schedule, clipping, checkpoints and resuming.
"""

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.trainer_callback import PrinterCallback

from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.errors import NonFiniteLoss, StorageError, TrainingError
from draftheads.files import write_atomic
from draftheads.target.pretrained import default_dtype
from draftheads.train.options import TrainOptions

OnStep = Callable[[int, int, float | None], None]  # steps done, steps in all, the last logged loss
Validate = Callable[[], dict[str, Any]]  # what to note of the head as it is


class TrainingInterrupted(TrainingError):
    """Ctrl-C stopped a run that can go on."""


def fit(
    learner: nn.Module,
    batches: PlannedBatches | PlannedTexts,
    options: TrainOptions,
    *,
    on_step: OnStep,
    validate: Validate,
    trainer_class: "Callable[..., HeadTrainer] | None" = None,
) -> None:
    """Trains a learner in place over all batches; from the last checkpoint on with ``--resume``.

    ``validate`` is called before the first step, every ``eval_steps`` and after the last; what it finds goes to
    ``validation.jsonl``.

    Raises:
        NonFiniteLoss: the loss became NaN or infinite; names the step and the documents of its batch.
        TrainingInterrupted: Ctrl-C; a checkpoint was saved.
    """
    folder = options.out / "checkpoints"
    _drop_incomplete(folder)  # or the Trainer, which keeps two, might count them and drop whole ones
    checkpoint = find_checkpoint(options.out) if options.resume else None
    first_step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    with _interruptible() as interrupted:
        log, validations = (
            StepLog(options.out / name, keep_until=first_step) for name in ("log.jsonl", "validation.jsonl")
        )
        callback = _Callback(log, on_step, interrupted, _Validation(validations, validate, options.eval_steps))
        trainer = (trainer_class or HeadTrainer)(
            model=learner,
            args=_arguments(options, folder, len(batches)),
            train_dataset=batches,
            data_collator=_only,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        callback.take_means = trainer.take_means
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
                raise
            _drop_incomplete(folder)
            raise StorageError(f"a checkpoint cannot be saved in {folder}: {error}; earlier ones are whole") from error
    done, total = trainer.state.global_step, trainer.state.max_steps
    if interrupted.is_set() and done < total:
        raise TrainingInterrupted(
            f"stopped after step {done} of {total}; a checkpoint is in {folder}: "
            "the same command with --resume goes on from there"
        )


def find_checkpoint(out: Path) -> str | None:
    """The newest checkpoint of a run that is not complete, if it left one."""
    whole = filter(_is_whole, (out / "checkpoints").glob("checkpoint-*"))
    newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def _is_whole(checkpoint: Path) -> bool:
    """Whether all of it was written: the Trainer writes its state after all else, but not in one go."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _drop_incomplete(folder: Path) -> None:
    """Removes checkpoints that were cut short."""
    for path in folder.glob("checkpoint-*"):
        if not _is_whole(path):
            shutil.rmtree(path, ignore_errors=True)


class StepLog:
    """``log.jsonl``: a JSON object a line, each written at once, so that a killed run leaves whole lines."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if keep_until and _step(line) <= keep_until]
        write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def add(self, record: dict[str, Any]) -> None:
        """Appends a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _step(line: str) -> float:
    """Of a log's line; infinite where a full disk or a power cut left only a part of it."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


@dataclass(frozen=True)
class _Validation:
    """When the head is measured in between, and where that goes."""

    log: StepLog
    validate: Validate
    eval_steps: int  # 0 for never

    def at(self, step: int, last_step: int) -> None:
        """Measures and notes, if it is time."""
        if self.eval_steps and (step % self.eval_steps == 0 or step == last_step):
            self.log.add({"step": step, **self.validate()})


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

    def __init__(self, log: StepLog, on_step: OnStep, interrupted: threading.Event, validation: _Validation) -> None:
        self.log = log
        self.validation = validation
        self.on_step = on_step
        self.interrupted = interrupted
        self.loss: float | None = None
        self.take_means: Callable[[], dict[str, Any]] = dict

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint brings the --save-steps and --log-steps of its time
        if state.global_step == 0:
            self.validation.at(0, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.on_step(state.global_step, state.max_steps, self.loss)
        self.validation.at(state.global_step, state.max_steps)
        if self.interrupted.is_set():
            control.should_save = control.should_training_stop = True
        # a resumed run knows no losses from before its checkpoint: no line of the log may need them
        control.should_log |= control.should_save

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


def _schedule(options: TrainOptions) -> dict[str, float]:
    return {"min_lr_rate": options.final_learning_rate}


def _arguments(options: TrainOptions, folder: Path, num_steps: int) -> TrainingArguments:
    use_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # the plan holds all epochs
        per_device_train_batch_size=1,  # one batch of the plan
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs=_schedule(options),
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


def learning_rates(options: TrainOptions, *, num_steps: int) -> list[float]:
    """The learning rate of every step, as the Trainer's scheduler gives it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=options.learning_rate)
    args = _arguments(options, options.out, num_steps)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=_schedule(options),
    )
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


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
