"""``draftheads bench``: draft heads, and what drafts without one, side by side under one engine."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.bench.drafters import (
    LEAST_PROMPTS,
    Bench,
    BenchRow,
    BenchSettings,
    Contender,
    cells,
    check_names,
    code_digest,
    headings,
    markdown,
)
from draftheads.checkpoint import read_head
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.cost_profile import machine_of
from draftheads.decode.engine import Prompt
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.files import locked, user_path, write_atomic
from draftheads.loading import UNTRAINED, Precision, find_template, load_drafter, load_target
from draftheads.models.embedded import SMOLLM2_135M, cache_folder
from draftheads.models.model import TargetModel
from draftheads.provenance import provenance
from draftheads.search.replay import encoded
from draftheads.search.workbook import Workbook
from draftheads.shapes import BestPaths
from draftheads.zoo.registry import find_head, zoo_heads

_NAME_WIDTH = 24  # of 80 columns; longer names are folded
_SMALL = "draft-model"


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and what drafts without one, on the same prompts with trees of the same size.

    Each head gets the tree of that size that serves it best, found on prompts of our own. Stopped or killed and started
    again, it goes on where it was.
    """

    model: tyro.conf.Positional[str] = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: bundled ones' names, folders or Hugging Face ids; prompt-lookup and lookahead need no training. All
    bundled ones and these two when left out."""
    chat_template: str | None = None
    """Chat template in place of the heads' or the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    draft_model: str | None = None
    """Also a smaller model of the same tokenizer, on a growing tree as it is: a folder or a Hugging Face id."""
    prompts: Path | None = None
    """A JSONL file of prompts to answer ("prompt", "messages" or "turns" in each line) instead of a handful of ours."""
    limit: int | None = None
    """Use the first so many prompts only."""
    out: Path | None = None
    """Write bench.json, bench.md (the table) and bench.html (with pictures) into this folder."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    precision: Precision = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32."""


def run(options: BenchOptions) -> None:
    """Compares and prints; the last line is one JSON object."""
    console = Console(highlight=False)
    quiet_transformers()
    prompts: list[Prompt] = list(prompts_in(options.prompts or own_prompts("demo")))
    if options.limit is not None and options.limit < LEAST_PROMPTS:
        raise InvalidSettings(f"--limit is {options.limit}; it must be at least {LEAST_PROMPTS}")
    prompts = prompts[: options.limit]
    if len(prompts) < LEAST_PROMPTS:
        raise DataError(f"{len(prompts)} prompts: give at least {LEAST_PROMPTS}, better 80", path=options.prompts)
    names = _named(options)
    template = find_template(options.chat_template, names.values(), options.model)
    out = user_path(options.out) if options.out else None
    if out is not None:
        _make(out)
    target = load_target(options.model, chat_template=template, precision=options.precision)
    contenders = list(_contenders(names, options, target))
    here = machine_of(target)
    others = prompts_in(own_prompts("calibration"))
    calibration = encoded(target, others, options.settings.rehearsal)  # by the model's own template
    identity = {
        "code": code_digest(),
        "model": [target.model_id, target.weights_print],
        "settings": _counted(options.settings),
        "conditions": here,
        "calibration": calibration,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = _work_folder(identity) or Path(temporary)
        with locked(folder, "set DRAFTHEADS_CACHE"), ProgressDisplay(console) as progress:
            bench = Bench(
                target,
                contenders,
                prompts,
                calibration,
                options.settings,
                book=Workbook(folder / "found", identity),
                progress=progress,
            )
            rows = bench.run()
    show(console, rows, options.settings)
    record = {
        "format_version": 1,
        "model": options.model,
        "precision": target.precision,
        "threads": torch.get_num_threads(),
        "num_prompts": len(prompts),
        "prompts": "/".join(options.prompts.parts[-2:]) if options.prompts else None,
        "settings": asdict(options.settings),
        "drafters": {contender.name: contender.identity for contender in contenders},
        "rows": [asdict(row) for row in rows],
        "provenance": provenance(),
    }
    if out is not None:
        _write(console, out, record, rows, options.settings)
    print(json.dumps(record))


def _named(options: BenchOptions) -> dict[str, str]:
    """What drafts, by the name that it has in the table: the last part of its own where that is enough."""
    heads = options.heads or _all_for(options.model)
    names = [Path(head).resolve().name if Path(head).is_dir() else Path(head).name for head in heads]
    named = {head if names.count(name) > 1 else name: head for head, name in zip(heads, names, strict=True)}
    check_names([*(named if len(named) == len(heads) else heads), *([_SMALL] if options.draft_model else [])])
    return named


def _all_for(model: str) -> tuple[str, ...]:
    """Medusa first, if it is there: what other heads are compared with; then what needs no head."""
    base = SMOLLM2_135M.name if model == SMOLLM2_135M.hub_id else model
    bundled = sorted((head.method for head in zoo_heads() if head.base_name == base), key=lambda m: (m != "medusa", m))
    return (*bundled, *UNTRAINED)


def _make(out: Path) -> None:
    """Says now what cannot be written later.

    Raises:
        StorageError: the folder cannot be made, or not written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}; choose another --out") from None


def _contenders(named: dict[str, str], options: BenchOptions, target: TargetModel) -> Iterator[Contender]:
    """What drafts."""
    for name, head_name in named.items():
        if head_name in UNTRAINED:
            drafter, nodes = UNTRAINED[head_name](), options.settings.num_nodes
            if isinstance(drafter, Lookahead):
                drafter = Lookahead.within(nodes)
            elif isinstance(drafter, PromptLookup):
                drafter = PromptLookup(num_tokens=min(drafter.num_tokens, nodes - 1))
            yield Contender(name, drafter, f"{head_name}-{nodes}")
            continue
        saved = read_head(find_head(head_name, options.model), ignore_profile=True)
        head = load_drafter(head_name, options.model, target, ignore_profile=True)
        sizes = hashlib.sha256(json.dumps(asdict(saved.config)).encode()).hexdigest()[:8]
        identity = f"{saved.method}-{saved.digest}-{sizes}"
        yield Contender(name, head, identity)
        if saved.method == "mlp-speculator" and head.config.num_heads >= BestPaths().depth:  # the papers' way, too
            widths = BestPaths().widths
            widths += (1,) * (head.config.num_heads - len(widths))
            paths = BestPaths.within(options.settings.num_nodes, widths)
            if paths.most_nodes <= options.settings.num_nodes:
                yield Contender(f"{name}, paths", head, f"{identity}-paths", paths)
    if options.draft_model is not None:
        small = load_target(options.draft_model, precision=options.precision)
        yield Contender(_SMALL, DraftModel(small, target), f"{_SMALL}-{small.weights_print}")


def _counted(settings: BenchSettings) -> dict[str, Any]:
    """Settings that all findings depend on; temperature and prompts are in the names of those that depend on them."""
    of_others = ("num_speed_prompts", "num_sampled_prompts", "temperature")
    return {name: value for name, value in asdict(settings).items() if name not in of_others}


def _work_folder(identity: dict[str, Any]) -> Path | None:
    """Where findings lie; None where there is no cache."""
    try:
        return cache_folder() / "bench" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    except InvalidSettings:
        return None


def _write(console: Console, out: Path, record: dict[str, Any], rows: list[BenchRow], settings: BenchSettings) -> None:
    write_atomic(out / "bench.json", json.dumps(record, indent=1).encode())
    table = out / "bench.md"
    write_atomic(table, "".join(line + "\n" for line in markdown(rows, settings, record["num_prompts"])).encode())
    console.print(f"wrote {table}", soft_wrap=True)
    write_pages(console, out, "bench")


def show(console: Console, rows: list[BenchRow], settings: BenchSettings) -> None:
    """Two tables that fit a terminal, without the errors, which are in the files."""
    names = headings(rows, settings)
    told = [cells(row, settings, errors=False) for row in rows]
    speeds = [names.index(name) for name in ("parameters", "tokens/s", "× plain", "draft ms/step", "step ms")]
    for columns in ([n for n in range(1, len(names)) if n not in speeds], speeds):
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        width = min(_NAME_WIDTH, max(map(len, (names[0], *(row[0] for row in told)))))
        table.add_column(names[0], overflow="fold", width=width, vertical="bottom")
        for number in columns:
            wraps = names[number] == "tree"
            table.add_column(names[number].replace(" ", "\n"), justify="right", vertical="bottom", no_wrap=not wraps)
        for row in told:
            table.add_row(*(Text(row[number]) for number in (0, *columns)))
        console.print(table)
        console.print()
    different = {row.name: row.num_different for row in rows if row.num_different}
    if different:
        numbers = ", ".join(f"{name} {number}" for name, number in different.items())
        console.print(f"answers that are not plain decoding's: {numbers}; near-ties, where a kernel rounds by size")
