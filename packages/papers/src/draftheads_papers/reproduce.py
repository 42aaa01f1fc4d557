"""Rebuilds a table of a paper for a model and its heads: trains what it needs, compares, and arranges the numbers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from draftheads.bench.compare import Comparison, compare_heads
from draftheads.bench.settings import MIN_PROMPTS, BenchSettings
from draftheads.bench.table import Row, copies_note
from draftheads.bench.timing import PLAIN
from draftheads.data.records import Record, read_suite, select
from draftheads.errors import InvalidSettings
from draftheads.speculation.shapes import Drafting
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import machine_in_words, provenance
from draftheads_papers.paper_tables import (
    BASELINES,
    Block,
    Cells,
    PaperTable,
    blocks_of,
    by_head,
    cells_of,
    drafting_cells,
    intervals_of,
    markdown_of,
)
from draftheads_papers.studies import FEW_TOKENS, Variant, folder_name, own_chats, own_text, planned, train_all

_ON_A_CPU = """\
× plain is about tokens/step divided by overhead. A GPU verifies 64 nodes in nearly the time of one token: it waits for
the weights. A CPU computes longer for each node, so large trees have a high overhead and a low × plain there. Compare
tokens/step with the paper's."""
_QUICK_VALUES = 3  # of a setting with more values
_QUICK_PROMPT = 256  # tokens of the longest prompt
_QUICK_TEXT = 256  # tokens of a block of plain text: a few blocks are held out
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_OURS = {  # categories of Spec-Bench by the names of ours
    **dict.fromkeys(_MT_BENCH, "chat"),
    "summarization": "summarisation",
    "qa": "question_answering",
    "math_reasoning": "maths",
    "rag": "retrieval",
}


@dataclass(frozen=True)
class Reproduction:
    """A table that was rebuilt."""

    blocks: list[Block]
    record: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        return list(markdown_of(self.blocks))


def trained_for(
    tables: Sequence[PaperTable], model: str, out: Path, budget: Mapping[str, Any], *, quick: bool, progress: Progress
) -> list[list[Variant]]:
    """Trains the variants of tables, those that several have once; what ``out`` has already is not trained again.

    Args:
        tables: whose variants are trained; the result has a list for each.
        model: a name, a folder or a Hugging Face id.
        out: the folder of trained variants.
        budget: settings of training for all variants, such as ``data``, ``max_tokens``, ``epochs`` and ``text``.
        quick: a small budget where none is given.
        progress: receives each stage.
    """
    for table in tables:
        if table.variants and not budget["data"] and not quick:
            fix = "give --data FILE…, --quick, or your own --heads"
            raise InvalidSettings(f"{table.name} trains {', '.join(table.variants)}: {fix}")
    budgets = [
        quick_budget(table, model, out, budget, progress) if quick and table.variants else budget for table in tables
    ]
    plans = [planned(table, model, out, budget) for table, budget in zip(tables, budgets, strict=True)]
    return train_all(plans, out, progress)


def reproduce(
    table: PaperTable,
    model: str,
    heads: Sequence[str] = (),
    variants: Sequence[Variant] = (),
    *,
    progress: Progress,
    quick: bool = False,
    prompts: str | None = None,
    limit: int | None = None,
    quality: Sequence[Any] = (),
) -> Reproduction:
    """Rebuilds a table.

    Args:
        table: what is measured.
        model: a name, a folder or a Hugging Face id.
        heads: in place of the table's, and of its variants.
        variants: of the table, trained by :func:`trained_for`.
        progress: receives each stage.
        quick: bounded work: few questions, short answers, few values of each setting.
        prompts: questions in place of the table's.
        limit: questions of each category.
        quality: measures of the answers, see :func:`draftheads_papers.measures.measures_of`.
    """
    if table.measured == "losses" and not variants:
        raise InvalidSettings(f"{table.name} has the losses of training: leave out --heads")
    cells: Cells = {}
    intervals: Cells = {}
    finished: list[Comparison] = []
    record: dict[str, Any] = {"variants": {one.name: asdict(one.report) for one in variants}, "runs": {}}
    if table.measured == "losses":
        for one in variants:
            cells |= losses_of(one)
    else:
        questions = questions_of(table, prompts, limit=limit, quick=quick)
        for run, task in _announced(table.runs, _tasks(model, heads or table.heads, variants), progress):
            settings = quick_settings(table.settings(run)) if quick else table.settings(run)
            compared = compare_heads(
                task.model,
                task.heads,
                questions,
                settings=settings,
                drafting=Drafting(draft_model=table.draft_model or None),
                transformers=table.transformers,
                quality=quality,
                original_model=model if task.tuned else None,
                keep=True,
                progress=progress,
                **table.load,
            )
            finished.append(compared)
            record["runs"].setdefault(run, []).append(compared.record)
            rows = [
                replace(row, name=task.names.get(row.name, row.name), settings={**row.settings, "run": run})
                for row in compared.rows
            ]
            cells |= _cells(table, task, rows, compared.record)
            intervals |= intervals_of(table, rows) if table.measured == "rows" else {}
    blocks = [
        f"**{table.title}** ({table.source}), here for {model}.",
        *blocks_of(table, cells, intervals, only_measured=quick),
        *_training(table, variants),
        *_notes(table, finished, quick=quick, has_intervals=any(intervals.values())),
    ]
    for compared in finished:
        if not compared.record["unmeasured"]:  # else the same command measures what is missing
            compared.forget()
    record = {
        "format_version": 1,
        "table": table.name,
        "model": model,
        "quick": quick,
        "cells": cells,
        "intervals": intervals,
        **record,
        "provenance": provenance(),
    }
    return Reproduction(blocks, record)


def _training(table: PaperTable, variants: Sequence[Variant]) -> Iterator[str]:
    """What the variants are, and the budget of each."""
    if variants and table.training:
        yield table.training.strip()
    budgets: dict[str, list[str]] = {}
    for one in variants:
        passes = f"{counted(one.report.num_training_tokens, 'token')} in {counted(one.options.epochs, 'pass')}"
        budgets.setdefault(passes, []).append(one.name)
    if budgets:
        words = "; ".join(f"{', '.join(names)} on {budget}" for budget, names in budgets.items())
        yield f"Trained here: {words}."


def _notes(table: PaperTable, finished: Sequence[Comparison], *, quick: bool, has_intervals: bool) -> Iterator[str]:
    """How our numbers were measured, and why they differ from the paper's."""
    records, kind = [compared.record for compared in finished], "A quick run" if quick else "A full run"
    if not records:
        yield f"{kind}."
        return
    first = records[0]
    longest = max(record["settings"]["max_new_tokens"] for record in records)
    yield (
        f"{kind}: {counted(first['num_prompts'], 'question')}, answers of at most {counted(longest, 'token')}, "
        f"{first['precision']}, {machine_in_words(first['provenance'])}, {first['provenance']['time'][:10]}."
    )
    if has_intervals:
        yield "In square brackets: 95 % bootstrap intervals over the questions."
    if any(record["unmeasured"] for record in records):
        yield "Some answers were not judged. They stay saved: the same command asks the judge again."
    if table.measured != "rows":
        return
    yield copies_note(row for compared in finished for row in compared.rows)
    if {"speedup", "token_milliseconds"} & {*table.values}:
        papers = f" The paper's baseline is {BASELINES[table.paper]}." if table.paper in BASELINES else ""
        yield f"Plain decoding is this package's own loop, which is faster than transformers' `generate`.{papers}"
    if "speedup" in table.values and first["provenance"]["device"] == "cpu":
        yield _ON_A_CPU


def questions_of(table: PaperTable, prompts: str | None, *, limit: int | None, quick: bool) -> list[Record]:
    """What is asked; in a quick run so many questions of each category that they fill the largest batch."""
    asked = read_suite(prompts or table.prompts)
    categories = () if prompts else table.categories
    if quick and limit is None:
        sizes = (size for run in table.runs for size in quick_settings(table.settings(run)).batch_sizes)
        limit = -(-max(MIN_PROMPTS, *sizes) // len(categories or {record.category for record in asked}))
    return [_with_our_category(record, table) for record in select(asked, categories, limit)]


@dataclass(frozen=True)
class _Task:
    """A model with the heads that are compared on it."""

    model: str
    heads: list[str]
    names: dict[str, str]  # what a table calls a head, by its name in the comparison
    tuned: str = ""  # the variant that the model is


def _tasks(model: str, heads: Sequence[str], variants: Sequence[Variant]) -> list[_Task]:
    frozen = [one for one in variants if one.model is None]
    names = {one.head.name: one.name for one in frozen}
    together = [_Task(model, [*heads, *(str(one.head) for one in frozen)], names)] if heads or frozen else []
    return together + [
        _Task(str(one.model), [str(one.head)], {one.head.name: one.name, PLAIN: f"{one.name}, plain"}, one.name)
        for one in variants
        if one.model is not None
    ]


def _announced(runs: Iterable[str], tasks: Sequence[_Task], progress: Progress) -> Iterator[tuple[str, _Task]]:
    """Each task in each run; their names are stages of progress where there are several."""
    comparisons = list(product(runs, tasks))
    for number, (run, task) in enumerate(comparisons, 1):
        if len(comparisons) > 1:
            name = " ".join(filter(None, (run, task.tuned or "the model itself")))
            progress.stage(f"comparison {number} of {len(comparisons)}: {name}")
        yield run, task


def _cells(table: PaperTable, task: _Task, rows: Sequence[Row], record: Mapping[str, Any]) -> Cells:
    if table.measured == "rows":
        return cells_of(table, rows)
    if table.measured == "drafting":
        found = drafting_cells(record["drafting"])
    else:
        found = {name: by_head(_top(ranks), "head") for name, ranks in record["accuracy"].items()}
    return {task.names.get(name, name): cells for name, cells in found.items()}


def _with_our_category(record: Record, table: PaperTable) -> Record:
    """The record; a category of Spec-Bench, of which MT-Bench's are chats, has the name that the table uses."""
    category = record.category
    columns = (column for model in table.published.values() for cells in model.values() for column in cells)
    is_own = any(column.split(" × ")[0] == category for column in columns)
    named = category if is_own else _OURS.get(category, category)
    return replace(record, labels={**record.labels, "category": named}) if category else record


def _top(ranks: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Top-1 and top-5 accuracy of each head in percent, from the share of each rank."""
    return {f"top-{best}": [100 * sum(shares[:best]) for shares in ranks] for best in (1, 5)}


def losses_of(variant: Variant) -> Cells:
    """The loss of each head along the training, at five places, and on held-out text."""
    path = variant.head / "log.jsonl"
    log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = [log[len(log) * part // 4 - (part > 0)] for part in range(5)] if log else []
    lines = {f"{variant.name}, step {line['step']}": by_head({"loss": line["head_losses"]}, "head") for line in chosen}
    return {**lines, f"{variant.name}, held-out": by_head({"loss": variant.report.losses}, "head")}


def quick_budget(
    table: PaperTable, model: str, out: Path, given: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """The budget of a quick run: what is not given is small; without chats, those of the model itself."""
    budget: dict[str, Any] = {"max_length": _QUICK_TEXT} if table.has_text_stage else {}
    if not given["data"]:
        budget |= {"max_tokens": FEW_TOKENS, "epochs": 1}
        most = given.get("max_tokens", FEW_TOKENS)
        chats = out / f"chats-{folder_name(model)}-{most}.jsonl"
        given = {**given, "data": (own_chats(model, chats, most, progress, **table.load),)}
        if table.has_text_stage and "text" not in given:
            budget["text"] = (own_text(out / "text.jsonl"),)
    return {**budget, **given}


def quick_settings(settings: BenchSettings) -> BenchSettings:
    """The first, a middle and the last value of settings with many; short prompts and answers; a short search."""
    few: dict[str, Any] = {
        name: tuple(values[i * (len(values) - 1) // (_QUICK_VALUES - 1)] for i in range(_QUICK_VALUES))
        for name, values in vars(settings).items()
        if isinstance(values, tuple) and len(values) > _QUICK_VALUES
    }
    few["prompt_tokens"] = tuple(dict.fromkeys(min(each, _QUICK_PROMPT) for each in settings.prompt_tokens))
    return replace(
        settings,
        **few,
        max_new_tokens=min(32, settings.max_new_tokens),
        num_calibration_prompts=min(8, settings.num_calibration_prompts),
    )
