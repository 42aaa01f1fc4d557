"""``draftheads bench``: draft heads, and what drafts without one, side by side under one engine."""

import hashlib
import json
import shlex
import sys
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

from draftheads.bench.drafters import Bench, BenchRow, BenchSettings, Contender, cells, headings, markdown
from draftheads.bench.page import RECORD, TABLE, write_page
from draftheads.checkpoint import conditions, read_head
from draftheads.cli.demo import PROMPTS
from draftheads.cli.generate import DTYPES, Dtype
from draftheads.cli.prompts import read_prompts
from draftheads.cli.show import quiet_transformers
from draftheads.cli.stages import Stages
from draftheads.decode.engine import Prompt
from draftheads.drafters.draft_model import DraftModel
from draftheads.errors import DataError, InvalidSettings, MissingDependency
from draftheads.files import user_path, write_atomic
from draftheads.growth import BestPaths
from draftheads.loading import UNTRAINED, load_drafter, load_target
from draftheads.provenance import provenance
from draftheads.search.prompts import CALIBRATION_PROMPTS
from draftheads.search.workbook import Workbook, locked
from draftheads.target.embedded import cache_folder
from draftheads.target.model import TargetModel
from draftheads.zoo.registry import find_head, zoo_heads


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
    draft_model: str | None = None
    """Also a smaller model of the same tokenizer: a folder or a Hugging Face id."""
    prompts: Path | None = None
    """A JSONL file of prompts to answer ("prompt", "messages" or "turns" in each line) instead of a handful of ours."""
    limit: int | None = None
    """Use the first so many prompts only."""
    out: Path | None = None
    """Write bench.json, bench.md (the table) and bench.html (with pictures) into this folder."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    dtype: Dtype = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32."""


def run(options: BenchOptions) -> None:
    """Compares and prints; the last line is one JSON object."""
    console = Console(highlight=False)
    quiet_transformers()
    prompts: list[Prompt] = list(read_prompts(options.prompts)) if options.prompts else list(PROMPTS)
    prompts = prompts[: options.limit]
    if len(prompts) < 2:
        raise DataError(f"{len(prompts)} prompts to answer: give at least 2, better 80", path=options.prompts)
    names = options.heads or _all_for(options.model)
    target = load_target(options.model, dtype=DTYPES.get(options.dtype))
    contenders = list(_contenders(names, options, target))
    out = user_path(options.out) if options.out else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    here = asdict(conditions("", target))
    identity = {"model": target.model_id, "settings": _counted(options.settings), "conditions": here}
    with tempfile.TemporaryDirectory() as temporary:
        folder = _work_folder(identity) or Path(temporary)
        with locked(folder), Stages(console) as display:
            bench = Bench(
                target,
                contenders,
                prompts,
                CALIBRATION_PROMPTS,
                options.settings,
                book=Workbook(folder / "found", identity, anew=False),
                display=display,
            )
            rows = bench.run()
    _show(console, rows, options.settings)
    record = {
        "format_version": 1,
        "command": shlex.join(["draftheads", *sys.argv[1:]]),
        "model": options.model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "num_prompts": len(prompts),
        "settings": asdict(options.settings),
        "rows": [asdict(row) for row in rows],
        "provenance": provenance(),
    }
    if out is not None:
        _write(console, out, record, rows, options.settings)
    print(json.dumps(record))


def _all_for(model: str) -> tuple[str, ...]:
    """Medusa first, if it is there: what other heads are compared with."""
    bundled = sorted((head.method for head in zoo_heads() if head.base_name == model), key=lambda m: (m != "medusa", m))
    if not bundled:
        raise InvalidSettings(f"no head is bundled for {model}: name some with --heads")
    return (*bundled, *UNTRAINED)


def _contenders(names: tuple[str, ...], options: BenchOptions, target: TargetModel) -> Iterator[Contender]:
    """What drafts, each under the last part of its name."""
    version = str(provenance()["draftheads"])
    for name in names:
        if name in UNTRAINED:
            yield Contender(name, UNTRAINED[name](), f"{name}-{version}")
            continue
        saved = read_head(find_head(name, options.model), ignore_plan=True)
        head = load_drafter(name, options.model, target, ignore_plan=True)
        yield Contender(Path(name).name, head, saved.digest)
        if saved.method == "mlp-speculator" and head.config.num_heads >= BestPaths().depth:  # the papers' way, too
            yield Contender(f"{Path(name).name}, paths", head.fresh(), f"{saved.digest}-paths", BestPaths())
    if options.draft_model is not None:
        small = load_target(options.draft_model, dtype=DTYPES.get(options.dtype))
        yield Contender("draft-model", DraftModel(small, target), f"draft-model-{small.weights_print}")


def _counted(settings: BenchSettings) -> dict[str, Any]:
    """Settings that tokens per step depend on."""
    return {name: value for name, value in asdict(settings).items() if name != "num_speed_prompts"}


def _work_folder(identity: dict[str, Any]) -> Path | None:
    """Where findings lie; None where there is no cache."""
    try:
        return cache_folder() / "bench" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    except InvalidSettings:
        return None


def _write(console: Console, out: Path, record: dict[str, Any], rows: list[BenchRow], settings: BenchSettings) -> None:
    write_atomic(out / RECORD, json.dumps(record, indent=1).encode())
    write_atomic(out / TABLE, "".join(line + "\n" for line in markdown(rows, settings)).encode())
    console.print(f"wrote {out / TABLE}", soft_wrap=True)
    try:
        console.print(f"wrote {write_page(out)}", soft_wrap=True)
    except MissingDependency as error:
        console.print(f"no page: {error}", soft_wrap=True)


def _show(console: Console, rows: list[BenchRow], settings: BenchSettings) -> None:
    """Two tables that fit a terminal, without the errors, which are in the files."""
    names = headings(rows, settings)
    told = [cells(row, settings, errors=False) for row in rows]
    speeds = [names.index(name) for name in ("parameters", "tokens/s", "× plain", "draft ms/step", "step ms")]
    for columns in ([n for n in range(1, len(names)) if n not in speeds], speeds):
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column(names[0], overflow="fold")
        for number in columns:
            table.add_column(names[number], justify="right")
        for row in told:
            table.add_row(*(Text(row[number]) for number in (0, *columns)))
        console.print(table)
        console.print()
    different = {row.name: row.num_different for row in rows if row.num_different}
    if different:
        numbers = ", ".join(f"{name} {number}" for name, number in different.items())
        console.print(f"answers that are not plain decoding's: {numbers}; near-ties, where a kernel rounds by size")
