"""Measures by references: values by hand, and problems of single items."""

from decimal import Decimal
from typing import Any

import pytest

from draftheads.bench.quality import Item, Measure, Scores
from draftheads.errors import InvalidSettings
from draftheads.utils.progress import NoProgress
from draftheads_papers.measures import Gsm8k, Rouge, final_number, measures_of


def item(name: str, *answers: str, **fields: Any) -> Item:
    return Item(name, "any", tuple("?" for _ in answers), answers, **fields)


def scores(measure: Measure, *items: Item) -> list[Scores]:
    return measure(items, NoProgress())


def test_a_judge_needs_an_address():
    with pytest.raises(InvalidSettings, match=r"the measure judge needs an endpoint: url under \[judge\]"):
        measures_of(["agreement", "judge"], {})
    agreement, gsm8k, judge = measures_of(["agreement", "gsm8k", "judge"], {"url": "http://127.0.0.1:1"})
    assert (agreement, type(gsm8k), judge.name) == ("agreement", Gsm8k, "judge")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Tom has 3 and buys 4. So 3 + 4 = 7.", "7"),
        ("#### 42", "42"),
        ("#### 42\nNext I check 5.", "42"),
        ("It was 3.\n#### 1,234", "1234"),
        ("The answer is 18. There were 20 before.", "18"),
        ("The ANSWER IS: **$1,234,567.50**.", "1234567.50"),
        ("the answer is 3? No: the answer is 4, not 5", "4"),
        ("12 is found, so the answer is clear", "12"),
        ("a loss of -$5", "-5"),
        ("it is $-5 today", "-5"),
        ("it is \N{MINUS SIGN}5", "-5"),
        ("10-3", "3"),
        ("(2)-3", "3"),
        ("about 50%.", "50"),
        ("exactly .5", "0.5"),
        ("exactly 0.125.", "0.125"),
        ("lists 1,2,3", "3"),
        ("1,2345", "2345"),
        ("x" * 9, None),
        ("####", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_numbers_and_not_texts():
    [found] = scores(
        Gsm8k(),
        item("same", "so 42.0", reference="42"),
        item("solution", "The answer is $1,000.", reference="2 * 500 = 1000\n#### 1000"),
        item("wrong", "so 41", reference="42"),
        item("silent", "no idea", reference="#### 42"),
        item("no reference", "42"),
        item("no answer", reference="42"),
        item("last counts", "42", "43", reference="43"),
        item("an integer", "43", reference=43),
    )
    assert found.values == {
        "same": 100, "solution": 100, "wrong": 0, "silent": 0, "last counts": 100, "an integer": 100
    }  # fmt: skip
    assert found.problems == {
        "no reference": "no number in the reference",
        "no answer": "IndexError: tuple index out of range",
    }
    assert found.measure == "gsm8k"


def test_rouge_by_hand():
    """The 4 words of the answer are among the 6 of the reference, 2 pairs of 3 among its 5, in order 4."""
    reference, answer = "the cat sat on the mat", "The cats sat on"
    [one, two, longest] = scores(
        Rouge(), item("a", answer, reference=reference), item("b", "x"), item("c", reference="")
    )
    assert [each.measure for each in (one, two, longest)] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert one.values == {"a": pytest.approx(100 * 2 * 4 / (4 + 6))}  # cats and cat have one stem
    assert two.values == {"a": pytest.approx(100 * 2 * 3 / (3 + 5))}
    assert longest.values == {"a": pytest.approx(80)}
    assert one.problems["b"] == "no reference text"
    assert "c" in two.problems
    [one, two, longest] = scores(Rouge(), item("a", "mat the on sat", reference=reference))
    assert one.values["a"] == pytest.approx(80)
    assert two.values["a"] == 0
    assert longest.values["a"] == pytest.approx(100 * 2 * 2 / (4 + 6))  # on … the stays in order
