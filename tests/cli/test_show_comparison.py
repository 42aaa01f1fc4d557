"""The tables and sentences of a comparison."""

import io
from typing import Any

import pytest
from rich.console import Console

from draftheads.bench.table import SPEED_COLUMNS, Row
from draftheads.cli import show_comparison
from draftheads.cli.bench import show
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepCosts
from draftheads.drafters.copying import Copying
from draftheads.speculation.tree import Tree
from families import by_hand, tiny_head, tiny_profile


def test_a_bar_shows_the_parts_in_proportion():
    parts = {"drafting": 3.0, "verification": 6.0, "accept and rest": 1.0}
    assert show_comparison.bar(parts, 10.0, cells=20).plain == "▒" * 6 + "█" * 12 + "░" * 2
    assert show_comparison.bar(parts, 20.0, cells=20).plain == "▒" * 3 + "█" * 6 + "░"
    assert show_comparison.bar(dict.fromkeys(parts, 0.0), 0.0).plain == ""
    coloured = Console(file=io.StringIO(), force_terminal=True, color_system="standard", _environ={})
    coloured.print(show_comparison.bar(parts, 10.0, cells=20))
    assert isinstance(coloured.file, io.StringIO)
    assert coloured.file.getvalue().count("\x1b[0m") == 3, "each part has its colour"


def costly(per_node: float) -> StepCosts:
    """A plain step takes 10 ms, each further node so many, a draft 1."""
    points = [("verify", 1, nodes, 10.0 + per_node * (nodes - 1)) for nodes in (1, 33)]
    return by_hand([*points, ("static", 1, 1, 1.0)])


def told(engine: Engine, per_node: float, *, copies: bool = False, **profile: Any) -> str:
    head = tiny_head("hydra", engine.model)
    drafter = Copying(head) if copies else head
    found = tiny_profile(Tree.chain(3), static_tokens=[1.0, 1.5, 1.75, 1.8], **profile)
    return show_comparison.tree_sentence("hydra", Engine(engine.model, drafter, profile=found, costs=costly(per_node)))


def test_a_sentence_explains_the_tree(engine: Engine):
    words = "With one request hydra drafts {}: a step then costs {} plain steps and gives about {} tokens."
    assert told(engine, 1.0, dynamic_tokens=[]) == words.format("a fixed tree of 3 nodes", 1.3, 1.8)
    assert told(engine, 1.0, dynamic_tokens=[1.0, 2.0]) == words.format("growing trees of 2 nodes", 1.2, 2.0)
    nothing = told(engine, 20.0, dynamic_tokens=[])
    assert nothing.startswith("With one request hydra drafts nothing: on this machine verifying draft tokens takes")
    assert "nothing, but copies from the text:" in told(engine, 20.0, copies=True, dynamic_tokens=[])
    assert "always drafts the same tree" in show_comparison.tree_sentence("hydra", engine)


def row_of(name: str, speedup: float = 1.5, **changes: Any) -> Row:
    numbers = {"tokens_per_second": 10.0, "tokens_per_step": 1.5, "num_drafted": 50, "num_copied": 7}
    return Row(name=name, speedup=speedup, **{**numbers, **changes})


def test_a_head_that_is_slower_than_plain_is_named():
    table = [row_of("transformers", 0.5), row_of("plain", 1.0), row_of("hydra", 1.2), row_of("medusa", 0.934)]
    options = {"precision": "fp32", "copy": True, "model": "./mine"}
    (sentence,) = show_comparison.slower_sentences(table, **options)  # type: ignore[arg-type]
    assert sentence == (
        "medusa is slower than plain decoding here (0.93 ×). Try --precision int8 or --no-copy, or measure its trees "
        "on your own prompts: draftheads tune ./mine medusa --prompts FILE"
    )
    (sentence,) = show_comparison.slower_sentences(table, precision="int8", copy=False, model="./mine")
    assert "here (0.93 ×). To change that, measure its trees" in sentence
    assert not show_comparison.slower_sentences(table[:3], precision="fp32", copy=True, model="./mine")
    assert "Of its 50 accepted draft tokens, 7 were copied" in show_comparison.copies_sentence(table[2])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setenv("COLUMNS", "80")
    return Console(highlight=False)


def test_the_widest_table_of_the_demo_fits_80_columns(capsys: pytest.CaptureFixture[str], narrow: Console):
    row = row_of(
        "transformers", 12.34, tokens_per_second=12345.67, tokens_per_step=12.345, speedup_quartiles=(10.12, 14.56),
        speedup_over_transformers=123.45, num_different=80, worst_margin=1.23e-05,
    )  # fmt: skip
    show_comparison.print_table([row], SPEED_COLUMNS, narrow)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[3].split() == [
        *("transformers", "12345.7", "12.35", "12.34", "(10.12-14.56)", "123.45", "no", "(80)", "1e-05")
    ]


def test_the_widest_parts_of_a_step_fit_80_columns(capsys: pytest.CaptureFixture[str], narrow: Console):
    parts = {"draft_milliseconds": 1234.5, "verify_milliseconds": 3.0}
    show_comparison.print_parts([row_of("plain", numbers=parts), row_of("h" * 90, numbers=parts)], narrow)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_the_tables_of_bench_fit_80_columns(capsys: pytest.CaptureFixture[str], narrow: Console):
    names = ["mlp-speculator", "hydra", "prompt-lookup", "x" * 40]
    trees = ["static, 24", "best 8 of 6x3x2, up to 23", "its own, up to 9", "growing, 24"]
    times = {"first_token_milliseconds": 1234.0, "step_milliseconds": 123.4, "p50_seconds": 10.25, "p99_seconds": 30.75}
    more = {"decode_speedup": 1.75, "overhead": 1.25, "numbers": times, "num_parameters": 12_300_000,
            "quality": {"agreement": 100.0, "common prefix": 50.0, "ROUGE-1": 30.25}}  # fmt: skip
    varied = ((0.0, 1), (0.7, 16), (1.0, 1), (1.0, 8))
    settings = [{"temperature": t, "acceptance": "typical", "batch_size": size} for t, size in varied]
    rows = [
        row_of(name, tree=tree, settings=one, part=part, **more)
        for part in ("all", "retrieval", "question_answering", "turn 1", "turn 2")
        for name, tree, one in zip(names, trees, settings, strict=True)
    ]
    show(narrow, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names[:-1]:
        found = [line for line in lines if line.startswith((f"{name} ", f"{name},")) and "fastest" not in line]
        assert len(found) >= 5, "speed, times, quality, and by part speed-up and tokens per step"
    assert "…" not in "".join(lines)
    assert sum("x" * 12 in line for line in lines) >= len(found), "long names are folded"


def test_answers_that_differ_are_named(capsys: pytest.CaptureFixture[str], narrow: Console):
    show(narrow, [row_of("hydra", num_answers=3, num_different=2)])
    words = " ".join(capsys.readouterr().out.split())
    assert "answers that differ from plain decoding: hydra 2" in words
    assert "hydra is fastest: 1.50 ± 0.00 × plain decoding (with the same text in 1 of 3 answers)." in words
    assert "Texts can differ where rounding decides" in words


def test_rows_are_told_apart_in_every_part_of_a_table(capsys: pytest.CaptureFixture[str], narrow: Console):
    """Also where a head has two kinds of trees: each part that is continued below has the names of both."""
    times = {"first_token_milliseconds": 12.0, "step_milliseconds": 123.4, "p50_seconds": 10.25, "p99_seconds": 30.75}
    more = {"decode_speedup": 1.75, "overhead": 1.25, "numbers": times, "num_different": 1}
    rows = [
        row_of("eagle", tree=words, settings={"tree": tree}, part=part, **more)
        for part in ("all", "retrieval", "maths")
        for tree, words in (("best", "growing, 24"), ("defaults", "defaults, with copies"))
    ]
    show(narrow, [row_of("plain", 1.0), *rows])
    lines = capsys.readouterr().out.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("plain ")]
    assert len(starts) >= 4, "parts of tables"
    for start in starts:
        names = [line for line in lines[start : start + 8] if line.startswith("eagle")]
        assert [line.split("  ")[0].strip() for line in names[:2]] == ["eagle, best", "eagle, defaults"]
    assert "eagle, best 1, eagle, defaults 1" in " ".join(" ".join(lines).split())
