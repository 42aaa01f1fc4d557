"""Measures of answers: values by hand, and problems of single items."""

import math
from typing import Any

import pytest
import torch

from draftheads.bench.quality import Agreement, Item, Measure, Perplexity, Scores
from draftheads.errors import InvalidSettings
from draftheads.utils.progress import NoProgress
from fake_progress import FakeProgress
from families import PROMPTS, tiny_model


def item(name: str, *answers: str, **fields: Any) -> Item:
    return Item(name, "any", tuple("?" for _ in answers), answers, **fields)


def scores(measure: Measure, *items: Item) -> list[Scores]:
    return measure(items, NoProgress())


def test_agreement_by_tokens_or_by_characters():
    """The common prefix ends with the first turn that differs."""

    def items(**answers: tuple[tuple[int, ...], ...]) -> list[Item]:
        return [item(name, *("" for _ in ids), answer_ids=ids) for name, ids in answers.items()]

    plain = items(a=((1, 2, 3), (4, 5)), b=((1, 2),), c=((1, 2, 3), (4, 5)), d=((1, 2, 3),))
    ours = items(a=((1, 2, 3), (4, 6)), b=((1, 2),), c=((1, 9, 3), (4, 5)), d=((1, 2),), e=((1,),))
    same, prefix = scores(Agreement(plain), *ours)
    assert same.values == {"a": 0, "b": 100, "c": 0, "d": 0}
    assert prefix.values == {"a": 4, "b": 2, "c": 1, "d": 2}
    assert same.problems == prefix.problems == {"e": "plain decoding has no answer"}

    same, prefix = scores(Agreement([item("a", "abc"), item("b", "x", "y")]), item("a", "abd"), item("b", "x"))
    assert (same.values, prefix.values) == ({"a": 0}, {"a": 2})
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
