"""Rebuilds a table of a paper for a model and its heads: trains what it needs, compares, and arranges the numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftheads.bench.compare import Comparison, compare_heads
from draftheads.bench.paper_tables import Cells, PaperTable, by_head, cells_of, drafting_cells, lines_of
from draftheads.bench.settings import BenchSettings
from draftheads.bench.studies import FEW_TOKENS, Budget, Variant, own_chats, renamed, train_variants
from draftheads.bench.table import Row
from draftheads.data.suites import read_suite, select
from draftheads.errors import InvalidSettings
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import provenance

_QUICK_VALUES = 3  # of a setting with more values


@dataclass(frozen=True)
class Reproduction:
    """A table that was rebuilt."""

    lines: list[str]  # in Markdown
    record: dict[str, Any]


def reproduce(
    table: PaperTable,
    model: str,
    heads: Sequence[str] = (),
    *,
    out: Path,
    budget: Budget,
    progress: Progress,
    quick: bool = False,
    prompts: str | None = None,
    limit: int | None = None,
    draft_model: str | None = None,
    quality: Sequence[Any] = (),
    original_model: str | None = None,
    **load_options: Any,
) -> Reproduction:
    """Rebuilds a table.

    Args:
        table: what is measured.
        model: a name, a folder or a Hugging Face id.
        heads: in place of the table's. Variants of a table are trained instead.
        out: the folder of trained variants.
        budget: on how much they are trained.
        progress: receives each stage.
        quick: bounded work: few questions, short answers, few values of each setting, little training.
        prompts: questions in place of the table's.
        limit: questions of each category.
        draft_model: a smaller model, for tables that compare one.
        quality: measures in place of the table's.
        original_model: as for :func:`draftheads.compare_heads`.
        load_options: as for :func:`draftheads.load`.

    Raises:
        InvalidSettings: variants are to be trained, and there is no data.
        ModelNotFound: the model has no such heads.
        DraftHeadsError: as of training and of comparisons.
    """
    variants: list[Variant] = []
    if table.variants:
        if not budget.data and quick:
            chats = own_chats(model, out / "chats.jsonl", budget.max_tokens or FEW_TOKENS, progress, **load_options)
            most, epochs = budget.max_tokens or FEW_TOKENS, budget.epochs or 1
            budget = replace(budget, data=(chats,), max_tokens=most, epochs=epochs)
        elif not budget.data:
            raise InvalidSettings(f"{table.name} trains {', '.join(table.variants)}: give --data FILE…, or --quick")
        small = {"eval_steps": 0, "tree_nodes": 16} if quick else {}
        variants = train_variants(table, model, out, budget, progress, **small)
    cells: Cells = {}
    record: dict[str, Any] = {"variants": {one.name: asdict(one.report) for one in variants}, "runs": {}}
    if table.measured == "losses":
        for one in variants:
            cells |= losses_of(one, budget)
    else:
        limit = 1 if quick and limit is None else limit
        questions = select(read_suite(prompts or table.prompts), table.categories, limit)
        measures = list(quality or [name for name in table.quality if name in ("agreement", "perplexity")])
        for run in table.runs:
            settings = quick_settings(table.settings(run)) if quick else table.settings(run)
            compared = [
                compare_heads(
                    of_model,
                    names,
                    questions,
                    settings=settings,
                    draft_model=draft_model if table.draft_model else None,
                    transformers=table.transformers,
                    quality=measures,
                    original_model=original_model or (model if of_model != model else None),
                    progress=progress,
                    **load_options,
                )
                for of_model, names in _compared(model, heads or table.heads, variants)
            ]
            rows = _named(compared, variants)
            rows = [replace(row, settings={**row.settings, "run": run}) for row in rows]
            record["runs"][run] = [each.record for each in compared]
            for found in _cells(table, rows, compared):
                for label, line in found.items():
                    cells.setdefault(label, {}).update(line)
    record = {
        "format_version": 1,
        "table": table.name,
        "model": model,
        "quick": quick,
        "cells": cells,
        **record,
        "provenance": provenance(),
    }
    return Reproduction([f"**{table.title}** ({table.source}), here for {model}.", "", *lines_of(table, cells)], record)


def _compared(model: str, heads: Sequence[str], variants: Sequence[Variant]) -> list[tuple[str, list[str]]]:
    """Models, each with the heads that are compared on it."""
    frozen = [str(one.head) for one in variants if one.model is None]
    tuned = [(str(one.model), [str(one.head)]) for one in variants if one.model is not None]
    return [*([(model, frozen or list(heads))] if frozen or not variants else []), *tuned]


def _named(compared: Sequence[Comparison], variants: Sequence[Variant]) -> list[Row]:
    """All rows; those of variants have their names."""
    if not variants:
        return [row for each in compared for row in each.rows]
    rows: list[Row] = []
    frozen = {one.head.name: one.name for one in variants if one.model is None}
    tuned = [one for one in variants if one.model is not None]
    if frozen:
        rows += [replace(row, name=frozen.get(row.name, row.name)) for row in compared[0].rows]
    for one, comparison in zip(tuned, compared[bool(frozen) :], strict=True):
        rows += renamed(comparison.rows, one.name, tuned=True)
    return rows


def _cells(table: PaperTable, rows: Sequence[Row], compared: Sequence[Comparison]) -> list[Cells]:
    if table.measured == "drafting":
        return [drafting_cells(each.record["drafting"]) for each in compared]
    if table.measured == "accuracy":
        return [
            {name: by_head(_top(ranks), "head") for name, ranks in each.record["accuracy"].items()} for each in compared
        ]
    return [cells_of(table, rows)]


def _top(ranks: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Top-1 and top-5 accuracy of each head, from the share of each rank."""
    return {f"top-{best}": [sum(shares[:best]) for shares in ranks] for best in (1, 5)}


def losses_of(variant: Variant, budget: Budget) -> Cells:
    """The loss of each head along the training, at five places, and on held-out text."""
    path = variant.head / "log.jsonl"
    log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = [log[len(log) * part // 4 - (part > 0)] for part in range(5)] if log else []
    lines = {f"{variant.name}, step {line['step']}": by_head({"loss": line["head_losses"]}, "head") for line in chosen}
    return {**lines, f"{variant.name}, held-out": by_head({"loss": variant.report.losses}, "head")}


def quick_settings(settings: BenchSettings) -> BenchSettings:
    """The first, a middle and the last value of settings with many; short answers; few prompts to search with."""
    few: dict[str, Any] = {
        name: tuple(values[i * (len(values) - 1) // (_QUICK_VALUES - 1)] for i in range(_QUICK_VALUES))
        for name, values in vars(settings).items()
        if isinstance(values, tuple) and len(values) > _QUICK_VALUES
    }
    return replace(settings, **few, max_new_tokens=min(32, settings.max_new_tokens), num_calibration_prompts=8)
