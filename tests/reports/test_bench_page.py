"""Facts of a comparison on its page."""

from dataclasses import asdict
from typing import Any

from draftheads.reports.bench_page import bench_page
from report_records import BENCH, bench_row


def test_the_answer_names_the_fastest_drafter() -> None:
    assert bench_page(BENCH).answer == (
        "hydra is fastest: 1.75 ± 0.12 times as fast as plain decoding, with 2.50 tokens per step."
    )


def test_the_answer_says_where_no_drafter_is_faster() -> None:
    rows = [asdict(bench_row("medusa", speedup=0.9))]
    assert bench_page({**BENCH, "rows": rows}).answer == "No drafter is faster than plain decoding."


def test_each_drafter_has_a_row_with_its_errors() -> None:
    (table,) = bench_page(BENCH).tables
    medusa, hydra = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (medusa["drafter"], hydra["drafter"]) == ("medusa", "hydra")
    assert hydra["× plain"] == "1.75\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.12", "numbers stay in one piece"
    assert hydra["tokens/s"] == "70.0"


def test_prompts_and_how_it_was_made_are_listed() -> None:
    page = bench_page(BENCH)
    assert page.note == "Greedy answers to all 6 prompts, sampled ones to 4 of them, speeds on 3."
    ((_, values),) = page.facts
    facts: dict[str, Any] = dict(values)
    assert facts["prompts"] == "6 of some/questions.jsonl"
    assert facts["command"] == "draftheads bench <tiny>"


def test_plots_show_speed_and_every_way_of_accepting() -> None:
    speed, tokens = bench_page(BENCH).figures
    assert ">hydra</text>" in speed.svg
    assert all(f">{way}</text>" in tokens.svg for way in ("greedy", "exact, T=0.7", "typical, T=0.7"))


def test_without_a_temperature_only_greedy_tokens_are_shown() -> None:
    page = bench_page({**BENCH, "settings": {**BENCH["settings"], "temperature": 0.0}})
    assert "typical" not in page.figures[1].svg
