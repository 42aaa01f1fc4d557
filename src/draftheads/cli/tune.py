"""``draftheads tune``: measures how many tokens a head's trees gain on the user's prompts, and shows it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftheads.acceptance_profile import PROFILE_FILE, AcceptanceProfile
from draftheads.checkpoint import read_head
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.cost_profile import cost_of
from draftheads.decode.engine import Prompt
from draftheads.errors import InvalidSettings
from draftheads.files import locked, user_path, write_atomic
from draftheads.loading import Precision, find_template, load_drafter, load_target
from draftheads.models.embedded import cache_folder
from draftheads.profiles import folder_to_write
from draftheads.provenance import provenance
from draftheads.search.replay import RehearsalSettings
from draftheads.search.tune import predicted, tune
from draftheads.zoo.registry import find_head

_WORK_FOLDER = "tune.work"  # where there is no cache
_SHOWN = (1, 2, 4, 8, 10, 16, 32, 64)


@dataclass(frozen=True)
class TuneOptions:
    """Measure how many tokens per step a head gains on your prompts and at your temperature.

    Not needed: every head comes with such a profile. Writes acceptance.json, which loading the head then goes by, and
    tune.html, which shows it. Stopped and started again, it goes on where it was.
    """

    model: tyro.conf.Positional[str]
    """A model: a name, a folder or a Hugging Face id."""
    head: tyro.conf.Positional[str]
    """Its draft head: a bundled one's name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the head's or the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    out: Path | None = None
    """Where to write; the head's own folder when left out, and for a bundled or downloaded head the user's cache."""
    prompts: Path | None = None
    """A JSONL file of prompts, best the kind that will come, instead of 64 of our own."""
    settings: tyro.conf.OmitArgPrefixes[RehearsalSettings] = field(default_factory=RehearsalSettings)
    precision: Precision = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32."""


def run(options: TuneOptions) -> None:
    """Measures, writes and shows."""
    console = Console(highlight=False)
    quiet_transformers()
    saved = read_head(find_head(options.head, options.model), ignore_profile=True)
    prompts: list[Prompt] = list(prompts_in(options.prompts or own_prompts("calibration")))
    template = find_template(options.chat_template, (options.head,), options.model)
    target = load_target(options.model, chat_template=template, precision=options.precision)
    head = load_drafter(options.head, options.model, target, ignore_profile=True)
    folder = user_path(options.out) if options.out else folder_to_write(saved)
    with locked(folder, "give --out"), ProgressDisplay(console) as progress:
        try:
            outcome = tune(target, head, prompts, options.settings, folder=work_folder(folder), progress=progress)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on with it")
            raise
        progress.stage("predicting speeds on this machine")
        found = predicted(outcome.profile, cost_of(target, head))
        record = {**outcome.record, **found, "head": options.head, "provenance": provenance()}
        write_atomic(folder / "tune.json", json.dumps(record).encode())
        outcome.profile.save(folder / PROFILE_FILE)
    _show(console, outcome.profile, found["batches"])
    hint = "" if options.out is None else f"; `--head {options.head} --profile {folder}` goes by it"
    console.print(f"wrote {folder / PROFILE_FILE}{hint}", soft_wrap=True)
    write_pages(console, folder, "tune")


def work_folder(folder: Path) -> Path:
    """Where the model's answers are kept. They hold prompts, which must not travel with a head."""
    try:
        return cache_folder() / "answers"
    except InvalidSettings:
        return folder / _WORK_FOLDER


def _show(console: Console, profile: AcceptanceProfile, batches: list[dict[str, object]]) -> None:
    """Tokens per step by nodes, and the fastest trees by rows."""
    table = _table("nodes", "static, tokens/step", "growing, tokens/step")
    for nodes in _SHOWN:
        cells = [
            f"{tokens[nodes - 1]:.2f}" if nodes <= len(tokens) else ""
            for tokens in (profile.static_tokens, profile.dynamic_tokens)
        ]
        if any(cells):
            table.add_row(str(nodes), *cells)
    console.print(table)
    table = _table("rows", "fastest here", "nodes", "tokens/s, predicted", "over plain")
    for batch in batches:
        kind = "no draft" if batch["kind"] == "none" else batch["kind"]
        speed, speedup = f"{batch['tokens_per_second']:.1f}", f"{batch['speedup']:.2f}"
        table.add_row(str(batch["batch_size"]), str(kind), str(batch["num_nodes"]), speed, speedup)
    console.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False)
