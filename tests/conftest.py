"""What tests of several files share."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cli_world import PROMPTS, write_model
from draftheads import loading
from draftheads.checkpoints import registry
from draftheads.decode import step_costs as cost
from draftheads.models import packed_weights
from draftheads.models.model import TargetModel
from draftheads.utils.machine import OtherPrograms
from families import by_hand, tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as thorough the variants of a test beyond those that its marker ``few`` leaves.

    One after the other, the variant is left whose values were left least so far: so all values of a parameter are. Of
    equal ones those come first that are evenly spread over all.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("thorough"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in variants.values():
        (most,) = same[0].get_closest_marker("few").args
        spread = {place * len(same) // most for place in range(min(most, len(same)))}
        others = [item for _, item in sorted(enumerate(same), key=lambda found: found[0] not in spread)]
        values = {item: [(name, id(value)) for name, value in item.callspec.params.items()] for item in same}
        used: Counter[tuple[str, int]] = Counter()
        for _ in range(len(spread)):
            left = min(others, key=lambda item: sum(used[value] for value in values[item]))
            used.update(values[left])
            others.remove(left)
        for item in others:
            item.add_marker(pytest.mark.thorough)


def pytest_report_header() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For thousands of tiny products: threads that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _idle_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests do not depend on how busy the machine is, and what they measure goes to no user's cache."""
    folder, own = tmp_path_factory.mktemp("costs"), cost.cache_folder

    def place() -> Path:
        return own() if "DRAFTHEADS_CACHE" in os.environ else folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftheads.decode.planner.CostCorrection", lambda: None)
        patch.setattr(cost, "cache_folder", place)
        patch.setattr(registry, "cache_folder", place)
        patch.setattr(packed_weights, "cache_folder", place)
        patch.setattr(OtherPrograms, "busy_cores", lambda _, **__: 0.0)
        patch.setattr(cost, "_still_right", lambda *_: True)
        patch.setattr(cost.logger, "disabled", True)  # where nothing is measured yet differs from run to run
        yield


@pytest.fixture
def cheap_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are loaded as if nodes cost next to nothing: on tiny models nothing else is faster than plain."""
    points = [("verify", 1, 1, 10.0), ("verify", 1, 33, 10.5), ("static", 1, 2, 0.01)]
    monkeypatch.setattr(loading, "costs_of", lambda *_, **__: by_hand(points))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is empty."""
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two heads for it, and prompts to tune on."""
    place = write_model(tmp_path_factory.mktemp("tune"))
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (place / "prompts.jsonl").write_text("\n".join(lines[:6]), encoding="utf-8")
    (place / "others.jsonl").write_text("\n".join(lines[4:]), encoding="utf-8")
    (place / "one.jsonl").write_text(lines[0], encoding="utf-8")
    return place
