"""Trains the variants of a table with the same budget on the same text, one after the other."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.data.records import own_prompts, prompts_in
from draftheads.heads import head_classes
from draftheads.heads.base import HeadConfig
from draftheads.loading import load
from draftheads.models.model_names import ADAPTER_FOLDER, TUNED_FOLDER
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import defaults_from
from draftheads.train.report import Report
from draftheads.train.run import train
from draftheads.utils.counts import counted
from draftheads.utils.files import locked, write_atomic
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import as_json_values, identity_digest
from draftheads_papers.paper_tables import PaperTable

_TIMES = 3  # sampled answers to each prompt, besides the greedy one
_ANSWER_TOKENS = 64
FEW_TOKENS = 3000  # of text in a quick study


@dataclass(frozen=True)
class Variant:
    """A trained variant."""

    name: str
    options: TrainOptions
    report: Report

    @property
    def head(self) -> Path:
        return head_of(self.options)

    @property
    def model(self) -> Path | None:
        """A tuned model, or its adapter."""
        joint = self.options.joint
        return self.options.out / (TUNED_FOLDER if joint == "full" else ADAPTER_FOLDER) if joint else None


def head_of(options: TrainOptions) -> Path:
    out = options.out / TUNED_FOLDER if options.joint == "full" else options.out
    return out / HEAD_FOLDER if options.joint else out


def planned(table: PaperTable, model: str, out: Path, budget: Mapping[str, Any]) -> dict[str, TrainOptions]:
    """The options of all variants of a table on a budget, see :func:`options_of`, by their names.

    Each has a folder of its own in ``out``, which differs for other settings: variants of several tables that have the
    same name and settings are trained once.
    """
    found: dict[str, TrainOptions] = {}
    for name, changes in table.variants.items():
        options = options_of({**table.shared, **changes}, model, out, budget)
        usual = {**options.defaults(), "out": str(out), "resume": True, "save_steps": options.save_steps}
        own = {key: value for key, value in sorted(as_json_values(vars(options)).items()) if value != usual.get(key)}
        if (start := changes.get("after")) is not None:  # with the heads of another variant
            own["start_from"] = found[start].out.name
            options = replace(options, start_from=str(head_of(found[start])))
        folder = f"{folder_name(name)}-{identity_digest(own)[:6]}"
        found[name] = replace(options, out=out / "heads" / folder, features=_shared_states(options, out / "states"))
    return found


def _shared_states(options: TrainOptions, folder: Path) -> Path | None:
    """Where hidden states are stored that other variants read, too; None for the run's own place."""
    config, _ = head_classes(options.method)
    if options.joint or options.features or config.hidden_layers is not HeadConfig.hidden_layers:
        return options.features  # a tuned model's change in each step; others read further layers
    decides = ("model", "data", "text", "max_length", "max_tokens", "chat_template", "template_variables", "precision")
    return folder / identity_digest(as_json_values({name: getattr(options, name) for name in decides}))


def train_all(plans: Sequence[Mapping[str, TrainOptions]], out: Path, progress: Progress) -> list[list[Variant]]:
    """Trains what is planned for tables in ``out``, each folder once; what was trained is not trained again."""
    names = {options.out: (name, options) for plan in plans for name, options in plan.items()}
    reports: dict[Path, Report] = {}
    with locked(out / "heads", "name another --out") if names else nullcontext():
        for number, (folder, (name, options)) in enumerate(names.items(), 1):
            progress.stage(f"variant {number} of {len(names)}: {name}")
            report = train(options, progress)
            assert report is not None
            reports[folder] = report
        shutil.rmtree(out / "states", ignore_errors=True)  # a run that was stopped has kept them
    return [[Variant(name, options, reports[options.out]) for name, options in plan.items()] for plan in plans]


def options_of(changes: Mapping[str, Any], model: str, out: Path, budget: Mapping[str, Any]) -> TrainOptions:
    """The options of one variant: of its recipe, its own, and the budget's, which count most.

    ``changes`` are options of training, and may have ``joint`` (the model is tuned, too), ``after`` (another variant,
    with whose heads it begins), and ``only_text`` or ``only_chats`` (the budget's other data are left out). ``budget``
    has the options that all variants share, such as ``data``, ``text`` and ``epochs``.
    """
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    settings.pop("after", None)
    given = {"model": model, "out": out, "resume": True, **budget}
    only_text, only_chats = settings.pop("only_text", False), settings.pop("only_chats", False)
    if settings.get("joint") or only_chats:
        given.pop("text", None)
    elif only_text and given.get("text"):
        given["data"] = ()
    recipe = defaults_from({**given, **settings})
    return TrainOptions.of(**{**recipe, **settings, **given})


def own_chats(model: str, path: Path, num_tokens: int, progress: Progress, **load_options: Any) -> Path:
    """Writes a few answers of the model to built-in prompts, for a quick study without data; returns the file."""
    if path.is_file():
        return path
    engine = load(model, **load_options)
    prompts = prompts_in(own_prompts("calibration"))
    per_prompt = 1 + _TIMES
    prompts = prompts[: max(8, num_tokens // (per_prompt * _ANSWER_TOKENS))]
    progress.stage(f"answering {counted(len(prompts), 'prompt')} for training")
    lines = []
    for seed in range(per_prompt):
        temperature = 0.8 if seed else 0.0
        results = engine.generate(prompts, max_new_tokens=_ANSWER_TOKENS, temperature=temperature, seed=seed)
        for prompt, result in zip(prompts, results, strict=True):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": result.text}]
            lines.append(json.dumps({"messages": messages, "finished": result.finish_reason == "stop"}))
    write_atomic(path, "".join(line + "\n" for line in lines).encode())
    return path


def own_text(path: Path) -> Path:
    """Writes built-in questions as plain text, for a quick study without any; returns the file."""
    lines = (json.dumps({"text": prompt}) + "\n" for prompt in prompts_in(own_prompts("tasks")))
    write_atomic(path, "".join(lines).encode())
    return path


def folder_name(variant: str) -> str:
    """The name of a variant's folder.

    >>> folder_name("hydra++ (PrefixMLP, teacher, 4 layers)"), folder_name("amphista-α")
    ('hydra++-PrefixMLP-teacher-4-layers', 'amphista-α')
    """
    return re.sub(r"[^\w+-]+", "-", variant).strip("-")
