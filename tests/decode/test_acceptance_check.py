"""A head that gains far less than its profile expects is named once, between answers."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

import draftheads
from adapter_world import saved_adapter
from cli_world import PROMPTS, write_model
from draftheads.cli.main import main
from draftheads.decode.acceptance_check import AcceptanceCheck
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from draftheads.errors import BaseModelWarning
from draftheads.serve.scheduler import Job, Limits, Scheduler
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from families import TREES, PlantedDrafter, by_hand, tiny_model, tiny_profile

pytestmark = pytest.mark.usefixtures("one_thread", "cheap_nodes")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMISING = tiny_profile(TREES["ragged"], dynamic_tokens=[1.0, *[2.5] * 23])  # far more than an untrained head gains
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

# accepted and expected draft tokens of texts of the model that the heads were trained for: built-in prompts, answers of
# at most 96 tokens, on a machine where a node costs a fifth of a plain step
OWN = {
    "medusa": (
        *((0, 1.3), (10, 10.5), (16, 10.7), (0, 1.4), (0, 0.5), (0, 1.1), (3, 4.4), (15, 12.5), (0, 1.4), (2, 3.9)),
        *((13, 9.3), (4, 3.3), (37, 19.1), (1, 2.5), (1, 2.4), (20, 11.4), (0, 0.6), (1, 2.4), (7, 7.2), (27, 12.2)),
        *((0, 1.6), (2, 1.4), (7, 8.5), (40, 14.8), (9, 7.1), (1, 2.2), (14, 13.3), (16, 13.7), (1, 2.0), (2, 2.6)),
    ),
    "hydra": (
        *((11, 13.3), (21, 21.4), (34, 21.3), (12, 12.7), (38, 24.1), (12, 13.2), (34, 26.8), (17, 20.9), (1, 5.3)),
        *((6, 6.0), (49, 29.0), (26, 17.4), (26, 24.3), (40, 22.4), (11, 9.8), (2, 7.7), (2, 3.8), (14, 14.5)),
    ),
}


def loaded(place: Path, **options: Any) -> Engine:
    return draftheads.load(place / "model", place / "hydra", **FP32, **options)


@pytest.mark.parametrize("head", OWN)
def test_own_texts_are_never_warned_of_in_a_thousand_runs(head: str) -> None:
    """Each run draws 200 texts: easy and hard ones, and some in which nothing is accepted."""
    draws = np.random.default_rng(1)
    for _ in range(1000):
        check = AcceptanceCheck("", "", "")
        for text in draws.integers(len(OWN[head]), size=200).tolist():
            check.note(20, *OWN[head][text])
            assert check.problem() is None


def test_texts_that_accept_half_are_warned_of_in_at_most_one_of_a_hundred_runs() -> None:
    """The worst case: on average exactly half is accepted, of some texts nothing and of others all."""
    draws, num_warned = np.random.default_rng(2), 0
    for _ in range(1000):
        check = AcceptanceCheck("", "", "")
        for accepted in (4 * draws.integers(2, size=100)).tolist():
            check.note(10, accepted, 4.0)
        num_warned += check.problem() is not None
    assert num_warned <= 20


@pytest.mark.parametrize(("share", "num_texts"), [(0.0, 8), (0.1, 9), (0.2, 12)])
@pytest.mark.parametrize("expected", [4, 25])
def test_a_head_of_another_model_is_named_after_few_texts(share: float, num_texts: int, expected: int) -> None:
    draws, counts = np.random.default_rng(3), []
    for _ in range(100):
        check = AcceptanceCheck("", "", "")
        while check.problem() is None:
            check.note(20, int(draws.binomial(2 * expected, share / 2)), expected)
        counts.append(check.num_texts)
    assert abs(np.median(counts) - num_texts) <= 1
    assert max(counts) <= 3 * num_texts


def test_one_long_text_decides_nothing() -> None:
    """Its steps are alike: it may be in a language that the head does not know."""
    check = AcceptanceCheck("", "", "")
    check.note(4000, 0, 2000.0)
    assert check.problem() is None


def test_short_texts_are_put_together() -> None:
    check = AcceptanceCheck("", "", "")
    for accepted in [1, 0, 0, 2] * 10:  # half of what is expected, but each text nothing or all
        check.note(2, accepted, 1.5)
    assert check.against < 10
    assert check.num_texts == 40


def test_the_warning_names_both_numbers_and_the_fix_once(place: Path) -> None:
    engine = loaded(place, max_batch_size=1)
    expected = draftheads.load(place / "model", **FP32).generate(TEXTS, max_new_tokens=40)
    with pytest.warns(BaseModelWarning) as said:
        found = engine.generate(TEXTS, max_new_tokens=40)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len(said) == 1
    check = engine.check
    assert check.num_texts == len(TEXTS)
    measured, promised = (1 + count / check.num_steps for count in (check.accepted, check.expected))
    words = str(said[0].message)
    assert f"{measured:.2f} tokens per step with {place / 'model'}" in words
    assert f"its acceptance profile expects {promised:.2f} (16 texts" in words
    fix = f"draftheads train --method hydra --start-from {place / 'hydra'} --model {place / 'model'} --data"
    assert f"`{fix} … --out …`" in words
    engine.generate(TEXTS, max_new_tokens=40)


def test_a_warning_that_is_an_error_ends_no_step(place: Path) -> None:
    """Warnings are errors here. The answers are whole before it is raised, and the engine goes on."""
    engine = loaded(place, max_batch_size=2)
    requests = engine.requests(TEXTS, max_new_tokens=40)
    with pytest.raises(BaseModelWarning):
        list(engine.run(requests))
    assert all(len(request.token_ids) == 40 for request in requests)
    assert len(engine.generate(TEXTS[:1], max_new_tokens=5)[0].token_ids) == 5


def test_nothing_is_said_while_an_answer_is_shown(place: Path) -> None:
    engine = loaded(place)
    engine.check.against = 1e6
    stream = engine.stream("a dog", max_new_tokens=40)
    events = [next(stream)]
    while events[-1].finish_reason is None:
        events.append(next(stream))
    with pytest.warns(BaseModelWarning):
        assert next(stream, None) is None


def test_the_server_logs_it(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning that is an error would end the thread that decodes."""
    engine = loaded(place)
    for _ in range(8):
        engine.check.note(20, 0, 9.0)
    caplog.set_level("WARNING", "draftheads")
    scheduler = Scheduler({"": engine}, Limits(kv_bytes=1 << 30))
    scheduler.start()
    try:
        for _ in range(2):
            events: Queue[Any] = Queue()
            (request,) = engine.requests(["a dog"], max_new_tokens=9)
            scheduler.submit(Job(request, Lane(""), "", events.put))
            while events.get(timeout=60).finish_reason is None:
                pass
    finally:
        scheduler.close(drain_seconds=0)
    assert len([line for line in caplog.messages if "tokens per step with" in line]) == 1


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5, "seed": 3}, {"repetition_penalty": 1.5}, {"logit_bias": ((7, 2.0),)}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_than_the_profile_s_do_not_count(place: Path, settings: dict[str, Any]) -> None:
    engine = loaded(place)
    engine.generate(PROMPTS[:4], max_new_tokens=30, **settings)
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
    engine = Engine(model, drafter, profile=profile, costs=CHEAP, check=check)
    engine.generate(prompts, max_new_tokens=120, ignore_eos=True)
    assert check.num_steps + check.accepted >= 200
    assert check.expected == pytest.approx(1.5 * check.num_steps)
    assert check.against < 0.1


def test_nothing_is_compared_with_a_profile_that_was_not_measured_on_greedy_answers(
    place: Path, tmp_path: Path
) -> None:
    assert loaded(place, tree="static:10").check is None
    for profile in (AcceptanceProfile.assumed(3), tiny_profile(TREES["ragged"], temperature=0.7)):
        profile.save(tmp_path / "acceptance.json")
        assert loaded(place, tree=tmp_path).check is None


def test_an_adapter_is_compared_on_its_own(place: Path, tmp_path: Path) -> None:
    engine = draftheads.load(place / "model", place / "hydra", **FP32, fast=False)
    adapter = saved_adapter(engine.model, tmp_path / "adapter", targets=("q_proj",))
    engine.check.against = 1e6
    with pytest.warns(BaseModelWarning):
        engine.generate(PROMPTS[:2], max_new_tokens=20)
    adapted = engine.with_adapter(adapter)
    assert adapted.check.against == 1.0
    with pytest.warns(BaseModelWarning, match=f"with {adapter}, and .*--start-from .*hydra --model {adapter}"):
        adapted.generate(TEXTS, max_new_tokens=40)


def test_the_command_line_warns_in_one_line_after_the_answers(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8")
    arguments = ["generate", "--prompts", str(tmp_path / "a.jsonl"), "--batch-size", "1"]
    arguments += ["--model", str(place / "model"), "--head", str(place / "hydra")]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*arguments, "--max-new-tokens", "40", "--precision", "fp32"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert said[0].startswith(f"warning: {place / 'hydra'} gives 1.")
