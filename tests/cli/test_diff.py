"""``draftheads bench diff``: numbers by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_world import Run
from draftheads.bench.table import Row
from draftheads.cli import diff
from draftheads.errors import DataError
from report_records import BENCH, GROWING, POINT, bench_record, bench_row, plain_row


def answer(way: str, question: str, *, tokens: int, steps: int, seconds: float | None) -> dict[str, Any]:
    return {
        "way": way,
        "settings": POINT if way == "plain" else GROWING,
        "question_id": question,
        "turn": 1,
        "token_ids": [7] * tokens,
        "step_tokens": [1] * steps,
        "seconds": seconds,
    }


def write(folder: Path, rows: list[Row], answers: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "bench.json").write_text(json.dumps(bench_record(*rows, **changes)))
    if answers is not None:
        (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    return folder


def answers_of(way: str, *, steps: int, seconds: list[float | None]) -> list[dict[str, Any]]:
    """9 tokens of each question."""
    return [
        answer(way, f"q{number}", tokens=9, steps=steps, seconds=each) for number, each in enumerate(seconds, start=1)
    ]


ROWS = [plain_row(), bench_row("hydra", speedup=1.5)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """With B, plain decoding takes twice as long, and hydra as long as before, with half as many steps."""
    before = [*answers_of("plain", steps=8, seconds=[1, 2, 4]), *answers_of("hydra", steps=4, seconds=[0.5, 1, 1])]
    now = [*answers_of("plain", steps=8, seconds=[2, 4, 8]), *answers_of("hydra", steps=2, seconds=[0.5, 1, 1])]
    return write(tmp_path / "a", ROWS, before), write(tmp_path / "b", ROWS, now)


def found(pair: tuple[Path, Path]) -> dict[tuple[str, str], diff.Difference]:
    each = diff.differences(*map(diff.read_result, pair))
    return {(one.name, one.measure): one for one in each}


def test_ratios_are_paired_by_question(pair: tuple[Path, Path]) -> None:
    numbers = found(pair)
    assert set(numbers) == {
        *(("plain", measure) for measure in ("tokens_per_step", "tokens_per_second")),
        *(("hydra", measure) for measure in ("tokens_per_step", "speedup", "tokens_per_second")),
    }
    assert {key: (one.ratio, one.interval, one.b_is) for key, one in numbers.items()} == {
        ("plain", "tokens_per_step"): (1.0, (1.0, 1.0), "unclear"),
        ("plain", "tokens_per_second"): (0.5, (0.5, 0.5), "lower"),
        ("hydra", "tokens_per_step"): (2.0, (2.0, 2.0), "higher"),
        ("hydra", "speedup"): (2.0, (2.0, 2.0), "higher"),
        ("hydra", "tokens_per_second"): (1.0, (1.0, 1.0), "unclear"),
    }


def test_quality_is_compared_by_its_intervals(tmp_path: Path) -> None:
    before = {"quality": {"gsm8k": 10.0, "judge": 0.0, "old": 1.0}, "quality_intervals": {"gsm8k": (8.0, 12.0)}}
    now = {
        "quality": {"gsm8k": 15.0, "judge": 7.0},
        "quality_intervals": {"gsm8k": (13.0, 17.0), "judge": (6.0, 8.0)},
    }
    a, b = (
        write(tmp_path / name, [plain_row(), replace(bench_row("hydra", speedup=1.5), **more)])
        for name, more in (("a", before), ("b", now))
    )
    numbers = {key: (one.ratio, one.b_is) for key, one in found((a, b)).items()}
    assert numbers["hydra", "gsm8k"] == (1.5, "higher")
    assert numbers["hydra", "judge"] == (None, "unknown")
    assert ("hydra", "old") not in numbers


def test_a_ratio_of_other_questions_in_each_has_a_wide_interval(tmp_path: Path) -> None:
    a = write(tmp_path / "a", ROWS, answers_of("hydra", steps=4, seconds=[1, 1, 1, 1]))
    b = write(tmp_path / "b", ROWS, answers_of("hydra", steps=4, seconds=[0.5, 2, 0.5, 2]))
    one = found((a, b))["hydra", "tokens_per_second"]
    assert one.ratio == pytest.approx(1.25)  # the mean of 2, 0.5, 2 and 0.5
    assert one.interval == (pytest.approx(0.5), pytest.approx(2.0))
    assert one.b_is == "unclear"


def test_without_answers_the_intervals_of_both_are_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", ROWS)
    b = write(tmp_path / "b", [plain_row(), bench_row("hydra", speedup=2.25, tokens_per_step=2.75)])
    numbers = found((a, b / "bench.json"))
    speed, tokens, rate = (numbers["hydra", name] for name in ("speedup", "tokens_per_step", "tokens_per_second"))
    assert (speed.a, speed.b, speed.ratio, speed.interval, speed.b_is) == (1.5, 2.25, 1.5, None, "higher")
    assert tokens.b_is == "unclear", "2.25-2.75 in both"
    assert rate.b_is == "unknown", "older records have no interval of tokens/s"


def test_turns_of_a_question_are_added_without_first_tokens_in_tokens_per_step(tmp_path: Path) -> None:
    def result(name: str, *turns: tuple[int, int, float]) -> Path:
        lines = [
            {**answer("hydra", question, tokens=tokens, steps=steps, seconds=seconds), "turn": turn}
            for question in ("q1", "q2", "q3")
            for turn, (tokens, steps, seconds) in enumerate(turns, start=1)
        ]
        return write(tmp_path / name, ROWS, lines)

    numbers = found((result("a", (9, 4, 1.0), (5, 4, 2.5)), result("b", (7, 2, 1.0), (13, 4, 1.5))))
    assert numbers["hydra", "tokens_per_step"].ratio == pytest.approx(((6 + 12) / 6) / ((8 + 4) / 8))
    assert numbers["hydra", "tokens_per_second"].ratio == pytest.approx((20 / 2.5) / (14 / 3.5))


def test_answers_in_groups_have_no_seconds_of_their_own(tmp_path: Path) -> None:
    lines = answers_of("hydra", steps=4, seconds=[None] * 3)
    numbers = found((write(tmp_path / "a", ROWS, lines), write(tmp_path / "b", ROWS, lines)))
    assert numbers["hydra", "tokens_per_second"].interval is None
    assert numbers["hydra", "tokens_per_step"].interval == (1.0, 1.0)


def test_the_same_number_in_other_prompts_is_another_question(tmp_path: Path) -> None:
    lines = answers_of("hydra", steps=4, seconds=[1.0] * 3)
    other = write(tmp_path / "b", ROWS, lines, prompts="other.jsonl")
    assert found((write(tmp_path / "a", ROWS, lines), other))["hydra", "tokens_per_step"].interval is None


def test_the_command_names_what_differs_first_and_prints_a_table(
    pair: tuple[Path, Path], tmp_path: Path, run: Run
) -> None:
    record = json.loads((pair[1] / "bench.json").read_text())
    record |= {"precision": "bf16", "drafters": {"medusa": "1234", "hydra": "new"}}
    record["rows"] += bench_record(bench_row("medusa", speedup=2.0))["rows"]
    (pair[1] / "bench.json").write_text(json.dumps(record))
    out = run(["bench", "diff", *map(str, pair), "--json", str(tmp_path / "diff.json")]).out
    assert " ".join(out.split()).startswith(
        "B differs from A: precision was 'fp32' and is 'bf16', hydra has other weights or options. Only in B: medusa."
    )
    (line,) = [line for line in out.splitlines() if "hydra" in line and "tokens/step" in line]
    assert line.split() == ["hydra", "tokens/step", "2.50", "2.50", "2.00", "(2.00-2.00)", "higher"]
    assert "no clear difference" in out
    assert max(map(len, out.splitlines())) <= 80
    assert sum("plain" in line and "tokens" in line for line in out.splitlines()) == 2, "one table"
    written = json.loads((tmp_path / "diff.json").read_text())
    assert len(written["differences"]) == 2
    first = written["rows"][0]
    assert (first["name"], first["measure"], first["interval"], first["b_is"]) == (
        *("plain", "tokens_per_step"),
        *([1.0, 1.0], "unclear"),
    )


def test_rows_with_other_settings_are_told_apart(tmp_path: Path, run: Run) -> None:
    larger = bench_row("hydra", speedup=1.5, settings={**GROWING, "num_nodes": 48})
    a, b = (write(tmp_path / name, [*ROWS, larger]) for name in "ab")
    out = run(["bench", "diff", str(a), str(b)]).out
    assert out.startswith("A and B have the same settings and machine.")
    assert "hydra, nodes 48" in " ".join(out.split())
    assert "batch" not in out


SETTINGS = {
    "nodes": ({"num_nodes": 8}, {"num_nodes": 48}, "hydra, growing, nodes 8 → 48"),
    "a tree": (
        {"tree": "chain", "num_nodes": 5},
        {"tree": "dense", "num_nodes": 16},
        "hydra, chain → dense, nodes 5 → 16",
    ),
    "acceptance": ({}, {"acceptance": "typical", "epsilon": 0.1}, "exact → typical"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_one_name_meet_where_a_setting_was_changed(tmp_path: Path, run: Run, name: str) -> None:
    before, now, words = SETTINGS[name]
    loaded = {**POINT, "tree": "defaults", "num_nodes": None, "acceptance": "exact", "epsilon": None}
    folders = []
    for folder, changed, steps in (("a", before, 8), ("b", now, 4)):
        settings = {**GROWING, **changed}
        rows = [
            plain_row(),
            bench_row("hydra", speedup=1.5, settings=settings),
            bench_row("hydra", speedup=1.5, settings=loaded),
        ]
        lines = answers_of("plain", steps=8, seconds=[1, 2, 4])
        lines += [{**line, "settings": settings} for line in answers_of("hydra", steps=steps, seconds=[1, 1, 1])]
        folders.append(write(tmp_path / folder, rows, lines))
    numbers = [
        one for one in diff.differences(*map(diff.read_result, folders)) if one.settings.get("tree") != "defaults"
    ]
    assert [(one.name, one.measure, one.ratio, one.b_is) for one in numbers if one.name == "hydra"] == [
        ("hydra", "tokens_per_step", 2.0, "higher"),
        ("hydra", "speedup", 1.0, "unclear"),
        ("hydra", "tokens_per_second", 1.0, "unclear"),
    ]
    out = run(["bench", "diff", *map(str, folders)]).out
    assert "Only in" not in out
    lines = out.splitlines()
    assert sum(line.startswith("drafter") for line in lines) == 1, "one table, in which each row has its number"
    end = lines[[line.startswith("drafter") for line in lines].index(True)].index("number") - 6
    assert words in " ".join(line[:end].strip() for line in lines)


def test_settings_that_both_vary_are_not_guessed(tmp_path: Path, run: Run) -> None:
    """16 nodes meet 16; of 4 and 8 none is the counterpart of 24 and 48, but 4 alone is that of 24 alone."""

    def result(name: str, *nodes: int) -> Path:
        return write(
            tmp_path / name,
            [
                plain_row(),
                *(bench_row("hydra", speedup=1.5, settings={**GROWING, "num_nodes": each}) for each in nodes),
            ],
        )

    def met(*names: str) -> list[tuple[Any, Any]]:
        ways = diff.same_ways(*(diff.read_result(tmp_path / name) for name in names))
        return [
            tuple(json.loads(way[1])["num_nodes"] for way in pair) for pair in ways.items() if pair[0][0] == "hydra"
        ]

    a, b = result("a", 4, 8, 16), result("b", 16, 24, 48)
    assert met("a", "b") == [(16, 16)]
    out = " ".join(run(["bench", "diff", str(a), str(b)]).out.split())
    assert "Only in A: hydra, nodes 4; hydra, nodes 8. Only in B: hydra, nodes 24; hydra, nodes 48." in out
    result("c", 4, 16)
    result("d", 16, 24)
    assert met("c", "d") == [(4, 24), (16, 16)]


@pytest.mark.parametrize("tree", ["defaults", "adaptive"])
def test_there_is_no_verdict_on_tokens_per_step_of_trees_that_follow_the_costs(
    tmp_path: Path, run: Run, tree: str
) -> None:
    settings = {**POINT, "tree": tree, "num_nodes": None, "acceptance": "exact", "epsilon": None}
    a, b = (
        write(
            tmp_path / name,
            [
                plain_row(),
                bench_row(
                    "hydra",
                    speedup=1.5,
                    settings=settings,
                    tokens_per_step=tokens,
                    tokens_per_step_interval=[tokens - 0.1, tokens + 0.1],
                ),
            ],
        )
        for name, tokens in (("a", 2.0), ("b", 1.5))
    )
    assert found((a, b))["hydra", "tokens_per_step"].b_is == "by costs"
    out = run(["bench", "diff", str(a), str(b)]).out
    assert "no verdict on it" in " ".join(out.split())
    fixed = write(tmp_path / "c", ROWS)
    assert "no verdict" not in run(["bench", "diff", str(fixed), str(fixed)]).out


def test_results_without_a_common_way_are_an_error(tmp_path: Path, run: Run) -> None:
    a, b = (
        write(tmp_path / "a", [bench_row("hydra", speedup=1.5)]),
        write(tmp_path / "b", [bench_row("x", speedup=1.5)]),
    )
    assert "have no drafter of the same name" in run(["bench", "diff", str(a), str(b)], code=1).err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "this comparison cannot be read"),
        ("[]", "this comparison cannot be read"),
        (json.dumps({**BENCH, "format_version": 1}), "its format version is 1; this release reads 3"),
        (json.dumps({**BENCH, "rows": [{"name": "x"}]}), "this comparison cannot be read"),
        (json.dumps({**BENCH, "provenance": None}), "this comparison cannot be read"),
        (None, r"cannot be read \(No such file"),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        diff.read_result(tmp_path if content else tmp_path / "bench.json")
    assert caught.value.path == str(tmp_path / "bench.json")
