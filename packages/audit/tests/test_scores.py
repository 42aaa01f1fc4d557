"""Whether texts are equal, and how far their tokens are apart: by the model, or by a server's log-probabilities."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from audit_world import NEW_TOKENS
from byte_tokenizers import TOKENIZERS
from draftheads.decode.engine import Engine
from draftheads.models.chat_template import TokenBytes
from draftheads.models.model import TargetModel
from draftheads.settings import Grammar
from draftheads_audit.compare import Score, Scorer, are_equal, compare, gap_by_logprobs
from draftheads_audit.model import ModelReference
from draftheads_audit.report import Pass, SampledSide, SeededRow
from draftheads_audit.run import smaller_gap
from draftheads_audit.server import (
    Answer,
    Place,
    places_of,
)
from families import tiny_model
from structured_world import json_model


@pytest.mark.parametrize(("num_tokens", "is_fine"), [(NEW_TOKENS, True), (NEW_TOKENS - 1, True), (9, False)])
def test_a_text_that_was_cut_is_compared_as_far_as_it_goes(num_tokens: int, is_fine: bool):
    short, long = Answer("abcdefghi", is_cut=True, num_tokens=num_tokens), Answer("abcdefghijk", is_cut=True)
    assert are_equal(short, long, max_tokens=NEW_TOKENS) == is_fine
    assert are_equal(long, short, max_tokens=NEW_TOKENS) == is_fine
    half = replace(short, text="abcdefghi\ufffd")
    assert are_equal(half, long, max_tokens=NEW_TOKENS) == is_fine
    assert not are_equal(replace(short, text="abcdefghx"), long, max_tokens=NEW_TOKENS)
    assert not are_equal(replace(short, is_cut=False), long, max_tokens=NEW_TOKENS)


def test_gaps_by_log_probabilities():
    places = [
        Place(b"the", -0.1, {b"the": -0.1, b"a": -2.0}),
        Place(b" cat", -0.5, {b" cat": -0.5, b" cats": -0.6, b" dog": -0.75}),
        Place(b" sat", -0.2, {b" sat": -0.2, b" is": -1.5}),
    ]
    reference = "the cat sat"
    assert gap_by_logprobs(places, "the dog", reference).gap == pytest.approx(0.25)
    assert gap_by_logprobs(places, "a dog", reference).gap == pytest.approx(1.9)
    assert gap_by_logprobs(places, "the cat is", reference).gap == pytest.approx(1.3)
    # it was " cats", and not an unlikely "s" after " cat"
    assert gap_by_logprobs(places, "the cats", reference).gap == pytest.approx(0.1)
    # a shorter token of the answer, which the reference also begins with
    longer = [Place(b'"]', -1.4, {b'"]': -1.4, b'"': -1.7, b",": -2.0})]
    assert gap_by_logprobs(longer, '" ,', '"]').gap == pytest.approx(0.3)
    penalised = [*places[:2], replace(places[2], logprob=-1.6, tops={b" sat": -1.6, b" is": -1.5})]
    assert "a penalty" in gap_by_logprobs(penalised, "the cat is", reference, is_greedy=True).reason
    assert gap_by_logprobs(penalised, "the cat is", reference).gap == pytest.approx(-0.1)
    least = gap_by_logprobs(places, "the cat ran", reference)
    assert (least.gap, least.is_least) == (pytest.approx(1.3), True)
    assert gap_by_logprobs(places, "the cat", reference).gap is None
    assert gap_by_logprobs(places, "the cat sat down", reference).gap is None
    assert "of another text" in gap_by_logprobs(places, "the dog", "the bird").reason
    tails = [Answer("the cat ran", is_cut=True), Answer(reference, is_cut=True)]

    def by_places(index: int, answer: Answer, other: Answer) -> Score:
        return gap_by_logprobs(places, answer.text, other.text)

    kinds = [compare(0, *tails, by_places, tolerance=t, max_tokens=9).kind for t in (0.25, 2.0)]
    assert kinds == ["wrong", "unscored"], "at least 1.3: more than 0.25, but perhaps less than 2"


@pytest.mark.parametrize(
    ("of_model", "of_baseline", "found", "num_asked"),
    [
        (0.1, 3.0, 0.1, 0),
        (3.0, 0.1, 0.1, 1),
        (3.0, 2.0, 2.0, 1),
        (-3.0, 4.0, -3.0, 1),
        (None, 2.0, 2.0, 1),
        (3.0, None, 3.0, 1),
    ],
)
def test_the_smaller_gap_of_model_and_baseline_counts(
    of_model: float | None, of_baseline: float | None, found: float, num_asked: int
):
    """The baseline is asked only where the model finds no near-tie."""
    asked: list[int] = []

    def fixed(gap: float | None) -> Scorer:
        def score(index: int, answer: Answer, reference: Answer) -> Score:
            asked.append(index)
            return Score(gap)

        return score

    answers = Answer("a", is_cut=True), Answer("b", is_cut=True)
    score = smaller_gap(fixed(of_model), fixed(of_baseline), 0.25, 0, *answers)
    assert (score.gap, len(asked)) == (found, 1 + num_asked)


# --- tokens of texts ---


class Spelling:
    """A model whose next tokens are given by the text so far; its tokenizer takes the longest token."""

    tokens = ("<eos>", "a", "c", "t", "s", " ", "o", "n", "cat", "cats", "on")

    def __init__(self, odds: dict[str, dict[str, float]]) -> None:
        self.odds, self.model, self.tokenizer, self.eos_ids = odds, self, self, frozenset({0})
        self.max_positions = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        ids = []
        while text:
            token = max((token for token in self.tokens[1:] if text.startswith(token)), key=len)
            ids.append(self.tokens.index(token))
            text = text[len(token) :]
        return {"input_ids": ids}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.tokens[token] for token in ids)

    def encode(self, _: object) -> list[int]:
        return [5]  # a space

    def next_scores(self, context: list[int]) -> torch.Tensor:
        scores = torch.full((len(self.tokens),), -20.0)
        for token, score in self.odds[self.decode(context[1:])].items():
            scores[self.tokens.index(token)] = score
        return scores


@pytest.mark.parametrize(
    ("odds", "gap"),
    [
        ({"": {"cat": -0.5, "cats": -0.6}, "cat": {" ": -0.1}}, 0.1),  # one token beside the other
        ({"": {"cat": -0.5, "cats": -9.0}, "cat": {" ": -0.7, "s": -0.8}}, 0.1),  # parted after a common one
        ({"": {"cat": -0.1, "cats": -3.0}, "cat": {" ": -0.1, "s": -4.0}}, 2.9),  # unlikely in both ways
        (
            {"": {"c": -0.1}, "c": {"a": -0.1}, "ca": {"t": -0.1}, "cat": {" ": -0.6, "s": -0.8}},
            0.2,
        ),  # letter by letter
        ({"": {"cats": -0.1, "cat": -4.0}}, -3.9),  # the reference is the less likely one
    ],
)
def test_a_text_can_be_written_with_several_sequences_of_tokens(odds: dict[str, dict[str, float]], gap: float):
    spelling: Any = Spelling(odds)
    model = ModelReference(spelling, ["x"])
    model.next_scores = spelling.next_scores  # type: ignore[method-assign]
    score = model.score(0, Answer("cats on", is_cut=True), Answer("cat on", is_cut=True))
    assert score.gap == pytest.approx(gap)


def test_an_end_is_a_token_too():
    spelling: Any = Spelling({"": {"cat": 0.0}, "cat": {"<eos>": -1.0, "s": -1.25}})
    model = ModelReference(spelling, ["x"])
    model.next_scores = spelling.next_scores  # type: ignore[method-assign]
    ended, longer = Answer("cat", is_cut=False), Answer("cats", is_cut=True)
    assert model.score(0, longer, ended).gap == pytest.approx(0.25)
    assert model.score(0, ended, longer).gap == pytest.approx(-0.25)


@pytest.fixture(scope="module")
def spelt() -> tuple[ModelReference, Answer]:
    """A random model with a tokenizer of pieces of words, and what it says: letters in tokens that no one would use."""
    engine = Engine(json_model())
    model = ModelReference(engine, [[{"role": "user", "content": "yes"}]])
    (result,) = engine.generate([model.prompt_ids[0]], grammar=Grammar.regex("[a-z, ]{80}"), max_new_tokens=40)
    assert model.usual_ids(result.text) != list(result.token_ids)
    return model, model._answer(result)


def test_a_reference_with_known_tokens_is_scored_by_them(spelt: tuple[ModelReference, Answer]):
    model, reference = spelt
    assert reference.token_ids is not None
    decode, score_of = model.engine.model.tokenizer.decode, partial(model.score, by_text=False)
    for place in range(2, len(reference.token_ids), 4):
        scores = model.next_scores([*model.prompt_ids[0], *reference.token_ids[:place]])
        before, right = decode(reference.token_ids[:place]), decode([reference.token_ids[place]])
        letters = [token for token in range(256) if decode([token]) in "abcdefghijklmnopqrstuvwxyz" and decode([token])]
        wrong = max((token for token in letters if decode([token]) != right[0]), key=lambda token: float(scores[token]))
        answer = Answer(f"{before}{decode([wrong])}~~~", is_cut=True)
        gap = float(scores[reference.token_ids[place]] - scores[wrong])
        score = score_of(0, answer, reference)
        if wrong in scores.topk(64).indices:
            assert score.gap == pytest.approx(gap, abs=1e-4)
        else:
            assert score.is_least
            assert score.gap is not None
            assert 0 < score.gap < gap
    unknown = score_of(0, Answer("abc", is_cut=True), replace(reference, token_ids=None))
    assert "under a schema" in unknown.reason


def test_the_end_of_an_answer_beside_known_tokens(spelt: tuple[ModelReference, Answer]):
    model, reference = spelt
    assert reference.token_ids is not None
    decode = model.engine.model.tokenizer.decode
    ended = Answer(decode(reference.token_ids[:7]), is_cut=False)
    scores = model.next_scores([*model.prompt_ids[0], *reference.token_ids[:7]])
    assert model.score(0, ended, reference).gap == pytest.approx(
        float(scores[reference.token_ids[7]] - scores[0]), abs=1e-4
    )
    first = replace(reference, token_ids=reference.token_ids[:7], text=ended.text, is_cut=False)
    longer = Answer(f"{ended.text}{decode([reference.token_ids[7]])}~", is_cut=True)
    gap = float(scores[0] - scores[reference.token_ids[7]])
    assert model.score(0, longer, first).gap == pytest.approx(gap, abs=1e-4)


def test_the_end_is_no_token_of_the_text():
    spelling: Any = Spelling({})
    assert ModelReference(spelling, ["x"]).token_ids(Answer("cats", is_cut=False, token_ids=(9, 0))) == [9]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str):
    tokenizer = TOKENIZERS[kind]
    known = TokenBytes(tokenizer)
    for text in (" the cat", " Привет", "日本", " cat 🙂"):
        ids = tokenizer(text)["input_ids"]
        assert b"".join(map(known.of, ids)).lstrip() == text.strip().encode()
    assert known.of(tokenizer.eos_token_id) == b"<eos>"


@pytest.mark.parametrize("given", [10**18, True, "abc", [256], [0.5], {"a": 1}])
def test_bytes_of_a_token_are_a_list_of_them(given: object):
    """A number would be so many zeros."""
    content = [{"token": "a", "logprob": -1.0, "top_logprobs": [], "bytes": given}]
    with pytest.raises((TypeError, ValueError)):
        places_of({"content": content})


def test_answers_are_read_under_the_generation_configuration():
    """The most likely tokens are those of the model with its rules: own answers have no margin."""
    model = tiny_model("llama")
    rules = {"no_repeat_ngram_size": 2, "sequence_bias": [[[7, 8], 4.0]], "repetition_penalty": 1.2, "min_length": 9}
    model.model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, **rules)
    engine = Engine(TargetModel(model.model, model.tokenizer, model.model_id))
    reference = ModelReference(engine, ["abc", "de"], max_new_tokens=16, is_chat=False)
    for index, answer in enumerate(reference.answers(None, lambda: None)):
        assert max(reference.margins(index, answer)) < 1e-4
        assert answer.token_ids is not None
        context = [*reference.prompt_ids[index], *answer.token_ids[:4]]
        assert int(reference.next_scores(context).argmax()) == answer.token_ids[4]


def test_few_tokens_give_no_verdict_on_a_distribution():
    side = SampledSide(8, 8, 0, Pass(None, None), num_tokens=199, excess=500.0, variance=1.0)
    assert SeededRow("seeded", side).deviations is None
    assert not SeededRow("seeded", side).is_off
    many = replace(side, num_tokens=200)
    assert SeededRow("seeded", many).is_off
    assert not SeededRow("seeded", many, many).is_off
    assert SeededRow("seeded", many, side).deviations is None
