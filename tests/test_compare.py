"""The comparison of ways of decoding, with ways of known times and answers; re-scoring with a planted mistake."""

import math
import time
from collections.abc import Sequence

import pytest
import torch

from draftheads.bench.compare import Answer, Way, compare, engine_way, rows, stock_way
from draftheads.bench.margins import Scorer
from draftheads.decode.engine import Engine
from draftheads.target.fast import speed_up
from draftheads.target.model import TargetModel
from families import PROMPTS, TREES, tiny_head, tiny_model

Ids = tuple[int, ...]


class FakeScorer(Scorer):
    """The margin of an answer is its first token in hundredths."""

    def __init__(self) -> None:
        pass

    def worst_margin(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        return token_ids[0] / 100


def way(name: str, answers: list[tuple[Ids, int, float]]) -> Way:
    """A way that has already answered: token ids, steps, seconds."""
    return Way(name, lambda _: pytest.fail("asked again"), [Answer(*answer) for answer in answers])


A, B, C = (1, 2, 3, 4, 5), (6, 7, 8), (9, 9, 9, 9, 9, 9, 9, 9)
THREE = [[1], [2], [3]]
PLAIN = [(A, 4, 1.0), (B, 2, 1.0), (C, 7, 2.0)]  # 16 tokens in 4 s


def test_a_row_says_how_fast_and_how_alike():
    fast = way("medusa", [(A, 2, 0.25), (B, 1, 0.5), ((9, 9, 9, 9, 9, 9, 9, 1), 4, 1.25)])  # 16 tokens in 2 s
    stock = way("transformers", [(A, 4, 2.0), (B, 2, 2.0), (C, 7, 1.0)])  # 16 tokens in 5 s
    table = rows([stock, way("plain", PLAIN), fast], THREE, FakeScorer())
    assert [row.method for row in table] == ["transformers", "plain", "medusa"]
    first, plain, medusa = table
    assert [row.tokens_per_second for row in table] == [3.2, 4.0, 8.0]
    assert [row.speedup for row in table] == [0.8, 1.0, 2.0]
    assert [row.speedup_over_transformers for row in table] == [1.0, 1.25, 2.5]
    assert [row.tokens_per_step for row in table] == [1.0, 1.0, 13 / 7]
    assert [(row.identical, row.num_different) for row in table] == [(True, 0), (True, 0), (False, 1)]
    assert [row.worst_margin for row in table] == [0.09] * 3
    # prompt by prompt medusa is 4, 2 and 1.6 times as fast as plain: quartiles in the middle of neighbours
    assert medusa.speedup_quartiles == pytest.approx((1.8, 3.0))
    assert plain.speedup_quartiles == (1.0, 1.0)
    assert first.speedup_quartiles == pytest.approx((0.5, 1.25))


def test_speed_goes_by_tokens_not_by_answers():
    """A way that stops early is not faster for that."""
    short = way("short", [(A[:1], 0, 0.2), (B[:1], 0, 1 / 3), (C[:1], 0, 0.25)])
    row = rows([way("plain", PLAIN), short], THREE, FakeScorer())[1]
    assert row.speedup_quartiles == pytest.approx((1.0, 1.0))
    assert row.tokens_per_second == pytest.approx(3 / (0.2 + 1 / 3 + 0.25))
    assert row.tokens_per_step == 1.0
    assert (row.identical, row.num_different) == (False, 3)


def test_quartiles_never_leave_the_data():
    """Two prompts, and one."""
    plain, fast = way("plain", PLAIN[:2]), way("fast", [(A, 2, 0.5), (B, 1, 0.25)])
    assert rows([plain, fast], THREE[:2], FakeScorer())[1].speedup_quartiles == pytest.approx((2.5, 3.5))
    plain, fast = way("plain", PLAIN[:1]), way("fast", [(A, 2, 0.5)])
    assert rows([plain, fast], THREE[:1], FakeScorer())[1].speedup_quartiles == (2.0, 2.0)


def test_references_say_what_to_be_identical_to():
    """With exact bits, heads are compared with plain decoding of the same kernels; the others still with plain."""
    other: list[Ids] = [A, B, (9, 9, 9)]
    exact = way("hydra", [(ids, 1, 1.0) for ids in other])
    near = way("near", [(ids, 1, 1.0) for ids in other])
    _, hydra, not_named = rows([way("plain", PLAIN), exact, near], THREE, FakeScorer(), references={"hydra": other})
    assert (hydra.identical, hydra.num_different) == (True, 0)
    assert (not_named.identical, not_named.num_different) == (False, 1)


def test_without_transformers_there_is_no_ratio_to_it():
    assert rows([way("plain", PLAIN)], THREE, FakeScorer())[0].speedup_over_transformers is None


def test_who_goes_first_changes_from_prompt_to_prompt():
    asked: list[tuple[str, int]] = []
    told: list[int] = []

    def recorder(name: str) -> Way:
        def decode(prompt: Sequence[int]) -> Answer:
            asked.append((name, prompt[0]))
            return Answer((prompt[0],), 1, 1.0)

        return Way(name, decode)

    ways = [recorder(name) for name in "abc"]
    compare(ways, [[0], [1], [2], [3]], on_answer=lambda: told.append(len(asked)))
    assert asked[:3] == [("a", 0), ("b", 0), ("c", 0)], "a warm-up comes first"
    order = ["".join(name for name, _ in asked[start : start + 3]) for start in range(3, 15, 3)]
    assert order == ["abc", "bca", "cab", "abc"]
    assert [number for _, number in asked[3:]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert told == list(range(4, 16))
    for each in ways:  # the warm-up's answer is not among them, and they are in the prompts' order
        assert [answer.token_ids for answer in each.answers] == [(0,), (1,), (2,), (3,)]


# --- real ways, tiny models ---


def test_real_ways_agree_on_a_tiny_model():
    stock = tiny_model("llama")
    plain = stock.twin()
    speed_up(plain.model, exact_bits=False)
    head = tiny_head("hydra", plain)
    head.shape = TREES["cartesian"]
    ways = [stock_way(stock, 20), engine_way("plain", Engine(plain), 20), engine_way("hydra", Engine(plain, head), 20)]
    start = time.perf_counter()
    compare(ways, PROMPTS)
    seconds = time.perf_counter() - start
    table = rows(ways, PROMPTS, Scorer(stock))
    assert [row.method for row in table] == ["transformers", "plain", "hydra"]
    assert all(row.identical and row.worst_margin < 1e-4 for row in table)
    assert table[0].tokens_per_step == table[1].tokens_per_step == 1.0
    assert table[2].tokens_per_step > 1.0
    assert 0 < sum(answer.seconds for each in ways for answer in each.answers) < seconds
    for each in ways:
        for answer in each.answers:
            assert len(answer.token_ids) == 20 or answer.token_ids[-1] in stock.eos_ids


def test_the_stock_way_stops_at_the_end_of_text():
    stock = tiny_model("llama")
    free = stock_way(stock, 20).decode(PROMPTS[0]).token_ids
    place = next(place for place in range(3, 20) if free[place] not in free[:place])
    stock.model.generation_config.eos_token_id = [free[place]]
    again = TargetModel(stock.model, stock.tokenizer, "again")
    answer = stock_way(again, 20).decode(PROMPTS[0])
    assert answer.token_ids == free[: place + 1] == engine_way("plain", Engine(again), 20).decode(PROMPTS[0]).token_ids
    assert answer.num_steps == place


# --- margins ---


def logits_of(model: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Every place by a pass of its own."""
    return torch.stack([model.model(torch.tensor([list(text[: i + 1])])).logits[0, -1] for i in range(len(text))])


def test_a_greedy_text_has_no_margin():
    model = tiny_model("llama")
    scorer = Scorer(model)
    for prompt in PROMPTS:
        answer = Engine(model).generate([prompt], max_new_tokens=20, ignore_eos=True)[0].token_ids
        assert scorer.worst_margin(prompt, answer) < 1e-5
    assert scorer.worst_margin(PROMPTS[0], ()) == 0.0


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_planted_token_shows_its_exact_gap(place: int):
    """Also at the first and at the last place; what follows is chosen greedily, so only the plant counts."""
    model = tiny_model("gemma2")
    prompt = PROMPTS[0]
    answer = list(Engine(model).generate([prompt], max_new_tokens=20, ignore_eos=True)[0].token_ids[:place])
    scores = logits_of(model, [*prompt, *answer])[-1]
    planted = int(scores.topk(3).indices[2])
    gap = float(scores.max() - scores[planted])
    assert gap > 0.01
    rest = Engine(model).generate([[*prompt, *answer, planted]], max_new_tokens=20, ignore_eos=True)[0].token_ids
    found = Scorer(model).worst_margin(prompt, [*answer, planted, *rest][:20])
    assert found == pytest.approx(gap, abs=1e-4)


def test_texts_in_bf16_are_scored_in_fp32():
    """The scorer is a model of its own in fp32, with the rounded weights: not bf16's sums, and not the stock model."""
    stock = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    scorer = Scorer(stock)
    assert scorer.model is not stock.model
    assert {parameter.dtype for parameter in scorer.model.parameters()} == {torch.float32}
    assert not scorer.model.training
    assert {parameter.dtype for parameter in stock.model.parameters()} == {torch.bfloat16}
    for name, parameter in scorer.model.named_parameters():
        assert torch.equal(parameter, stock.model.get_parameter(name).float())
    exact = tiny_model("llama", tie_word_embeddings=True)
    exact.model.load_state_dict({name: value.float() for name, value in stock.model.state_dict().items()})
    prompt, text = PROMPTS[0], [4, 9, 2, 11]
    scores = logits_of(exact, [*prompt, *text])[len(prompt) - 1 : -1]
    gap = max(float(row.max() - row[token]) for row, token in zip(scores, text, strict=True))
    assert scorer.worst_margin(prompt, text) == pytest.approx(gap, abs=1e-5)
    assert math.isfinite(gap)
    assert Scorer(exact).model is exact.model, "fp32 needs no second copy"
