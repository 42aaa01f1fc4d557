"""``draftheads tune``: finds the trees that pay for a head on this machine, and shows why."""

import hashlib
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftheads.checkpoint import PLAN_FILE, SavedHead, conditions, read_head
from draftheads.cli.prompts import read_prompts
from draftheads.cli.show import quiet_transformers
from draftheads.cli.stages import Stages
from draftheads.decode.engine import Engine, Prompt
from draftheads.errors import DataError, InvalidSettings, MissingDependency
from draftheads.files import locked, user_path, write_atomic
from draftheads.loading import Precision, load_drafter, load_target, plans_folder
from draftheads.plan import Conditions, Plan
from draftheads.provenance import provenance
from draftheads.search.page import RECORD, write_page
from draftheads.search.prompts import CALIBRATION_PROMPTS
from draftheads.search.tune import Tuner, TuneSettings
from draftheads.search.verify import Verified, Verifier
from draftheads.target.embedded import cache_folder
from draftheads.zoo.registry import find_head, zoo_heads

_WORK_FOLDER = "tune.work"  # where there is no cache


@dataclass(frozen=True)
class TuneOptions:
    """Find the trees of guesses that make a head fast on this machine, for each number of requests at a time.

    Writes plan.json, which loading the head then goes by, and tune.html, which shows why. Stopped or killed and
    started again, it goes on where it was.
    """

    model: tyro.conf.Positional[str]
    """A model: a name, a folder or a Hugging Face id."""
    head: tyro.conf.Positional[str]
    """Its draft head: a bundled one's name, a folder or a Hugging Face id."""
    out: Path | None = None
    """Where to write; the head's own folder when left out, and for a bundled or downloaded head the user's cache."""
    prompts: Path | None = None
    """A JSONL file of prompts to calibrate on, best the kind that will come, instead of 64 of our own."""
    settings: tyro.conf.OmitArgPrefixes[TuneSettings] = field(default_factory=TuneSettings)
    verify: Path | None = None
    """Then compare the plan on these other prompts (a JSONL file) with no guesses and fixed trees; long."""
    verify_prompts: int = 16
    """How many of them are timed at each batch size; tokens per step are counted on all."""
    precision: Precision = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32."""
    exact_bits: bool = False
    """Tune for decoding with exact_bits."""


def run(options: TuneOptions) -> None:
    """Searches, writes and shows."""
    console = Console(highlight=False)
    quiet_transformers()
    saved = read_head(find_head(options.head, options.model), ignore_plan=True)
    prompts: list[Prompt] = list(read_prompts(options.prompts)) if options.prompts else list(CALIBRATION_PROMPTS)
    others: list[Prompt] = list(read_prompts(options.verify)) if options.verify else []
    if options.verify and len(others) < 2:
        raise DataError(f"prompts to compare on: {len(others)}; give at least 2, better 30", path=options.verify)
    target = load_target(options.model, precision=options.precision, exact_bits=options.exact_bits)
    head = load_drafter(options.head, options.model, target, ignore_plan=True)
    here = conditions(saved.digest, target)
    folder = user_path(options.out) if options.out else own_folder(saved, here)
    with locked(folder, "give --out"), Stages(console) as display:
        tuner = Tuner(
            target,
            head,
            prompts,
            options.settings,
            conditions=here,
            command=_command(),
            folder=work_folder(folder),
            anew=options.verify is None,
            display=display,
        )
        for prompt in others:
            Engine(target).encode(prompt)  # or say now that one is too long
        try:
            outcome = tuner.run()
            record = {**outcome.record, "head": options.head, "provenance": provenance()}
            _save(folder, outcome.plan, record)
            verified = None
            if options.verify is not None:
                verified = Verifier(
                    target,
                    head,
                    outcome.plan,
                    outcome.record,
                    others,
                    num_speed_prompts=options.verify_prompts,
                    settings=options.settings,
                    book=tuner.book,
                    display=display,
                ).run()
                _save(
                    folder, outcome.plan, {**record, "verified": {"prompts": options.verify.name, **asdict(verified)}}
                )
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on with it")
            raise
        tuner.book.finish()
    _show(console, outcome.plan, verified)
    hint = "" if options.out is None else f"; `--head {options.head} --plan {folder}` goes by it"
    console.print(f"wrote {folder / PLAN_FILE}{hint}", soft_wrap=True)
    try:
        console.print(f"wrote {write_page(folder)}", soft_wrap=True)
    except MissingDependency as error:
        console.print(f"no page: {error}", soft_wrap=True)


def _save(folder: Path, plan: Plan, record: dict[str, Any]) -> None:
    write_atomic(folder / RECORD, json.dumps(record).encode())
    plan.save(folder / PLAN_FILE)


def own_folder(saved: SavedHead, here: Conditions) -> Path:
    """The head's, unless it belongs to the package or to the Hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    folder = saved.folder.resolve()
    foreign = [head.folder.resolve() for head in zoo_heads()]
    if folder in foreign or folder.is_relative_to(Path(HF_HUB_CACHE).resolve()):
        return plans_folder(saved.method, here)
    return saved.folder


def work_folder(folder: Path) -> Path:
    """Where findings on the way to the plan in ``folder`` lie: they hold prompts, which must not travel with a head."""
    try:
        return cache_folder() / "tune" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    except InvalidSettings:
        return folder / _WORK_FOLDER


def _command() -> str:
    return shlex.join(["draftheads", *sys.argv[1:]])


def _show(console: Console, plan: Plan, verified: Verified | None) -> None:
    """The winners, and how they did on other prompts."""
    assert plan.tuned is not None
    table = _table("rows", "tree", "nodes", "tokens/s", "over plain")
    for choice in plan.tuned.choices:
        kind = "no guesses" if choice.kind == "none" else choice.kind
        speed = f"{choice.tokens_per_second:.1f}"
        table.add_row(str(choice.batch_size), kind, str(choice.num_nodes), speed, f"{choice.speedup:.2f}")
    console.print(table)
    if verified is not None:
        _show_verified(console, verified)


def _show_verified(console: Console, verified: Verified) -> None:
    table = _table("rows", "way", "tokens/s", "tokens/step", "predicted", "over plain")
    for row in verified.rows:
        predicted = "" if row.predicted_tokens_per_step is None else f"{row.predicted_tokens_per_step:.2f}"
        speed, step = f"{row.tokens_per_second:.1f}", f"{row.tokens_per_step:.2f}"
        table.add_row(str(row.batch_size), row.way, speed, step, predicted, f"{row.speedup:.2f} ± {row.error:.2f}")
    console.print(table)
    table = _table("tokens/step of", "predicted", "± 1 s.e.", f"measured, {verified.num_prompts} prompts")
    for tree in verified.predictions:
        table.add_row(tree.way, f"{tree.predicted:.3f}", f"{tree.error:.3f}", f"{tree.measured:.3f}")
    console.print(table)
    phases = {phase.phase: phase.batch_size for phase in verified.mixed_load}
    table = _table("tokens/s with rows:", *map(str, phases.values()))
    for way in dict.fromkeys(phase.way for phase in verified.mixed_load):
        speeds = [f"{phase.tokens_per_second:.1f}" for phase in verified.mixed_load if phase.way == way]
        table.add_row(way, *speeds)
    console.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False)
