"""Training steps: batches of the plan in their order, optimizers, checkpoints, and the log.

A checkpoint is one file, written whole or not at all. accelerate shares the steps between processes.
"""

import json
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object, send_to_device, set_seed
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from draftheads.data.batches import PlannedTexts
from draftheads.data.features import FeatureStore
from draftheads.errors import NonFiniteLoss, StorageError, TrainingError
from draftheads.heads.base import DraftHead
from draftheads.models.model_config import default_device, default_dtype
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.report import BEST
from draftheads.train.run_folder import RunFolder, find_checkpoint, step_of
from draftheads.train.training_data import TrainingData
from draftheads.utils.files import write_atomic
from draftheads.utils.machine import ahead
from draftheads.utils.progress import Progress


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
    data: TrainingData,
    progress: Progress,
    validate: Callable[[], dict[str, Any]],
) -> int:
    """Trains a learner in place on all batches of ``data``; with ``--resume`` from the last checkpoint.

    ``validate`` measures the head as it is now: before the first step, with every checkpoint and at the ends of epochs.
    Its results go to ``validation.jsonl``. A learner with a lower loss than all before is saved, too. Of several
    processes only the first one validates. It writes, and on hosts with a disk of their own one writes checkpoints.

    Returns:
        The number of steps that were done before.
    """
    options = folder.options
    set_seed(options.seed)
    highest = [group["lr"] for group in optimizer.param_groups]
    rates = steps.rates if len(steps.rates) == len(highest) else [steps.rates[0]] * len(highest)
    own = processes.group(folder.path)
    if own.number == 0:
        folder.tidy_checkpoints()
    checkpoint = folder.checkpoint()
    first_step = 0 if checkpoint is None else _load(checkpoint, learner, optimizer)
    if len(begun := {*processes.every(first_step)}) > 1:
        fix = "copy the newest checkpoint to all hosts, or delete all checkpoints"
        raise StorageError(f"hosts have checkpoints of different steps in {folder.checkpoints}: {sorted(begun)}; {fix}")
    log, held_out = StepLog(folder.path / "log.jsonl", first_step), _HeldOut(folder, learner, validate, first_step)
    model = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",  # of other types than fp32 is only the pass below
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not steps.all_are_trained)],
    ).prepare_model(learner)
    indices = list(data.batches_of(own, first_step))
    bf16, total = computes_in_bf16(options), data.num_steps
    parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    recent: deque[tuple[float, int]] = deque(maxlen=10)  # mean losses over the heads, and predictions
    if first_step == 0:
        held_out.measure(0)
    with _interruptible() as interrupted, ThreadPoolExecutor(1) as reader:
        order = chain.from_iterable(indices)  # stored batches are read while the one before is computed
        is_stored = isinstance(data.store, FeatureStore)
        read = ahead(reader, batches.__getitem__, order, 1) if is_stored else map(batches.__getitem__, order)
        for step in range(first_step + 1, total + 1):
            inputs = steps.inputs(step - 1)
            for group, rate, most in zip(optimizer.param_groups, rates, highest, strict=True):
                group["lr"] = most * rate(step - 1)
            means = _gradients(model, batches, read, step, indices[step - first_step - 1], inputs=inputs, bf16=bf16)
            norm = nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            recent.append((fmean(means["head_losses"]), max(1, means["predictions"])))
            numbers = {name: value for name, value in inputs.items() if isinstance(value, float)}
            of_step = {"learning_rate": optimizer.param_groups[0]["lr"], "grad_norm": float(norm)}
            log.add({"step": step, "loss": means.pop("loss"), **of_step, **means, **numbers})
            is_due = step == total or step % options.save_steps == 0
            if is_due or step in data.epoch_ends:
                held_out.measure(step)
            progress.progress(step, total, f"loss {fmean(*zip(*recent, strict=True)):.3f}{held_out.note}")
            is_interrupted = processes.any_of(interrupted.is_set())
            if is_due or is_interrupted:
                _save(folder, step, learner, optimizer)
            if is_interrupted and step < total:
                kept = f"a checkpoint is in {folder.checkpoints}: the same command with --resume continues from there"
                raise TrainingInterrupted(f"stopped after step {step} of {total}; {kept}")
    return first_step


class _HeldOut:
    """Measures a learner as it is, and saves the one with the lowest loss; in the first of several processes."""

    def __init__(
        self, folder: RunFolder, learner: nn.Module, validate: Callable[[], dict[str, Any]], first_step: int
    ) -> None:
        self.folder, self.learner, self.validate = folder, learner, validate
        self.log = StepLog(folder.path / "validation.jsonl", first_step)
        best = find_checkpoint(folder.path, BEST)
        self.lowest = float("inf") if best is None else read_checkpoint(best)["loss"]
        self.note = ""  # of the newest, for the progress

    def measure(self, step: int) -> None:
        if processes.is_first():
            measured = self.validate()
            loss = fmean(measured["losses"])
            if loss < self.lowest:
                self.lowest = loss
                _write(self.folder, BEST, step, {"loss": loss, "learner": self.learner.state_dict()})
            self.log.add({"step": step, **measured})
            self.note = f", held-out loss {loss:.3f} at step {step}"


def _gradients(
    model: Any,
    batches: PlannedTexts,
    read: Iterator[dict[str, Any]],
    step: int,
    indices: Sequence[int],
    *,
    inputs: dict[str, Any],
    bf16: bool,
) -> dict[str, Any]:
    """Gradients of a step's batches, as of one large batch, and what the learner reports of it.

    ``indices`` are the batches of this process, and ``read`` has them in their order. The predictions of all processes
    are counted first: each sum of losses is divided by their number, so a prediction weighs the same in every batch.
    """
    device, count = processes.device(), processes.count()
    reported: dict[str, list[Tensor]] = {}
    model.train()
    counts = [getattr(model, "module", model).count(**send_to_device(batches.texts(i), device)) for i in indices]
    numbers = processes.total(torch.stack([each["numbers"] for each in counts]).sum(0))
    for part, batch in enumerate(islice(read, len(indices))):
        documents = batch.pop("documents").tolist()
        is_waiting = count > 1 and part < len(indices) - 1  # the processes exchange gradients after the last part
        with model.no_sync() if is_waiting else nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = model(**send_to_device(batch, device), **inputs, **{**counts[part], "numbers": numbers})
            if not torch.isfinite(output["loss"]):
                texts = ", ".join(batches.store.sources[i] for i in documents)
                fix = "check these texts, or lower --learning-rate"
                raise NonFiniteLoss(f"the loss is {output['loss'].item()} at step {step}, on {texts}: {fix}")
            (output["loss"].float() * count).backward()  # of the processes' gradients the mean is taken
        for name, value in output.items():
            reported.setdefault(name, []).append(value.detach().float())
    means = {name: processes.total(torch.stack(values).sum(0)) for name, values in sorted(reported.items())}
    return {**{name: value.tolist() for name, value in means.items()}, "predictions": int(numbers.sum())}


def computes_in_bf16(options: TrainOptions) -> bool:
    """Whether products are rounded to bf16: as given, or if the device computes in bf16."""
    if options.precision in ("auto", "4bit"):
        return default_dtype(default_device()) == torch.bfloat16
    return options.precision == "bf16"


# --- optimizers ---


def make_optimizer(options: TrainOptions, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """AdamW over groups of parameters, which may have their own ``lr`` and ``weight_decay``."""
    given: dict[str, Any] = {name: getattr(options, name) for name in ("betas", "weight_decay")}
    if options.optimizer == "adamw-8bit":
        import bitsandbytes  # noqa: PLC0415 - an extra

        kind: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]  # it has no __all__
    else:
        kind = partial(AdamW, fused=True)
    optimizer: Optimizer = kind(list(groups), lr=options.learning_rate, **given)
    return optimizer


def head_optimizer(options: TrainOptions, head: DraftHead) -> Optimizer:
    """For a head alone: matrices may decay, vectors do not."""
    if options.optimizer == "muon":
        decay, adamw = options.weight_decay, {"betas": options.betas, "fused": True}
        return MuonAdamW(head, lr=options.learning_rate, weight_decay=decay, **adamw)
    wide, vectors = _by_width([parameter for parameter in head.parameters() if parameter.requires_grad])
    return make_optimizer(options, [{"params": wide}, {"params": vectors, "weight_decay": 0.0}])


def _by_width(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices, and the vectors."""
    return [one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim <= 1]


class MuonAdamW(Optimizer):
    """Three groups: matrices by Muon, then other matrices (which may decay) and vectors (which do not) by AdamW.

    Muon (Jordan et al. 2024) makes the momentum of a matrix nearly orthogonal, so that all its directions move equally
    far. Its steps are scaled to the size of AdamW's ("Muon is scalable", Liu et al. 2025), so one learning rate and one
    weight decay serve all groups.
    """

    def __init__(self, head: DraftHead, *, lr: float, weight_decay: float, **adamw: Any) -> None:
        """For all trained parameters of a head; ``adamw`` are further arguments of :class:`torch.optim.AdamW`."""
        matrices = hidden_matrices(head)
        taken = set(map(id, matrices))
        wide, vectors = _by_width([one for one in head.parameters() if one.requires_grad and id(one) not in taken])
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: tuple[Optimizer, ...] = (
            Muon([{"params": matrices}], **shared, adjust_lr_fn="match_rms_adamw"),
            AdamW([{"params": wide}], **shared, **adamw),
            AdamW([{"params": vectors}], **{**shared, "weight_decay": 0.0}, **adamw),
        )
        super().__init__([part.param_groups[0] for part in self._parts], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Each group by its own rule. Groups and state are this optimizer's own, so they are saved and loaded whole."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


def hidden_matrices(head: DraftHead) -> list[Tensor]:
    """The trained matrices of a head, without embeddings and without those that lead to the vocabulary."""
    embeddings = (module.weight for module in head.modules() if isinstance(module, nn.Embedding))
    others = set(map(id, (*embeddings, *head.logit_parameters())))
    return [one for one in head.parameters() if one.requires_grad and one.ndim == 2 and id(one) not in others]


# --- files ---


def _save(folder: RunFolder, step: int, learner: nn.Module, optimizer: Optimizer) -> None:
    """A checkpoint to resume from."""
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    state = {"learner": learner.state_dict(), "optimizer": optimizer.state_dict()}
    state["random"] = gather_object([random])  # of each process
    if processes.writes(folder.path):
        _write(folder, "checkpoint", step, state)


def _write(folder: RunFolder, kind: str, step: int, state: dict[str, Any]) -> None:
    """Writes a checkpoint and removes the one of that kind before."""
    path = folder.checkpoints / f"{kind}-{step}.pt"
    try:
        write_atomic(path, lambda file: torch.save(state, file))
    except (StorageError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        raise StorageError(
            f"a checkpoint cannot be saved in {folder.checkpoints}: {error}; earlier ones are kept"
        ) from error
    for other in folder.checkpoints.glob(f"{kind}-*.pt"):
        if other != path:
            other.unlink()


def _load(path: Path, learner: nn.Module, optimizer: Optimizer) -> int:
    """Restores a checkpoint; returns its step."""
    state = read_checkpoint(path, learner, optimizer)
    random = state["random"][processes.number()]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    return step_of(path)


def read_checkpoint(path: Path, learner: nn.Module | None = None, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """What a checkpoint has beside the states, which are loaded into the learner and the optimizer that are given."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        weights, moments = state.pop("learner"), state.pop("optimizer", None)
        if learner is not None:
            learner.load_state_dict(weights)
        if optimizer is not None:
            optimizer.load_state_dict(moments)
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise StorageError(f"{path} cannot be read: {error}; delete it, and the run begins again") from error
    return state


class StepLog:
    """A JSON object per line, each written at once, so that a killed run leaves whole lines.

    Only the first process writes it. Lines of a run before are kept up to the step ``keep_until``.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        self.path = path
        if processes.is_first():
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in lines if keep_until and _step(line) <= keep_until]
            write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def add(self, record: dict[str, Any]) -> None:
        if processes.is_first():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


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
    before = signal.getsignal(signal.SIGINT)  # known before the first signal can come

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
