"""The acceptance profile of a head for the user's own prompts: the model answers them, and the head drafts along."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.profile_store import folder_to_write
from draftheads.checkpoints.registry import head_name
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.engine import Engine
from draftheads.decode.planner import Planner, rates
from draftheads.decode.prompts import Prompt, prompt_list
from draftheads.decode.step_costs import StepCosts, costs_of
from draftheads.errors import InvalidSettings
from draftheads.loading import engine_on, load_drafter, load_target, template_of
from draftheads.models.model_names import model_name
from draftheads.search.measure_acceptance import measured_profile
from draftheads.search.replay import encoded, own_answers
from draftheads.search.settings import ReplaySettings
from draftheads.settings import Precision
from draftheads.speculation.acceptance_profile import KINDS, PROFILE_FILE, AcceptanceProfile
from draftheads.speculation.shapes import Drafting
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import check_writable, finish_replacing, locked, user_path, write_atomic
from draftheads.utils.progress import Progress, shown
from draftheads.utils.provenance import provenance

RECORD = "tune.json"
BATCH_SIZES = (1, 2, 4, 8, 16)  # for which speeds are predicted
_ANSWERS_FOLDER = "tune.work"  # where the user has no cache


@dataclass(frozen=True)
class Tuning:
    """A head's profile and what it was made from."""

    profile: AcceptanceProfile
    record: dict[str, Any]  # as in ``tune.json``
    folder: Path  # where both are written
    engine: Engine  # the model with the head, as it is loaded with this profile


def tune_head(
    model: str | PathLike[str],
    head: str | PathLike[str],
    prompts: Sequence[Prompt] | None = None,
    *,
    chat_template: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    settings: ReplaySettings | None = None,
    precision: Precision = "auto",
    progress: Progress | bool = True,
    **load_options: Any,
) -> Tuning:
    """Measures how many tokens a step gains with a head, on the user's prompts; what ``draftheads tune`` does.

    Writes ``acceptance.json``, by which the head is then loaded, and ``tune.json``. The model's answers are saved, so a
    run that was stopped continues, and other heads use them again.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        head: a bundled head's name, a folder, or a Hugging Face id.
        prompts: to be answered; 64 built-in ones when left out.
        chat_template: as for :func:`draftheads.load`.
        out: the folder to write to. When left out, the head's own folder, or for a bundled or downloaded head a folder
            in the user's cache.
        settings: of the answers and the trees.
        precision: as for :func:`draftheads.load`.
        progress: True shows bars in a notebook or on a terminal; or receives each stage.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        ModelNotFound, CheckpointError: the model or the head cannot be loaded.
        DataError: fewer than two prompts, or fewer than two answers.
        StorageError: the folder cannot be written, or another process writes into it.
    """
    settings, progress = settings or ReplaySettings(), shown(progress)
    prompts = prompts_in(own_prompts("calibration")) if prompts is None else prompt_list(prompts)
    model, head = model_name(model), head_name(head)
    saved = resolve_head(head, model, ignore_profile=True)
    folder = user_path(out) if out else folder_to_write(saved)
    check_writable(folder / PROFILE_FILE)
    template = template_of(chat_template, saved)
    target = load_target(model, chat_template=template, precision=precision, **load_options)
    drafter = load_drafter(saved, target, fast=load_options.get("fast", True))
    with locked(folder, "give --out"):
        answers = own_answers(
            target, encoded(target, prompts, settings), settings, folder=answers_folder(folder), progress=progress
        )
        profile, measured = measured_profile(target, drafter, answers, settings, progress=progress)
        progress.stage("predicting speeds on this machine")
        record = {
            "format_version": 2,
            "method": drafter.config.method,
            "model_id": target.model_id,
            "head": head,
            "dtype": str(target.dtype).removeprefix("torch."),
            "temperature": settings.temperature,
            "num_texts": len(answers),
            **measured,
            **predicted(profile, costs_of(target, drafter)),
            "provenance": provenance(),
        }
        write_atomic(folder / RECORD, json.dumps(record).encode())
        finish_replacing(folder)
        profile.save(folder / PROFILE_FILE)
    drafting = Drafting(saved.name, tree=str(folder))
    engine = engine_on(target, saved, drafting, drafter=drafter, max_batch_size=1)
    return Tuning(profile, record, folder, engine)


def answers_folder(folder: Path) -> Path:
    """Where the model's answers are saved: not with the head, which may be published, for they contain the prompts."""
    try:
        return cache_folder() / "answers"
    except InvalidSettings:
        return folder / _ANSWERS_FOLDER


def predicted(profile: AcceptanceProfile, costs: StepCosts) -> dict[str, Any]:
    """Tokens per second on this machine, for the record: of each kind and size of tree, and of the fastest."""
    planner = Planner(profile, costs)
    found, batches = [], []
    for rows in BATCH_SIZES:
        passes, drafting = planner.costs_now(rows)
        plain = 1e3 * rows / float(passes[0])
        ways: list[dict[str, Any]] = [{"kind": "none", "num_nodes": 1, "depth": 0, "tokens_per_second": plain}]
        for kind in KINDS:
            fastest: dict[int, tuple[float, int]] = {}  # by nodes: tokens per second, and the depth
            own = [way for way in planner.ways if way.kind == kind]
            for way, by_nodes in zip(own, rates(own, rows, passes, drafting), strict=True):
                for nodes, rate in enumerate(1e3 * by_nodes[1:], 2):
                    fastest[nodes] = max(fastest.get(nodes, (0.0, 0)), (float(rate), way.depth))
            speeds = [speed for speed, _ in fastest.values()]
            ways += [
                {"kind": kind, "num_nodes": nodes, "depth": depth, "tokens_per_second": speed}
                for nodes, (speed, depth) in fastest.items()
            ]
            found.append({"batch_size": rows, "kind": kind, "num_nodes": list(fastest), "tokens_per_second": speeds})
        best = max(ways, key=itemgetter("tokens_per_second"))
        speedup = best["tokens_per_second"] / plain
        batches.append({"batch_size": rows, **best, "plain_tokens_per_second": plain, "speedup": speedup})
    return {"rates": found, "batches": batches}
