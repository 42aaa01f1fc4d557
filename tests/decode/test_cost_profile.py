"""Cost profiles: lines between measurements, measuring in time, and the cache."""

import json
import re
import warnings
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.cpu.threads import ThreadChoice
from draftheads.decode import cost_profile as module
from draftheads.decode.cost_profile import CostPoint, CostProfile, cost_key, cost_of, measure_cost, read_cost
from draftheads.decode.step_timer import StepTimer, typical_tree, wait_for
from draftheads.errors import CacheWarning, CheckpointError, SpeedWarning
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.utils.machine import OtherPrograms
from fake_cuda import GPU, FakeCuda
from families import by_hand, tiny_head, tiny_model
from thorough import some_rows

ALL = 1000.0  # cores
slowdown_itself = module.slowdown
COST = by_hand(
    [
        ("verify", 1, 1, 10.0),
        ("verify", 1, 5, 18.0),
        ("verify", 4, 1, 19.0),
        ("verify", 4, 3, 35.0),
        ("follow", 1, 1, 0.5),
        ("static", 1, 3, 2.0),
        ("static", 1, 5, 4.0),
        ("dynamic", 1, 4, 6.0),
    ]
)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def head(target: TargetModel) -> DraftHead:
    return tiny_head("medusa", target)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- between measurements ---


@pytest.mark.parametrize(
    ("rows", "nodes", "milliseconds"),
    [
        (1, 1, 10.0),
        (1, 3, 14.0),
        (1, 7, 22.0),
        (4, 1, 19.0),
        (4, 3, 35.0),
        (2, 1, 12.0 + 1.0),  # a third of what four rows add
        (2, 3, 20.0 + 1.0),
        (3, 1, 14.0 + 2.0),
        (4, 5, 51.0),  # by the last slope
        (7, 1, 22.0 + 6.0),
    ],
)
def test_verifying_between_and_beyond_what_was_measured(rows: int, nodes: int, milliseconds: float) -> None:
    assert COST.verify(rows, nodes) == pytest.approx(milliseconds)


def test_between_numbers_of_rows_the_number_of_tokens_counts() -> None:
    """Up to 8 tokens cost nothing more, later ones compute, and each row costs something."""

    def truth(rows: int, nodes: int) -> float:
        return 20.0 + 3.0 * max(0, rows * nodes - 8) + 0.5 * (rows - 1)

    places = [*((1, n) for n in (1, 4, 8, 16, 32)), *((4, n) for n in (1, 2, 4)), *((16, n) for n in (1, 2, 4))]
    between = [(rows, nodes) for rows in (1, 2, 3, 6, 8, 12, 16) for nodes in (1, 2, 3, 4)]
    cost = by_hand([("verify", *place, truth(*place)) for place in places])
    # what disturbs a measurement adds, and other points of as many tokens or rows correct it
    for disturbed in ((1, 4), (1, 16), (4, 1), (4, 2), (4, 4), (16, 1), (16, 2)):
        other = by_hand([("verify", *place, truth(*place) * (1 + 0.4 * (place == disturbed))) for place in places])
        for rows, nodes in between:
            assert cost.verify(rows, nodes) == pytest.approx(truth(rows, nodes))
            assert other.verify(rows, nodes) == pytest.approx(truth(rows, nodes)), disturbed
    few = by_hand([("verify", *place, truth(*place)) for place in places if place[0] == 1 or place[1] == 1])
    for rows, nodes in between:
        assert few.verify(rows, nodes) == pytest.approx(truth(rows, nodes)), "one point of many rows is enough"


def test_drafting_and_following() -> None:
    assert COST.draft("static", 1, 2) == COST.draft("static", 8, 3) == 2.0
    assert COST.draft("static", 1, 4) == 3.0
    assert COST.draft("static", 1, 7) == 6.0
    assert COST.draft("dynamic", 1, 9) == 6.0
    assert COST.follow(3) == 0.5
    bare = by_hand([("verify", 1, 1, 10.0), ("static", 1, 2, 1.0)])
    assert (bare.draft("dynamic", 1, 5), bare.follow(1)) == (1.0, 0.0), "what was not measured is as the nearest kind"


def test_each_level_of_a_tree_costs_as_much_as_the_others() -> None:
    cost = CostProfile(
        (
            CostPoint("verify", 1, 1, 10.0),
            CostPoint("static", 1, 2, 3.0, depth=1),
            CostPoint("dynamic", 1, 2, 2.0, depth=1),
            CostPoint("dynamic", 1, 8, 6.0, depth=3),  # 2 for each further level
            CostPoint("dynamic", 1, 24, 18.0, depth=5),  # 4 for each
            CostPoint("dynamic", 5, 4, 9.0, depth=3),  # 3 for each, the first, too
        )
    )
    for nodes, depth, milliseconds in ((2, 1, 2.0), (8, 3, 6.0), (24, 5, 18.0)):
        assert cost.draft("dynamic", 1, nodes, depth) == cost.draft("dynamic", 1, nodes) == milliseconds
    assert cost.draft("dynamic", 1, 8, 6) == 12.0
    assert cost.draft("dynamic", 1, 24, 1) == 2.0
    assert cost.draft("dynamic", 1, 16, 2) == 5.0
    assert cost.draft("dynamic", 5, 4, 1) == cost.draft("dynamic", 5, 24, 1) == 3.0
    assert cost.draft("dynamic", 9, 24, 1) == 4.0, "the line over rows goes on"
    assert cost.draft("dynamic", 5, 4, 4) == 12.0
    assert cost.draft("dynamic", 3, 8, 2) == (4.0 + 6.0) / 2
    assert cost.draft("static", 1, 8, 2) == 6.0, "nothing is known of a second level"
    assert cost.draft("dynamic", 1, 1, 0) == 0.0
    assert COST.draft("static", 1, 4, 9) == 3.0, "where the depth is not known, it does not count"
    tired = CostProfile((*cost.points[:3], CostPoint("dynamic", 1, 8, 1.0, depth=3)))
    assert tired.draft("dynamic", 1, 8, 6) == 2.0, "no level costs less than nothing"


@pytest.mark.parametrize(("method", "depth"), [("hydra", 3), ("medusa", 3), ("eagle", 5), ("small-llama", 5)])
def test_drafting_is_measured_with_known_depths(target: TargetModel, method: str, depth: int) -> None:
    """Heads without a limit are measured deeper than they were trained."""
    head = tiny_head(method, target)
    found = fake(target, head, linear)
    depths = {(point.part, point.nodes): point.depth for point in found.points}
    assert [depths["dynamic", nodes] for nodes in (2, 5, 8, 24)] == [1, min(4, depth), depth, depth]
    assert [depths["static", nodes] for nodes in (2, 24)] == [1, depth]
    assert {point.depth for point in found.points if point.part in ("verify", "follow")} == {None}
    timer = StepTimer(target, head)
    for part, nodes in (("static", 24), ("dynamic", 24), ("dynamic", 2)):
        draft = timer._drafter(2).propose(timer._context(2, 1), timer._shape(part, nodes))
        assert draft.max_depth == timer.depth_of(part, nodes)


def test_with_one_row_measured_several_rows_are_as_many_nodes() -> None:
    one = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 9, 26.0)])
    assert one.verify(4, 2) == one.verify(1, 8) == 24.0


points = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 3, 8, 20]), st.floats(0.1, 100.0)),
    max_size=14,
    unique_by=lambda point: point[:2],
)


@given(points, points, st.integers(1, 40), st.integers(1, 70), st.integers(0, 4000))
@settings(max_examples=200, deadline=None)
def test_more_rows_nodes_or_text_never_cost_less(
    found: list[tuple[int, int, float]], long: list[tuple[int, int, float]], rows: int, nodes: int, text: int
) -> None:
    others = [("verify", *point) for point in found if point[:2] != (1, 1)]
    cost = by_hand([("verify", 1, 1, 7.0), *others, *(("verify", *point, 1024) for point in long)])
    here = cost.verify(rows, nodes, text)
    assert cost.verify(rows, nodes + 1, text) >= here - 1e-9
    assert cost.verify(rows + 1, nodes, text) >= here - 1e-9
    assert cost.verify(rows, nodes, text + 100) >= here - 1e-9


def test_a_profile_comes_back(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(COST.to_json())
    assert read_cost(tmp_path / "cost.json") == COST


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 99},
        {"points": [{"part": "verify", "rows": 1, "nodes": 1}]},
        {"points": [{"part": "sleep", "rows": 1, "nodes": 1, "milliseconds": 1.0}]},
        {"points": [{"part": "verify", "rows": 1, "nodes": 1, "milliseconds": -1.0}]},
        {"points": [{"part": "verify", "rows": 0, "nodes": 1, "milliseconds": 1.0}]},
        {"points": [{"part": "verify", "rows": 1, "nodes": 2, "milliseconds": 1.0}]},
        {"points": []},
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({**json.loads(COST.to_json()), **change}))
    with pytest.raises((CheckpointError, ValueError)):
        read_cost(tmp_path / "cost.json")


# --- measuring ---


class FakeTimer(StepTimer):
    """A machine whose parts take what a function says; nothing is computed."""

    cost: Callable[[str, int, int], float] = staticmethod(lambda part, rows, nodes: 1.0)
    asked: list[tuple[str, int, int]]
    clock = 0.0

    def __init__(self, target: TargetModel, drafter: DraftHead) -> None:
        super().__init__(target, drafter)
        type(self).asked = []
        type(self).clock = 0.0

    @property
    def now(self) -> float:
        return self.clock

    def milliseconds(self, part: str, rows: int, nodes: int, *, text_tokens: int | None = None) -> float:
        spent = float(type(self).cost(part, rows, nodes)) + 0.001 * rows * nodes * ((text_tokens or 256) - 256)
        type(self).clock += spent / 1e3
        self.asked.append((part, rows, nodes))
        return spent


def fake(target: TargetModel, head: DraftHead, cost: Callable[[str, int, int], float], **options: Any) -> CostProfile:
    FakeTimer.cost = staticmethod(cost)
    return measure_cost(target, head, timer_class=FakeTimer, **{"budget_seconds": 5.0, **options})


@pytest.mark.parametrize(("step", "least", "most"), [(5.0, 0.5, 1.0), (60.0, 1.0, 2.4), (900.0, 2.5, 6.0)])
def test_measuring_takes_about_as_long_as_loading(
    target: TargetModel, head: DraftHead, step: float, least: float, most: float
) -> None:
    fake(target, head, lambda *_: step, budget_seconds=None)
    assert least <= FakeTimer.clock <= most


def linear(part: str, rows: int, nodes: int) -> float:
    return 20.0 + rows * nodes if part == "verify" else 2.0


def test_a_fast_machine_is_measured_at_every_point(target: TargetModel, head: DraftHead) -> None:
    found = fake(target, head, linear)
    verified = {(point.rows, point.nodes) for point in found.points if point.part == "verify"}
    assert verified == {
        *((1, nodes) for nodes in (1, 4, 8, 12, 16, 24, 32, 48, 64)),
        *((4, nodes) for nodes in (1, 2, 4, 8, 16)),
        *((16, nodes) for nodes in (1, 2, 4)),
    }
    assert {point.part for point in found.points} == {"verify", "follow", "static", "dynamic"}
    for rows, nodes in ((1, 10), (4, 6), (8, 3), (16, 4)):
        assert found.verify(rows, nodes) == pytest.approx(20.0 + rows * nodes)
    assert max(FakeTimer.asked.count(one) for one in FakeTimer.asked) == 8, "four sweeps of two timings"


@pytest.mark.parametrize("slowness", [1.0, 5.0, 20.0, 100.0, 700.0])
def test_measuring_ends_in_time_and_begins_with_what_decides(
    target: TargetModel, head: DraftHead, slowness: float
) -> None:
    found = fake(target, head, lambda *place: slowness * linear(*place))
    assert FakeTimer.clock <= 5.0 + 1e-9 or len(found.points) == 2
    verified = [(point.rows, point.nodes) for point in found.points if point.part == "verify"]
    assert {(1, 1), (1, 8)} <= set(verified)
    assert found.verify(1, 8) == pytest.approx(28.0 * slowness)


def test_sizes_that_can_never_be_faster_are_left_out(target: TargetModel, head: DraftHead) -> None:
    """Three heads: four tokens in a step at most, so what costs more is never faster."""
    found = fake(target, head, lambda part, rows, nodes: 10.0 * rows * nodes if part == "verify" else 1.0)
    assert max(point.nodes for point in found.points if (point.part, point.rows) == ("verify", 1)) == 8


def test_verifying_is_also_measured_after_a_long_text(head: DraftHead) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    found = fake(model, head, linear)
    long = [(point.rows, point.nodes) for point in found.points if point.text_tokens == 1024]
    assert long == [(1, 1), (1, 8), (4, 1), (4, 4), (16, 1), (16, 2)]
    assert FakeTimer.clock <= 5.0
    for rows, nodes in ((1, 4), (4, 3), (16, 2), (32, 1)):
        short = found.verify(rows, nodes)
        assert found.verify(rows, nodes, 256) == short
        assert found.verify(rows, nodes, 640) == pytest.approx(short + 0.001 * rows * nodes * 384)


def test_a_long_text_that_needs_too_much_memory_is_not_measured(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONG_TEXT_BYTES", 4 * 1024 * 10)
    monkeypatch.setattr(
        FakeTimer, "bytes_per_token", property(lambda self: 10, lambda self, value: None), raising=False
    )
    found = fake(tiny_model("llama", max_position_embeddings=2048), head, linear)
    assert {point.rows for point in found.points if point.text_tokens == 1024} == {1, 4}


def test_a_single_outlier_does_not_count(target: TargetModel, head: DraftHead) -> None:
    found = fake(target, head, lambda *place: linear(*place) * (20 if FakeTimer.asked.count(place) == 0 else 1))
    assert found.verify(1, 4) == pytest.approx(24.0)


@pytest.mark.parametrize(
    ("family", "method"),
    some_rows(
        product(["llama", "gpt2", "gemma3_text"], ["medusa", "hydra", "eagle3", "small-llama"]),
        *[("gpt2", "medusa"), ("gemma3_text", "eagle3")],
    ),
)
def test_real_steps_are_measured(family: str, method: str) -> None:
    """Also of a model that knows few positions, and heads that read all of the text."""
    model = tiny_model(family)
    head = tiny_head(method, model)
    found = measure_cost(model, head, budget_seconds=600.0)  # all points, also on a busy machine
    assert all(point.milliseconds > 0 for point in found.points)
    assert {point.part for point in found.points} == {"verify", "follow", "static", "dynamic"}


def test_a_point_above_the_others_is_lowered() -> None:
    cost = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 4, 14.0), ("verify", 1, 8, 14.0), ("verify", 1, 16, 22.0)])
    assert [cost.verify(1, nodes) for nodes in (1, 8, 16)] == [10.0, 14.0, 22.0]
    assert cost.verify(1, 4) == pytest.approx(10.0 + 3 * 4 / 7)
    assert by_hand([("verify", 1, 1, 12.0), ("verify", 1, 4, 10.0)]).verify(1, 1) == 10.0


def test_a_draft_is_timed_after_a_pass_of_the_model(
    target: TargetModel, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the decoding loop the model's weights have driven the head's from the caches."""
    timer = StepTimer(target, head)
    timer.milliseconds("static", 1, 3)
    passes: list[int] = []
    logits = TargetModel.logits
    monkeypatch.setattr(TargetModel, "logits", lambda self, hidden: passes.append(1) or logits(self, hidden))
    timer.milliseconds("static", 1, 3)
    assert passes == [1]


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_drafting_is_timed_with_all_levels(target: TargetModel, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a level would seem cheap where arbitrary text makes a head unsure."""
    drafter = tiny_head("eagle", target, num_heads=3)
    timer, levels = StepTimer(target, drafter), []
    descend = type(drafter).descend

    def counted(self: Any, state: Any, depth: int, parents: Any, token_ids: Any) -> Any:
        levels.append(depth)
        return descend(self, state, depth, parents, token_ids)

    monkeypatch.setattr(type(drafter), "descend", counted)
    timer.milliseconds("dynamic", 1, nodes)
    depth = timer.depth_of("dynamic", nodes)
    assert levels == list(range(depth - 1))


def test_typical_trees_hang_together() -> None:
    for nodes in range(1, 65):
        assert typical_tree(nodes, depth=4, top_k=4).num_nodes == nodes
    assert typical_tree(64, depth=1, top_k=3).num_nodes == 4


# --- the cache ---


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[CostProfile]:
    """What was measured, instead of measuring."""
    found: list[CostProfile] = []

    def measure(*_: Any, **__: Any) -> CostProfile:
        found.append(by_hand([("verify", 1, 1, 10.0 + len(found))]))
        return found[-1]

    monkeypatch.setattr(module, "measure_cost", measure)
    return found


def test_it_is_measured_once(target: TargetModel, head: DraftHead, cache: Path, measured: list[CostProfile]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cost_of(target, head) == cost_of(target, head) == measured[0]
    assert len(measured) == 1
    assert (cache / "costs" / f"{cost_key(target, head)}.json").is_file()


def test_what_speeds_depend_on_is_in_the_key(target: TargetModel, head: DraftHead) -> None:
    others = [
        cost_key(tiny_model("llama", intermediate_size=64), head),
        cost_key(tiny_model("llama", dtype=torch.bfloat16), head),
        cost_key(tiny_model("qwen2"), head),
        cost_key(target, tiny_head("hydra", target)),
        cost_key(target, tiny_head("medusa", target, num_layers=2)),
        cost_key(target, head),
    ]
    assert len(set(others)) == 6
    assert cost_key(tiny_model("llama", seed=1), tiny_head("medusa", target, seed=1)) == others[-1], "not weights"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert cost_key(target, head) != others[-1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1, "points": []}', '{"format_version": 7}'])
def test_a_damaged_cache_is_measured_anew_with_one_warning(
    target: TargetModel, head: DraftHead, cache: Path, measured: list[CostProfile], text: str
) -> None:
    cost_of(target, head)
    (cache / "costs" / f"{cost_key(target, head)}.json").write_text(text)
    with pytest.warns(CacheWarning, match="cannot be read") as caught:
        assert cost_of(target, head) == measured[1]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cost_of(target, head) == measured[1]


def test_a_cache_that_cannot_be_written_is_one_warning(
    target: TargetModel, head: DraftHead, cache: Path, monkeypatch: pytest.MonkeyPatch, measured: list[CostProfile]
) -> None:
    cache.write_text("in the way")
    for number, place in enumerate((str(cache), "~nobody-of-that-name/cache")):
        monkeypatch.setenv("DRAFTHEADS_CACHE", place)
        with pytest.warns(CacheWarning, match="not kept") as caught:
            assert cost_of(target, head) == measured[number]
        assert len(caught) == 1


# --- other programs ---


class Others:
    """Other programs."""

    cores = 0.0  # that they use
    slowdown = 1.0  # of a step


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    found = Others()
    monkeypatch.setattr(OtherPrograms, "busy_cores", lambda *_, **__: found.cores)
    monkeypatch.setattr(module, "slowdown", lambda *_: found.slowdown)
    monkeypatch.setattr(module, "thread_choice", lambda: ThreadChoice(OtherPrograms(), is_fixed=True))
    return found


def test_costs_that_other_programs_disturbed_are_not_kept(
    target: TargetModel, head: DraftHead, cache: Path, measured: list[CostProfile], others: Others
) -> None:
    others.cores = ALL
    with pytest.warns(SpeedWarning, match=r"other programs use the processor .*: the measured costs .* not kept"):
        assert cost_of(target, head) == measured[0]
    assert not list(cache.rglob("*.json"))
    others.cores = 0.0
    assert cost_of(target, head) == cost_of(target, head) == measured[1]
    assert len(measured) == 2


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "case",  # slowdown, cores of others, whether the costs are measured anew, the warning
    [
        (1.2, 0.0, False, None),
        (0.85, 0.0, False, None),
        (0.7, 0.0, True, None),  # it was measured on a busy machine
        (1.4, 0.0, True, None),  # this is another machine by now
        (1.4, ALL, False, r"a step takes 1.4 times as long as on the idle machine"),
        (0.7, ALL, True, "not kept"),
    ],
)
def test_stored_costs_are_compared_with_a_step(
    target: TargetModel,
    head: DraftHead,
    measured: list[CostProfile],
    others: Others,
    case: tuple[float, float, bool, str | None],
) -> None:
    others.slowdown, others.cores, is_measured, warning = 1.0, 0.0, *case[2:]
    cost_of(target, head)
    others.slowdown, others.cores = case[:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cost_of(target, head) == measured[1 if is_measured else 0]
    assert len(measured) == 1 + is_measured
    assert [one.category for one in caught] == ([SpeedWarning] if warning else [])
    assert warning is None or re.search(warning, str(caught[0].message))
    kept = 1 if is_measured and not others.cores else 0
    others.slowdown, others.cores = 1.0, 0.0
    assert cost_of(target, head) == measured[kept], "measured anew and kept only on a quiet machine"


def test_a_plain_step_is_compared_with_the_profile(
    target: TargetModel, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = iter([*[50.0] * 4, *[50.0] * 11, 5.0, *[1.0] * 4])
    monkeypatch.setattr(StepTimer, "milliseconds", lambda *_: next(timings))
    profile = by_hand([("verify", 1, 1, 10.0)])
    assert slowdown_itself(profile, target, head) == 0.5, "a disturbance of some steps is no change"
    assert slowdown_itself(profile, target, head) == 0.1, "which a few steps show"
    assert not list(timings)


def test_points_are_sorted_and_rounded(target: TargetModel, head: DraftHead) -> None:
    found = fake(target, head, lambda *_: 1 / 3)
    assert found.points[0].milliseconds == 0.3333
    assert all((a.part, a.rows, a.nodes) < (b.part, b.rows, b.nodes) for a, b in pairwise(found.points))
    assert CostPoint("verify", 1, 1, 0.3333) in found.points


def test_measuring_waits_for_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server measures a new head while its model thread may capture a step."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    wait_for(GPU)
    assert (cuda.current_stream(GPU).num_waits, cuda.current_stream().num_waits) == (1, 0)


def test_nothing_in_the_package_waits_for_a_whole_device() -> None:
    sources = Path(module.__file__).parents[1].rglob("*.py")
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources}
    assert [name for name, text in texts.items() if re.search(r"cuda\.(synchronize|empty_cache)\b", text)] == []
