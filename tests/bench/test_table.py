"""Rows and columns of a comparison, from answers whose times are known."""

from dataclasses import replace

import pytest

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import SPEED_COLUMNS, Row, columns, markdown, timed_row
from draftheads.bench.timing import Answers

SETTINGS = BenchSettings(num_sampled_prompts=4, num_speed_prompts=3)


def answers(*each: tuple[int, int, float]) -> list[Answers]:
    """Single answers: tokens, steps, seconds."""
    return [Answers(((7,) * tokens,), (steps,), seconds) for tokens, steps, seconds in each]


PLAIN = answers((5, 4, 1.0), (3, 2, 1.0), (8, 7, 2.0))  # 16 tokens in 4 s
FAST = answers((5, 2, 0.25), (3, 1, 0.5), (8, 4, 1.25))  # 16 tokens in 2 s
STOCK = answers((5, 4, 2.0), (3, 2, 2.0), (8, 7, 1.0))  # 16 tokens in 5 s
ROW = Row(
    name="medusa", tree="static, 6", tokens_per_step=1.5, tokens_per_step_error=0.25, over_first=1.0,
    over_first_error=0.0, tokens_per_second=20.0, speedup=1.25, speedup_error=0.125, sampled_tokens_per_step=1.375,
    sampled_error=0.0625,
)  # fmt: skip


def test_a_row_has_speed_and_tokens_per_step():
    row = timed_row("medusa", FAST, PLAIN, STOCK)
    assert row.tokens_per_second == 8.0
    assert row.speedup == 2.0
    assert row.speedup_error > 0
    assert row.speedup_over_transformers == 2.5
    assert row.tokens_per_step == 13 / 7
    assert row.num_tokens == 16
    # prompt by prompt medusa is 4, 2 and 1.6 times as fast as plain decoding
    assert row.speedup_quartiles == pytest.approx((1.8, 3.0))


def test_plain_decoding_is_compared_with_itself():
    row = timed_row("plain", PLAIN, PLAIN)
    assert (row.speedup, row.speedup_error, row.speedup_quartiles) == (1.0, 0.0, (1.0, 1.0))
    assert row.tokens_per_step == 1.0
    assert row.speedup_over_transformers is None


def test_a_way_that_stops_early_is_not_faster_for_that():
    row = timed_row("short", answers((1, 0, 0.2), (1, 0, 1 / 3), (1, 0, 0.25)), PLAIN)
    assert row.speedup_quartiles == pytest.approx((1.0, 1.0))
    assert row.tokens_per_second == pytest.approx(3 / (0.2 + 1 / 3 + 0.25))
    assert row.tokens_per_step == 1.0


def test_parts_of_a_step_are_means_over_timed_steps():
    one = replace(FAST[0], draft_milliseconds=6.0, verify_milliseconds=20.0, rest_milliseconds=1.0, num_timed_steps=2)
    row = timed_row("medusa", [one, replace(one, num_timed_steps=3)], PLAIN[:2])
    assert row.parts == {"drafting": 12 / 5, "verification": 8.0, "accept and rest": 0.4}
    assert row.step_milliseconds == pytest.approx(54 / 5)


def cells(row: Row, *, errors: bool) -> dict[str, str]:
    return {column.heading: column.cell(row) for column in columns(SETTINGS, first="medusa", errors=errors)}


def test_cells_show_values_and_their_errors_and_nothing_that_was_not_measured():
    shown = cells(ROW, errors=True)
    assert shown["tokens/step"] == "1.50 ± 0.25"
    assert shown["× medusa"] == "1.00 ± 0.00"
    assert shown["× plain"] == "1.25 ± 0.12"
    assert shown["exact T=0.7"] == "1.38 ± 0.06"
    assert [shown[f"{rule} T=0.7"] for rule in ("typical", "rejection", "block")] == ["", "", ""]
    assert shown["parameters"] == "none"
    assert cells(ROW, errors=False)["tokens/step"] == "1.50"


def test_without_a_temperature_there_are_no_columns_for_sampled_answers():
    greedy = replace(SETTINGS, temperature=0.0)
    assert not any("T=" in column.heading for column in columns(greedy, first="medusa"))
    assert list(markdown([ROW], greedy, 6))[-1] == (
        "Greedy answers to all 6 prompts, speeds on 3. ± is one standard error."
    )


def test_the_markdown_table_has_a_line_for_each_row():
    lines = list(markdown([ROW, replace(ROW, name="hydra")], SETTINGS, 6))
    assert lines[0].startswith("| drafter | parameters | tree | tokens/step | × medusa |")
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| medusa", "| hydra"]
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[-1].startswith("Greedy answers to all 6 prompts, sampled ones to 4 of them, speeds on 3. ±")


def test_speed_columns_name_texts_that_differ():
    row = replace(ROW, speedup_quartiles=(1.0, 1.5), num_different=3, worst_margin=0.00012)
    shown = {column.heading: column.cell(row) for column in SPEED_COLUMNS}
    assert shown["speed-up (quartiles)"] == "1.25 (1.00-1.50)"
    assert shown["same text"] == "no (3)"
    assert shown["worst margin"] == "0.0001"
