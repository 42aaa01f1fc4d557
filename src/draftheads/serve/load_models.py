"""From names to what is served: one loaded model, an engine for each head, and the exchange of a head."""

import re
from contextlib import suppress
from dataclasses import replace
from os.path import realpath
from pathlib import Path
from threading import Thread
from typing import Annotated

import torch
from pydantic import Field

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.head_files import CONFIG_FILE, HEAD_FILES
from draftheads.checkpoints.registry import zoo_heads
from draftheads.decode.engine import Engine
from draftheads.decode.grammar import compiler_for
from draftheads.errors import DraftHeadsError, InvalidSettings, ModelNotFound
from draftheads.loading import engine_on, find_drafts, load_target, name_of, template_of
from draftheads.models.model import TargetModel
from draftheads.models.model_names import base_of, shown_name
from draftheads.runners import bytes_of_states, bytes_per_slot
from draftheads.serve.fields import Fields
from draftheads.serve.options import ServeOptions
from draftheads.serve.scheduler import Scheduler
from draftheads.serve.state import ServedModel
from draftheads.speculation.shapes import AUTO_HEAD, Drafting
from draftheads.utils.files import current, user_path
from draftheads.utils.machine import find_memory

_UNKNOWN_BYTES = 2 << 30  # of free memory, where it is not known
_NAME = re.compile(r"\w[\w.+-]{0,99}(/\w[\w.+-]{0,99}){0,4}", re.ASCII)  # a head's own, or folders and names
_CONTEXT = 8192  # of models without a limit


def load_served(options: ServeOptions) -> tuple[list[ServedModel], dict[str, Engine]]:
    """Loads a model once, and its heads; the first one also drafts for the adapters. The engines are by served name."""
    model, load = options.model, options.load
    draftings = {head: Drafting(head, corpus=options.corpus) for head in options.head or (None,)}
    resolved = {head: find_drafts(drafting, name_of(model)) for head, drafting in draftings.items()}
    template = template_of(load.chat_template, *resolved.values())
    target = load_target(model, **{**load.given(), "chat_template": template})
    preparing = Thread(target=_prepare_grammars, args=(target,))
    preparing.start()
    base = options.name or _short_name(model)
    models: list[ServedModel] = []
    engines: dict[str, Engine] = {}
    for head, drafts in resolved.items():
        served = base if not engines else f"{base}:{_short_name(str(head))}"
        if served in engines:
            raise InvalidSettings(f"--head {head}: there are two heads of this name; rename the folder of one")
        engine = engines[served] = engine_on(target, drafts, draftings[head], max_batch_size=options.max_rows)
        shown = engine.drafter.name if head == AUTO_HEAD else head
        models.append(ServedModel(served, base, None if shown is None else _short_name(shown)))
    for adapter, folder in options.adapters.items():
        if adapter in engines:
            raise InvalidSettings(f"--adapter {adapter}={folder}: {adapter} is served already; give another name")
        engines[adapter] = engines[base].with_adapter(folder)
        _prepare_grammars(engines[adapter].model)  # it may have its own tokenizer
        models.append(replace(models[0], name=adapter, adapter=adapter))
    preparing.join()
    return models, engines


def _prepare_grammars(target: TargetModel) -> None:
    """Before there are streams: a large vocabulary takes a second, and other threads wait."""
    with suppress(DraftHeadsError):  # there are models without grammars
        compiler_for(target.tokenizer, vocab_size=target.vocab_size, eos_ids=target.eos_ids)


def _short_name(name: str) -> str:
    """A folder's own name; other names as they are. No path of this machine is shown to clients."""
    folder = user_path(name)
    return folder.resolve().name if folder.exists() else name


def default_kv_bytes(target: TargetModel, max_rows: int) -> int:
    """A budget for keys and values: half of the free memory, and at most what all rows can use twice over."""
    per_token = bytes_per_slot(target) + target.hidden_size * target.dtype.itemsize
    most = 2 * (max_rows * (target.max_positions or _CONTEXT) * per_token + bytes_of_states(target, max_rows))
    return max(1, min(most, _free_bytes(target) // 2))


def _free_bytes(target: TargetModel) -> int:
    if target.device.type == "cuda":
        return int(torch.cuda.mem_get_info(target.device)[0])
    memory = find_memory()
    known = [amount for amount in (memory.available or memory.total, memory.limit) if amount]
    return min(known, default=_UNKNOWN_BYTES)


class HeadFields(Fields):
    """The fields of a request to exchange a head."""

    model: Annotated[str, Field(min_length=1)]
    head: Annotated[str, Field(min_length=1)]


def exchange_head(scheduler: Scheduler, options: ServeOptions, served: str, head: str) -> None:
    """Loads and checks a head, and uses it for all later requests of a served model. Takes seconds."""
    old, folder = scheduler.engines[served], allowed_head(head, options.model, options.head_folder)
    try:
        drafting = Drafting(head, corpus=options.corpus)
        drafts = resolve_head(folder, options.model)
        new = engine_on(old.model, drafts, drafting, max_batch_size=old.max_batch_size, keep_cost=False)
    except DraftHeadsError as error:  # no path of this machine is shown to clients
        own = old.model.model_id
        error.args = (str(error).replace(str(folder), head).replace(own, shown_name(own)), *error.args[1:])
        raise

    def change() -> None:
        # a new dictionary: other threads may be looking at the old one
        scheduler.core.engines = {**scheduler.engines, served: new}

    scheduler.call(change).result()  # between two steps


def allowed_head(head: str, model: str, head_folder: Path | None = None) -> Path:
    """The folder of a head that is installed with a package, or lies below the folder of heads."""
    base = base_of(model)
    installed = {in_zoo.method: in_zoo.folder for in_zoo in zoo_heads() if in_zoo.base_name == base}
    known = installed | {f"{in_zoo.base_name}/{in_zoo.method}": in_zoo.folder for in_zoo in zoo_heads()}
    if head in known:
        return known[head]
    if head_folder is not None and _NAME.fullmatch(head):
        root, folder = (Path(realpath(path)) for path in (user_path(head_folder), user_path(head_folder) / head))
        files = [current(folder, name) for name in HEAD_FILES]
        # a link may lead elsewhere, and realpath() returns one that leads to itself
        outside = [path for path in (folder, *files) if not Path(realpath(path)).is_relative_to(root)]
        if not outside and current(folder, CONFIG_FILE).is_file():
            return folder
    where = "start the server with --head-folder" if head_folder is None else "it is not in --head-folder"
    names = ", ".join(installed) or "none"
    raise ModelNotFound(f"there is no head {head[:80]!r}: {where}; installed for this model: {names}")
