"""A head that gains far less than its profile expects is named once, between answers."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn import functional as F

import draftheads
from adapter_world import saved_adapter
from cli_world import PROMPTS, write_model
from draftheads.decode.engine import Engine
from draftheads.decode.planner import AcceptanceCheck, CostCorrection
from draftheads.errors import BaseModelWarning
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Draft
from draftheads.speculation.drafter import Context
from draftheads.speculation.shapes import Shape
from draftheads.speculation.tree import Tree
from families import TREES, PlantedDrafter, by_hand, tiny_model, tiny_profile
from scheduler_world import run_to_end, scheduler_of, submit

pytestmark = pytest.mark.usefixtures("one_thread", "cheap_nodes")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMISING = tiny_profile(TREES["ragged"], dynamic_tokens=[1.0, *[2.5] * 23])  # far more than an untrained head gains
SLOW = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 33, 500.0), ("static", 1, 1, 500.0)])
CHEAP = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 33, 10.5), ("static", 1, 1, 0.01)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and heads that promise too much."""
    return write_model(tmp_path_factory.mktemp("promising"), profile=PROMISING)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "draftheads.decode.planner.CostCorrection", lambda: None
    )  # what is drafted depends on tokens only
    with warnings.catch_warnings():
        warnings.simplefilter("error", BaseModelWarning)
        yield


TEXTS = [f"{first} {second}" for first in PROMPTS[:4] for second in ("bad", "dog", "ice", "kin")]

# accepted and expected draft tokens of Medusa in texts of the model that it was trained for: built-in prompts, answers
# of at most 96 tokens, on a machine where a node costs a fifth of a plain step
OWN = [
    *((0, 1.3), (10, 10.5), (16, 10.7), (0, 1.4), (0, 0.5), (0, 1.1), (3, 4.4), (15, 12.5), (0, 1.4), (2, 3.9)),
    *((13, 9.3), (4, 3.3), (37, 19.1), (1, 2.5), (1, 2.4), (20, 11.4), (0, 0.6), (1, 2.4), (7, 7.2), (27, 12.2)),
    *((0, 1.6), (2, 1.4), (7, 8.5), (40, 14.8), (9, 7.1), (1, 2.2), (14, 13.3), (16, 13.7), (1, 2.0), (2, 2.6)),
]


def loaded(place: Path, **options: Any) -> Engine:
    return draftheads.load(place / "model", place / "hydra", **FP32, **options)


def test_own_texts_are_never_warned_of_in_a_hundred_runs() -> None:
    """Each run draws 200 texts of 20 steps: easy and hard ones, and some in which nothing is accepted."""
    draws = np.random.default_rng(1)
    for _ in range(100):
        check = AcceptanceCheck("", "", "")
        for text in draws.integers(len(OWN), size=200).tolist():
            check.steps.extend([OWN[text], *[(0, 0.0)] * 19])
            assert check.problem() is None


@pytest.mark.parametrize(("share", "is_named"), [(0.0, True), (0.3, True), (0.7, False), (1.0, False)])
def test_a_head_of_another_model_is_named_and_an_unusual_text_is_not(share: float, is_named: bool) -> None:
    draws, check = np.random.default_rng(3), AcceptanceCheck("", "", "")
    for _ in range(24):
        check.steps.append((0, 2.0))
    assert check.problem() is None, "so few tokens decide nothing"
    for _ in range(500):
        check.steps.append((int(draws.binomial(4, share / 2)), 2.0))
    assert (check.problem() is not None) == is_named
    assert check.problem() is None, "it is said once"


def test_the_warning_names_both_numbers_and_the_fix_once(place: Path) -> None:
    engine = loaded(place, max_batch_size=1)
    expected = draftheads.load(place / "model", **FP32).generate(TEXTS, max_new_tokens=40)
    with pytest.warns(BaseModelWarning) as said:
        found = engine.generate(TEXTS, max_new_tokens=40)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len(said) == 1
    check = engine.check
    accepted, expected_tokens = map(sum, zip(*check.steps, strict=True))
    measured, promised = (1 + count / len(check.steps) for count in (accepted, expected_tokens))
    words = str(said[0].message)
    assert f"{measured:.2f} tokens per step with {place / 'model'}" in words
    assert f"its acceptance profile expects {promised:.2f} (the last {len(check.steps)} steps" in words
    fix = f"draftheads train --method hydra --start-from {place / 'hydra'} --model {place / 'model'} --data"
    assert f"`{fix} … --out …`" in words
    engine.generate(TEXTS, max_new_tokens=40)


def test_nothing_is_said_while_an_answer_is_shown(place: Path) -> None:
    engine = loaded(place)
    engine.check.steps.append((0, 1e6))
    stream = engine.stream("a dog", max_new_tokens=40)
    while next(stream).finish_reason is None:
        pass
    with pytest.warns(BaseModelWarning):
        assert next(stream, None) is None


def test_the_server_logs_it(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning that is an error would end the thread that decodes."""
    engine = loaded(place)
    engine.check.steps.append((0, 72.0))
    caplog.set_level("WARNING", "draftheads")
    scheduler = scheduler_of({"": engine})
    for _ in range(2):
        submit(scheduler, [5, 6])
        run_to_end(scheduler)
    assert len([line for line in caplog.messages if "tokens per step with" in line]) == 1


def test_rows_of_other_settings_than_the_profile_s_do_not_count(place: Path) -> None:
    engine = loaded(place)
    others = [{"temperature": 0.9, "seed": 1}, {"repetition_penalty": 1.5}, {"logit_bias": ((7, 2.0),)}]
    settings = [draftheads.SamplingSettings(max_new_tokens=20, **own) for own in ({}, *others)]
    greedy, *_ = engine.generate(PROMPTS[:4], settings)
    assert 0 < len(engine.check.steps) <= greedy.num_steps


def test_a_profile_that_is_kept_is_not_warned_of() -> None:
    """The drafter plants plain decoding's answer: all its draft tokens are accepted."""
    model = tiny_model("llama")
    prompts = [(5, 6, 7), (8, 9, 4, 3)]
    answers = Engine(model).generate(prompts, max_new_tokens=120, ignore_eos=True)
    chain = Tree.chain(3)
    drafter = PlantedDrafter(chain, dict(zip(prompts, (one.token_ids for one in answers), strict=True)))
    profile = tiny_profile(chain, static_tokens=[1.0, 1.5, 2.0, 2.5], dynamic_tokens=[])
    check = AcceptanceCheck("planted", "planted", "tiny")
    engine = Engine(model, drafter, profile=profile, costs=CHEAP, check=check)
    engine.generate(prompts, max_new_tokens=120, ignore_eos=True)
    accepted, expected = map(sum, zip(*check.steps, strict=True))
    assert len(check.steps) + accepted >= 200
    assert expected == pytest.approx(1.5 * len(check.steps))
    assert accepted > 0.9 * expected


def test_fixed_trees_and_profiles_of_sampled_answers_are_not_compared(place: Path, tmp_path: Path) -> None:
    tiny_profile(TREES["ragged"], temperature=0.7).save(tmp_path / "acceptance.json")
    for tree in ("static:10", tmp_path):
        engine = loaded(place, tree=tree)
        engine.generate(TEXTS[:2], max_new_tokens=8)
        assert engine.check.drafts
        assert not engine.check.steps


class Useless(PlantedDrafter):
    """Drafts a token that is banned."""

    def propose(self, context: Context, shape: Shape) -> Draft:
        assert isinstance(shape, Tree)
        return Draft.on_tree(shape, F.pad(context.root_ids[:, None], (0, shape.num_nodes - 1)))


@pytest.mark.parametrize("how", ["fixed tree", "profile of sampled answers", "assumed profile", "plain is faster"])
def test_a_useless_head_is_named_after_500_steps_whatever_its_profile(how: str) -> None:
    chain = Tree.chain(3)
    check, drafter = AcceptanceCheck("eagle3", "useless", "tiny"), Useless(chain, {})
    options: dict[str, Any] = {"costs": SLOW if how == "plain is faster" else CHEAP}
    if how == "fixed tree":
        options = {"shape": chain}
    elif how == "profile of sampled answers":
        options["profile"] = tiny_profile(chain, temperature=0.7, dynamic_tokens=[])
    else:
        options["profile"] = AcceptanceProfile.assumed(3)
    engine = Engine(tiny_model("llama"), drafter, check=check, **options)
    if engine.planner is not None and how == "plain is faster":
        engine.planner.correction = CostCorrection()
    settings = {"temperature": 0.8, "seed": 1, "logit_bias": ((0, -100.0),), "ignore_eos": True}
    for _ in range(3):  # 360 steps of four rows
        engine.generate([[5, 6], [7, 8], [9], [4]], max_new_tokens=31, **settings)
    assert check.num_steps == 360
    with pytest.warns(BaseModelWarning, match=r"useless gives 1\.00 tokens per step with tiny \(its last \d+ drafts"):
        engine.generate([[5, 6], [7, 8], [9], [4]] * 2, max_new_tokens=31, **settings)


def test_a_head_whose_profile_is_assumed_and_drafts_nothing_right_is_named(place: Path, tmp_path: Path) -> None:
    """As an imported head whose layers were read wrongly."""
    AcceptanceProfile.assumed(3).save(tmp_path / "acceptance.json")
    engine = loaded(place, tree=tmp_path)
    with pytest.warns(BaseModelWarning, match=r"hydra gives 1\.\d\d tokens per step .* a head is assumed to give 1\."):
        engine.generate(TEXTS[:6], max_new_tokens=24)


def test_an_adapter_is_compared_on_its_own(place: Path, tmp_path: Path) -> None:
    engine = draftheads.load(place / "model", place / "hydra", **FP32, fast=False)
    adapter = saved_adapter(engine.model, tmp_path / "adapter", targets=("q_proj",))
    engine.check.steps.append((0, 1e6))
    with pytest.warns(BaseModelWarning):
        engine.generate(PROMPTS[:2], max_new_tokens=20)
    adapted = engine.with_adapter(adapter)
    assert not adapted.check.steps
    with pytest.warns(BaseModelWarning, match=f"with {adapter}, and .*--start-from .*hydra --model {adapter}"):
        adapted.generate(TEXTS, max_new_tokens=40)
