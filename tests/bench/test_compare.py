"""Drafters side by side: what is measured, by a drafter whose acceptance and times are known, and what is saved."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftheads
from draftheads.bench import compare, rounds, timing
from draftheads.bench.compare import Comparison
from draftheads.bench.contenders import Contender
from draftheads.bench.quality import Item, Measure, Outcome
from draftheads.bench.rounds import Bench
from draftheads.bench.settings import BenchSettings, Point, Variant
from draftheads.bench.table import ALL, Row
from draftheads.bench.timing import PLAIN, STOCK, Answers, Way, together
from draftheads.checkpoints.checkpoint import save_head
from draftheads.data.records import Record
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.mixed import Mixed
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import NoProgress
from fake_progress import FakeProgress
from families import PlantedDrafter, tiny_head, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(6)]
OTHERS = [[9, 3 + row, 8] for row in range(8)]
SETTINGS = BenchSettings(trees=("best",), num_nodes=(6,), max_new_tokens=10, num_calibration_prompts=8)


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafting of heads is timed once."""
    monkeypatch.setattr(timing, "_REPEATS", 1)


def of_head(name: str, head: DraftHead, identity: str = "1") -> Contender:
    """A head whose best tree is found, and from which drafts can be drawn."""
    return Contender(name, head, identity, head=head, draws=True)


def contenders(model: TargetModel) -> list[Contender]:
    heads = [of_head(method, tiny_head(method, model), f"{method}-1") for method in ("medusa", "hydra")]
    small = DraftModel(tiny_model("llama", seed=5), model)
    return [
        *heads,
        Contender("draft-model", small, "small-1", draws=True),
        Contender("prompt-lookup", Mixed(None), "lookup-1"),
    ]


def bench(
    model: TargetModel,
    folder: Path,
    each: Sequence[Contender] | None = None,
    settings: BenchSettings = SETTINGS,
    prompts: Sequence[Any] = PROMPTS,
    **options: Any,
) -> Bench:
    each = contenders(model) if each is None else each
    return Bench(model, each, prompts, OTHERS, settings, folder=folder, progress=NoProgress(), **options)


def named(rows: Sequence[Row], part: str = ALL) -> dict[str, Row]:
    return {row.name: row for row in rows if row.part == part}


# --- a drafter whose acceptance is known ---


class Scripted(PlantedDrafter):
    """Drafts chains of two tokens along the model's own texts, of which 0, 2, 1, 0, 2, 1 … are right."""

    fills_shapes, max_depth = False, 2

    def start(self) -> Self:
        self.rights = cycle((0, 2, 1))
        return super().start()

    def _any_node(self, nodes: int) -> int:
        return next(self.rights)

    def _plant(self, token_ids: Tensor, path: list[int], row: int) -> None:
        for node, token in zip((1, 2), [*self._coming(self.texts[row]), 0, 0], strict=False):
            token_ids[node] = token if node in path else 6 if token == 5 else 5


def scripted_bench(model: TargetModel, folder: Path, *, num_tokens: int) -> Bench:
    answers = Engine(model).generate(PROMPTS, max_new_tokens=num_tokens, ignore_eos=True)
    known = {tuple(prompt): answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)}
    settings = replace(SETTINGS, max_new_tokens=num_tokens, ignore_eos=True)
    return bench(model, folder, [Contender("scripted", Scripted(Tree.chain(2), known), "1")], settings)


def test_all_numbers_of_a_drafter_whose_acceptance_and_times_are_known(model: TargetModel, tmp_path: Path, clock: Any):
    clock.slow(Scripted, "propose")
    one = scripted_bench(model, tmp_path, num_tokens=10)
    rows = named(one.run())
    plain, scripted = rows[PLAIN], rows["scripted"]
    # an answer of 10 tokens: plain decoding takes 1 + 9 · 2.5 s; scripted 1 + 3 + 2 + 1 + (2 of) 3 tokens in 5 steps
    assert plain.tokens_per_second == pytest.approx(10 / 23.5)
    speeds = {"tokens_per_second": 10 / (1 + 5 * 3.5), "speedup": 23.5 / 18.5, "decode_speedup": 22.5 / 17.5}
    steps = {"tokens_per_step": 9 / 5, "accepted_per_step": 4 / 5, "overhead": 3.5 / 2.5}  # rate / overhead = speed-up
    assert {name: getattr(scripted, name) for name in (*speeds, *steps)} == pytest.approx({**speeds, **steps})
    assert scripted.speedup_interval == pytest.approx((23.5 / 18.5, 23.5 / 18.5))
    assert scripted.steps_by_tokens == [2 * 6, 2 * 6, 1 * 6], "the last answer token ends the last step early"
    assert scripted.acceptance_by_depth == pytest.approx([3 / 5, 2 / 5])
    assert tuple(scripted.parts.values()) == (1e3, 2e3, 5e2)
    assert scripted.number("step_milliseconds") == 35e2
    assert plain.number("first_token_milliseconds") == scripted.number("first_token_milliseconds") == 1e3
    assert scripted.number("p50_seconds") == pytest.approx(18.5)
    assert plain.number("token_milliseconds") == pytest.approx(2500)
    assert scripted.number("token_milliseconds") == pytest.approx(17.5e3 / 9)
    assert (plain.speedup, plain.decode_speedup, plain.overhead, plain.tokens_per_step) == (1, 1, 1, 1)
    assert (plain.num_different, scripted.num_different, scripted.num_answers) == (0, 0, 6)


def test_tokens_per_step_are_those_of_decoding(model: TargetModel, tmp_path: Path):
    one = bench(model, tmp_path)
    rows = named(one.run())
    assert list(rows) == [PLAIN, "medusa", "hydra", "draft-model", "prompt-lookup"]
    for contender in one.contenders:
        row = rows[contender.name]
        (variant,) = one.settings.variants(0.0)
        chosen = one.trees.find(contender, variant)
        assert chosen is not None
        results = Engine(model, contender.drafter, shape=chosen.shape).generate(PROMPTS, max_new_tokens=10)
        tokens, steps = sum(len(r.token_ids) - 1 for r in results), sum(r.num_steps for r in results)
        assert row.tokens_per_step == pytest.approx(tokens / steps), contender.name
        assert row.num_different == 0, "fp32"
        assert (row.predicted_tokens_per_step is not None) == isinstance(contender.drafter, DraftHead)
    assert [row.tree for row in rows.values()][-2:] == ["growing, 6", "its own, up to 17"]


@pytest.mark.parametrize("rule", ["exact", "typical", "rejection", "block"])
def test_each_acceptance_rule_is_timed_at_a_temperature(model: TargetModel, tmp_path: Path, rule: str):
    settings = replace(SETTINGS, trees=("chain",), temperatures=(0.7,), acceptance=(rule,), epsilons=(0.2,))
    each = contenders(model)[1:]
    if rule in ("rejection", "block"):
        left_out = bench(model, tmp_path, each, settings)
        assert "prompt-lookup" not in named(left_out.run())
        words = f"prompt-lookup is left out: it cannot draft trees of the kind chain with {rule} acceptance"
        assert [problem["problem"] for problem in left_out.problems] == [words]
        with pytest.raises(InvalidSettings, match="no drafter is left: prompt-lookup is left out"):
            bench(model, tmp_path, each[-1:], settings).run()
        each = each[:2]
    one = bench(model, tmp_path, each, settings)
    rows = named(one.run())
    plain = {line["question_id"]: line["token_ids"] for line in one.lines if line["way"] == PLAIN}
    for contender in each:
        row = rows[contender.name]
        assert (row.settings["temperature"], row.settings["acceptance"]) == (0.7, rule)
        assert row.settings["epsilon"] == (0.2 if rule == "typical" else None)
        assert row.speedup > 0
    own = {line["question_id"]: line["token_ids"] for line in one.lines if line["way"] == "hydra"}
    if rule == "exact":
        assert own == plain, "the same seeds, and a rule that changes nothing"
    (variant,) = one.settings.variants(0.7)
    assert one.settings.sampling(next(one.settings.points()), variant).acceptance == rule


def test_every_combination_of_settings_is_measured():
    settings = replace(
        SETTINGS, trees=("best", "defaults"), num_nodes=(3, 5), batch_sizes=(1, 2), temperatures=(0.0, 0.8),
        acceptance=("exact", "typical"), epsilons=(0.1, 0.3),
    )  # fmt: skip
    assert list(settings.points()) == [Point(1, 0.0), Point(1, 0.8), Point(2, 0.0), Point(2, 0.8)]
    trees = (("best", 3), ("best", 5), ("defaults", None))
    assert list(settings.variants(0.0)) == [Variant(*tree) for tree in trees]
    rules = (("exact", None), ("typical", 0.1), ("typical", 0.3))
    assert list(settings.variants(0.8)) == [Variant(*tree, *rule) for tree in trees for rule in rules]


def test_a_time_box_bounds_the_answers_and_saves_none(model: TargetModel, tmp_path: Path):
    one = bench(model, tmp_path, contenders(model)[-1:], max_seconds=1e-6)
    rows = named(one.run())
    assert {row.num_answers for row in rows.values()} == {1}, "no prompt is begun that would not be answered in time"
    assert one.saved == []


def test_transformers_is_timed_one_prompt_at_a_time(model: TargetModel, tmp_path: Path):
    settings = replace(SETTINGS, batch_sizes=(1, 2))
    rows = bench(model, tmp_path, contenders(model)[:1], settings, stock=model).run()
    stock = [row for row in rows if row.name == STOCK]
    assert [row.settings["batch_size"] for row in stock] == [1]
    assert stock[0].num_different == 0
    assert [row.speedup_over_transformers is not None for row in rows] == [True] * 3 + [False] * 2


def test_drafters_are_also_timed_as_they_are_loaded(model: TargetModel, tmp_path: Path):
    usual = Engine(model, Mixed(None, num_tokens=2), max_batch_size=7)
    each = [Contender("lookup", Mixed(None), "lookup", as_loaded=lambda _: usual)]
    rows = bench(model, tmp_path, each, replace(SETTINGS, trees=("best", "defaults"))).run()
    assert [(row.name, row.settings.get("tree")) for row in rows] == [
        (PLAIN, None), ("lookup", "best"), ("lookup", "defaults")
    ]  # fmt: skip
    assert usual.max_batch_size == 1


# --- questions ---


def asked(*turns: str, category: str = "", number: int | str | None = None, **more: Any) -> Record:
    labels = {name: value for name, value in (("category", category), ("question_id", number)) if value}
    messages = tuple({"role": "user", "content": turn} for turn in turns)
    return Record(messages, is_text=True, labels=labels, **more)


QUESTIONS = [
    asked("a dog", "and a cat", category="chat", number=81),
    asked("hello", category="maths", number=82, reference="7"),
    asked("fog and ice", "why", category="chat", number=83),
]


def test_the_model_s_own_answers_continue_a_conversation(world: Path, tmp_path: Path):
    engine = draftheads.load(str(world / "model"), precision="fp32", fast=False)
    settings = replace(SETTINGS, max_new_tokens=6)
    one = bench(engine.model, tmp_path, [Contender("lookup", Mixed(None), "1")], settings, QUESTIONS)
    rows = one.run()
    second = next(line for line in one.lines if (line["way"], line["question_id"], line["turn"]) == ("lookup", "81", 2))
    (first,) = engine.generate(["a dog"], max_new_tokens=6)
    messages = [
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": first.text.strip()},
        {"role": "user", "content": "and a cat"},
    ]
    (expected,) = engine.generate([messages], max_new_tokens=6)
    assert tuple(second["token_ids"]) == expected.token_ids
    parts = list(dict.fromkeys(row.part for row in rows))
    assert parts == [ALL, "chat", "maths", "turn 1", "turn 2"]
    counts = {row.part: row.num_answers for row in rows if row.name == "lookup"}
    assert counts == {ALL: 5, "chat": 4, "maths": 1, "turn 1": 3, "turn 2": 2}
    assert one.example is not None
    assert "".join(piece for piece, _ in one.example["pieces"]) == next(
        line["text"] for line in one.lines if line["way"] == "lookup"
    )


@pytest.fixture(scope="module")
def talking(world: Path) -> TargetModel:
    """A model with a tokenizer and a chat template."""
    return draftheads.load(str(world / "model"), precision="fp32", fast=False).model


def test_answers_stand_in_the_conversation_without_blanks_around_them(talking: TargetModel, tmp_path: Path):
    ids = talking.tokenizer(" hello ", add_special_tokens=False)["input_ids"]
    assert talking.tokenizer.decode(ids) != "hello"
    assert bench(talking, tmp_path, [])._said(ids) == "hello"


def test_what_is_too_long_is_a_problem_of_its_question(talking: TargetModel, tmp_path: Path):
    model = talking
    limit = model.max_positions
    assert limit is not None
    long = "a dog " * limit
    questions = [asked(long, number=1), *QUESTIONS, asked("hello", long, number=9)]
    one = bench(model, tmp_path, [Contender("lookup", Mixed(None), "1")], SETTINGS, questions)
    rows = one.run()
    assert named(rows)["lookup"].num_answers == 6
    problems = [(problem["question"], problem["turn"]) for problem in one.problems]
    assert problems == [("1", 1), ("9", 2), ("9", 2)], "for each way"
    assert len({line["question_id"] for line in one.lines}) == 4
    assert f"takes at most {limit - 1}" in one.problems[0]["problem"]
    with pytest.raises(DataError, match="the model takes 2 prompts: give at least 3"):
        bench(model, tmp_path, [], SETTINGS, [*questions[:1], *QUESTIONS[:2]]).run()


def test_the_last_group_takes_the_prompts_that_are_left(model: TargetModel, tmp_path: Path):
    settings = replace(SETTINGS, batch_sizes=(1, 2), max_new_tokens=3)
    prompts = [[5 + n, 6, 7] for n in range(19)]
    rows = bench(model, tmp_path, [Contender("lookup", Mixed(None), "1")], settings, prompts).run()
    assert [row.num_answers for row in rows] == [19] * 4
    assert [row.speedup_interval is None for row in rows] == [False, False, True, True], "two groups say nothing"


def test_a_turn_that_one_way_does_not_reach_is_left_out_of_both():
    def answer(turn: int, seconds: float) -> Answers:
        return Answers(token_ids=((1, 2),), num_steps=(1,), seconds=seconds, questions=(turn,), turn=turn, group=turn)

    own, plain = [answer(0, 1.0), answer(1, 1.0)], [answer(0, 2.0)]
    assert together(own, plain) == (own[:1], plain)
    assert together(plain, own) == (plain, own[:1])


def test_prompts_can_have_one_length_and_long_ones_lose_their_middle(model: TargetModel, tmp_path: Path):
    prompts = [[*prompt, *range(10, 30), 7, 8] for prompt in PROMPTS[:3]]
    settings = replace(SETTINGS, longest_prompt=5, prompt_tokens=(3, 9))
    one = bench(model, tmp_path, [], settings, [*prompts, [3, 4]])
    whole = [one._ids(Point(), question) for question in one.questions]
    assert whole == [*([*prompt[:3], 7, 8] for prompt in prompts), [3, 4]]
    for point in settings.points():
        cut = [one._ids(point, question) for question in one.questions]
        assert cut == [(ids * 5)[: point.prompt_tokens] for ids in whole]


# --- quality ---

TEXTS = ["a dog", "hello", "fog and ice"]


class Length(Measure):
    """Of the last answer, where there is a reference."""

    name = "length"

    def score(self, item: Item) -> Outcome:
        return (float(len(item.answers[-1])),) if item.reference else "no reference"


def test_quality_is_measured_for_each_way_and_part(talking: TargetModel, tmp_path: Path):
    each = [Contender("lookup", Mixed(None), "1")]
    one = bench(talking, tmp_path, each, SETTINGS, QUESTIONS, measures=("agreement", Length()))
    rows = one.run()
    by_part = {row.part: row.quality for row in rows if row.name == "lookup"}
    assert by_part[ALL]["agreement"] == 100.0
    assert by_part["turn 1"] == by_part["turn 2"] == {}, "whole conversations are measured"
    (overall,) = (row for row in rows if (row.name, row.part) == ("lookup", ALL))
    assert overall.quality_counts == {"length": 1}
    assert overall.quality_intervals.keys() == {"agreement", "common prefix"}, "of one question there is none"
    assert by_part["maths"].keys() == {"agreement", "common prefix", "length"}
    assert "length" not in by_part["chat"], "no references"
    reasons = {(problem["question"], problem["problem"]) for problem in one.problems}
    assert {question for question, _ in reasons} == {"81", "83"}
    assert all(reason.startswith("length: ") for _, reason in reasons)


class Rater(Measure):
    """A program elsewhere that rates answers, once it is there."""

    name, asks_others, is_there = "rater", True, False

    def score(self, item: Item) -> Outcome:
        return (5.0,) if self.is_there else "it is down"


def test_a_comparison_whose_judge_was_down_can_be_judged_again(world: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    rater, answered = Rater(), []
    way = rounds.engine_way
    monkeypatch.setattr(rounds, "engine_way", lambda *args: answered.append(args) or way(*args))

    def compared() -> list[Row]:
        settings = replace(SETTINGS, num_calibration_prompts=2)
        options: dict[str, Any] = {"settings": settings, "quality": [rater], "progress": False, "precision": "fp32"}
        return draftheads.compare_heads(str(world / "model"), ["prompt-lookup"], TEXTS, **options).rows

    times = [row.tokens_per_second for row in compared()]
    assert (rater.folder or tmp_path).is_dir()
    rater.is_there = True
    rows = compared()
    assert [row.tokens_per_second for row in rows] == times, "its answers are those of before"
    assert {row.quality["rater"] for row in rows} == {5.0}
    assert [row.tokens_per_second for row in compared()] != times, "now it is finished, and measured anew"


def test_typical_acceptance_is_never_without_quality(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    settings = BenchSettings(
        trees=("chain",), temperatures=(0.7,), acceptance=("typical",), max_new_tokens=8, num_calibration_prompts=2
    )
    options: dict[str, Any] = {"settings": settings, "progress": False, "precision": "fp32"}
    original, head = str(world / "model"), str(world / "hydra")
    rows = draftheads.compare_heads(original, [head], TEXTS, **options).rows
    assert all(row.quality.keys() == {"agreement", "common prefix", "perplexity"} for row in rows)
    loaded = Mock(side_effect=compare.load_target)
    monkeypatch.setattr(compare, "load_target", loaded)
    draftheads.compare_heads(original, [head], TEXTS, original_model=original, **options)
    assert loaded.call_count == 2, "perplexity is under the original model"


# --- what is saved ---


class Stopping:
    """Counts timed answers, and stops at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop_at = 0, -1
        real = rounds.engine_way

        def way(engine: Engine, *arguments: Any) -> Way:
            decode = real(engine, *arguments)

            def counted(group: Any, max_new_tokens: int) -> Any:
                self.count += max_new_tokens == SETTINGS.max_new_tokens
                if self.count == self.stop_at:
                    raise KeyboardInterrupt
                return decode(group, max_new_tokens)

            return counted

        monkeypatch.setattr(rounds, "engine_way", way)


def test_a_comparison_that_was_stopped_continues(model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stopping = Stopping(monkeypatch)
    two = contenders(model)[:2]
    stopping.stop_at = 3 * 4 + 2  # in the fifth prompt
    with pytest.raises(KeyboardInterrupt):
        bench(model, tmp_path, two).run()
    stopping.count, stopping.stop_at = 0, -1
    rows = bench(model, tmp_path, two).run()
    assert stopping.count == 2 * 3, "four prompts were answered before"
    assert {row.num_answers for row in rows} == {6}
    again = bench(model, tmp_path, two)
    stopping.count = 0
    again.run()
    assert stopping.count == 0, "until they are forgotten"
    Comparison(rows, {}, [], tuple(again.saved)).forget()
    bench(model, tmp_path, two).run()
    assert stopping.count == 6 * 3, "times are measured anew"


@pytest.fixture
def found_trees(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Heads whose tree was searched for."""
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(world)
    names: list[str] = []
    real = rounds.TreeFinder._replay

    def noted(self: Any, name: str, head: DraftHead, nodes: int) -> Any:
        names.append(name)
        return real(self, name, head, nodes)

    monkeypatch.setattr(rounds.TreeFinder, "_replay", noted)
    return names


QUICK = BenchSettings(trees=("best",), num_nodes=(4,), max_new_tokens=6, num_calibration_prompts=2)


def test_the_function_returns_rows_and_uses_trees_that_were_saved(found_trees: list[str], tmp_path: Path):
    def rows(head: Any = "./hydra", model: Any = "./model", **options: Any) -> list[Row]:
        return draftheads.compare_heads(
            model, [head, "lookahead"], TEXTS, settings=QUICK, precision="fp32", **options
        ).rows

    assert [row.name for row in rows()] == [PLAIN, "hydra", "lookahead"]
    rows()
    assert len(found_trees) == 1
    rows(fresh=True)
    assert len(found_trees) == 2, "fresh ignores what was saved"
    base = draftheads.load("./model", precision="fp32").model
    other = tmp_path / "other" / "hydra"
    save_head(tiny_head("hydra", base, embedding_scale=1.25), other, base=base)
    rows(other)
    assert len(found_trees) == 3, "another configuration"
    save_head(tiny_head("hydra", base, seed=1), other, base=base)
    rows(other)
    assert len(found_trees) == 4, "other weights"
    shutil.copytree("model", tmp_path / "model")
    weights = load_file("model/model.safetensors")
    changed = "model.layers.0.mlp.down_proj.weight"  # not in the fingerprints by which a head knows its base model
    path = tmp_path / "model" / "model.safetensors"
    save_file({**weights, changed: 1.5 * weights[changed]}, path, metadata={"format": "pt"})
    rows(other, tmp_path / "model")
    assert len(found_trees) == 5, "other weights of the model"


def test_the_record_has_every_number(found_trees: list[str]):
    comparison = draftheads.compare_heads("./model", ["./hydra"], TEXTS, settings=QUICK, transformers=True)
    record = json.loads(json.dumps(comparison.record))
    assert [row["name"] for row in record["rows"]] == [PLAIN, STOCK, "hydra"]
    assert BenchSettings(**record["settings"]) == QUICK, "settings are read back"
    assert record["drafting"]["hydra"]["heads"]
    assert record["peak_bytes"] > 1e6
    assert record["problems"] == []
    assert len(comparison.answers) == 3 * 3
    assert [Row(**row) for row in record["rows"]][2].speedup == comparison.rows[2].speedup


# --- what cannot be compared ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_nodes": 1}, r"--num-nodes is 1: must be at least 2"),
        ({"num_nodes": (1, 8), "trees": ("paths", "chain")}, r"--num-nodes is .*: must be at least 2"),
        ({"num_nodes": 0, "trees": "paths"}, r"--num-nodes is 0: must be at least 1"),
        ({"num_nodes": (4, 4)}, "each value once"),
        ({"trees": ()}, "give at least one value"),
        ({"trees": ("wide",)}, r"--trees is wide: choose among best"),
        ({"batch_sizes": [0]}, "must be at least 1"),
        ({"temperatures": -0.5}, "temperature is -0.5"),
        ({"temperatures": (0.7,), "epsilons": 2.0}, "typical_epsilon is 2.0"),
        ({"acceptance": "typical"}, "greedy answers need no rule: add --temperatures 0.7"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(InvalidSettings, match=words):
        replace(SETTINGS, **changes)


def test_at_least_three_prompts_are_needed():
    with pytest.raises(DataError, match="2 prompts: give at least 3"):
        draftheads.compare_heads("nowhere", ["medusa"], ["a", "b"])


# --- the example ---


def test_the_example_marks_accepted_draft_tokens(model: TargetModel, tmp_path: Path):
    one = scripted_bench(model, tmp_path, num_tokens=8)
    one.run()
    assert one.example is not None
    (line,) = [line for line in one.lines if (line["way"], line["question_id"]) == ("scripted", "1")]
    assert line["step_tokens"] == (1, 3, 2, 1), "after the token that reading the prompt gives"
    drafted = [False, False, *(True, True, False), *(True, False), False]
    assert one.example["pieces"] == [
        [f"<{token}>", mark] for token, mark in zip(line["token_ids"], drafted, strict=True)
    ]


def test_a_batch_that_cannot_be_filled_is_told_and_points_are_counted(model: TargetModel, tmp_path: Path):
    progress = FakeProgress()
    settings = replace(SETTINGS, batch_sizes=(2, 8), trees=("chain",))
    one = Bench(model, contenders(model)[:1], PROMPTS, OTHERS, settings, folder=tmp_path, progress=progress)
    one.run()
    assert [problem["problem"] for problem in one.problems] == ["batch size 8: 6 prompts cannot fill it"]
    stages = [stage for stage in progress.stages if stage.startswith("timing 2 ways")]
    assert [stage.rpartition(" (")[2] for stage in stages] == ["1 of 2)", "2 of 2)"]
