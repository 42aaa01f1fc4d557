"""From names to an engine that decodes: the model, the head that was trained for it, and the tree."""

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from os import PathLike, fspath
from os.path import isfile
from pathlib import Path
from typing import Any, Never, Unpack

import torch

from draftheads.checkpoints.checkpoint import ResolvedHead, bound_head, resolve_head
from draftheads.checkpoints.registry import (
    FoundHead,
    find_head,
    find_profile,
    find_published,
    heads_here,
    heads_on_hub,
    is_hub_model,
    shapes_of,
)
from draftheads.cpu.optimise import return_freed_memory
from draftheads.decode.engine import Engine
from draftheads.decode.planner import AcceptanceCheck
from draftheads.decode.step_costs import costs_of
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import LOOKUP_TOKENS, Mixed
from draftheads.drafters.sources import Corpus, Source, TextSoFar
from draftheads.errors import (
    BaseModelWarning,
    ChatTemplateWarning,
    CheckpointError,
    DraftHeadsError,
    InvalidSettings,
    UnsupportedModel,
    no_such,
    require_at_least,
    require_bool,
)
from draftheads.formats.reading import TAGS, format_of, imported_once, is_published
from draftheads.heads.base import DraftHead
from draftheads.models.chat_template import read_template, unread_variables
from draftheads.models.model import TargetModel
from draftheads.models.model_config import DTYPES, device_named
from draftheads.models.model_names import base_of, kind_of_folder, model_name, name_of_loaded, tuned_from
from draftheads.models.packed_weights import PackedWeights
from draftheads.models.pretrained import LoadOptions, tokenizer_of
from draftheads.runners.structure import checked
from draftheads.settings import ROUNDED_BITS, Precision
from draftheads.speculation.shapes import AUTO_HEAD, UNTRAINED_HEADS, ByProfile, Drafting, TreeChoice, calibrated
from draftheads.utils.files import user_path
from draftheads.utils.messages import short, split_variables, with_variables

# what the model computes in; int8 and int4 multiply integers between fp32 numbers
PRECISIONS: dict[str, torch.dtype | None] = {"auto": None, **DTYPES, **dict.fromkeys(ROUNDED_BITS, torch.float32)}

_MOST_NAMED = 3  # heads that were found and not taken

logger = logging.getLogger("draftheads")
Loadable = str | PathLike[str] | Any  # a name, or a loaded ``transformers`` model


def load(
    model: Loadable,
    head: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    draft_model: Loadable | None = None,
    chat_template: str | PathLike[str] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    tree: TreeChoice = "auto",
    copy: bool = True,
    corpus: str | PathLike[str] | None = None,
    precision: Precision = "auto",
    device: str | int | torch.device | None = None,
    max_batch_size: int = 16,
    max_length: int | None = None,
    fast: bool = True,
    cuda_graphs: bool = False,
    four_bit: bool = False,
    quantization_config: Any = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **unknown: Never,
) -> Engine:
    """An engine for a model, with a draft head or without.

    Args:
        model: ``smollm2-135m``, a folder, a GGUF file, or a Hugging Face id; also of a peft adapter (LoRA), which is
            merged into its base model. Or a loaded ``transformers`` model, with ``tokenizer``: it shares its weights
            with the engine and does not change. On a CPU, ``fast`` then holds packed weights besides them.
        head: a bundled head's name (``medusa``, ``hydra``), a folder, or a Hugging Face id; also of a head that Medusa,
            Hydra, IBM, EAGLE or speculators have saved, which is then kept in the cache. ``auto`` takes one that is
            made for the model (:func:`search_heads`), else ``prompt-lookup``, and logs which. Without training:
            ``prompt-lookup`` copies from the text so far, ``lookahead`` predicts n-grams with the model itself.
        tokenizer: of a loaded model, or used in place of the model's own; a tokenizer, or the name of its model.
        draft_model: a smaller model drafts in place of a head: a name, also of one with another tokenizer, or a loaded
            model with the same.
        chat_template: ``chatml``, ``hermes``, ``llama-2``, ``vicuna``, or a Jinja file. When left out, that of the
            head's training if it had one, else the tokenizer's own.
        template_variables: values of variables of the chat template, such as ``{"enable_thinking": False}``, for chats
            that give no others. When left out, those of the head's training.
        tree: what is drafted. ``auto``: the size of each draft follows from the head's acceptance profile (what
            ``draftheads tune`` measured, else the head's own) and from the costs on this machine, which are measured
            in about a second the first time that model, head and machine are used together, and cached. ``plain``:
            nothing. A number of nodes: growing trees. ``static:24``: the profile's best tree of so many nodes.
            ``drawn:3``: a chain of sampled tokens. Or a list of rank paths, its JSON text
            or a file of it; a :class:`Tree`, :class:`BestFirst` or :class:`Sampled`; or an
            ``acceptance.json`` or a folder with one: as ``auto``, by this profile.
        copy: drafts of a head or draft model also hold copies from the text so far, where its last tokens stood before.
        corpus: a text file, from which drafts hold copies, too: documents or code that answers quote.
        precision: ``fp32``, ``bf16``, ``fp16``, ``int8`` or ``int4``; ``auto`` is bf16 where the machine computes
            in it, else fp16 on GPUs (T4, V100) and fp32 on CPUs. ``int8`` and ``int4``, for CPUs, hold linear layers in
            8 and 4 bits: faster, but they change the model, int8 a little and int4 more.
        device: where; CUDA if there is one.
        max_batch_size: requests that are decoded together.
        max_length: most tokens of prompt and answer together. When left out, what the model's configuration says.
        fast: on a CPU, packed weights and grouped attention; off is the stock model.
        cuda_graphs: on CUDA, steps are captured as graphs; for models without recurrent layers. This was not yet run on
            a GPU.
        four_bit: 4-bit linear layers (NF4) by bitsandbytes. It changes the model.
        quantization_config: another quantisation of ``transformers``, such as ``BitsAndBytesConfig``.
        device_map: where ``transformers`` puts the weights, in place of ``device``. They must come to one device.
        attn_implementation: ``sdpa`` or ``eager``; others do not take the masks of trees.
        trust_remote_code: whether Python code that comes with the model may run on this machine.
        unknown: arguments of other names are errors that name the right one.

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError: the model, the head or an adapter cannot be loaded.
        InvalidTree: ``tree`` is deeper than the head.
        InvalidSettings: a wrong value, arguments that contradict each other or need another one, a draft model
            that shares no token with the model; or int8 or int4 without the native library.
        MissingDependency: an adapter, ``four_bit`` or the model needs a package that is not installed.

    Warns:
        CacheWarning: the cache of measured costs or of packed weights is damaged or cannot be written.
        SpeedWarning: the faster products do not fit this version of transformers, or a draft model shares few tokens.
        RoundingWarning: a pass over a tree differs from a text's by more than the model's own rounding in 16 bits.
        LengthWarning: texts end before the model's own greatest length.
        GenerationWarning: a part of the model's generation configuration changes texts and is not applied.
        ChatTemplateWarning: the head was trained with other variables of the template, or it does not read one.
        BaseModelWarning: the layers of the model differ much from those that the head was trained for; or, once and
            after an answer, far fewer draft tokens were accepted than the profile expects; or the head that ``auto``
            has found does not fit.
    """
    for argument in unknown:
        raise no_such("argument", argument, list(signature(load).parameters)[:-1])
    require_bool(fast=fast, cuda_graphs=cuda_graphs, four_bit=four_bit, trust_remote_code=trust_remote_code)
    require_at_least(1, max_batch_size=max_batch_size)
    _check_paths(head=head, chat_template=chat_template, corpus=corpus)
    if template_variables:
        chat_template = with_variables(chat_template, template_variables)
    name = name_of(model)
    if draft_model is not None:
        name_of(draft_model, "draft_model")
    drafting = Drafting(head, draft_model, tree, copy, None if corpus is None else fspath(corpus))  # type: ignore[arg-type]
    drafts = find_drafts(drafting, name)
    how: dict[str, Any] = {"fast": fast, "cuda_graphs": cuda_graphs}
    of_names: dict[str, Any] = {"precision": precision, "trust_remote_code": trust_remote_code}
    target = load_target(
        model,
        tokenizer=tokenizer,
        chat_template=template_of(chat_template, drafts),
        device=device,
        max_length=max_length,
        four_bit=four_bit,
        quantization_config=quantization_config,
        device_map=device_map,
        attn_implementation=attn_implementation,
        **how,
        **of_names,
    )
    if draft_model is not None and not drafting.is_plain:
        is_named = isinstance(draft_model, str | PathLike)
        more = {"device": target.device, **of_names} if is_named else {"tokenizer": target.tokenizer}
        draft = DraftModel(load_target(draft_model, **how, **more), target)
        return with_draft_model(draft, target, drafting, max_batch_size=max_batch_size)
    return engine_on(target, drafts, drafting, max_batch_size=max_batch_size, fast=fast)


def with_draft_model(draft: DraftModel, target: TargetModel, drafting: Drafting, *, max_batch_size: int) -> Engine:
    """The engine of :func:`load` with a draft model, and with the copies and the tree of ``drafting``.

    Raises:
        InvalidSettings: the corpus cannot be read.
        InvalidTree: the tree has ranks that the draft model cannot fill.
    """
    shape = None if isinstance(drafting.shape, ByProfile) else drafting.shape
    sources = sources_of(target, drafting)
    return Engine(target, Mixed(draft, sources) if sources else draft, shape=shape, max_batch_size=max_batch_size)


def resolve(
    head: str | PathLike[str], model: str | PathLike[str], *, ignore_profile: bool = False
) -> ResolvedHead | str:
    """A head that was found and read, for :func:`engine_on`; the name of what drafts without training stays a name."""
    return str(head) if head in UNTRAINED_HEADS else resolve_head(head, model, ignore_profile=ignore_profile)


def engine_on(
    target: TargetModel,
    drafts: ResolvedHead | str | Path | None,
    drafting: Drafting,
    *,
    drafter: DraftHead | None = None,
    max_batch_size: int = 16,
    fast: bool = True,
    keep_cost: bool = True,
) -> Engine:
    """An engine on a loaded target, which several engines can share.

    The chat template stays the target's: :func:`template_of` finds the one of a head.

    Args:
        target: the model.
        drafts: what :func:`resolve` or :func:`find_drafts` found for ``drafting.head``; None decodes plainly.
        drafting: how it drafts.
        drafter: the head that was loaded of ``drafts``, if there is one already.
        max_batch_size: as for :func:`load`.
        fast: as for :func:`load`.
        keep_cost: off: costs that have to be measured now are not cached, as other work may slow them down.
    """
    shape = drafting.shape
    if drafting.head == AUTO_HEAD and isinstance(drafts, ResolvedHead | Path):
        name = str(drafts) if isinstance(drafts, Path) else drafts.name
        options: dict[str, Any] = {"drafter": drafter, "max_batch_size": max_batch_size}
        options |= {"fast": fast, "keep_cost": keep_cost}
        try:
            return engine_on(target, drafts, replace(drafting, head=name, tree=shape), **options)  # type: ignore[arg-type]
        except (CheckpointError, UnsupportedModel) as error:
            drafts, words = _untrained(drafting)
            warnings.warn(f"head auto: {name} does not fit, so {words} ({error})", BaseModelWarning, stacklevel=2)
    if isinstance(drafts, Path):
        drafts = resolve_head(imported_once(drafts, target), target.model_id)
    if drafting.is_plain or (drafts is None and drafting.corpus is None):
        return Engine(target, max_batch_size=max_batch_size)
    sources = sources_of(target, drafting)
    if not isinstance(drafts, ResolvedHead):
        untrained = Lookahead() if drafts == "lookahead" else Mixed(None, sources, num_tokens=LOOKUP_TOKENS)
        return Engine(target, untrained, max_batch_size=max_batch_size)
    drafter = load_drafter(drafts, target, fast=fast) if drafter is None else drafter
    acceptance = find_profile(drafts, shape.profile if isinstance(shape, ByProfile) else "auto")
    assumed = [str(guess) for guess in drafts.provenance.get("assumed") or ()]
    if assumed := assumed[: -1 if acceptance.num_tokens else None]:  # the last one is of a head that is not measured
        warnings.warn(f"{drafts.name}: it is assumed {', and '.join(assumed)}", BaseModelWarning, stacklevel=3)
    whole = Mixed.by_profile(drafter, acceptance, sources) if sources else drafter
    if isinstance(shape, ByProfile) and shape.static_nodes:
        shape = acceptance.tree(shape.static_nodes)
    check = AcceptanceCheck(drafts.method, drafts.name, drafts.model, is_assumed=not acceptance.num_tokens)
    options = {"max_batch_size": max_batch_size, "check": check}
    if not isinstance(shape, ByProfile):
        return Engine(target, whole, shape=calibrated(shape, acceptance.temperatures), **options)
    costs = costs_of(target, drafter, keep=keep_cost)
    return_freed_memory()
    return Engine(target, whole, profile=acceptance, costs=costs, **options)


def sources_of(target: TargetModel, drafting: Drafting) -> list[Source]:
    """What drafts are copied from.

    Raises:
        InvalidSettings: the corpus cannot be read.
    """
    copies: list[Source] = [TextSoFar()] if drafting.copy or drafting.head == "prompt-lookup" else []
    if drafting.corpus is None:
        return copies
    return [*copies, Corpus.read(drafting.corpus, target.tokenizer, target.vocab_size)]


def template_of(chat_template: str | PathLike[str] | None, *drafts: ResolvedHead | str | Path | None) -> str | None:
    """Text of the chat template for a model and its heads: the given one, else the one of the heads' training.

    Raises:
        InvalidSettings: there is no such template, or the heads were trained with different ones.
    """
    saved = {head.name: head.chat_template for head in drafts if isinstance(head, ResolvedHead)}
    variables, named = split_variables(None if chat_template is None else fspath(chat_template))
    trained = {name: split_variables(text) for name, text in saved.items()}
    for name, (known, _) in trained.items():
        if chat_template is not None and known != variables:
            warnings.warn(
                f"{name} was trained with {_shown(known)}, and the chat template has {_shown(variables)} now: fewer of "
                "its draft tokens may be accepted",
                ChatTemplateWarning,
                stacklevel=3,
            )
    if named is not None or not saved:
        return read_template(chat_template)
    kept = set(saved.values()) if chat_template is None else {template for _, template in trained.values()}
    if len(kept) > 1:
        raise InvalidSettings(
            f"{', '.join(saved)} were trained with different chat templates: give --chat-template or chat_template=…"
        )
    return with_variables(kept.pop(), variables) if variables else kept.pop()


def _shown(variables: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in variables.items()) or "no template variables"


def find_drafts(drafting: Drafting, model: str) -> ResolvedHead | str | Path | None:
    """What drafts, for :func:`engine_on`, which converts the file or folder of a head of another project."""
    if drafting.is_plain or drafting.head is None:
        return None
    if drafting.head != AUTO_HEAD:
        return _drafts_named(drafting.head, model)
    found, notes = search_heads(model)
    for place, head in enumerate(found):
        try:
            drafts = _drafts_named(head.name, model)
        except DraftHeadsError as error:
            notes.append(f"{head.name} cannot be used: {error}")
            continue
        others, more = found[place + 1 :], len(found) - place - 1 - _MOST_NAMED
        also = f"also found: {', '.join(map(str, others[:_MOST_NAMED]))}" if others else "nothing else was found"
        also += f" and {more} more (`draftheads info {model}`)" if more > 0 else ""
        logger.info("head auto takes %s", "; ".join([str(head), also, *notes]))
        return drafts
    untrained, words = _untrained(drafting)
    logger.info("head auto: %s", "; ".join([f"no head for {model} was found, so {words}", *notes]))
    return untrained


def _untrained(drafting: Drafting) -> tuple[str | None, str]:
    """What drafts where no head is found, and in words. InvalidSettings: the given tree needs a head."""
    head = "prompt-lookup" if drafting.copy else None
    replace(drafting, head=head)
    return head, "copies from the text are drafted" if drafting.copy else "nothing is drafted"


def search_heads(model: str, *, asks_hub: bool = False) -> tuple[list[FoundHead], list[str]]:
    """Heads that are made for a model, in the order in which ``auto`` tries them, without loading the model.

    They are in its own files or folder, installed, in the caches, or on the Hub, by the cards of models there.

    Args:
        model: its name.
        asks_hub: also if a head was found here.

    Returns:
        The heads, and sentences: why the Hub was not asked, and which model this one was tuned from.
    """
    base, folder, notes = base_of(model), user_path(model), []
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    found = []
    for place in (model, *map(str, inner)):
        is_other = kind_of_folder(user_path(place)) != "draft head"
        if is_other and (form := format_of(shapes_of(place))) is not None and form.read is not None:
            found.append(FoundHead(place, form.name, "in the model's own files" if place == model else "in its folder"))
    of_files = {head.method for head in found}  # converted before, they are in the cache, too
    found += [head for head in heads_here(model) if head.method not in of_files]
    if asks_hub or not found:
        on_hub, note = heads_on_hub(model if is_hub_model(model) else base, ("draftheads", *TAGS))
        found += on_hub
        notes += [note] if note else []
    if folder.is_dir() and (origin := tuned_from(folder)) not in (None, base):
        heads = ", ".join(map(str, heads_here(model, base=origin))) or f"see `draftheads info {origin}`"
        notes.append(f"{model} was tuned from {origin}, whose heads can be tried: {heads}")
    return found, notes


def _drafts_named(head: str | PathLike[str], model: str) -> ResolvedHead | str | Path:
    if head in UNTRAINED_HEADS:
        return str(head)
    path = user_path(fspath(head))
    if isfile(path):  # noqa: PTH113 - the method is an error for names that are too long
        return path
    folder = find_head(head, model)
    is_ours = kind_of_folder(folder) == "draft head"
    found = folder if is_ours or path.is_dir() else find_published(head, model)
    return found if not is_ours and is_published(found) else resolve_head(head, model, folder=folder)


def load_drafter(head: ResolvedHead, target: TargetModel, *, fast: bool = True) -> DraftHead:
    """The head alone, ready to draft for ``target``; errors as for :func:`load`."""
    # fp32 on CPUs: drafts of a few rows are faster so, and kernels hold the weights in 16 bits all the same
    dtype = torch.float32 if fast and target.device.type == "cpu" else None
    drafter = bound_head(head, head.tensors, target, dtype)
    if fast:
        drafter.speed_up()
        return_freed_memory()
    return drafter


def name_of(model: Loadable, what: str = "model") -> str:
    """The name of a model, also of a loaded one.

    Raises:
        InvalidSettings: it is neither a name nor a loaded model.
    """
    return name_of_loaded(model) if _is_loaded(model) else model_name(model, what)


def load_target(
    model: Loadable,
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    precision: Precision = "auto",
    device: str | int | torch.device | None = None,
    max_length: int | None = None,
    fast: bool = True,
    cuda_graphs: bool = False,
    **options: Unpack[LoadOptions],
) -> TargetModel:
    """The model alone; arguments and errors as for :func:`load`, but ``chat_template`` is a template's text."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InvalidSettings(f"precision is {precision!r}; choose among {', '.join(PRECISIONS)}")
    bits, place = ROUNDED_BITS.get(precision), device_named(device)
    quantised = "four_bit=True" if options.get("four_bit") else options.get("quantization_config")
    _check_rounded(precision, quantised=quantised)
    if cuda_graphs and place.type != "cuda":
        raise InvalidSettings(f"cuda_graphs is for CUDA; the model is on {place}")
    tokenizer = tokenizer_of(tokenizer, trust_remote_code=options.get("trust_remote_code", False))
    ours: dict[str, Any] = {"chat_template": chat_template, "max_length": max_length}

    def read(packed: PackedWeights | None = None) -> TargetModel:
        if _is_loaded(model):  # the cache knows files alone
            target = TargetModel.of(model, tokenizer, **ours)
            _check_as_loaded(target, precision, None if device is None else place, options)
        else:
            _check_rounded(precision, None if options.get("device_map") else place)
            kept: dict[str, Any] = {"packed": packed}
            target = TargetModel.load(
                model, tokenizer=tokenizer, dtype=PRECISIONS[precision], device=device, **kept, **ours, **options
            )
        if cuda_graphs and target.is_recurrent:
            raise InvalidSettings(
                f"cuda_graphs is not for {target.model_id}: its recurrent layers walk each tree level by level, so "
                "steps have no fixed shapes that could be captured; leave cuda_graphs out"
            )
        target.step_mode.graphs = cuda_graphs
        return target

    target = read(None if bits is None else PackedWeights(bits))
    quantised = f"{target.model_id}, whose weights are quantised" if target.is_quantised else None
    _check_rounded(precision, target.device, fast=fast, quantised=quantised)
    target = checked(target, read, fast=fast, bits=bits)
    return_freed_memory()
    if unread := unread_variables(target):
        warnings.warn(
            f"the chat template of {target.model_id} does not read {', '.join(unread)}: it changes nothing",
            ChatTemplateWarning,
            stacklevel=2,
        )
    return target


def _is_loaded(model: object) -> bool:
    return isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model, "get_output_embeddings")


def _check_as_loaded(
    target: TargetModel, precision: str, device: torch.device | None, options: Mapping[str, Any]
) -> None:
    """Does the loaded model agree with the arguments, which cannot change it?"""
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise InvalidSettings(
            f"{given[0]} is for a model given by its name; this one is loaded: give it to from_pretrained"
        )
    dtype = DTYPES.get(precision)
    if dtype not in (None, target.dtype):
        raise InvalidSettings(
            f"precision is {precision} and the loaded model computes in {target.precision}: leave precision out, or "
            f"convert the model by model.to({dtype})"
        )
    if device is not None and (device.type, device.index or 0) != (target.device.type, target.device.index or 0):
        raise InvalidSettings(
            f"device is {device} and the loaded model is on {target.device}: leave device out, or move the model by "
            f"model.to('{device}')"
        )


def _check_rounded(
    precision: str, place: torch.device | None = None, *, fast: bool = True, quantised: object = None
) -> None:
    """int8 and int4 are kernels for CPUs, and quantised layers have kernels of their own."""
    if precision not in ROUNDED_BITS:
        return
    if place is not None and place.type != "cpu":
        raise InvalidSettings(
            f"precision {precision} is for CPUs; the model is on {place}: give device='cpu' or four_bit=True"
        )
    if not fast:
        raise InvalidSettings(f"precision {precision} needs fast=True: it is one of the faster kernels")
    if quantised is not None:
        what = short(str(quantised))
        raise InvalidSettings(f"precision {precision} and {what}: give one of them; it needs nn.Linear layers")


def _check_paths(**values: object) -> None:
    for name, value in values.items():
        if not (value is None or (isinstance(value, str | PathLike) and str(value))):
            shown = f"of type {type(value).__name__}" if isinstance(value, torch.nn.Module) else repr(value)
            also = ": for a loaded head use Engine(target, head)" if isinstance(value, DraftHead) else ""
            raise InvalidSettings(f"{name} is {shown}; give a name, a path or None{also}")
