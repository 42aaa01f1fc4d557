"""From names to an engine that decodes: the model, the head that was trained for it, and the tree."""

from os import PathLike, fspath

import torch

from draftheads.checkpoint import load_head
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.target.fast import rows_keep_their_bits, speed_up
from draftheads.target.model import TargetModel
from draftheads.target.target import check_trees
from draftheads.tree import Tree
from draftheads.zoo.registry import find_head


def load(
    model: str | PathLike[str],
    head: str | PathLike[str] | None = None,
    *,
    tree: Tree | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    max_batch_size: int = 16,
    fast: bool = True,
    exact_bits: bool = False,
) -> Engine:
    """An engine for a model, with a draft head or without.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        head: a bundled head's name (``medusa``, ``hydra``), a folder, or a Hugging Face id; None decodes plainly.
        tree: the tree of guesses; the head's own plan when left out.
        dtype: what the model computes in; bf16 on CUDA and on CPUs that have it, else fp32.
        device: where; CUDA if there is one.
        max_batch_size: requests that are decoded together.
        fast: on a CPU, packed weights and grouped attention; off is the stock model.
        exact_bits: compute so that plain and speculative text are equal to the bit on a CPU, also in bf16; a step takes
            8 to 17 % longer. Without it they are equal in fp32, and in bf16 up to near-ties.

    Raises:
        ModelNotFound, UnsupportedModel: the model.
        CheckpointError, ModelNotFound: the head.
        InvalidTree: ``tree`` is deeper than the head.
        InvalidSettings: ``tree`` without ``head``, or ``exact_bits`` on a machine whose kernels do not keep it.
    """
    if tree is not None and head is None:
        raise InvalidSettings("a tree needs a head to fill it: give head=…")
    target = load_target(model, dtype=dtype, device=device, fast=fast, exact_bits=exact_bits)
    drafter = None
    if head is not None:
        drafter = load_drafter(head, model, target, fast=fast)
        if tree is not None:
            drafter.tree = tree
    return Engine(target, drafter, max_batch_size=max_batch_size)


def load_drafter(
    head: str | PathLike[str], model: str | PathLike[str], target: TargetModel, *, fast: bool = True
) -> DraftHead:
    """The head alone, ready to draft for ``target``, which is ``model``; arguments and errors as for :func:`load`."""
    drafter = load_head(find_head(fspath(head), fspath(model)), target)
    if fast:
        drafter.speed_up()
    return drafter


def load_target(
    model: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    fast: bool = True,
    exact_bits: bool = False,
) -> TargetModel:
    """The model alone; arguments and errors as for :func:`load`."""
    target = TargetModel.load(fspath(model), dtype=dtype, device=device)
    check_trees(target)
    if exact_bits and target.device.type != "cpu":
        raise InvalidSettings(f"exact_bits is for CPUs; the model is on {target.device}")
    if fast or exact_bits:
        speed_up(target.model, exact_bits=exact_bits)
    if exact_bits and not rows_keep_their_bits(target.model):
        raise InvalidSettings("exact_bits: this CPU's kernels change a row's bits with the number of rows")
    return target
