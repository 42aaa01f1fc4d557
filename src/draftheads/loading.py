"""From names to an engine that decodes: the model, the head that was trained for it, and the tree."""

import contextlib
import re
import shlex
import warnings
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

import torch

from draftheads.checkpoint import PLAN_FILE, check_tuned, conditions, load_head, read_head
from draftheads.decode.engine import Engine
from draftheads.draft import Drafter
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import InvalidSettings, ModelNotFound, PlanWarning
from draftheads.files import user_path
from draftheads.growth import Shape
from draftheads.heads.base import DraftHead
from draftheads.plan import Conditions, Tuned, read_plan
from draftheads.target.embedded import cache_folder
from draftheads.target.fast import rows_keep_their_bits
from draftheads.target.model import TargetModel
from draftheads.target.target import check_trees
from draftheads.tree import Tree
from draftheads.zoo.registry import find_head

# what drafts without a head, by name
UNTRAINED: dict[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookup, "lookahead": Lookahead}
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
# what the model computes in; int8 multiplies integers between fp32 numbers
PRECISIONS: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as the command line has them


def load(
    model: str | PathLike[str],
    head: str | PathLike[str] | None = None,
    *,
    draft_model: str | PathLike[str] | None = None,
    tree: Shape | None = None,
    plan: str | PathLike[str] | None = "auto",
    adaptive: bool = True,
    precision: Precision = "auto",
    device: str | torch.device | None = None,
    max_batch_size: int = 16,
    fast: bool = True,
    exact_bits: bool = False,
) -> Engine:
    """An engine for a model, with a draft head or without.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        head: a bundled head's name (``medusa``, ``hydra``), a folder, or a Hugging Face id; ``prompt-lookup`` copies
            from the text so far and ``lookahead`` refines guesses of the model itself, neither needs training; None
            decodes plainly.
        draft_model: a smaller model of the same tokenizer drafts in place of a head: a folder or a Hugging Face id.
        tree: always draft on this tree, or by this rule (:class:`BestFirst`, :class:`BestPaths`, :class:`Sampled`),
            whatever the plan.
        plan: which tree pays, by the number of rows: ``auto`` takes what ``draftheads tune`` left for this head, if it
            did, else the head's fixed tree; a ``plan.json`` or a folder with one; None is the head's fixed tree.
        adaptive: with a tuned plan, whether to guess more or less by how it goes. Off, equal requests meet equal trees.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``int8``; ``auto`` is bf16 on CUDA and on CPUs that have it, else
            fp32. ``int8`` holds linear layers in 8 bits: faster on CPUs, but it changes the model a little.
        device: where; CUDA if there is one.
        max_batch_size: requests that are decoded together.
        fast: on a CPU, packed weights and grouped attention; off is the stock model.
        exact_bits: compute so that plain and speculative text are equal to the bit on a CPU, also in bf16; a step takes
            8 to 17 % longer. Without it they are equal in fp32, and in bf16 up to near-ties.

    Raises:
        ModelNotFound, UnsupportedModel: the model.
        CheckpointError, ModelNotFound: the head.
        InvalidTree: ``tree`` is deeper than the head.
        InvalidSettings: ``tree`` or ``plan`` without what drafts, both of them, ``head`` and ``draft_model``, a draft
            model of another tokenizer, or ``exact_bits`` on a machine whose kernels do not keep it.

    Warns:
        PlanWarning: the plan was tuned on another machine, for another type, or with another version.
    """
    _check_what_drafts(head, draft_model, tree, plan)
    if head is not None and head not in UNTRAINED:
        find_head(fspath(head), fspath(model))  # said before the model is loaded
    target = load_target(model, precision=precision, device=device, fast=fast, exact_bits=exact_bits)
    if head in UNTRAINED:
        return Engine(target, UNTRAINED[str(head)](), max_batch_size=max_batch_size)
    if draft_model is not None:
        small = load_target(draft_model, precision=precision, device=device, fast=fast)
        return Engine(target, DraftModel(small, target, shape=tree), max_batch_size=max_batch_size)
    if head is None:
        return Engine(target, max_batch_size=max_batch_size)
    drafter = load_drafter(head, model, target, fast=fast)
    tuned = None
    if isinstance(tree, Tree):
        drafter.tree = tree
    elif tree is not None:
        drafter.shape = tree
        with warnings.catch_warnings():  # how sure the head may be does not depend on the machine
            warnings.simplefilter("ignore", PlanWarning)
            known = None if plan is None else find_tuned(head, model, target, drafter)
        if known is not None:
            drafter.confidence = tuple(known.confidence)
    elif plan is not None:
        tuned = find_tuned(head, model, target, drafter, plan=plan)
    return Engine(target, drafter, max_batch_size=max_batch_size, tuned=tuned, adaptive=adaptive)


def _check_what_drafts(
    head: str | PathLike[str] | None,
    draft_model: str | PathLike[str] | None,
    tree: Shape | None,
    plan: str | PathLike[str] | None,
) -> None:
    """Do the arguments of :func:`load` go together?"""
    is_own_plan = plan not in (None, "auto")
    if is_own_plan and head is None:
        raise InvalidSettings("a plan needs a head to draft by it: give head=…")
    if is_own_plan and tree is not None:
        raise InvalidSettings(f"tree and plan {plan} contradict each other: give one of them")
    if head is not None and draft_model is not None:
        raise InvalidSettings(f"head {head} and draft_model {draft_model}: give one of them")
    if tree is not None and (head in UNTRAINED or (head is None and draft_model is None)):
        what = f"{head} fills no tree" if head else "nothing is there to fill it"
        shown = f"a tree of {tree.num_nodes} nodes" if isinstance(tree, Tree) else str(tree)
        raise InvalidSettings(f"{shown}: {what}; give a draft head by head=…, or draft_model=…")
    if is_own_plan and head in UNTRAINED:
        raise InvalidSettings(f"plan {plan}: {head} has none")


def find_tuned(
    head: str | PathLike[str],
    model: str | PathLike[str],
    target: TargetModel,
    drafter: DraftHead,
    *,
    plan: str | PathLike[str] = "auto",
) -> Tuned | None:
    """What ``draftheads tune`` found for a head; None where nobody tuned it. Arguments as for :func:`load`.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, InvalidTree: a plan that is broken, or not one for this head.
        ModelNotFound: no such file.
        InvalidSettings: a plan that was asked for by name, and is not tuned.

    Warns:
        PlanWarning: it was tuned under other conditions.
    """
    saved = read_head(find_head(fspath(head), fspath(model)))
    here = conditions(saved.digest, target)
    path = _plan_file(plan) if plan != "auto" else _kept_plan(saved.method, here) or saved.folder / PLAN_FILE
    tuned = read_plan(path).tuned
    if tuned is None:
        if plan != "auto":
            raise InvalidSettings(f"{path} is not tuned: run `{_tuning(model, head, here)}`, or leave the plan out")
        return None
    check_tuned(drafter, tuned, path)
    if differences := tuned.conditions.differences(here):
        warnings.warn(
            f"{path} was tuned under other conditions ({'; '.join(differences)}): "
            f"tune again with `{_tuning(model, head, here)}`",
            PlanWarning,
            stacklevel=3,
        )
    return tuned


def plans_folder(method: str, here: Conditions) -> Path:
    """Where plans are kept of heads whose own folder is not the user's: one for each type, kind of kernel and device.

    Raises:
        InvalidSettings: there is no place for a cache.
    """
    device = re.sub(r"\W+", "-", here.device)
    return cache_folder() / "plans" / f"{method}-{here.head}-{here.dtype}-{here.kernels}-{device}"


def kept_plans(digest: str) -> list[Path]:
    """Plans in the user's cache for a head of that digest."""
    with contextlib.suppress(InvalidSettings, OSError):
        return sorted((cache_folder() / "plans").glob(f"*-{digest}-*/{PLAN_FILE}"))
    return []


def _kept_plan(method: str, here: Conditions) -> Path | None:
    """The plan in the user's cache, if there is one that can be reached."""
    with contextlib.suppress(InvalidSettings, OSError):
        path = plans_folder(method, here) / PLAN_FILE
        return path if path.is_file() else None
    return None


def _tuning(model: str | PathLike[str], head: str | PathLike[str], here: Conditions) -> str:
    """The command that makes a plan for just these conditions."""
    words = ["draftheads", "tune", fspath(model), fspath(head)]
    words += ["--dtype", _SHORT[here.dtype]] if here.dtype in _SHORT else []
    return shlex.join(words + ["--exact-bits"] * (here.kernels == "exact_bits"))


def _plan_file(plan: str | PathLike[str]) -> Path:
    path = user_path(plan)
    path = path / PLAN_FILE if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFound(f"no plan at {plan}: no such file; `draftheads tune` makes one")
    return path


def load_drafter(
    head: str | PathLike[str],
    model: str | PathLike[str],
    target: TargetModel,
    *,
    fast: bool = True,
    ignore_plan: bool = False,
) -> DraftHead:
    """The head alone, ready to draft for ``target``, which is ``model``; arguments and errors as for :func:`load`.

    ``ignore_plan`` is for who makes a new plan: the one that is there may be broken or missing.
    """
    drafter = load_head(find_head(fspath(head), fspath(model)), target, ignore_plan=ignore_plan)
    if fast:
        drafter.speed_up(folder=kernels_folder())
    return drafter


def load_target(
    model: str | PathLike[str],
    *,
    precision: Precision = "auto",
    device: str | torch.device | None = None,
    fast: bool = True,
    exact_bits: bool = False,
) -> TargetModel:
    """The model alone; arguments and errors as for :func:`load`."""
    if precision not in PRECISIONS:
        raise InvalidSettings(f"precision is {precision!r}; choose among {', '.join(PRECISIONS)}")
    int8 = precision == "int8"
    target = TargetModel.load(fspath(model), dtype=PRECISIONS[precision], device=device)
    check_trees(target)
    if (exact_bits or int8) and target.device.type != "cpu":
        raise InvalidSettings(f"{'int8' if int8 else 'exact_bits'} is for CPUs; the model is on {target.device}")
    if int8 and not fast:
        raise InvalidSettings("precision int8 needs fast=True: it is one of the faster kernels")
    if fast or exact_bits:
        target.speed_up(exact_bits=exact_bits, int8=int8, folder=kernels_folder())
    if (exact_bits or int8) and not rows_keep_their_bits(target.model):
        raise InvalidSettings("exact_bits: this CPU's kernels change a row's bits with the number of rows")
    return target


def kernels_folder() -> Path | None:
    """Where measured choices of kernels are kept; None where the user has no place for a cache."""
    try:
        return cache_folder() / "kernels"
    except InvalidSettings:
        return None
