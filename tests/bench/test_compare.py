"""Drafters side by side: what is counted, on which trees, and what is saved."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import draftheads
from draftheads.bench import compare
from draftheads.bench.compare import Bench, numbered
from draftheads.bench.contenders import Contender
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import SAMPLED_FIELDS, Row
from draftheads.bench.timing import Answers, Way
from draftheads.checkpoints.checkpoint import save_head
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.search.replay import Replay
from draftheads.speculation.shapes import BestFirst, BestPaths, Sampled, Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import NoProgress
from families import tiny_head, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(6)]
OTHERS = [[9, 3 + row, 8] for row in range(8)]
SETTINGS = BenchSettings(
    num_nodes=6,
    max_new_tokens=10,
    num_speed_prompts=3,
    num_sampled_prompts=4,
    batch_size=4,
    num_calibration_prompts=8,
    temperature=0.7,
)
SAMPLED = [PROMPTS[row] for row in (0, 1, 3, 4)]


def of_head(name: str, head: DraftHead, identity: str) -> Contender:
    """A head whose best tree is found, and whose drawn drafts are counted."""
    return Contender(name, head, identity, head=head, draws=True)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_model("llama")


def contenders(model: TargetModel) -> list[Contender]:
    heads = [of_head(method, tiny_head(method, model), f"{method}-1") for method in ("medusa", "hydra")]
    small = DraftModel(tiny_model("llama", seed=5), model)
    return [
        *heads,
        Contender("draft-model", small, "small-1", BestFirst(SETTINGS.num_nodes), draws=True),
        Contender("prompt-lookup", PromptLookup(), "lookup-1"),
    ]


def bench(
    model: TargetModel, folder: Path, each: list[Contender] | None = None, settings: BenchSettings = SETTINGS
) -> Bench:
    each = contenders(model) if each is None else each
    return Bench(model, each, PROMPTS, OTHERS, settings, folder=folder, progress=NoProgress())


@pytest.fixture(scope="module")
def compared(model: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[Row]]:
    one = bench(model, tmp_path_factory.mktemp("bench"))
    return one, one.run()


# --- what is counted ---


def one_by_one(engine: Engine, prompts: list[list[int]], **sampling: Any) -> float:
    """Tokens per step, each prompt answered alone."""
    tokens = steps = 0
    for number, prompt in enumerate(prompts):
        (result,) = engine.generate([prompt], max_new_tokens=10, seed=compare._SEED + number, **sampling)
        tokens, steps = tokens + len(result.token_ids) - 1, steps + result.num_steps
    return tokens / steps


def test_greedy_tokens_per_step_are_those_of_decoding(compared: tuple[Bench, list[Row]]):
    one, rows = compared
    assert [row.name for row in rows] == ["medusa", "hydra", "draft-model", "prompt-lookup"]
    for contender, row in zip(one.contenders, rows, strict=True):
        engine = one._engine(contender.drafter, one._shapes[contender.name])
        assert row.tokens_per_step == one_by_one(engine, PROMPTS), contender.name


@pytest.mark.parametrize("rule", list(SAMPLED_FIELDS))
def test_sampled_tokens_per_step_are_those_of_decoding(compared: tuple[Bench, list[Row]], rule: str):
    one, rows = compared
    for contender, row in zip(one.contenders, rows, strict=True):
        shape = one._shapes[contender.name]
        if rule in ("rejection", "block"):
            shape = one._drawn(contender, one._prepare(contender)).get(rule)
        found = getattr(row, SAMPLED_FIELDS[rule][0])
        if contender.name == "prompt-lookup" and rule in ("rejection", "block"):
            assert found is None, "it draws nothing"
            continue
        engine = one._engine(contender.drafter, shape)
        assert found == one_by_one(engine, SAMPLED, temperature=0.7, acceptance=rule), contender.name


def test_drawn_drafts_have_the_static_tree_or_a_chain(compared: tuple[Bench, list[Row]]):
    one, _ = compared
    head, small = one.contenders[1], one.contenders[2]
    found = one._prepare(head)
    shapes = one._drawn(head, found)
    tree = shapes["rejection"]
    assert isinstance(tree, Sampled)
    assert tree.tree.num_nodes == len(found["paths"]) + 1 <= 6
    assert shapes["block"] == Sampled(Tree.chain(3)), "a token for each of three heads"
    assert one._drawn(small, {}) == dict.fromkeys(("rejection", "block"), Sampled(Tree.chain(5)))


def test_siblings_of_a_drawn_tree_are_numbered_in_order():
    tree = Tree.from_paths([(1,), (4,), (1, 3), (4, 0), (4, 2)])
    assert numbered(tree) == Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    assert numbered(Tree.cartesian([3, 2])) == Tree.cartesian([3, 2])


def test_rows_describe_the_drafters(compared: tuple[Bench, list[Row]]):
    one, rows = compared
    for contender, row in zip(one.contenders, rows, strict=True):
        assert row.num_different == 0, "fp32"
        assert row.over_first == pytest.approx(row.tokens_per_step / rows[0].tokens_per_step)
        assert 0 < row.draft_milliseconds < row.step_milliseconds
        assert row.tokens_per_second > 0
        assert (row.predicted_tokens_per_step is not None) == isinstance(contender.drafter, DraftHead)
    assert rows[0].over_first_error == 0
    assert rows[1].over_first_error
    assert [row.tree for row in rows[2:]] == ["growing, 6", "its own, up to 9"]


def test_drafters_are_also_timed_as_they_are_loaded(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual = Engine(model, PromptLookup())
    each = [Contender("lookup", PromptLookup(), "lookup", defaults=usual), Contender("other", PromptLookup(), "other")]
    monkeypatch.setattr(compare, "over_plain", lambda engines, _: dict.fromkeys(engines, (1.5, 0.25)))
    lookup, other = bench(model, tmp_path, each, replace(SETTINGS, temperature=0.0)).run()
    assert (lookup.default_speedup, lookup.default_speedup_error) == (1.5, 0.25)
    assert other.default_speedup is None


def test_answers_that_differ_from_plain_decoding_s_are_counted(model: TargetModel, tmp_path: Path):
    one = bench(model, tmp_path, [Contender("lookup", PromptLookup(), "lookup")], replace(SETTINGS, temperature=0.0))
    one.run()
    (path,) = tmp_path.glob("greedy-lookup-*.json")
    saved = json.loads(path.read_text())
    saved["token_ids"][4:] = [[1], [2, 3]]
    path.write_text(json.dumps(saved))
    assert one.run()[0].num_different == 2


def test_without_a_temperature_nothing_is_sampled(model: TargetModel, tmp_path: Path):
    (row,) = bench(model, tmp_path, contenders(model)[:1], replace(SETTINGS, temperature=0.0)).run()
    assert {getattr(row, field) for fields in SAMPLED_FIELDS.values() for field in fields} == {None}
    assert not list(tmp_path.glob("*-at-*"))


# --- trees ---


@pytest.mark.parametrize("grows", [True, False])
def test_a_head_drafts_on_the_tree_that_is_predicted_to_be_best(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, grows: bool
):
    run = Replay.run

    def changed(self: Replay, answers: Any) -> dict[str, Any]:
        found = run(self, answers)
        found["dynamic"]["expected"][-1] = found["static"]["expected"][-1] + (0.1 if grows else -0.1)
        found["confidence"]["temperatures"] = [1.5, 1.25, 0.75]
        return found

    monkeypatch.setattr(Replay, "run", changed)

    def prepared() -> Shape | None:
        one = bench(model, tmp_path, [of_head("hydra", tiny_head("hydra", model), "1")])
        one._prepare(one.contenders[0])
        return one._shapes["hydra"]

    shape = prepared()
    if grows:
        assert shape == BestFirst(6, top_k=10, beam=6, temperatures=(1.5, 1.25, 0.75))
    else:
        assert isinstance(shape, Tree)
        assert shape.num_nodes == 6
    monkeypatch.setattr(Replay, "run", None)
    assert prepared() == shape, "the search is done once"


def test_a_shape_of_one_s_own_is_drafted_as_it_is(model: TargetModel, tmp_path: Path):
    head = tiny_head("mlp-speculator", model)
    one = bench(model, tmp_path, [Contender("paths", head, "1", BestPaths((3, 2, 2), 2))])
    (row,) = one.run()
    assert row.tree == "best 2 of 3x2x2, up to 7"
    assert row.predicted_tokens_per_step is None
    assert row.rejection_tokens_per_step is None
    assert row.tokens_per_step == one_by_one(one._engine(head, BestPaths((3, 2, 2), 2)), PROMPTS)


# --- what is saved ---


class Counter:
    """Notes how often engines answer prompts, several at a time and timed alone; can stop in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted, self.timed = 0, 0
        self.stop_at: int | None = None
        real_count, real_way = compare.answers_of, compare.engine_way

        def count(*arguments: Any) -> Answers:
            self.counted += 1
            return real_count(*arguments)

        def way(engine: Engine) -> Way:
            real = real_way(engine)

            def decode(group: Any, max_new_tokens: int) -> Answers:
                self.timed += max_new_tokens == SETTINGS.max_new_tokens
                if self.stop_at is not None and self.timed > self.stop_at:
                    raise KeyboardInterrupt
                return real(group, max_new_tokens)

            return decode

        monkeypatch.setattr(compare, "answers_of", count)
        monkeypatch.setattr(compare, "engine_way", way)

    def of(self, one: Bench) -> tuple[int, int]:
        """Countings and timed answers of a run."""
        self.counted = self.timed = 0
        one.run()
        return self.counted, self.timed


def test_what_was_counted_is_saved_and_what_was_timed_is_not(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counter = Counter(monkeypatch)
    two = contenders(model)[:2]
    counter.stop_at = 4  # in the second prompt
    with pytest.raises(KeyboardInterrupt):
        bench(model, tmp_path, two).run()
    assert counter.counted == 2 * 5 + 1
    counter.stop_at = None
    assert counter.of(bench(model, tmp_path, two)) == (0, 3 * 2), "the first prompt was timed before"
    assert counter.of(bench(model, tmp_path)) == (5 + 3, 5 * 3), "only the new drafters are counted"
    assert counter.of(bench(model, tmp_path)) == (0, 5 * 3), "speeds are measured each time"
    other = replace(SETTINGS, num_sampled_prompts=5)
    assert counter.of(bench(model, tmp_path, two, other)) == (2 * 4, 3 * 3), "sampled answers to other prompts"


def quick(**changes: Any) -> BenchSettings:
    sizes = {"num_nodes": 4, "max_new_tokens": 6, "num_speed_prompts": 3, "num_calibration_prompts": 2}
    return BenchSettings(**{"temperature": 0.0, **sizes, **changes})


@pytest.fixture
def counted(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that the engines really computed."""
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(world)
    found: list[str] = []
    real = compare.answers_of

    def noted(engine: Engine, *arguments: Any) -> Answers:
        found.append(type(engine.drafter).__name__)
        return real(engine, *arguments)

    monkeypatch.setattr(compare, "answers_of", noted)
    return found


ASKED = ["a dog", "hello", "fog and ice"]


def test_the_function_returns_rows_and_uses_what_was_saved(counted: list[str]):
    def rows(**options: Any) -> list[Row]:
        return draftheads.compare_heads("./model", ["./hydra", "lookahead"], ASKED, settings=quick(), **options).rows

    found = rows(precision="fp32")
    assert [row.name for row in found] == ["hydra", "lookahead"]
    assert counted == ["NoDraft", "HydraHead", "Lookahead"]
    again = rows(precision="fp32")
    assert len(counted) == 3
    assert [row.tokens_per_step for row in again] == [row.tokens_per_step for row in found]
    rows(precision="fp32", fresh=True)
    assert len(counted) == 6, "fresh ignores what was saved"


def test_other_settings_and_another_configuration_are_counted_anew(counted: list[str], tmp_path: Path):
    draftheads.compare_heads("./model", ["./hydra"], ASKED, settings=quick())
    draftheads.compare_heads("./model", ["./hydra"], ASKED, settings=quick(num_nodes=5))
    assert len(counted) == 4
    base = load_target("model")
    other = tiny_head("hydra", base, embedding_scale=1.25)
    save_head(other, tmp_path / "other" / "hydra", base=base)
    draftheads.compare_heads("./model", [str(tmp_path / "other" / "hydra")], ASKED, settings=quick())
    assert len(counted) == 5


def test_changed_weights_in_the_same_folder_are_counted_anew(counted: list[str], tmp_path: Path):
    def computed() -> list[str]:
        """What is computed for a head and a drafter without one, on a model in the same folders each time."""
        counted.clear()
        draftheads.compare_heads(model, [head, "lookahead"], ASKED, settings=quick(), precision="fp32")
        return counted

    model, head = tmp_path / "model", tmp_path / "hydra"
    shutil.copytree("model", model)
    base = load_target(str(model), precision="fp32")
    save_head(tiny_head("hydra", base), head, base=base)
    assert computed() == ["NoDraft", "HydraHead", "Lookahead"]
    assert computed() == []
    save_head(tiny_head("hydra", base, seed=1), head, base=base)
    assert computed() == ["HydraHead"], "other weights of the head"
    weights = load_file(model / "model.safetensors")
    changed = "model.layers.0.mlp.down_proj.weight"  # not in the fingerprints by which a head knows its base model
    save_file({**weights, changed: 1.5 * weights[changed]}, model / "model.safetensors", metadata={"format": "pt"})
    assert computed() == ["NoDraft", "HydraHead", "Lookahead"], "other weights of the model"


# --- what cannot be compared ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_nodes": 1}, "--num-nodes is 1: must be at least 2"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"num_speed_prompts": 2}, "--num-speed-prompts is 2: must be at least 3"),
        ({"num_sampled_prompts": 0}, "--num-sampled-prompts is 0: must be at least 3"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(InvalidSettings, match=words):
        replace(SETTINGS, **changes)


def test_at_least_three_prompts_are_needed():
    with pytest.raises(DataError, match="2 prompts: give at least 3"):
        draftheads.compare_heads("nowhere", ["medusa"], ["a", "b"])
