"""Training steps: batches of the plan in their order, the optimizer, checkpoints, and the log.

A checkpoint is one file, written whole or not at all. accelerate shares the steps between processes.
"""

import json
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object, send_to_device, set_seed
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from draftheads.data.batches import PlannedTexts
from draftheads.errors import NonFiniteLoss, StorageError, TrainingError
from draftheads.heads.base import DraftHead
from draftheads.models.devices import default_device, default_dtype
from draftheads.train import processes
from draftheads.train.muon import MuonAdamW
from draftheads.train.options import HardwareOptions, TrainOptions
from draftheads.train.report import mean_loss
from draftheads.train.run_folder import RunFolder
from draftheads.utils.files import remove_leftovers, write_atomic
from draftheads.utils.progress import Progress

Validate = Callable[[], dict[str, Any]]  # measures the head as it is now


class TrainingInterrupted(TrainingError):
    """Ctrl-C stopped a run that can be resumed."""


@dataclass(frozen=True)
class Steps:
    """What changes from step to step, counted from 0."""

    rates: Sequence[Callable[[int], float]]  # part of the highest learning rate; of each group of parameters, or one
    inputs: Callable[[int], dict[str, Any]] = lambda _: {}  # for the learner, beside the batch; numbers are logged
    all_are_trained: bool = True  # whether each step has gradients of all parameters


def fit(
    learner: nn.Module,
    optimizer: Optimizer,
    steps: Steps,
    batches: PlannedTexts,
    folder: RunFolder,
    *,
    epoch_ends: frozenset[int],
    progress: Progress,
    validate: Validate,
) -> int:
    """Trains a learner in place on all batches; with ``--resume`` from the last checkpoint.

    ``validate`` is called before the first step, every ``eval_steps``, at ``epoch_ends`` and after the last step. Its
    results go to ``validation.jsonl``. Of several processes only the first one validates and writes.

    Returns:
        The number of steps that were done before.
    """
    options, report = folder.options, folder.options.report
    set_seed(options.schedule.seed)
    highest = [group["lr"] for group in optimizer.param_groups]
    rates = steps.rates if len(steps.rates) == len(highest) else [steps.rates[0]] * len(highest)
    if processes.is_first():
        remove_leftovers(folder.checkpoints / "*")
    checkpoint = folder.checkpoint()
    first_step = 0 if checkpoint is None else _load(checkpoint, learner, optimizer)
    log, validations = _logs(folder, first_step)
    model = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",  # of other types than fp32 is only the pass below
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not steps.all_are_trained)],
    ).prepare_model(learner)
    compute = _Compute(model, batches, bf16=computes_in_bf16(options.hardware))
    parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    total = len(batches) // (options.schedule.accumulate * processes.count())
    notes: dict[str, str] = {}

    def measure(step: int) -> None:
        is_due = report.eval_steps and (step % report.eval_steps == 0 or step in {*epoch_ends, total})
        if is_due and processes.is_first():
            measured = validate()
            validations.add({"step": step, **measured})
            notes["held-out loss"] = f"{mean_loss(measured['losses']):.3f} at step {step}"

    if first_step == 0:
        measure(0)
    with _interruptible() as interrupted:
        for step in range(first_step + 1, total + 1):
            inputs = steps.inputs(step - 1)
            for group, rate, most in zip(optimizer.param_groups, rates, highest, strict=True):
                group["lr"] = most * rate(step - 1)
            compute.gradients(step, options.schedule.accumulate, inputs)
            norm = nn.utils.clip_grad_norm_(parameters, options.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            measure(step)
            named = [f"{name} {notes[name]}" for name in ("loss", "held-out loss") if name in notes]
            progress.progress(step, total, ", ".join(named))
            is_last = processes.any_of(interrupted.is_set()) or step == total
            saves = is_last or step % report.save_steps == 0
            if saves or step % report.log_steps == 0:  # a resumed run does not know the losses before its checkpoint
                means = compute.take_means()
                notes["loss"] = f"{mean_loss(means['head_losses']):.3f}"
                numbers = {name: value for name, value in inputs.items() if isinstance(value, float)}
                of_step = {"learning_rate": optimizer.param_groups[0]["lr"], "grad_norm": float(norm)}
                log.add({"step": step, "loss": means.pop("loss"), **of_step, **means, **numbers})
            if saves:
                _save(folder, step, learner, optimizer)
            if is_last and step < total:
                raise TrainingInterrupted(
                    f"stopped after step {step} of {total}; a checkpoint is in {folder.checkpoints}: "
                    "the same command with --resume continues from there"
                )
    return first_step


class _Compute:
    """Gradients of a step, and means over all processes of what the learner reported since the last log."""

    def __init__(self, model: nn.Module, batches: PlannedTexts, *, bf16: bool) -> None:
        self.model: Any = model
        self.batches, self.device = batches, processes.device()
        self.autocast = lambda: torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext()
        self.reported: dict[str, list[Tensor]] = {}

    def gradients(self, step: int, accumulate: int, more: dict[str, Any]) -> None:
        """Means of ``accumulate`` batches in each process; process p of n has every n-th batch, from p on."""
        self.model.train()
        number, count = processes.number(), processes.count()
        for part in range(accumulate):
            index = ((step - 1) * accumulate + part) * count + number
            is_waiting = count > 1 and part < accumulate - 1  # the processes exchange gradients after the last part
            with self.model.no_sync() if is_waiting else nullcontext():
                mean = self.loss(step, self.batches[index], more) / accumulate
                mean.backward()

    def loss(self, step: int, batch: dict[str, Any], more: dict[str, Any]) -> Tensor:
        documents = batch.pop("documents").tolist()
        with self.autocast():  # type: ignore[no-untyped-call]
            output = self.model(**send_to_device(batch, self.device), **more)
        for name, value in output.items():
            self.reported.setdefault(name, []).append(value.detach().float())
        loss: Tensor = output["loss"].float()
        if not torch.isfinite(loss):
            texts = ", ".join(self.batches.store.sources[i] for i in documents)
            fix = "check these texts, or lower --learning-rate"
            raise NonFiniteLoss(f"the loss is {loss.item()} at step {step}, on {texts}: {fix}")
        return loss

    def take_means(self) -> dict[str, Any]:
        means = {name: processes.mean(torch.stack(values).mean(0)) for name, values in sorted(self.reported.items())}
        self.reported.clear()
        return {name: value.tolist() for name, value in means.items()}


def make_optimizer(options: TrainOptions, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """AdamW over groups of parameters, which may have their own ``lr`` and ``weight_decay``."""
    adamw = options.optimizer
    kind: Any = AdamW
    given: dict[str, Any] = {"lr": options.schedule.learning_rate, "betas": adamw.betas}
    if adamw.optimizer == "adamw-8bit":
        import bitsandbytes  # noqa: PLC0415 - an extra

        kind = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]  # it has no __all__
    else:
        given["fused"] = True
    optimizer: Optimizer = kind(list(groups), weight_decay=adamw.weight_decay, **given)
    return optimizer


def head_optimizer(options: TrainOptions, head: DraftHead) -> Optimizer:
    """For a head alone: matrices may decay, vectors do not."""
    adamw = options.optimizer
    if adamw.optimizer == "muon":
        rate = options.schedule.learning_rate
        return MuonAdamW(head, lr=rate, weight_decay=adamw.weight_decay, betas=adamw.betas, fused=True)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    wide, vectors = ([weight for weight in trained if (weight.ndim > 1) == is_wide] for is_wide in (True, False))
    return make_optimizer(options, [{"params": wide}, {"params": vectors, "weight_decay": 0.0}])


def computes_in_bf16(options: HardwareOptions) -> bool:
    """Whether products are rounded to bf16: as given, or if the device computes in bf16."""
    if options.precision == "auto":
        return default_dtype(default_device()) == torch.bfloat16
    return options.precision == "bf16"


def _save(folder: RunFolder, step: int, learner: nn.Module, optimizer: Optimizer) -> None:
    """Writes a checkpoint and removes the one before."""
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    state = {
        "learner": learner.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": gather_object([random]),  # of each process
    }
    if not processes.is_first():
        return
    path = folder.checkpoints / f"checkpoint-{step}.pt"
    try:
        write_atomic(path, lambda file: torch.save(state, file))
    except (StorageError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        raise StorageError(
            f"a checkpoint cannot be saved in {folder.checkpoints}: {error}; earlier ones are kept"
        ) from error
    for other in folder.checkpoints.glob("checkpoint-*.pt"):
        if other != path:
            other.unlink()


def _load(path: Path, learner: nn.Module, optimizer: Optimizer) -> int:
    """Restores a checkpoint; returns its step."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        learner.load_state_dict(state["learner"])
        optimizer.load_state_dict(state["optimizer"])
        random = state["random"][processes.number()]
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise StorageError(f"{path} cannot be read: {error}; delete it, and the run begins again") from error
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    return int(path.stem.rpartition("-")[2])


def _logs(folder: RunFolder, first_step: int) -> list["StepLog"]:
    """``log.jsonl`` and ``validation.jsonl``, up to that step."""
    writer = None
    if folder.options.report.tensorboard and processes.is_first():
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        # removes what an earlier part of the run showed after its last checkpoint
        writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=first_step + 1)
    names = ("log", "validation")
    return [StepLog(folder.path / f"{name}.jsonl", keep_until=first_step, writer=writer) for name in names]


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
