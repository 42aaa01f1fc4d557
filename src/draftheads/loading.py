"""From names to an engine that decodes: the model, the head that was trained for it, and the tree."""

import os
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

import torch

from draftheads.acceptance_profile import AcceptanceProfile
from draftheads.chat_template import read_template
from draftheads.checkpoint import load_head, read_head
from draftheads.decode.cost_profile import cost_of
from draftheads.decode.engine import Engine
from draftheads.draft import Drafter
from draftheads.drafters.copy_odds import DEFAULT_ODDS
from draftheads.drafters.copying import Copying
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import CacheWarning, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.models.embedded import cache_folder
from draftheads.models.fast import return_freed_memory, rows_keep_their_bits
from draftheads.models.kv_target import check_trees
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import default_device
from draftheads.profiles import find_profile
from draftheads.shapes import Shape, calibrated
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


def load(
    model: str | PathLike[str],
    head: str | PathLike[str] | None = None,
    *,
    draft_model: str | PathLike[str] | None = None,
    chat_template: str | PathLike[str] | None = None,
    tree: Shape | None = None,
    profile: str | PathLike[str] | None = "auto",
    copy: bool = True,
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
            from the text so far and ``lookahead`` predicts n-grams with the model itself, neither needs training; None
            decodes plainly.
        draft_model: a smaller model of the same tokenizer drafts in place of a head: a folder or a Hugging Face id.
        chat_template: used in place of the tokenizer's own: ``chatml``, ``llama-2``, ``vicuna``, or a Jinja file. When
            left out, a head's own template is used, if it was trained with one.
        tree: always draft on this tree, or by this rule (:class:`BestFirst`, :class:`BestPaths`, :class:`Sampled`),
            whatever the profile.
        profile: the head's acceptance profile, from which and from the costs on this machine the size of each draft
            follows. ``auto`` takes what ``draftheads tune`` measured, if it did, else the one that comes with the head;
            an ``acceptance.json`` or a folder with one; None drafts on a fixed tree of 10 nodes. The costs are measured
            in at most five seconds the first time that model, head and machine are used together, and cached.
        copy: drafts of a head or draft model also hold copies from the text so far, where its last tokens stood before.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``int8``; ``auto`` is bf16 on CUDA and on CPUs that have it, else
            fp32. ``int8`` holds linear layers in 8 bits: faster on CPUs, but it changes the model a little.
        device: where; CUDA if there is one.
        max_batch_size: requests that are decoded together.
        fast: on a CPU, packed weights and grouped attention; on CUDA, steps captured as graphs; off is the stock model.
        exact_bits: compute so that plain and speculative text are equal to the bit on a CPU, also in bf16; a step takes
            8 to 17 % longer. Without it they are equal in fp32, and in bf16 up to near-ties.

    Raises:
        ModelNotFound, UnsupportedModel: the model.
        CheckpointError, ModelNotFound: the head.
        InvalidTree: ``tree`` is deeper than the head.
        InvalidSettings: ``tree`` or ``profile`` without a drafter, both of them, ``head`` and ``draft_model``, a draft
            model of another tokenizer, or ``exact_bits`` on a machine whose kernels do not keep it.

    Warns:
        CacheWarning: the cache of measured costs and kernels is damaged or cannot be written.
    """
    _check_what_drafts(head, draft_model, tree, profile)
    template = find_template(chat_template, () if head is None else (head,), model)
    target = load_target(
        model, chat_template=template, precision=precision, device=device, fast=fast, exact_bits=exact_bits
    )
    if head in UNTRAINED:
        return Engine(target, UNTRAINED[str(head)](), max_batch_size=max_batch_size)
    if draft_model is not None:
        small = load_target(draft_model, precision=precision, device=device, fast=fast)
        draft = DraftModel(small, target)
        if tree is not None:
            draft.check_shape(tree)
        return Engine(target, Copying(draft) if copy else draft, shape=tree, max_batch_size=max_batch_size)
    if head is None:
        return Engine(target, max_batch_size=max_batch_size)
    drafter = load_drafter(head, model, target, fast=fast)
    return head_engine(
        target, drafter, head=head, model=model, tree=tree, profile=profile, copy=copy, max_batch_size=max_batch_size
    )


def head_engine(
    target: TargetModel,
    drafter: DraftHead,
    *,
    head: str | PathLike[str],
    model: str | PathLike[str],
    tree: Shape | None = None,
    profile: str | PathLike[str] | None = "auto",
    copy: bool = True,
    max_batch_size: int = 16,
) -> Engine:
    """An engine of loaded parts; the other arguments as for :func:`load`."""
    found = None if profile is None else find_profile(head, model, profile=profile)
    whole = copying(drafter, found) if copy else drafter
    if tree is not None:
        drafter.check_shape(tree)
        known = found or read_head(find_head(fspath(head), fspath(model))).profile
        return Engine(target, whole, shape=calibrated(tree, known.confidence), max_batch_size=max_batch_size)
    if found is None:
        return Engine(target, whole, max_batch_size=max_batch_size)
    extra_nodes = whole.num_tokens if isinstance(whole, Copying) else 0
    with warnings.catch_warnings():
        if kernels_folder() is None:  # the user has been warned
            warnings.simplefilter("ignore", CacheWarning)
        cost = cost_of(target, drafter, extra_nodes=extra_nodes)
    return_freed_memory()
    return Engine(target, whole, max_batch_size=max_batch_size, profile=found, cost=cost)


def copying(drafter: DraftHead, profile: AcceptanceProfile | None) -> Copying:
    """A head whose trees also hold copies, which compete for nodes by the probabilities in the profile."""
    if profile is None:
        return Copying(drafter)
    gains = [after - before for before, after in pairwise(profile.static_tokens)]
    values = {tuple(path): gain for path, gain in zip(profile.paths, gains, strict=False) if 0.0 < gain < 1.0}
    return Copying(drafter, odds=profile.copies or DEFAULT_ODDS, values=values)


def _check_what_drafts(
    head: str | PathLike[str] | None,
    draft_model: str | PathLike[str] | None,
    tree: Shape | None,
    profile: str | PathLike[str] | None,
) -> None:
    """Do the arguments of :func:`load` go together?"""
    is_own = profile not in (None, "auto")
    if is_own and head is None:
        raise InvalidSettings(f"profile {profile} needs a head: give head=…")
    if is_own and tree is not None:
        raise InvalidSettings(f"tree and profile {profile} contradict each other: give one of them")
    if head is not None and draft_model is not None:
        raise InvalidSettings(f"head {head} and draft_model {draft_model}: give one of them")
    if tree is not None and (head in UNTRAINED or (head is None and draft_model is None)):
        what = f"{head} fills no tree" if head else "nothing is there to fill it"
        shown = f"a tree of {tree.num_nodes} nodes" if isinstance(tree, Tree) else str(tree)
        raise InvalidSettings(f"{shown}: {what}; give a draft head by head=…, or draft_model=…")
    if is_own and head in UNTRAINED:
        raise InvalidSettings(f"profile {profile}: {head} has none")


def find_template(
    chat_template: str | PathLike[str] | None, heads: Iterable[str | PathLike[str]], model: str | PathLike[str]
) -> str | None:
    """Text of the chat template for a model and its heads: the given one, else the one of the heads' training.

    Raises:
        InvalidSettings: there is no such template, or the heads were trained with different ones.
        ModelNotFound, CheckpointError: there is no such head, or it cannot be read.
    """
    trained = [fspath(head) for head in heads if head not in UNTRAINED]
    saved = {head: read_head(find_head(head, fspath(model)), ignore_profile=True).chat_template for head in trained}
    if chat_template is not None or not saved:
        return read_template(chat_template)
    if len(set(saved.values())) > 1:
        raise InvalidSettings(f"{', '.join(saved)} were trained with different chat templates: give --chat-template")
    return next(iter(saved.values()))


def load_drafter(
    head: str | PathLike[str],
    model: str | PathLike[str],
    target: TargetModel,
    *,
    fast: bool = True,
    ignore_profile: bool = False,
) -> DraftHead:
    """The head alone, ready to draft for ``target``, which is ``model``; arguments and errors as for :func:`load`.

    With ``ignore_profile`` its acceptance profile may be broken or missing.
    """
    # fp32 on CPUs: drafts of a few rows are faster so, and kernels hold the weights in 16 bits all the same
    dtype = torch.float32 if fast and target.device.type == "cpu" else None
    drafter = load_head(find_head(fspath(head), fspath(model)), target, dtype=dtype, ignore_profile=ignore_profile)
    if fast:
        drafter.speed_up(folder=kernels_folder())
        return_freed_memory()
    return drafter


def load_target(
    model: str | PathLike[str],
    *,
    chat_template: str | None = None,
    precision: Precision = "auto",
    device: str | torch.device | None = None,
    fast: bool = True,
    exact_bits: bool = False,
) -> TargetModel:
    """The model alone; arguments and errors as for :func:`load`, but ``chat_template`` is a template's text."""
    if precision not in PRECISIONS:
        raise InvalidSettings(f"precision is {precision!r}; choose among {', '.join(PRECISIONS)}")
    int8 = precision == "int8"
    place = default_device() if device is None else torch.device(device)
    # int8 computes between its products in fp32 on CPUs, and in the usual type on GPUs
    dtype = None if int8 and place.type == "cuda" else PRECISIONS[precision]
    target = TargetModel.load(fspath(model), dtype=dtype, device=device, chat_template=chat_template)
    target.set_graphs(on=fast and target.device.type == "cuda")
    check_trees(target)
    if exact_bits and target.device.type != "cpu":
        raise InvalidSettings(f"exact_bits is for CPUs; the model is on {target.device}")
    if int8 and target.device.type not in ("cpu", "cuda"):
        raise InvalidSettings(f"precision int8 is for CPUs and CUDA; the model is on {target.device}")
    if int8 and not fast:
        raise InvalidSettings("precision int8 needs fast=True: it is one of the faster kernels")
    if fast or exact_bits:
        target.speed_up(exact_bits=exact_bits, int8=int8, folder=kernels_folder(warn=True))
    if (exact_bits or int8) and target.device.type == "cpu" and not rows_keep_their_bits(target.model):
        what = "precision int8" if int8 else "exact_bits"
        raise InvalidSettings(f"{what}: this CPU's kernels change a row's bits with the number of rows")
    return_freed_memory()
    return target


def kernels_folder(*, warn: bool = False) -> Path | None:
    """Where measured choices of kernels are kept; None where the user has no place for a cache.

    Warns:
        CacheWarning: if asked to, where there is a place that cannot be written.
    """
    try:
        folder = cache_folder() / "kernels"
    except InvalidSettings:
        return None
    if problem := _unwritable(folder):
        if warn:
            warnings.warn(f"{problem}: what is measured is measured again at each start", CacheWarning, stacklevel=4)
        return None
    return folder


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be kept in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"the cache cannot be written ({error})"
    return None if os.access(folder, os.W_OK) else f"the cache cannot be written ({folder} is read-only)"
