"""``draftheads bench`` and ``demo``: drafters side by side with one engine; ``tune``: a head on the user's prompts."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.bench.compare import Comparison, compare_heads
from draftheads.bench.settings import MIN_PROMPTS, BenchOptions, BenchSettings, DemoOptions
from draftheads.bench.table import ALL, Row, by_part, markdown, remarks, table_of, verdict
from draftheads.bench.timing import over_plain
from draftheads.bench.tree_sizes import COLUMNS as SIZE_COLUMNS
from draftheads.bench.tree_sizes import Synthetic, fastest_tree, forecast, synthetic_engine, time_trees
from draftheads.checkpoints.registry import find_head
from draftheads.cli.config import keep_config
from draftheads.cli.show import (
    DRAFTED,
    ProgressDisplay,
    check_json_path,
    print_table,
    quiet_transformers,
    write_json,
    write_page,
)
from draftheads.data.records import Record, own_prompts, prompts_in, read_suite, select
from draftheads.decode.step_costs import read_costs
from draftheads.errors import DataError
from draftheads.search.replay import encoded, own_answers
from draftheads.search.settings import ReplaySettings, TuneOptions
from draftheads.search.tune import RECORD, answers_folder, tune_head, tune_on_states
from draftheads.speculation.acceptance_profile import MAX_NODES, PROFILE_FILE, AcceptanceProfile
from draftheads.speculation.shapes import Drafting
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, write_atomic
from draftheads.utils.provenance import machine_in_words

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead

_FEW = 4  # of our own questions of each category
_MOST_PROBLEMS = 5  # that are printed; all are in the files
_LARGEST = 32  # nodes of trees of a head that nobody has trained; on a CPU larger ones are slower


def run(options: BenchOptions, *, max_seconds: float = math.inf) -> None:
    console = Console(highlight=False)
    quiet_transformers()
    check_json_path(options.json)
    if options.accept is not None:
        _run_synthetic(options, console)
        return
    questions = questions_of(options)
    out = None if options.out is None else check_writable(options.out / "bench.json").parent
    with ProgressDisplay(console) as progress:
        comparison = compare_heads(
            options.model,
            options.heads,
            questions,
            drafting=Drafting(draft_model=options.draft_model, corpus=options.corpus),
            settings=options.settings,
            quality=options.quality,
            transformers=options.transformers,
            precision=options.precision,
            fresh=options.fresh,
            max_seconds=max_seconds,
            progress=progress,
        )
    # where the questions are from, without the folders of the user
    source = None if options.prompts is None else "/".join(Path(options.prompts).parts[-2:])
    record = {**comparison.record, "prompts": source}
    if example := record["example"]:
        colours = Text.assemble("; draft tokens are ", ("green", DRAFTED)) if console.color_system else ""
        console.print(Text.assemble((example["question"], "bold"), f"   ({example['way']}", colours, ")\n"))
        pieces = ((text, DRAFTED if is_drafted else "") for text, is_drafted in example["pieces"])
        console.print(Text.assemble(*pieces), end="\n\n")
    show(console, comparison.rows)
    problems = [in_words(each) for each in record["problems"]]
    if (more := len(problems) - _MOST_PROBLEMS) > 0:
        problems[_MOST_PROBLEMS:] = [f"… and {more} more; bench.json has all"]
    if record["disturbed"]:
        problems.append("other programs used the processor: times are too long; × plain suffers less")
    for line in problems:
        console.print(line, markup=False, style="yellow")
    if out is not None:
        write(console, out, replace(comparison, record=record))
        keep_config(options, out / "config.yaml")
    write_json(options.json, record)


def _run_synthetic(options: BenchOptions, console: Console) -> None:
    """What a head of given acceptance would bring."""
    profile = AcceptanceProfile.of_rates(options.rates, _LARGEST if options.costs is None else MAX_NODES)
    method = (*options.heads, "hydra")[0]
    if options.costs is not None:
        rows, problems = forecast(profile, read_costs(options.costs)), list[dict[str, Any]]()
    else:
        with ProgressDisplay(console) as progress, tempfile.TemporaryDirectory() as folder:
            progress.stage(f"timing steps with an untrained {method} head")
            engine = synthetic_engine(options.model, method, profile, Path(folder), options.precision)
            settings = ReplaySettings(max_new_tokens=BenchSettings.max_new_tokens)
            asked = encoded(engine.model, [record.prompt for record in questions_of(options)], settings)
            answers = own_answers(engine.model, asked, settings, folder=Path(folder), progress=progress)
            drafter = Synthetic(cast("DraftHead", engine.drafter), options.rates, answers)
            found, problems = time_trees(engine, [1], asked, folder=Path(folder), progress=progress, drafter=drafter)
            rows = found[1]
    shown = [column for column in SIZE_COLUMNS if options.costs is None or "measured" not in column.heading]
    print_table(console, [column.heading for column in shown], [[each.cell(row) for each in shown] for row in rows])
    nodes, best = fastest_tree(rows, "predicted_tokens_per_second")
    gain = best.numbers["predicted_speedup"]
    console.print(f"fastest by prediction: {counted(nodes, 'node')}, {gain:.2f} × plain decoding")
    for problem in problems:
        console.print(in_words(problem), markup=False, style="yellow")
    write_json(options.json, {"accept": options.rates, "method": method, "rows": [asdict(row) for row in rows]})


def demo(options: DemoOptions) -> None:
    """The comparison of ``bench`` in a time box."""
    usual = {name: value for name, value in vars(options).items() if name not in ("seconds", "max_new_tokens")}
    settings = BenchSettings(trees=("defaults",), max_new_tokens=options.max_new_tokens)
    run(BenchOptions(**usual, transformers=True, settings=settings), max_seconds=options.seconds)


def questions_of(options: BenchOptions) -> list[Record]:
    """The questions that the options choose."""
    questions, limit = read_suite(options.prompts or "tasks"), options.limit
    return select(questions, options.category, _FEW if limit is None and options.prompts is None else limit)


def write(console: Console, out: Path, comparison: Comparison) -> None:
    """Writes the files of a comparison."""
    write_atomic(out / "bench.json", json.dumps(comparison.record, indent=1).encode())
    record = comparison.record
    asked = counted(record["num_prompts"], "prompt") + (f" of {record['prompts']}" if record["prompts"] else "")
    longest, machine = counted(record["settings"]["max_new_tokens"], "token"), machine_in_words(record["provenance"])
    lines = [verdict(comparison.rows), "", *markdown(comparison.rows), ""]
    lines.append(f"{record['model']} in {record['precision']}, {asked}, answers of at most {longest}; {machine}.")
    if record["problems"]:
        lines += ["", "Not answered or not measured:", "", *(f"* {in_words(each)}" for each in record["problems"])]
    write_atomic(out / "bench.md", "".join(line + "\n" for line in lines).encode())
    answers = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in comparison.answers)
    write_atomic(out / "answers.jsonl", answers.encode())
    console.print(f"wrote {out / 'bench.md'}", soft_wrap=True)
    write_page(console, out, "bench")


def show(console: Console, rows: Sequence[Row]) -> None:
    """A table of each kind of columns, so that they fit a terminal, and the verdict. The files have intervals, too."""
    overall = [row for row in rows if row.part == ALL]
    tables = [("", table_of(overall, kind, intervals=False)) for kind in ("speed", "time", "quality")]
    tables += [(f"{title} by category and turn", (headings, lines)) for title, headings, lines in by_part(rows)]
    for title, (headings, lines) in tables:
        if headings:
            print_table(console, headings, lines, title)
            console.print()
    for sentence in (verdict(rows), *remarks(rows)):
        console.print(sentence.replace("`", ""), markup=False)


def in_words(problem: Mapping[str, Any]) -> str:
    """What was not answered or measured, and why.

    >>> in_words({"question": "81", "turn": 2, "problem": "too long"})
    'question 81, turn 2: too long'
    """
    turn = f", turn {problem['turn']}" if problem["turn"] else ""
    return (f"question {problem['question']}{turn}: " if problem["question"] else "") + str(problem["problem"])


# --- tune ---


def tune(options: TuneOptions) -> None:
    """Measures how many tokens a head's trees gain on the user's prompts, and shows it."""
    console = Console(highlight=False)
    quiet_transformers()
    find_head(options.head, options.model)  # raises before the prompts are read
    if options.features is not None:
        _tune_on_states(options, options.features, console)
        return
    prompts = prompts_in(options.prompts or own_prompts("calibration"))
    if options.measure is not None:
        given, fewest = min(len(prompts), options.num_prompts), max((MIN_PROMPTS, *options.measure))
        if given < fewest:
            fix = "give more --prompts, and not fewer --num-prompts"
            raise DataError(f"--measure needs at least {fewest} prompts, and these are {given}: {fix}")
    with ProgressDisplay(console) as progress:
        try:
            tuning = tune_head(
                options.model,
                options.head,
                prompts,
                out=options.out,
                settings=options.settings,
                **options.load.given(),
                progress=progress,
            )
            progress.stage("timing the defaults and plain decoding in turns")
            asked = encoded(tuning.engine.model, prompts, options.settings)
            speedup, error = over_plain({options.head: tuning.engine}, asked)[options.head]
            trees, problems = dict[int, list[Row]](), list[dict[str, Any]]()
            if options.measure is not None:
                sizes, folder = sorted({*options.measure} or {1}), answers_folder(tuning.folder)
                trees, problems = time_trees(tuning.engine, sizes, asked, folder=folder, progress=progress)
        except KeyboardInterrupt:
            console.print("stopped; the same command continues from here")
            raise
    measured = {size: list(map(asdict, rows)) for size, rows in trees.items()}
    record = {**tuning.record, "defaults": {"speedup": speedup, "error": error}, "measured": measured}
    write_atomic(tuning.folder / RECORD, json.dumps(record).encode())
    write_page(console, tuning.folder, "tune", show=True)
    hint = "" if options.out is None else f"; to use it: `--head {options.head} --tree {tuning.folder}`"
    console.print(f"wrote {tuning.folder / PROFILE_FILE}{hint}", soft_wrap=True)
    for problem in problems:
        console.print(in_words(problem), markup=False, style="yellow")
    for size, rows in trees.items():
        path = tuning.folder / f"static-{size}.json"
        write_atomic(path, tuning.profile.tree(fastest_tree(rows)[0]).to_json().encode())
        console.print(f"wrote {path}; to use it: `--head {options.head} --tree {path}`", soft_wrap=True, markup=False)


def _tune_on_states(options: TuneOptions, features: Path, console: Console) -> None:
    with ProgressDisplay(console) as progress:
        how = {"out": options.out, "settings": options.settings, "progress": progress, **options.load.given()}
        profile, folder = tune_on_states(options.model, options.head, features, **how)
    console.print(f"tokens per step on {counted(profile.num_texts, 'text')} ({counted(profile.num_tokens, 'token')})")
    table = Table("nodes", "static", "growing")
    for nodes in (2, 4, 8, 16, 32, 64):
        kinds = (profile.static_tokens, profile.dynamic_tokens)
        table.add_row(str(nodes), *(f"{tokens[nodes - 1]:.2f}" if nodes <= len(tokens) else "" for tokens in kinds))
    console.print(table)
    console.print(f"wrote {folder / PROFILE_FILE}", soft_wrap=True)
