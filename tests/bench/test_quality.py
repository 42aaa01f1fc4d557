"""Measures of answers: values by hand, and problems of single items."""

import math
import sys
from decimal import Decimal
from typing import Any

import pytest
import torch

from draftheads.bench.quality import Agreement, Gsm8k, Item, Measure, Perplexity, Rouge, Scores, final_number
from draftheads.errors import InvalidSettings, MissingDependency
from draftheads.utils.progress import NoProgress
from fake_progress import FakeProgress
from families import PROMPTS, tiny_model


def item(name: str, *answers: str, **fields: Any) -> Item:
    return Item(name, "any", tuple("?" for _ in answers), answers, **fields)


def scores(measure: Measure, *items: Item) -> list[Scores]:
    return measure(items, NoProgress())


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
    assert (found.measure, found.unit) == ("gsm8k", "%")


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


def test_rouge_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingDependency, match=r"rouge-score.*draftheads\[bench\]"):
        Rouge()


def test_agreement_by_tokens():
    plain = [item("a", "", "", answer_ids=((1, 2, 3), (4, 5))), item("b", "", answer_ids=((1, 2),))]
    ours = [
        item("a", "", "", answer_ids=((1, 2, 3), (4, 6))),
        item("b", "", answer_ids=((1, 2),)),
        item("c", "", answer_ids=((1,),)),
    ]
    same, prefix = scores(Agreement(plain), *ours)
    assert same.values == {"a": 0, "b": 100}
    assert prefix.values == {"a": 4, "b": 2}
    assert same.problems == prefix.problems == {"c": "plain decoding has no answer"}
    assert (same.unit, prefix.unit) == ("%", "tokens")


def test_the_common_prefix_ends_with_the_first_turn_that_differs():
    plain = [item("a", "", "", answer_ids=((1, 2, 3), (4, 5))), item("b", "", answer_ids=((1, 2, 3),))]
    ours = [item("a", "", "", answer_ids=((1, 9, 3), (4, 5))), item("b", "", answer_ids=((1, 2),))]
    same, prefix = scores(Agreement(plain), *ours)
    assert same.values == {"a": 0, "b": 0}
    assert prefix.values == {"a": 1, "b": 2}


def test_agreement_by_characters_and_without_all_turns():
    same, prefix = scores(Agreement([item("a", "abc"), item("b", "x", "y")]), item("a", "abd"), item("b", "x"))
    assert (same.values, prefix.values) == ({"a": 0}, {"a": 2})
    assert prefix.unit == "characters"
    assert same.problems == {"b": "plain decoding has another number of turns"}


def test_perplexity_is_by_token_over_all_items():
    """Each token's probability by a pass of its own; chunks and items of other lengths do not change it."""
    model = tiny_model("llama")
    answers = {"long": [i % 20 for i in range(3, 40)], "short": [5]}

    def losses(prompt: list[int], answer: list[int]) -> list[float]:
        text = [*prompt, *answer]
        places = range(len(prompt), len(text))
        return [-float(model.model(torch.tensor([text[:i]])).logits[0, -1].log_softmax(-1)[text[i]]) for i in places]

    expected = {name: losses(PROMPTS[0], answer) for name, answer in answers.items()}
    items = [
        item(name, "", prompt_ids=(tuple(PROMPTS[0]),), answer_ids=(tuple(answer),)) for name, answer in answers.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftheads.bench.quality._CHUNK", 8)
        [found] = scores(Perplexity(model), *items)
    for name, values in expected.items():
        assert found.values[name] == pytest.approx(sum(values) / len(values), rel=1e-4)
    together = [loss for values in expected.values() for loss in values]
    estimate = found.estimate()
    assert estimate is not None
    assert estimate.value == pytest.approx(math.exp(sum(together) / len(together)), rel=1e-4)
    assert abs(estimate.value - math.exp(sum(found.values.values()) / 2)) > 1  # not the mean of means
    assert estimate.low <= estimate.value <= estimate.high


def test_perplexity_of_several_turns_and_of_none():
    model = tiny_model("llama")
    prompt, ids = tuple(PROMPTS[0]), (7, 8, 9)
    [single] = scores(Perplexity(model), item("a", "", prompt_ids=(prompt,), answer_ids=(ids,)))
    [found] = scores(
        Perplexity(model),
        item("twice", "", "", prompt_ids=(prompt, prompt), answer_ids=(ids, ids)),
        item("no prompt", "", prompt_ids=((),), answer_ids=((7, 8, 9),)),
        item("after the first", "", prompt_ids=((7,),), answer_ids=((8, 9),)),
        item("empty", "", prompt_ids=(prompt,), answer_ids=((),)),
        item("one token", "", prompt_ids=((),), answer_ids=((7,),)),
        item("texts only", "a text"),
        item("too large", "", prompt_ids=(prompt,), answer_ids=((10**6,),)),
    )
    assert found.values["twice"] == pytest.approx(single.values["a"], rel=1e-5)
    assert found.weights["twice"] == 6
    assert found.values["no prompt"] == pytest.approx(found.values["after the first"], rel=1e-5)
    assert {found.problems[name] for name in ("empty", "one token", "texts only")} == {"no tokens"}
    assert found.problems["too large"].startswith("IndexError")


def test_the_mean_and_its_interval():
    found = Scores("any", {str(i): float(i) for i in range(100)}, {"x": "no value"})
    estimate = found.estimate()
    assert estimate is not None
    assert estimate.value == pytest.approx(49.5)
    assert 42 < estimate.low < 46.5
    assert 52.5 < estimate.high < 57  # 1.96 standard errors of 2.9
    assert Scores("any", {}, {"x": "no value"}).estimate() is None


class Odd(Measure):
    """Fails in every way."""

    name = "odd"

    def score(self, item: Item) -> Any:
        if item.question_id == "nan":
            return (math.nan,)
        if item.question_id == "ours":
            raise InvalidSettings("a sentence")
        return (1 / len(item.answers),)


@pytest.mark.parametrize("parallel", [1, 4])
def test_one_item_fails_alone(parallel: int):
    measure, progress = Odd(), FakeProgress()
    measure.parallel = parallel
    [found] = measure([item("none"), item("nan"), item("ours"), item("fine", "x")], progress)
    assert found.values == {"fine": 1}
    assert found.problems == {
        "none": "ZeroDivisionError: division by zero", "nan": "not finite: (nan,)", "ours": "a sentence"
    }  # fmt: skip
    assert progress.last[:2] == (4, 4)
    assert progress.stages == ["measuring odd"]
