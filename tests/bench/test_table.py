"""Rows and columns of a comparison, from answers whose times are known."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from draftheads.bench import table
from draftheads.bench.table import (
    ALL,
    COLUMNS,
    Column,
    Row,
    by_part,
    markdown,
    parts_of,
    remarks,
    table_of,
    timed_row,
    verdict,
)
from draftheads.bench.timing import Answers


def answers(*each: tuple[int, int, float]) -> list[Answers]:
    """Single answers: tokens, steps, seconds, of which half a second reads the prompt."""

    def answer(group: int, tokens: int, steps: int, seconds: float) -> Answers:
        times, drafts = {"seconds": seconds, "prompt_seconds": 0.5}, {"num_drafted": tokens - 1 - steps}
        places = {"questions": (group,), "group": group, "num_copied": group}
        return Answers(token_ids=((7,) * tokens,), num_steps=(steps,), **times, **places, **drafts)

    return [answer(group, *one) for group, one in enumerate(each)]


PLAIN = answers((5, 4, 1.0), (3, 2, 1.0), (8, 7, 2.0))
FAST = answers((5, 2, 0.75), (3, 1, 0.6), (8, 4, 1.25))
STOCK = answers((5, 4, 2.0), (3, 2, 2.0), (8, 7, 1.0))
ROW = Row(
    name="medusa", tree="static, 6", tokens_per_step=1.5, tokens_per_step_interval=(1.25, 1.75), num_answers=6,
    tokens_per_second=20.0, speedup=1.25, speedup_interval=(1.0, 1.5), speedup_error=0.125,
    settings={"tree": "best", "temperature": 0.0, "batch_size": 1},
)  # fmt: skip


def test_a_row_has_speed_and_tokens_per_step():
    row = timed_row("medusa", FAST, PLAIN, STOCK)
    # tokens per second, answer by answer: 5 / 0.75, 3 / 0.6, 8 / 1.25 beside 5, 3, 4 and 2.5, 1.5, 8
    speed = (5 / 0.75 + 3 / 0.6 + 8 / 1.25) / 3
    assert row.tokens_per_second == pytest.approx(speed)
    assert row.speedup == pytest.approx(speed / 4), "Spec-Bench: mean over items, divided by plain decoding's mean"
    assert row.speedup_over_transformers == pytest.approx(speed / 4)
    assert row.decode_speedup == pytest.approx((13 / 1.1) / (13 / 2.5))
    assert row.tokens_per_step == pytest.approx(13 / 7)
    assert row.accepted_per_step == pytest.approx(6 / 7)
    assert row.overhead == pytest.approx((1.1 / 7) / (2.5 / 13)), "time of a step over plain decoding's"
    assert row.num_tokens == 16
    assert row.speedup_interval is not None
    low, high = row.speedup_interval
    assert 4 / 3 <= low < row.speedup < high <= 5 / 3
    assert 0 < row.speedup_error < 0.2
    assert row.number("copied_percent") == pytest.approx(100 * 3 / 6)


def test_latencies_are_percentiles_of_all_answers_and_memory_is_the_most_of_a_group():
    def group(number: int, places: range, peak_bytes: int) -> Answers:
        texts, steps = ((7, 7),) * len(places), (1,) * len(places)
        firsts, lasts = tuple(place / 10 for place in places), tuple(map(float, places))
        times = {"seconds": 100.0, "first_seconds": firsts, "last_seconds": lasts}
        return Answers(token_ids=texts, num_steps=steps, group=number, peak_bytes=peak_bytes, **times)

    own = [group(0, range(51, 101), 3), group(1, range(10), 7), group(2, range(10, 51), 5)]
    row = timed_row("medusa", own, own)
    assert [row.number(f"p{share}_seconds") for share in (50, 90, 99)] == pytest.approx([50.0, 90.0, 99.0])
    assert row.number("first_token_milliseconds") == pytest.approx(5e3)
    assert row.number("peak_gigabytes") == 7e-9


def test_categories_and_turns_are_parts_where_prompts_are_answered_alone():
    one, two, three = PLAIN
    talk = [one, replace(two, turn=1, questions=(0,), group=0), replace(three, questions=(1,), group=1)]
    parts = {
        name: [answer for answer in talk if belongs(answer)]
        for name, belongs in parts_of(talk, [("a", "language x"), ("b", "")])
    }
    assert parts == {ALL: talk, "a": talk[:2], "b": talk[2:], "turn 1": [talk[0], talk[2]], "turn 2": talk[1:2]}
    together = replace(one, token_ids=((1,), (2,)))
    assert [name for name, _ in parts_of([together], [("a", ""), ("b", "")])] == [ALL]
    assert [name for name, _ in parts_of([one], [("a", "")])] == [ALL]


def test_languages_are_parts_beside_categories():
    one, two, _ = PLAIN
    talk, labels = [one, replace(two, questions=(1,), group=1)], [("chat", "language fr"), ("chat", "language ja")]
    parts = {name: [answer for answer in talk if belongs(answer)] for name, belongs in parts_of(talk, labels)}
    assert parts == {ALL: talk, "language fr": talk[:1], "language ja": talk[1:]}


def test_a_column_shows_a_field_of_rows_or_computes():
    assert not [column.name for column in COLUMNS if column.compute is None and not hasattr(ROW, column.name)]


def cells(row: Row, *others: Row, intervals: bool = True) -> dict[str, str]:
    headings, (line, *_) = table_of([row, *others], intervals=intervals)
    return {heading: cell for heading, cell in zip(headings, line, strict=True) if cell}


def test_cells_show_values_and_intervals_and_nothing_that_was_not_measured():
    shown = cells(ROW)
    assert shown["tokens/step"] == "1.50 (1.25-1.75)"
    assert shown["× plain"] == "1.25 (1.00-1.50)"
    assert not {"first token ms", "overhead", "T", "batch", "peak memory GB", "parameters"} & shown.keys()
    assert cells(ROW, intervals=False)["tokens/step"] == "1.50"
    measured = replace(ROW, quality={"gsm8k": 12.5}, quality_intervals={"gsm8k": (0.0, 25.0)})
    assert cells(measured)["gsm8k"] == "12.50 (0.00-25.00)"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            [
                {"tree": "best", "temperature": t, "acceptance": "typical", "epsilon": e}
                for t, e in ((0.7, 0.09), (0.0, 0.2))
            ],
            ["medusa, T 0.7, ε 0.09", "medusa, T 0, ε 0.2"],
        ),
        ([{"tree": "paths", "num_nodes": number} for number in (1, 5)], ["medusa, k = 1", "medusa, k = 5"]),
        (
            [{"tree": tree, "num_nodes": nodes} for tree, nodes in (("static", 6), ("static", 9), ("dense", 6))],
            ["medusa, static, nodes 6", "medusa, static, nodes 9", "medusa, dense, nodes 6"],
        ),
    ],
)
def test_settings_are_in_a_row_s_name_where_they_vary(settings: list[dict[str, Any]], names: list[str]):
    rows = [replace(ROW, part=part, settings=own) for own in settings for part in (ALL, "maths")]
    assert [cells(row, *rows)["drafter"] for row in rows[::2]] == names
    plain = [replace(ROW, name="plain", part=part, settings={}) for part in (ALL, "maths")]
    (_, _, lines), _ = by_part([*plain, *rows])
    assert [line[0] for line in lines] == ["plain", *names]


def test_the_markdown_tables_have_a_line_for_each_way():
    other = replace(ROW, name="hydra", speedup=2.0)
    lines = list(markdown([ROW, replace(ROW, part="maths", speedup=3.0), other, replace(other, part="maths")]))
    assert lines[0].startswith("| drafter | tree | tokens/step | × plain |")
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| medusa", "| hydra"]
    assert "| medusa | 3.00 | 1.25 |" in lines
    assert "| hydra | 2.00 | 2.00 |" in lines
    assert lines[5].endswith("Heads draft alone, without copies from the text.")
    assert list(by_part([ROW, other])) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "medusa is fastest: 1.25 ± 0.12 × plain decoding (static, 6, with the same text in 6 of 6 answers)."),
        ({"num_different": 2}, "with the same text in 4 of 6 answers"),
        ({"settings": {"tree": "best", "temperature": 0.7}}, "× plain decoding (static, 6)."),
        ({"speedup": 1.0625}, "No drafter is clearly faster than plain decoding: the fastest, medusa, reaches 1.06"),
        ({"speedup": 0.5}, "No drafter is faster than plain decoding"),
        ({"settings": {"tree": "defaults"}}, "With the defaults on this machine: 1.25 ± 0.12 × plain"),
        (
            {"settings": {"tree": "defaults"}, "numbers": {"copied_percent": 80.0}},
            "(medusa; 80 % of the accepted draft",
        ),
    ],
)
def test_the_verdict_names_the_fastest_drafter(changes: dict[str, Any], words: str):
    plain = replace(ROW, name="plain", speedup=9.0)
    rows = [plain, replace(ROW, speedup=0.25), replace(ROW, **changes), replace(ROW, part="maths", speedup=7.0)]
    assert words in verdict(rows)


def test_remarks_say_what_limits_the_verdict():
    close = replace(ROW, name="hydra", speedup=1.2, num_different=1)
    warm = replace(ROW, name="eagle", speedup=0.5, settings={"acceptance": "typical", "temperature": 0.7})
    sentences = " ".join(remarks([ROW, close, warm]))
    assert "Within the errors, hydra can be as fast as medusa." in sentences
    assert "Texts can differ where rounding decides" in sentences
    assert "Acceptance typical changes the distribution of texts: measure it: `--quality`." in sentences


def test_texts_are_compared_where_they_are_not_drawn_and_a_mean_over_some_questions_says_of_how_many():
    assert cells(replace(ROW, num_different=2))["same text"] == "4 of 6"
    assert "same text" not in cells(replace(ROW, settings={"temperature": 0.7}))
    assert "same text" not in cells(replace(ROW, name="plain"))
    row = replace(ROW, quality={"judge": 7.0, "rouge": 5.0}, quality_counts={"judge": 2})
    assert (cells(row)["judge"], cells(row)["rouge"]) == ("7.00, of 2", "5.00")


@pytest.mark.parametrize(("tree", "nodes", "advised"), [("static, 24", 24, True), ("its own, up to 9", 24, False)])
def test_smaller_trees_are_advised_where_there_are_trees_of_a_size(tree: str, nodes: int, advised: bool):
    row = replace(ROW, speedup=0.9, speedup_error=0.05, tree=tree, settings={"tree": "best", "num_nodes": nodes})
    assert any("smaller `--num-nodes`" in sentence for sentence in remarks([row])) == advised


def test_a_column_is_one_entry(monkeypatch: pytest.MonkeyPatch):
    """It is in the row, its JSON, the tables, and tables of papers."""
    one = Column("answers_per_question", "answers", ".0f", "time", lambda own: float(len(own)))
    monkeypatch.setattr(table, "COLUMNS", (*table.COLUMNS, one))
    row = timed_row("medusa", FAST, PLAIN)
    assert row.number("answers_per_question") == asdict(row)["numbers"]["answers_per_question"] == len(FAST)
    assert cells(row)["answers"] == str(len(FAST))
    assert any("| answers |" in line for line in table.markdown([row]))
