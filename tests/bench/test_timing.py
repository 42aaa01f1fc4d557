"""Ways of decoding answer in turn, within a time box, and are timed."""

import math
from typing import Any

import pytest

from draftheads.bench import timing
from draftheads.bench.timing import (
    Answers,
    Group,
    StepClock,
    Way,
    drafting_cost,
    engine_way,
    over_plain,
    stock_way,
    take_turns,
)
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import STEP_TOKENS, StepTimer, typical_tree
from draftheads.drafters.lookahead import Lookahead, LookaheadSession
from draftheads.drafters.mixed import Mixed
from draftheads.heads.base import HeadSession
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.speculation.drafter import NoDraft
from draftheads.speculation.tree import Tree
from families import PROMPTS, tiny_head, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


# --- turns ---


def recorder(name: str, asked: list[tuple[str, int, int]]) -> Way:
    """A way that notes its name, the prompt and the number of tokens."""

    def decode(group: Group, max_new_tokens: int) -> list[Answers]:
        asked.append((name, group[0][0], max_new_tokens))
        return [Answers(token_ids=((group[0][0],),), num_steps=(1,), seconds=1.0)]

    return decode


def test_every_way_is_warmed_up_and_goes_first_in_turn():
    asked: list[tuple[str, int, int]] = []
    groups = [[[number]] for number in range(6)]
    ways = {name: recorder(name, asked) for name in "abc"}
    answers = take_turns(ways, groups, max_new_tokens=8)
    assert asked[:3] == [("a", 0, 4), ("b", 0, 4), ("c", 0, 4)]
    order = ["".join(name for name, *_ in asked[start : start + 3]) for start in range(3, 21, 3)]
    assert order == ["abc", "cba", "bca", "acb", "cab", "bac"]
    assert [number for _, number, _ in asked[3:]] == [number for number in range(6) for _ in "abc"]
    for name in "abc":
        assert [one.token_ids for one in answers[name]] == [((number,),) for number in range(6)]


@pytest.mark.parametrize(("number", "few"), [(4, [0, 1, 2, 3]), (12, [0, 2, 4, 6, 8, 10])])
def test_engines_are_compared_with_plain_decoding_in_turns_on_a_few_prompts(
    model: TargetModel, monkeypatch: pytest.MonkeyPatch, number: int, few: list[int]
):
    asked: list[tuple[str, int]] = []
    engines = {name: Engine(model, tiny_head("medusa", model)) for name in ("one", "two")}
    names = {id(engine): name for name, engine in engines.items()}

    def way(engine: Engine) -> Way:
        name = names.get(id(engine), "plain")
        assert (name == "plain") == isinstance(engine.drafter, NoDraft)

        def decode(group: Group, max_new_tokens: int) -> list[Answers]:
            if max_new_tokens == 64:
                asked.append((name, group[0][0]))
            return [Answers(token_ids=((1, 2, 3),), num_steps=(2,), seconds=1.0 if name == "plain" else 0.5)]

        return decode

    monkeypatch.setattr(timing, "engine_way", way)
    assert over_plain(engines, [[prompt] for prompt in range(number)]) == {"one": (2.0, 0.0), "two": (2.0, 0.0)}
    assert sorted(asked) == [(name, prompt) for name in ("one", "plain", "two") for prompt in few]
    assert [name for name, _ in asked[:6]] == ["plain", "one", "two", "two", "one", "plain"]


# --- the time box ---


class Machine:
    """Ways that move a clock on: so many seconds for the prompt, and for each token of an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *speeds: tuple[float, float]) -> None:
        self.now = 0.0
        self.ways = {f"way {number}": self._way(*speed) for number, speed in enumerate(speeds)}
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def _way(self, reading: float, per_token: float) -> Way:
        def decode(_: Group, max_new_tokens: int) -> list[Answers]:
            seconds = reading + per_token * max_new_tokens
            self.now += seconds
            return [Answers(token_ids=((7,) * max_new_tokens,), num_steps=(max_new_tokens - 1,), seconds=seconds)]

        return decode

    def run(self, seconds: float, *, most: int = 128) -> tuple[int, int]:
        """How many groups were answered, and the tokens of each answer."""
        groups = [[[number]] for number in range(6)]
        answers = take_turns(self.ways, groups, max_new_tokens=most, max_seconds=seconds)
        (num_groups,) = {len(each) for each in answers.values()}
        (num_tokens,) = {one.num_tokens for each in answers.values() for one in each}
        return num_groups, num_tokens


@pytest.mark.parametrize("slowness", [1.0, 5.0])
def test_a_slow_machine_gives_shorter_answers_to_three_prompts(slowness: float, monkeypatch: pytest.MonkeyPatch):
    ways = [(0.1, 0.075), (0.1, 0.04), (0.1, 0.025), (0.1, 0.03)]
    machine = Machine(monkeypatch, *((reading * slowness, per_token * slowness) for reading, per_token in ways))
    num_groups, num_tokens = machine.run(120.0)
    assert num_groups >= 3
    assert num_tokens == 128 if slowness == 1.0 else 32 <= num_tokens < 128
    assert 60.0 < machine.now <= 120.0


@pytest.mark.parametrize(
    ("speeds", "seconds", "most", "expected"),
    [
        ([(0.01, 0.01), (0.01, 0.005)], 120.0, 128, (6, 128)),  # a fast machine answers everything
        ([(10.0, 10.0)], math.inf, 128, (6, 128)),  # and so does any machine without a time box
        ([(0.0, 0.5)], 50.0, 128, (2, 32)),  # a very slow one answers fewer prompts …
        ([(0.0, 50.0)], 50.0, 128, (1, 32)),  # … but at least one
        ([(0.0, 1.0)], 10.0, 5, (1, 5)),  # answers never get longer
        # warming up takes 20 seconds and each answer 32: three end after 116 seconds, and four after 148
        ([(0.0, 1.0)], 148.5, 32, (4, 32)),
        ([(0.0, 1.0)], 147.5, 32, (3, 32)),
    ],
)
def test_prompts_and_tokens_fit_the_time_box(
    speeds: Any, seconds: float, most: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    assert Machine(monkeypatch, *speeds).run(seconds, most=most) == expected


# --- ways ---


@pytest.mark.parametrize("group", [PROMPTS[:1], PROMPTS])
def test_an_engine_s_answers_are_its_own_and_are_counted(model: TargetModel, group: list[list[int]]):
    engine = Engine(model, Mixed(tiny_head("hydra", model), probs=[[0.9, 0.8, 0.7, 0.6]]), max_batch_size=2)
    results = engine.generate(group, max_new_tokens=20)
    (found,) = engine_way(engine)(group, 20)
    assert found.token_ids == tuple(result.token_ids for result in results)
    assert found.num_steps == tuple(result.num_steps for result in results)
    assert found.num_copied == sum(result.num_copied for result in results) > 0
    accepted = sum(len(result.token_ids) - 1 - result.num_steps for result in results)
    assert accepted <= found.num_drafted <= accepted + len(group)  # the last step may end inside a draft


def test_transformers_way_stops_at_the_end_of_text():
    stock = tiny_model("llama")
    free = stock_way(stock)(PROMPTS[:1], 20)[0].token_ids[0]
    place = next(place for place in range(3, 20) if free[place] not in free[:place])
    stock.model.generation_config.eos_token_id = [free[place]]
    again = TargetModel(stock.model, stock.tokenizer, "again")
    (found,) = stock_way(again)(PROMPTS[:1], 20)
    assert found.token_ids == (free[: place + 1],)
    assert found.token_ids == engine_way(Engine(again))(PROMPTS[:1], 20)[0].token_ids
    assert found.num_steps == (place,)


def test_transformers_way_tells_reading_prompts_from_decoding(monkeypatch: pytest.MonkeyPatch):
    stock, now = tiny_model("llama"), [0.0]

    def computing(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        now[0] += 100.0 if inputs["input_ids"].shape[1] > 1 else 1.0

    stock.model.register_forward_pre_hook(computing, with_kwargs=True)
    monkeypatch.setattr(StepClock, "now", property(lambda _: now[0]))
    (found,) = stock_way(stock, SamplingSettings(ignore_eos=True))(PROMPTS[:2], 5)
    assert (found.first_seconds, found.last_seconds) == ((100.0, 204.0), (104.0, 208.0))
    assert (found.prompt_seconds, found.seconds) == (200.0, 208.0)


def test_transformers_way_draws_at_a_temperature_by_the_prompt_s_seed():
    assert timing._seed_of([1, 2]) == timing._seed_of((1, 2)) != timing._seed_of([1, 3])
    stock = tiny_model("llama")

    def texts(temperature: float) -> tuple[tuple[int, ...], ...]:
        return stock_way(stock, SamplingSettings(temperature=temperature, ignore_eos=True))(PROMPTS, 20)[0].token_ids

    assert texts(1.0) == texts(1.0) != texts(0.0)
    assert texts(1e-3) == texts(0.0), "it is this temperature"


# --- parts of a step ---


@pytest.mark.parametrize(("session", "part"), [(HeadSession, "propose"), (LookaheadSession, "on_verify")])
def test_parts_are_of_all_steps_but_the_first_after_a_prompt(model: TargetModel, clock: Any, session: Any, part: str):
    """Learning from a step counts as drafting."""
    clock.slow(session, part)
    drafter = tiny_head("medusa", model) if session is HeadSession else Lookahead()
    (found,) = engine_way(Engine(model, drafter))(PROMPTS[:1], 10)
    steps = found.num_steps[0] - 1
    assert 2 <= steps <= 8
    assert found.num_timed_steps == steps
    parts = found.draft_milliseconds, found.verify_milliseconds, found.rest_milliseconds
    assert parts == (1e3 * steps, 2e3 * steps, 0.5e3 * steps)
    assert found.seconds == 1.0 + 3.5 * (steps + 1)
    (without_steps,) = engine_way(Engine(model))(PROMPTS[:1], 1)
    assert (without_steps.num_timed_steps, without_steps.verify_milliseconds) == (0, 0.0)


# --- what drafting costs ---


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("medusa", {"prefix": 0.0, "heads": [11.0, 2.0, 0.0]}),
        ("small-llama", {"prefix": 8.0, "heads": [3.0, 2.0, 0.0]}),  # a head that reads the text first
    ],
)
def test_a_head_costs_what_its_level_adds_to_a_tree(
    monkeypatch: pytest.MonkeyPatch, method: str, expected: dict[str, Any]
):
    calls: list[Tree | None] = []

    class Timer:
        """Reading takes 8 ms, chains 11, 13 and 12.5, the first two times far more, and later now and then, too."""

        def __init__(self, *_: Any) -> None: ...

        def read(self, rows: int) -> float:
            return self.draft(rows, None)

        def draft(self, rows: int, shape: Tree | None) -> float:
            assert rows == 1
            calls.append(shape)
            repeat = calls.count(shape)
            times = {None: 8.0, Tree.chain(1): 11.0, Tree.chain(2): 13.0, Tree.chain(3): 12.5}
            return times[shape] + (1e3 if repeat < 3 or repeat % 10 == 0 else 0.0)

    monkeypatch.setattr(timing, "StepTimer", Timer)
    target = tiny_model("llama")
    assert drafting_cost(target, tiny_head(method, target), num_nodes=1) == expected


def test_drafting_is_timed_on_the_first_levels_of_one_tree(monkeypatch: pytest.MonkeyPatch):
    drafted: list[Tree] = []
    monkeypatch.setattr(timing.StepTimer, "draft", lambda _, rows, shape: [drafted.append(shape), rows][1])
    target = tiny_model("llama")
    drafting_cost(target, tiny_head("medusa", target), num_nodes=12)
    first, second, third = (set(tree.paths) for tree in drafted[:3])
    assert first < second < third == {*typical_tree(12, depth=4, top_k=4).paths, (0, 0, 0)} - {(0, 0, 0, 0)}
    assert first == {path for path in third if len(path) <= 1}


def test_the_prefix_is_the_time_of_layers_that_read_the_text(monkeypatch: pytest.MonkeyPatch):
    """On a CPU, tokens of steps without a draft are only put aside; here they must be read."""
    target = tiny_model("llama")
    head = tiny_head("hydra++", target)
    read: list[int] = []
    counts = head.read
    monkeypatch.setattr(head, "read", lambda context, *args: read.append(max(context.counts)) or counts(context, *args))
    timer = StepTimer(target, head)
    assert timer.read(1) > 0
    before = len(read)
    timer.read(1)
    assert read[before:] == [STEP_TOKENS]
    timer.draft(1, Tree.chain(1))
    assert read[before:] == [STEP_TOKENS] * 2, "nothing was left to read"
