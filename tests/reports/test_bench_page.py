"""Facts of a comparison on its page."""

from dataclasses import replace
from typing import Any

import pytest

from draftheads.bench.table import Row
from draftheads.reports.bench_page import bench_page
from draftheads.reports.page import Page, Plot, Table
from report_records import BENCH, GROWING, POINT, bench_record, bench_row, curves_of, plain_row


def page_of(*rows: Row, **changes: Any) -> Page:
    return bench_page(bench_record(*rows, **changes))


def plots(page: Page) -> dict[str, Plot]:
    return {plot.name: plot for plot in page.plots}


def bars_of(page: Page, name: str) -> dict[str, list[tuple[Any, ...]]]:
    """Groups and values of bars, by series."""
    return {series: [point[:2] for point in each] for series, each in curves_of(plots(page)[name])[""].items()}


def cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_verdict_names_the_fastest_drafter_and_counts_equal_answers():
    page = bench_page(BENCH)
    assert page.verdict == (
        "hydra is fastest: 1.75 ± 0.12 × plain decoding (growing, 24, with the same text in 6 of 6 answers)."
    )
    assert page.note == "Every way answers 6 prompts in turn, with at most 128 tokens."
    assert [value for value, _ in page.numbers] == ["1.75", "2.50", "70.0", "6"]
    (_, settings), (_, provenance) = page.facts
    assert dict(settings)["prompts"] == "6 of some/questions.jsonl"
    assert dict(settings)["num_nodes"] == [24]
    assert dict(provenance)["command"] == "draftheads bench <tiny>"


def test_a_record_of_plain_decoding_alone_has_a_page():
    page = page_of(plain_row())
    assert page.verdict == "There is no drafter to compare."
    assert list(plots(page)) == ["speed-and-tokens", "drafting"]


def test_each_way_has_a_row_with_its_intervals_fastest_first():
    (table,) = bench_page(BENCH).tables
    assert [row[0] for row in table.rows] == ["hydra", "medusa", "plain"]
    assert table.best == 0
    hydra, medusa, plain = cells(table)
    assert hydra["× plain"] == "1.75 (1.50-2.00)"
    assert medusa["tokens/step"] == "2.50 (2.25-2.75)"
    assert plain["tokens/s"] == "40.0"
    assert hydra["draft ms"] == "3.0"


def test_an_answer_has_its_draft_tokens_in_colour():
    example = {"way": "hydra", "question": "Why?", "pieces": [["Because", False], [" of", True]]}
    (text,) = page_of(bench_row("hydra", speedup=1.5), example=example).texts
    title = "An answer of hydra: its accepted draft tokens are green"
    assert text == (title, [("Why?\n\n", ""), ("Because", "answer"), (" of", "drafted")])


def test_problems_and_quality_have_tables_of_their_own():
    row = bench_row("hydra", speedup=1.5, quality={"rouge": 0.5}, quality_intervals={"rouge": [0.25, 0.75]})
    problem = {"question": "q7", "turn": 2, "problem": "hydra: the conversation became too long"}
    _, quality, problems = page_of(plain_row(), row, problems=[problem]).tables
    assert quality.columns == ["drafter", "rouge"]
    assert cells(quality)[0] == {"drafter": "hydra", "rouge": "0.50 (0.25-0.75)"}
    assert problems.rows == [["q7", 2, "hydra: the conversation became too long"]]


PARTS = {"chat": 1.25, "code": 2.25, "turn 1": 1.5, "turn 2": 2.0}


def with_parts(name: str, speedup: float) -> list[Row]:
    row = bench_row(name, speedup=speedup)
    return [row, *(replace(row, part=part, speedup=speedup * value) for part, value in PARTS.items())]


def test_categories_have_grouped_bars_and_tables_with_turns():
    page = page_of(plain_row(), *with_parts("medusa", 1.0), *with_parts("hydra", 2.0))
    groups = ("chat", "code", "all")  # in the order of the record; turns are in the table
    bars = {"hydra": (2.5, 4.5, 2.0), "medusa": (1.25, 2.25, 1.0)}
    assert bars_of(page, "speed") == {name: list(zip(groups, values, strict=True)) for name, values in bars.items()}
    overall, speedups, tokens = page.tables
    assert len(overall.rows) == 3
    assert speedups.columns == ["drafter", "chat", "code", "turn 1", "turn 2", "all"]
    assert speedups.rows[0] == ["hydra", "2.50", "4.50", "3.00", "4.00", "2.00"]
    assert tokens.title == "Tokens per step by category and turn"


def test_plots_of_one_category_and_one_point():
    page = bench_page(BENCH)
    assert list(plots(page)) == ["speed", "speed-and-tokens", "lengths", "depths", "parts", "drafting"]
    assert curves_of(plots(page)["speed"])[""]["hydra"] == [("all", 1.75, (1.625, 1.875))]
    assert curves_of(plots(page)["speed-and-tokens"])["× plain decoding"] == {
        "hydra": [(2.5, 1.75, [1.5, 2.0], [2.25, 2.75])],
        "medusa": [(2.5, 1.5, [1.25, 1.75], [2.25, 2.75])],
        "plain": [(1, 1)],
    }
    assert curves_of(plots(page)["lengths"])["steps, %"]["hydra"] == [(1, 12.5), (2, 25), (3, 62.5)]
    assert curves_of(plots(page)["depths"])["steps, %"]["hydra"] == [(1, 75), (2, 50)]
    parts = bars_of(page, "parts")
    assert parts["verification"] == [("hydra", 27), ("medusa", 27)], "no parts of plain decoding were measured"
    assert bars_of(page, "drafting") == {
        "prefix": [("medusa", 0), ("hydra", 0.5)],
        "head 1": [("medusa", 1), ("hydra", 1)],
        "head 2": [("medusa", 0), ("hydra", 0.25)],
    }
    assert not any("Shown" in plot.caption or "Measured" in plot.caption for plot in page.plots)


def test_batch_sizes_have_curves_of_speed_and_latency():
    rows = []
    for size, speedup in ((4, 0.75), (1, 1.5)):
        rows.append(plain_row(settings={**POINT, "batch_size": size}, tokens_per_second=40.0 * size))
        for nodes in (8, 24):
            settings = {**GROWING, "batch_size": size, "num_nodes": nodes}
            latency = {"p50_seconds": size / 2}
            rows.append(bench_row("hydra", speedup=speedup + nodes / 100, settings=settings, numbers=latency))
    page = page_of(*rows)
    curves = curves_of(plots(page)["batch_size"])
    assert curves["tokens/s"] == {
        "hydra": [(1, pytest.approx(69.6)), (4, pytest.approx(39.6))],
        "plain": [(1, 40), (4, 160)],
    }
    assert curves["median answer, s"] == {"hydra": [(1, 0.5), (4, 2.0)]}
    assert plots(page)["batch_size"].caption.endswith("Shown: the fastest row of each drafter.")
    low, high = curves_of(plots(page)["num_nodes"])["× plain decoding"]["hydra"]
    assert low == (8, pytest.approx(1.58), pytest.approx([1.33, 1.83]))
    assert high == (24, pytest.approx(1.74), pytest.approx([1.49, 1.99]))
    where = "Measured at batch size 1 and temperature\N{NO-BREAK SPACE}0."
    assert plots(page)["num_nodes"].caption.endswith(where)
    assert bars_of(page, "speed") == {"hydra": [("all", pytest.approx(1.74))]}
    assert plots(page)["speed"].caption.endswith(f"Shown: the fastest row of each drafter. {where}")


def test_thresholds_have_curves_of_tokens_and_quality():
    rows = [bench_row("hydra", speedup=1.0), plain_row()]
    for epsilon, tokens in ((0.25, 2.0), (0.125, 3.0)):
        settings = {**GROWING, "temperature": 0.5, "acceptance": "typical", "epsilon": epsilon}
        more: dict[str, Any] = {"tokens_per_step": tokens, "quality": {"rouge": epsilon}}
        rows.append(bench_row("hydra", speedup=1.5, settings=settings, **more))
    assert curves_of(plots(page_of(*rows))["epsilon"]) == {
        "tokens/step": {"hydra": [(0.125, 3.0, [2.25, 2.75]), (0.25, 2.0, [2.25, 2.75])]},
        "rouge": {"hydra": [(0.125, 0.125), (0.25, 0.25)]},
    }
    without = page_of(*(replace(row, quality={}) for row in rows))
    assert "epsilon" not in plots(without), "there is nothing to choose by"


def test_plots_with_many_drafters_show_the_fastest_ones():
    rows = [bench_row(f"head {number}", speedup=2 - number / 10) for number in range(9)]
    page = page_of(plain_row(), *rows)
    assert list(bars_of(page, "speed")) == [f"head {number}" for number in range(7)]
    assert plots(page)["speed"].caption.endswith("Shown: the 7 fastest drafters.")
    assert len(plots(page)["speed-and-tokens"].panels["× plain decoding"]) == 10, "plain decoding, too"


def test_a_row_has_one_name_in_plots_and_tables_and_a_head_one_colour():
    """With copies, its curves are dashed and its bars hatched."""
    loaded = {**GROWING, "tree": "defaults"}
    depths = [0.5, 0.0, 0.25, *[0.0] * 13]
    rows = [
        plain_row(),
        *(replace(row, settings=loaded, tree="defaults, with copies") for row in with_parts("hydra", 1.75)),
        *with_parts("hydra", 1.5),
        *with_parts("medusa", 1.25),
        *(replace(row, settings=loaded, tree="defaults, with copies") for row in with_parts("medusa", 1.0)),
    ]
    page = page_of(*rows)
    names = ["hydra, defaults", "hydra, growing", "medusa, growing", "medusa, defaults"]
    assert list(bars_of(page, "speed")) == list(plots(page)["lengths"].panels["steps, %"]) == names
    assert [row[0] for table in page.tables for row in table.rows if row[0] != "plain"] == 3 * names
    styles = [plots(page)["speed"].styles[name] for name in names]
    assert [style.is_dashed for style in styles] == [True, False, False, True]
    assert styles[0].colour == styles[1].colour != styles[2].colour == styles[3].colour
    deep = page_of(bench_row("hydra", speedup=1.5, acceptance_by_depth=depths))
    assert curves_of(plots(deep)["depths"])["steps, %"]["hydra"] == [(1, 50), (2, 0), (3, 25), (4, 0)]
