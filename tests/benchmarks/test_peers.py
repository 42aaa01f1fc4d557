"""The comparison with other programs: a peer that fails is a row, and turns are fair."""

import doctest
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import machine  # noqa: E402 - the scripts are found by the line above
import peers  # noqa: E402
import rounds  # noqa: E402
import worker_process  # noqa: E402
from worker_process import Reply, WorkerFailed  # noqa: E402

FACTS = {"cpu": "a CPU", "cpu_flags": ["avx2"], "threads": 1}
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8]]
GOOD = """
from worker import Answers, serve
def load(settings):
    return lambda prompts, count: Answers([[9] * min(count, 5) for _ in prompts], 2 * len(prompts))
serve(load, ("pytest",))
"""
NO_BATCHES = """
from worker import Answers, serve
def load(settings):
    def generate(prompts, count):
        if len(prompts) > 1:
            raise ValueError("one at a time\\nplease")
        print("what a library prints is no answer")
        return Answers([[9] * count])
    return generate
serve(load, ())
"""
DIES = """
import os, sys
from worker import Answers, serve
def load(settings):
    def generate(prompts, count):
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    return generate
serve(load, ())
"""


class Recorder:
    """A peer that notes who was asked."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def ask(self, prompts: list[list[int]], max_new_tokens: int) -> Reply:
        if max_new_tokens > 1:
            self.notes.append(self.name)
        return Reply(0.5, (max_new_tokens,) * len(prompts), None)


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.Comparison:
    (tmp_path / "workers").mkdir()
    shared = (BENCHMARKS / "workers" / "worker.py").read_text(encoding="utf-8")
    (tmp_path / "workers" / "worker.py").write_text(shared, encoding="utf-8")
    for name, code in {"good": GOOD, "no_batches": NO_BATCHES, "dies": DIES}.items():
        (tmp_path / "workers" / f"{name}_worker.py").write_text(code, encoding="utf-8")
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(worker_process, "_WORKERS", tmp_path / "workers")
    monkeypatch.setattr(rounds, "_PAUSE_SECONDS", 0)
    options = peers.Options(
        environments=tmp_path, rounds=3, batch_sizes=(1, 2), threads=1, timeout=600, json=tmp_path / "out.json"
    )
    ways = [peers.DecodingMethod(name, name, {}) for name in ("good", "no_batches", "dies", "absent")]
    return peers.Comparison(options, ways, PROMPTS, FACTS)


def test_a_peer_that_fails_becomes_a_row_with_its_error(comparison: peers.Comparison):
    comparison.run()
    errors = {key: row.error for key, row in comparison.rows.items()}
    assert errors["good", 1] is None
    assert errors["good", 2] is None
    assert errors["no_batches", 1] is None
    assert errors["no_batches", 2] == "ValueError: one at a time"
    assert errors["dies", 1] == errors["dies", 2] == "ended with status 3: out of luck"
    assert "benchmarks/environments.sh absent" in errors["absent", 1]


def test_tokens_and_steps_are_counted_in_every_round(comparison: peers.Comparison):
    comparison.run()
    row = comparison.rows["good", 2]
    assert [tally.num_tokens for tally in row.rounds] == [20, 20, 20]
    assert row.tokens_per_step == 2.0  # four of five tokens come from steps, two steps each
    assert comparison.rows["no_batches", 1].tokens_per_step is None


def test_the_json_file_has_every_row_and_nothing_of_where_it_ran(comparison: peers.Comparison):
    comparison.run()
    text = comparison.options.json.read_text(encoding="utf-8")
    assert text.count('"batch_size"') == 8
    assert str(comparison.options.environments) not in text


def test_every_peer_begins_once_and_a_block_is_answered_by_all_in_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rounds, "_PAUSE_SECONDS", 0)
    notes: list[str] = []
    names = ["a", "b", "c"]
    rows = {(name, 2): rounds.Row(name, 2) for name in names}
    for turn in range(3):
        found = {name: Recorder(name, notes) for name in names}
        rounds.run_round(found, rows, PROMPTS[:2], 4, turn=turn, failed=lambda row, error: None)
    assert notes == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert rows["a", 2].speeds == [16.0, 16.0, 16.0]


def test_a_peer_that_does_not_answer_is_ended(comparison: peers.Comparison):
    slow = "import time\ntime.sleep(60)"
    (worker_process._WORKERS / "good_worker.py").write_text(slow, encoding="utf-8")
    process = worker_process.WorkerProcess(
        Path(sys.executable),
        "good_worker.py",
        {},
        num_threads=1,
        log=comparison.options.environments / "log",
        timeout=1,
    )
    with pytest.raises(WorkerFailed, match="no answer within 1 s"):
        process.versions()
    process.stop()
    assert not process.is_alive


def test_an_unknown_peer_is_refused():
    with pytest.raises(SystemExit, match="no peer 'nonsense'; choose among"):
        peers.chosen([peers.DecodingMethod("good", "good", {})], ["nonsense"])


@pytest.mark.parametrize("module", [machine, peers])
def test_the_examples_in_docstrings_hold(module: ModuleType):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
