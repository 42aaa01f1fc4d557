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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from draftheads.data.batches import PlannedBatches, PlannedTexts
from draftheads.errors import MissingDependency, NonFiniteLoss, StorageError, TrainingError
from draftheads.files import write_atomic
from draftheads.models.pretrained import default_dtype
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.schedule import Stage, staged_rate

OnStep = Callable[[int, int, float | None], None]  # steps done, steps in all, the last logged loss
Validate = Callable[[], dict[str, Any]]  # what to note of the head as it is


class TrainingInterrupted(TrainingError):
    """Ctrl-C stopped a run that can go on."""


def fit(
    learner: nn.Module,
    batches: PlannedBatches | PlannedTexts,
    options: TrainOptions,
    *,
    stages: Sequence[Stage],
    on_step: OnStep,
    validate: Validate,
    trainer_class: "Callable[..., HeadTrainer] | None" = None,
) -> None:
    """Trains a learner in place over all batches; from the last checkpoint on with ``--resume``.

    ``validate`` is called before the first step, every ``eval_steps`` and after the last; what it finds goes to
    ``validation.jsonl``. Of several processes only the first validates and writes.

    Raises:
        NonFiniteLoss: the loss became NaN or infinite; names the step and the documents of its batch.
        TrainingInterrupted: Ctrl-C; a checkpoint was saved.
    """
    require_packages(options)
    folder = options.out / "checkpoints"
    _drop_incomplete(folder)  # or the Trainer, which keeps two, might count them and drop whole ones
    checkpoint = find_checkpoint(options.out) if options.resume else None
    first_step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    with _interruptible() as interrupted:
        board = _Board.open(options.out / "tensorboard", first_step) if options.tensorboard else _Board(None)
        log, validations = (
            StepLog(options.out / f"{name}.jsonl", keep_until=first_step, board=board, name=name)
            for name in ("log", "validation")
        )
        callback = _Callback(log, on_step, interrupted, _Validation(validations, validate, options.eval_steps))
        trainer = (trainer_class or HeadTrainer)(
            rates=[learning_rate_of(options, stages)],
            model=learner,
            args=_arguments(options, folder),
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
    # each process writes the state of its own random numbers, and waits for none of the others
    count = _processes_of(checkpoint.parents[1])
    return count == 1 or all((checkpoint / f"rng_state_{number}.pth").exists() for number in range(count))


def _processes_of(out: Path) -> int:
    """How many made the checkpoints of a run, whoever asks now: it may be resumed, by mistake, with another number."""
    try:
        return int(json.loads((out / "run.json").read_text(encoding="utf-8"))["processes"])
    except (OSError, ValueError, KeyError):
        return 1


def _drop_incomplete(folder: Path) -> None:
    """Removes checkpoints that were cut short."""
    for path in folder.glob("checkpoint-*"):
        if not _is_whole(path):
            shutil.rmtree(path, ignore_errors=True)


class StepLog:
    """``log.jsonl``: a JSON object a line, each written at once, so that a killed run leaves whole lines.

    Written by the first process alone, and shown on a TensorBoard if there is one.
    """

    def __init__(self, path: Path, *, keep_until: int, board: "_Board | None" = None, name: str = "log") -> None:
        self.path = path
        self.board = board or _Board(None)
        self.name = name
        if not processes.is_first():
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if keep_until and _step(line) <= keep_until]
        write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def add(self, record: dict[str, Any]) -> None:
        """Appends a line."""
        if not processes.is_first():
            return
        self.board.show(self.name, record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class _Board:
    """TensorBoard's view of the log, if it is wanted."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    @classmethod
    def open(cls, folder: Path, first_step: int) -> Self:
        """What an earlier part of the run showed after ``first_step`` is taken back."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        writer = SummaryWriter(str(folder), purge_step=first_step + 1) if processes.is_first() else None
        return cls(writer)

    def show(self, name: str, record: dict[str, Any]) -> None:
        """A curve for each number, and for each head's."""
        if self.writer is None:
            return
        for key, value in record.items():
            if isinstance(value, list):
                numbers = {f"{name}/{key}/{i + 1}": number for i, number in enumerate(value)}
            else:
                numbers = {f"{name}/{key}": value}
            for curve, number in numbers.items():
                if key != "step":
                    self.writer.add_scalar(curve, number, record["step"])
        self.writer.flush()


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
        if processes.is_first() and self.eval_steps and (step % self.eval_steps == 0 or step == last_step):
            self.log.add({"step": step, **self.validate()})


class HeadTrainer(Trainer):
    """Batches come ready from the plan, in its order; losses are checked, and what the learner reports is averaged."""

    def __init__(self, *, rates: Sequence[Callable[[int], float]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rates = rates  # of each group of parameters, or of all: the part of its highest learning rate by step
        self._reported: dict[str, list[Tensor]] = {}  # by name, since they were last taken

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        batches: PlannedBatches | PlannedTexts = self.train_dataset if train_dataset is None else train_dataset  # type: ignore[assignment]
        return SequentialSampler(batches)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Each group's own rates."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            rates = list(self.rates) if len(self.rates) > 1 else list(self.rates) * len(optimizer.param_groups)
            self.lr_scheduler = LambdaLR(optimizer, rates)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The learner's loss; one that is no number ends the run."""
        documents = inputs.pop("documents")
        output = model(**inputs)
        loss: Tensor = output["loss"]
        if not torch.isfinite(loss):
            sources = self.train_dataset.sources  # type: ignore[union-attr]
            texts = ", ".join(sources[i] or f"text {i} of the features" for i in documents.tolist())
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, on {texts}: look there, "
                "or lower --learning-rate"
            )
        for name in output.keys() - {"loss"}:
            self._reported.setdefault(name, []).append(output[name].detach())
        return loss

    def take_means(self) -> dict[str, Any]:
        """Means of what all learners reported since the last call: ``head_losses``, and what else they name."""
        means = {
            name: processes.mean_of(torch.stack(values).mean(0)).tolist()
            for name, values in sorted(self._reported.items())
        }
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
        if processes.any_of(self.interrupted.is_set()):
            self.interrupted.set()
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


def learning_rate_of(options: TrainOptions, stages: Sequence[Stage]) -> Callable[[int], float]:
    """A step's part of ``options.learning_rate``."""
    return partial(staged_rate, stages=stages, warmup=options.warmup, final=options.final_learning_rate)


def require_packages(options: TrainOptions) -> None:
    """Asks for packages that will be needed later.

    Raises:
        MissingDependency: one is not installed.
    """
    if options.optimizer == "adamw-8bit" and find_spec("bitsandbytes") is None:
        raise MissingDependency("--optimizer adamw-8bit needs bitsandbytes: pip install 'draftheads[quantised]'")
    if options.tensorboard and find_spec("tensorboard") is None:
        raise MissingDependency("--tensorboard needs tensorboard: pip install 'draftheads[tensorboard]'")


def _arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    use_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # the plan holds all epochs
        per_device_train_batch_size=1,  # one batch of the plan
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        optim="adamw_torch_fused" if options.optimizer == "adamw" else "adamw_bnb_8bit",
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
        ddp_find_unused_parameters=False,
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
