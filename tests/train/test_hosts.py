"""Processes of several hosts, as threads: who shares a folder, whose texts and batches are whose."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from draftheads.data import features as stores
from draftheads.data.features import LiveStore, Texts
from draftheads.data.texts import load_texts
from draftheads.errors import InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.train import processes, training_data
from draftheads.train.new_head import new_head
from draftheads.train.processes import Group
from draftheads.train.run_folder import RunFolder
from draftheads.train.training_data import plan_training, read_texts, with_hidden_states
from fake_progress import FakeProgress
from training_world import counting_chats, train_options, write_chats

T = TypeVar("T")
SECONDS = 20.0


class Launched:
    """Runs a function in a thread for each process; ``hosts`` has the host of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
        self.hosts, self.own = hosts, threading.local()
        self.barrier, self.values = threading.Barrier(len(hosts), timeout=SECONDS), [None] * len(hosts)
        environment = lambda: SimpleNamespace(host=hosts[self.own.number], num_processes=len(hosts))  # noqa: E731
        parts = {"number": lambda: self.own.number, "count": lambda: len(hosts), "every": self.every}
        parts |= {"wait": self.barrier.wait, "any_of": lambda here: any(self.every(here)), "Environment": environment}
        for name, value in {**parts, "group": processes.group.__wrapped__}.items():
            monkeypatch.setattr(processes, name, value)

    def every(self, here: Any) -> list[Any]:
        self.values[self.own.number] = here
        self.barrier.wait()
        found = [*self.values]
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Its results; or the first error, which ends the other threads."""
        results: list[Any] = [None] * len(self.hosts)

        def work(number: int) -> None:
            self.own.number = number
            try:
                results[number] = function(number)
            except Exception as error:  # noqa: BLE001 - it is raised below
                results[number] = error

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize(
    ("hosts", "is_shared", "expected"),
    [
        ((0, 0), True, [Group(0, 1, 0, 2), Group(0, 1, 1, 2)]),
        ((0, 1, 1), True, [Group(0, 1, 0, 3), Group(0, 1, 1, 3), Group(0, 1, 2, 3)]),
        ((0, 0, 1, 1), False, [Group(0, 2, 0, 2), Group(0, 2, 1, 2), Group(1, 2, 0, 2), Group(1, 2, 1, 2)]),
        ((2, 2, 0), False, [Group(1, 2, 0, 2), Group(1, 2, 1, 2), Group(0, 2, 0, 1)]),
    ],
)
def test_the_processes_that_see_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int], is_shared: bool, expected: list[Group]
):
    launched = Launched(monkeypatch, hosts)

    def facts(number: int) -> tuple[Group, bool, int]:
        folder = tmp_path / ("one" if is_shared else str(hosts[number]))
        own = 10 if is_shared else 10 + hosts[number]
        return processes.group(folder), processes.writes(folder), processes.of_all(folder, own)

    found = launched.run(facts)
    assert [group for group, *_ in found] == expected
    assert [writes for _, writes, _ in found] == [group.number == 0 for group in expected]
    total = 10 if is_shared else sum(10 + host for host in {*hosts})
    assert [each for *_, each in found] == [total] * len(hosts)
    assert not list(tmp_path.rglob(".seen-*"))


@pytest.mark.parametrize("have_equal_files", [False, True])
def test_hosts_share_texts_steps_and_the_draft_vocabulary(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, have_equal_files: bool
):
    """Two hosts of two processes. The batches of a step are those of all processes, each once."""
    hosts = (0, 0, 1, 1)
    chats = counting_chats(41)
    parts = [chats, chats] if have_equal_files else [chats[:30], chats[30:]]
    for host, part in enumerate(parts):
        (tmp_path / str(host)).mkdir()
        write_chats(tmp_path / str(host) / "chats.jsonl", part)
    launched, read = Launched(monkeypatch, hosts), stores.read_alone
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(stores, "TOKENS_PER_SHARD", 64)
    monkeypatch.setattr(
        stores, "read_alone", lambda *given: reads.append((launched.own.number, len(given[1]))) or read(*given)
    )

    def work(number: int) -> Any:
        host = tmp_path / str(hosts[number])
        sizes = {"max_length": 64, "batch_tokens": 96, "method": "hydra"}
        options = train_options(host / "out", host / "states", data=(host / "chats.jsonl",), **sizes)
        texts = read_texts(target, options)
        store = with_hidden_states(target, texts, options, FakeProgress())
        planned = plan_training(store, options)
        head = new_head(options, target, store, planned.training)
        group = processes.group(options.out)
        return [*texts], planned, list(planned.batches_of(group, 0)), head.state_dict()

    found = launched.run(work)
    assert not [one for one in found if isinstance(one, Exception)], found
    whole = [text.token_ids for text in load_texts(target, [write_chats(tmp_path / "all.jsonl", chats)], max_length=64)]
    first, _, second, _ = ([text.token_ids for text in texts] for texts, *_ in found)
    assert (first, second) == ((whole[::2], whole[1::2]) if have_equal_files else (whole[:30], whole[30:]))
    assert sorted({number for number, _ in reads}) == [0, 1, 2, 3]
    assert sum(size for _, size in reads) == sum(map(len, whole)), "each text is read once"
    assert len({planned.num_steps for _, planned, *_ in found}) == 1
    for one, other in (found[:2], found[2:]):
        steps = list(zip(one[2], other[2], strict=True))
        assert [sorted(first + second) for first, second in steps] == [[2 * i, 2 * i + 1] for i in range(len(steps))]
        assert len(one[1].plan) == 2 * len(steps)
    names = [name for name in found[0][3] if "vocab" in name or "token_ids" in name]
    assert names
    for *_, tensors in found[1:]:
        assert all(torch.equal(tensors[name], found[0][3][name]) for name in names)


def test_hosts_with_one_full_disk_or_other_kinds_of_texts_or_settings(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What one host cannot do, none does; what would train another head is refused on all of them."""
    data = [write_chats(tmp_path / f"{host}.jsonl", counting_chats(8)) for host in (0, 1)]
    book = write_chats(tmp_path / "book.jsonl", [{"text": " ".join(f"w{i}" for i in range(50))}] * 4)
    launched = Launched(monkeypatch, (0, 1))

    def options(number: int, **changes: Any) -> Any:
        return train_options(
            tmp_path / str(number),
            None,
            **{"data": (data[number],), "max_length": 64, "draft_vocab_size": 0, **changes},
        )

    def stored(number: int) -> Any:
        chosen = options(number)
        return with_hidden_states(target, read_texts(target, chosen), chosen, FakeProgress())

    free = lambda _: SimpleNamespace(free=1000 if launched.own.number else 1 << 40)  # noqa: E731
    monkeypatch.setattr(training_data.shutil, "disk_usage", free)
    assert [type(store) for store in launched.run(stored)] == [LiveStore, LiveStore]

    def both_kinds(number: int) -> Any:
        chosen = options(number, **({"text": (book,)} if number else {}))
        return plan_training(LiveStore(target, read_texts(target, chosen)), chosen)

    kinds = [str(error) for error in launched.run(both_kinds)]
    assert all(kind.startswith("hosts have different kinds of texts") for kind in kinds), kinds

    def claimed(number: int, **changes: Any) -> Any:
        chosen = options(number, **(changes if number else {}))
        store = LiveStore(target, Texts.open(tmp_path / str(number) / "texts"))
        planned, folder = plan_training(store, chosen), RunFolder(chosen)
        vars(folder)["date"] = "2026-12-01"  # Python 3.11 lets no two threads compute a cached property
        return folder.claim(planned, model=f"model-of-{number}", start=None)

    launched.run(lambda number: read_texts(target, options(number)))
    assert launched.run(claimed) == [None, None]
    for error in launched.run(lambda number: claimed(number, learning_rate=0.01)):
        assert isinstance(error, InvalidSettings)
        assert "learning_rate" in str(error)
        assert "0.01" in str(error)
        assert "0.02" in str(error)
