"""The comparison with other programs: failures are rows, turns are fair, and the smallest run is a real one."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402 - the scripts are found by the line above
import peers  # noqa: E402
from harness import ProgramFailed, Reply  # noqa: E402

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8]]
LOAD = (
    "from worker import Answers, serve\nimport os, sys, time\ndef load(settings):\n    def generate(prompts, count):\n"
)
PROGRAMS = {  # what generate does; the packages whose version is told
    "good": ("return Answers([[9] * min(count, 5) for _ in prompts], 2 * len(prompts))", ("pytest",)),
    "no_batches": (
        (
            "if prompts[1:]: raise ValueError('one at a time\\nplease')\n        print('no answer')\n        "
            "return Answers([[9] * count])"
        ),
        (),
    ),
    "dies": ("print('out of luck', file=sys.stderr, flush=True); os._exit(3)", ()),
}


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.Comparison:
    (tmp_path / "workers").mkdir()
    shared = (BENCHMARKS / "workers" / "worker.py").read_text(encoding="utf-8")
    (tmp_path / "workers" / "worker.py").write_text(shared, encoding="utf-8")
    for name, (code, packages) in PROGRAMS.items():
        script = f"{LOAD}        {code}\n    return generate\nserve(load, {packages})\n"
        (tmp_path / "workers" / f"{name}_worker.py").write_text(script, encoding="utf-8")
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(harness, "_WORKERS", tmp_path / "workers")
    monkeypatch.setattr(peers, "_PAUSE_SECONDS", 0)
    out = tmp_path / "out.json"
    options = peers.Measured(environments=tmp_path, rounds=3, batch_sizes=(1, 2), threads=1, timeout=600, json=out)
    ways = [peers.DecodingMethod(name, name, {}) for name in (*PROGRAMS, "absent")]
    return peers.Comparison(options, ways, PROMPTS)


def test_a_peer_that_fails_is_a_row_and_the_others_are_counted(
    comparison: peers.Comparison, capsys: pytest.CaptureFixture[str]
):
    comparison.run()
    errors = {key: row.error for key, row in comparison.rows.items()}
    assert [errors[key] for key in (("good", 1), ("good", 2), ("no_batches", 1))] == [None] * 3
    assert errors["no_batches", 2] == "ValueError: one at a time"
    assert errors["dies", 1] == errors["dies", 2] == "ended with status 3: out of luck"
    assert "benchmarks/environments.sh absent" in errors["absent", 1]
    row = comparison.rows["good", 2]
    assert [sum(reply.num_tokens for reply in each) for each in row.rounds] == [20, 20, 20]
    assert row.tokens_per_step == 2.0  # four of five tokens come from steps, two steps each
    assert comparison.rows["no_batches", 1].tokens_per_step is None
    assert len(comparison.rows["good", 1].first_token_milliseconds) == 3
    text = comparison.options.json.read_text(encoding="utf-8")
    assert text.count('"batch_size"') == 8
    assert str(comparison.options.environments) not in text, "nothing of where it ran"
    comparison.show(["tokens"], lambda row: [str(len(row.texts()))])
    assert "absent: skipped: no environment" in capsys.readouterr().out


def test_every_peer_begins_once_and_a_block_is_answered_by_all_in_turn(comparison: peers.Comparison):
    notes: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, prompts: list[list[int]], max_new_tokens: int) -> Reply:
            notes.append(self.name)
            return Reply(0.5, ((9,) * max_new_tokens,) * len(prompts))

    names = ["a", "b", "c"]
    comparison.peers = {name: Recorder(name) for name in names}
    comparison.rows = {(name, 2): peers.Row(name, 2) for name in names}
    comparison.prompts = PROMPTS[:2]
    for turn in range(3):
        comparison.round(2, turn)
    assert notes == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert comparison.rows["a", 2].speeds == [2 * 128 / 0.5] * 3


def test_a_peer_that_does_not_answer_is_ended(comparison: peers.Comparison, tmp_path: Path):
    (tmp_path / "workers" / "good_worker.py").write_text("import time\ntime.sleep(600)", encoding="utf-8")
    limits = {"threads": 1, "log": tmp_path / "log", "timeout": 1}
    process = harness.WorkerProcess(Path(sys.executable), "good_worker.py", {}, **limits)
    with pytest.raises(ProgramFailed, match="no answer within 1 s"):
        process.versions()
    process.stop()
    assert process.process.poll() is not None


def test_an_unknown_peer_is_refused():
    with pytest.raises(SystemExit, match="no peer 'nonsense'; choose among"):
        peers.chosen([peers.DecodingMethod("good", "good", {})], ["nonsense"])


def test_the_smallest_run_of_draftheads_and_transformers(
    world: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """One prompt, one round, a tiny model; each program is a process of its own."""
    monkeypatch.setattr(peers, "real_model", lambda: world / "model")
    monkeypatch.setattr(peers, "SMOLLM2_135M", str(world / "model"))
    python = tmp_path / "transformers" / "bin" / "python"  # an environment: this one
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    few = {"limit": 1, "rounds": 1, "max_new_tokens": 12, "batch_sizes": (1,), "threads": 1}
    places = {"prompts": world / "prompts.jsonl", "environments": tmp_path, "json": tmp_path / "out.json"}
    head = str(world / "hydra")
    chosen = (f"draftheads fp32 {head}", "transformers fp32")
    peers.main(peers.Options(peers=chosen, head=head, precision="fp32", **places, **few))
    ours, theirs = json.loads(places["json"].read_text(encoding="utf-8"))["rows"]
    assert (ours["name"], theirs["name"]) == chosen
    assert ours["num_tokens"] == theirs["num_tokens"] > 1


SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def test_every_script_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        shown = capsys.readouterr().out
        assert not end.value.code, name
        assert "usage: " in shown, name
        assert "--" in shown, name
