"""Facts of a comparison on its page."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from draftheads.bench.table import Row
from draftheads.reports.bench_page import bench_page
from report_records import BENCH, bench_row


def words(text: str) -> str:
    """With ordinary spaces."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def record(*rows: Row) -> dict[str, Any]:
    return {**BENCH, "rows": [asdict(row) for row in rows]}


def test_the_verdict_names_the_fastest_drafter_and_counts_equal_answers():
    assert words(bench_page(BENCH).verdict) == (
        "With trees of 24 nodes, hydra is fastest: 1.75 ± 0.12 × plain decoding, with the same text in 6 of 6 answers."
    )


@pytest.mark.parametrize(("speedup", "start"), [(0.9, "no drafter is faster"), (1.1, "no drafter is clearly faster")])
def test_the_verdict_says_where_no_drafter_is_faster(speedup: float, start: str):
    page = bench_page(record(replace(bench_row("medusa", speedup=speedup), num_different=2)))
    assert words(page.verdict) == (
        f"With trees of 24 nodes, {start} than plain decoding: the fastest, medusa, reaches {speedup:.2f} ± 0.12 × "
        "its speed, with the same text in 4 of 6 answers."
    )
    assert "Trees of 24 nodes may be too large" in page.note
    assert "Texts can differ where rounding decides" in page.note


def test_the_speed_with_the_defaults_comes_first():
    usual = [
        replace(bench_row("medusa", speedup=1.5), default_speedup=1.25, default_speedup_error=0.0625),
        replace(bench_row("hydra", speedup=1.75), default_speedup=1.125, default_speedup_error=0.0625),
        bench_row("copies", speedup=2.0),
    ]
    page = bench_page(record(*usual))
    assert words(page.verdict) == "With the defaults on this machine: 1.25 ± 0.06 × plain decoding (medusa)."
    assert words(page.note).startswith("With trees of 24 nodes, copies is fastest: 2.00")
    assert page.numbers[0] == ("1.25", "× plain with the defaults, medusa")
    assert page.tables[0].columns[:3] == ["drafter", "× plain, defaults", "× plain"]
    assert [words(row[1]) for row in page.tables[0].rows] == ["", "1.12 ± 0.06", "1.25 ± 0.06"]
    assert "Defaults choose the size of each draft for this machine." in page.note


def test_drafters_within_the_errors_of_the_fastest_are_named():
    close, far = bench_row("close", speedup=1.51), bench_row("far", speedup=1.49)
    page = bench_page(record(close, far, bench_row("hydra", speedup=1.75)))
    assert "Within the errors, close can be as fast as hydra." in page.note
    assert "errors" not in bench_page(record(far, bench_row("hydra", speedup=1.75))).note


def test_each_drafter_has_a_row_with_its_errors_fastest_first():
    greedy, sampled = bench_page(BENCH).tables
    hydra, medusa = (dict(zip(greedy.columns, row, strict=True)) for row in greedy.rows)
    assert (medusa["drafter"], hydra["drafter"]) == ("medusa", "hydra")
    assert greedy.best == 0
    assert hydra["× plain"] == "1.75\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.12", "numbers stay in one piece"
    assert hydra["tokens/s"] == "70.0"
    assert words(hydra["same text"]) == "6 of 6"
    assert "× medusa" in greedy.columns, "the first drafter of the record"
    assert greedy.columns[:4] == ["drafter", "× plain", "tokens/s", "tokens/step"]
    assert sampled.columns[1:3] == ["exact T=0.7", "typical T=0.7"]
    assert [words(cell) for cell in sampled.rows[0][:3]] == ["hydra", "2.25 ± 0.50", "2.38 ± 0.06"]


def test_prompts_and_how_it_was_made_are_folded():
    page = bench_page(BENCH)
    assert page.note.startswith("Greedy answers to all 6 prompts, sampled ones to 4 of them, speeds on 3.")
    (_, settings), (_, provenance) = page.facts
    assert dict(settings)["prompts"] == "6 of some/questions.jsonl"
    assert dict(settings)["num_nodes"] == 24
    assert dict(provenance)["command"] == "draftheads bench <tiny>"


def test_plots_show_speed_and_every_way_of_accepting():
    speed, tokens = bench_page(BENCH).figures
    assert ">hydra</text>" in speed.svg
    assert speed.alt == "Bars, speed: hydra 1.75, medusa 1.50."
    assert all(f">{way}</text>" in tokens.svg for way in ("greedy", "exact, T=0.7", "typical, T=0.7"))


def test_without_a_temperature_only_greedy_tokens_are_shown():
    page = bench_page({**BENCH, "settings": {**BENCH["settings"], "temperature": 0.0}})
    assert "typical" not in page.figures[1].svg
    assert len(page.tables) == 1


def test_names_of_heads_are_not_formulas():
    speed, _ = bench_page(record(bench_row("$a$ <b>", speedup=1.5))).figures
    assert ">$a$ &lt;b&gt;</text>" in speed.svg
