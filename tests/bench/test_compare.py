"""The comparison of ways of decoding, with ways of known times and answers; re-scoring with a planted mistake."""

import math
import time
from collections.abc import Sequence

import pytest
import torch

from draftheads.bench.compare import Answer, Extent, Way, compare, engine_way, rows, stock_way
from draftheads.bench.margins import Scorer
from draftheads.bench.step_parts import step_parts
from draftheads.decode.engine import Engine
from draftheads.drafters.copying import Copying
from draftheads.models.fast import speed_up
from draftheads.models.model import TargetModel
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
    return Way(name, lambda *_: pytest.fail("asked again"), [Answer(*answer) for answer in answers])


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
        def decode(prompt: Sequence[int], _: int) -> Answer:
            asked.append((name, prompt[0]))
            return Answer((prompt[0],), 1, 1.0)

        return Way(name, decode)

    ways = [recorder(name) for name in "abc"]
    compare(ways, [[0], [1], [2], [3]], max_new_tokens=8, on_answer=lambda: told.append(len(asked)))
    warm_up = [(name, 0) for name in "aabbcc"]
    assert asked[:6] == warm_up
    del asked[:6]
    order = ["".join(name for name, _ in asked[start : start + 3]) for start in range(0, 12, 3)]
    assert order == ["abc", "bca", "cab", "abc"]
    assert [number for _, number in asked] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert told == list(range(7, 19))
    for each in ways:  # the warm-up's answer is not among them, and they are in the prompts' order
        assert [answer.token_ids for answer in each.answers] == [(0,), (1,), (2,), (3,)]


# --- the time box ---


class Machine:
    """Ways that move a clock on: so many seconds for the prompt, and for each token of an answer."""

    def __init__(self, *speeds: tuple[float, float]) -> None:
        self.now = 0.0
        self.ways = [self._way(f"way {number}", *speed) for number, speed in enumerate(speeds)]

    def clock(self) -> float:
        return self.now

    def _way(self, name: str, reading: float, per_token: float) -> Way:
        def decode(_: Sequence[int], max_new_tokens: int) -> Answer:
            seconds = reading + per_token * max_new_tokens
            self.now += seconds
            return Answer((7,) * max_new_tokens, max_new_tokens - 1, seconds)

        return Way(name, decode)

    def compare(self, seconds: float, *, num_prompts: int = 6, most: int = 128) -> Extent:
        prompts = [[number] for number in range(num_prompts)]
        extent = compare(self.ways, prompts, max_new_tokens=most, seconds=seconds, clock=self.clock)
        assert all(len(way.answers) == extent.num_prompts for way in self.ways), "every way answers every prompt"
        assert {len(a.token_ids) for way in self.ways for a in way.answers} == {extent.max_new_tokens}
        assert extent.seconds == pytest.approx(self.now)
        return extent


def test_a_fast_machine_answers_everything_and_is_done_early():
    extent = Machine((0.01, 0.01), (0.01, 0.005)).compare(120.0)
    assert (extent.num_prompts, extent.max_new_tokens) == (6, 128)
    assert extent.seconds < 15.0


@pytest.mark.parametrize("slowness", [1.0, 2.0, 3.0, 4.0, 5.0])
def test_a_slow_machine_answers_three_prompts_in_time(slowness: float):
    """As long as 32 tokens can be afforded: the answers get shorter before there are fewer than three."""
    ways = [(0.1, 0.075), (0.1, 0.04), (0.1, 0.025), (0.1, 0.03)]
    machine = Machine(*((reading * slowness, per_token * slowness) for reading, per_token in ways))
    extent = machine.compare(120.0)
    assert extent.num_prompts >= 3
    assert 32 <= extent.max_new_tokens <= 128
    assert extent.seconds <= 120.0
    assert extent.seconds > 60.0, "the time is used"
    if slowness == 1.0:
        assert extent.max_new_tokens == 128


def test_a_very_slow_machine_answers_fewer_prompts_but_at_least_one():
    two, one = Machine((0.0, 0.5)), Machine((0.0, 50.0))
    assert (two.compare(50.0).num_prompts, one.compare(50.0).num_prompts) == (2, 1)
    assert {len(answer.token_ids) for answer in (*two.ways[0].answers, *one.ways[0].answers)} == {32}
    assert two.now <= 50.0


def test_no_prompt_is_begun_that_would_not_fit():
    """Warming up takes 20 seconds and each answer of 32 tokens 32: three end after 116 seconds, four after 148."""
    assert Machine((0.0, 1.0)).compare(148.5, most=32).num_prompts == 4
    assert Machine((0.0, 1.0)).compare(147.5, most=32).num_prompts == 3


def test_without_a_box_nothing_is_cut():
    extent = Machine((10.0, 10.0)).compare(math.inf)
    assert (extent.num_prompts, extent.max_new_tokens) == (6, 128)
    assert Machine((0.0, 1.0)).compare(10.0, most=5).max_new_tokens == 5, "never more than asked for"


def test_texts_are_scored_once():
    asked: list[Ids] = []

    class Counting(FakeScorer):
        def worst_margin(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
            asked.append(tuple(token_ids))
            return super().worst_margin(prompt_ids, token_ids)

    rows([way("plain", PLAIN), way("hydra", PLAIN)], THREE, Counting())
    assert asked == [A, B, C]
    assert [row.worst_margin for row in rows([way("plain", PLAIN)], THREE, None)] == [None]


# --- real ways, tiny models ---


def test_real_ways_agree_on_a_tiny_model():
    stock = tiny_model("llama")
    plain = stock.twin()
    speed_up(plain.model, exact_bits=False)
    head = tiny_head("hydra", plain)
    engine = Engine(plain, Copying(head), shape=TREES["cartesian"])
    ways = [stock_way(stock), engine_way("plain", Engine(plain)), engine_way("hydra", engine)]
    start = time.perf_counter()
    extent = compare(ways, PROMPTS, max_new_tokens=20)
    seconds = time.perf_counter() - start
    assert (extent.num_prompts, extent.max_new_tokens) == (3, 20)
    table = rows(ways, PROMPTS, Scorer(stock))
    assert [row.method for row in table] == ["transformers", "plain", "hydra"]
    found = engine.generate(PROMPTS, max_new_tokens=20)
    assert table[2].num_copied == sum(result.num_copied for result in found) > 0
    accepted = sum(len(result.token_ids) - 1 - result.num_steps for result in found)
    assert accepted <= table[2].num_drafted <= accepted + len(PROMPTS)  # the last step may end inside a draft
    assert table[1].num_drafted == table[1].num_copied == 0
    assert all(row.identical and row.worst_margin < 1e-4 for row in table)
    assert table[0].tokens_per_step == table[1].tokens_per_step == 1.0
    assert table[2].tokens_per_step > 1.0
    assert 0 < sum(answer.seconds for each in ways for answer in each.answers) < seconds
    for each in ways:
        for answer in each.answers:
            assert len(answer.token_ids) == 20 or answer.token_ids[-1] in stock.eos_ids


def test_the_stock_way_stops_at_the_end_of_text():
    stock = tiny_model("llama")
    free = stock_way(stock).decode(PROMPTS[0], 20).token_ids
    place = next(place for place in range(3, 20) if free[place] not in free[:place])
    stock.model.generation_config.eos_token_id = [free[place]]
    again = TargetModel(stock.model, stock.tokenizer, "again")
    answer = stock_way(again).decode(PROMPTS[0], 20)
    assert answer.token_ids == free[: place + 1] == engine_way("plain", Engine(again)).decode(PROMPTS[0], 20).token_ids
    assert answer.num_steps == place


def test_the_parts_of_a_step_make_up_the_time_of_an_answer():
    model = tiny_model("llama")
    head = tiny_head("hydra", model)
    start = time.perf_counter()
    parts = step_parts(Engine(model, head), PROMPTS[0], max_new_tokens=20)
    milliseconds = 1e3 * (time.perf_counter() - start)
    assert list(parts) == ["drafting", "verification", "accept and rest"]
    assert all(0 < each < milliseconds for each in parts.values())
    assert sum(parts.values()) < milliseconds
    assert step_parts(Engine(model), PROMPTS[0], max_new_tokens=20)["drafting"] < parts["drafting"]
    assert set(step_parts(Engine(model), PROMPTS[0], max_new_tokens=1).values()) == {0.0}, "no step at all"


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
