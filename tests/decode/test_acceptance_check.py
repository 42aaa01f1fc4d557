"""A head that gains far less than its profile expects is named once, between answers."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftheads
from adapter_world import saved_adapter
from cli_world import PROMPTS, write_model
from draftheads.cli.main import main
from draftheads.decode.acceptance_check import AcceptanceCheck
from draftheads.decode.engine import Engine
from draftheads.errors import BaseModelWarning
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from families import TREES, PlantedDrafter, by_hand, tiny_model, tiny_profile
from scheduler_world import join

pytestmark = pytest.mark.usefixtures("one_thread", "cheap_nodes")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMISING = tiny_profile(TREES["ragged"], dynamic_tokens=[1.0, *[2.5] * 23])  # far more than an untrained head gains
CHEAP = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 33, 10.5), ("static", 1, 2, 0.01)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and heads that promise too much."""
    return write_model(tmp_path_factory.mktemp("promising"), profile=PROMISING)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BaseModelWarning)
        yield


def loaded(place: Path, **options: Any) -> Engine:
    return draftheads.load(place / "model", place / "hydra", **FP32, **options)


def test_the_warning_names_both_numbers_and_the_fix_once(place: Path) -> None:
    engine = loaded(place)
    prompts = PROMPTS[:4]
    expected = draftheads.load(place / "model", **FP32).generate(prompts, max_new_tokens=60)
    with pytest.warns(BaseModelWarning) as said:
        found = engine.generate(prompts, max_new_tokens=60)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len(said) == 1
    check = engine.check
    assert check.num_steps + check.accepted >= 200
    measured, promised = (1 + count / check.num_steps for count in (check.accepted, check.expected))
    words = str(said[0].message)
    assert f"{measured:.2f} tokens per step with {place / 'model'}" in words
    assert f"its acceptance profile expects {promised:.2f} ({check.num_steps + check.accepted} tokens" in words
    fix = f"draftheads train --method hydra --start-from {place / 'hydra'} --model {place / 'model'} --data"
    assert f"`{fix} … --out …`" in words
    engine.generate(prompts, max_new_tokens=60)


def test_200_tokens_of_several_answers_are_needed(place: Path) -> None:
    engine = loaded(place)
    for _ in range(3):
        engine.generate(PROMPTS[:1], max_new_tokens=50)
    with pytest.warns(BaseModelWarning):
        engine.generate(PROMPTS[:1], max_new_tokens=150)


def test_nothing_is_said_while_an_answer_is_shown(place: Path) -> None:
    stream = loaded(place).stream("a dog", max_new_tokens=400)
    events = [next(stream)]
    while events[-1].finish_reason is None:
        events.append(next(stream))
    with pytest.warns(BaseModelWarning):
        assert next(stream, None) is None


def test_a_batch_says_it_before_the_next_prompt(place: Path) -> None:
    engine = loaded(place)
    batch = engine.batch()
    join(batch, engine.requests(["a dog"], max_new_tokens=400))
    while batch.requests:
        batch.step()
    join(batch, engine.requests(["ice"], max_new_tokens=4))
    with pytest.warns(BaseModelWarning):
        batch.step()


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5, "seed": 3}, {"repetition_penalty": 1.5}, {"logit_bias": ((7, 2.0),)}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_than_the_profile_s_do_not_count(place: Path, settings: dict[str, Any]) -> None:
    engine = loaded(place)
    engine.generate(PROMPTS, max_new_tokens=60, **settings)
    assert engine.check == AcceptanceCheck("hydra", str(place / "hydra"), str(place / "model"))


def test_rows_of_other_settings_in_the_same_batch_do_not_count(place: Path) -> None:
    engine = loaded(place)
    settings = [draftheads.SamplingSettings(max_new_tokens=20, temperature=t, seed=1) for t in (0.0, 0.9)]
    greedy, _ = engine.generate(PROMPTS[:2], settings)
    assert 0 < engine.check.num_steps <= greedy.num_steps


def test_a_profile_that_is_kept_is_not_warned_of() -> None:
    """The drafter plants plain decoding's answer: all its draft tokens are accepted."""
    model = tiny_model("llama")
    prompts = [(5, 6, 7), (8, 9, 4, 3)]
    answers = Engine(model).generate(prompts, max_new_tokens=120, ignore_eos=True)
    chain = Tree.chain(3)
    drafter = PlantedDrafter(chain, dict(zip(prompts, (one.token_ids for one in answers), strict=True)))
    profile = tiny_profile(chain, static_tokens=[1.0, 1.5, 2.0, 2.5], dynamic_tokens=[])
    check = AcceptanceCheck("planted", "planted", "tiny")
    engine = Engine(model, drafter, profile=profile, cost=CHEAP, check=check)
    engine.generate(prompts, max_new_tokens=120, ignore_eos=True)
    assert check.num_steps + check.accepted >= 200
    assert check.expected == pytest.approx(1.5 * check.num_steps)


@pytest.mark.parametrize(("accepted", "is_said"), [(45, True), (55, False)])
def test_half_of_the_expected_draft_tokens_is_little(accepted: int, is_said: bool) -> None:
    check = AcceptanceCheck("hydra", "hydra", "tiny")
    check.note(180, accepted, 100.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check.warn()
    assert bool(said) == is_said


def test_nothing_is_compared_with_a_profile_that_was_not_measured_on_greedy_answers(
    place: Path, tmp_path: Path
) -> None:
    assert loaded(place, profile=None).check is None
    for profile in (AcceptanceProfile.assumed(3), tiny_profile(TREES["ragged"], temperature=0.7)):
        profile.save(tmp_path / "acceptance.json")
        assert loaded(place, profile=tmp_path).check is None


def test_an_adapter_is_compared_on_its_own(place: Path, tmp_path: Path) -> None:
    engine = draftheads.load(place / "model", place / "hydra", **FP32, fast=False)
    adapter = saved_adapter(engine.model, tmp_path / "adapter", targets=("q_proj",))
    with pytest.warns(BaseModelWarning):
        engine.generate(PROMPTS, max_new_tokens=60)
    adapted = engine.with_adapter(adapter)
    with pytest.warns(BaseModelWarning, match=f"with {adapter}, and .*--start-from .*hydra --model {adapter}"):
        adapted.generate(PROMPTS, max_new_tokens=60)


def test_the_command_line_warns_in_one_line_after_the_answer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "a dog", "--model", str(place / "model"), "--head", str(place / "hydra")]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*arguments, "--max-new-tokens", "400", "--precision", "fp32"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert said[0].startswith(f"warning: {place / 'hydra'} gives 1.")
