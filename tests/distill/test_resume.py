"""Distillations that are killed, stopped, started twice or meet a full disk: nothing is lost or repeated."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_world import RECORDS, manifest, options, records, write_prompts
from draftheads.distill import journal
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.journal import Journal, manifest_path, part_path
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import Outcome, distill
from draftheads.errors import DataError, DistillationInterrupted, InvalidSettings, StorageError
from fake_progress import FakeProgress

NUM_SELF_TALK = 60
TOTAL = len(RECORDS) + NUM_SELF_TALK


class Echo:
    """Answers at once; has few self-talk questions, so that many are repeated, also in other chunks."""

    def __init__(self, model: str = "echo", *, is_finished: bool = True) -> None:
        self.identity = {"model": model}
        self.is_finished = is_finished  # whether its answers end by themselves
        self.asked: list[int] = []  # indices of the conversations

    def converse(self, dialogues: list[Dialogue], on_progress: OnProgress) -> None:
        for dialogue in dialogues:
            self.asked.append(dialogue.index)
            while not dialogue.is_over:
                if not dialogue.ask_next():
                    dialogue.ask(f"w{dialogue.next_seed % 40}")
                dialogue.answer(f"{dialogue.temperature} {dialogue.next_seed}", is_finished=self.is_finished)
                dialogue.count(3)
                on_progress(3, 0)
            on_progress(0, 1)


class Killed(BaseException):
    """Stands for the end of the process."""


def echo_options(folder: Path, **changes: Any) -> DistillOptions:
    return options(folder, **{"num_self_talk": NUM_SELF_TALK, "chunk_size": 15, **changes})


def run(chosen: DistillOptions, source: Echo | None = None, progress: FakeProgress | None = None) -> Outcome:
    return distill(chosen, lambda: source or Echo(), progress or FakeProgress())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run without a stop."""
    chosen = echo_options(tmp_path_factory.mktemp("whole"))
    counts = run(chosen).counts
    assert counts.num_repeated > 5
    return chosen.out.read_bytes()


def test_repeated_self_talk_questions_are_dropped(tmp_path: Path):
    chosen = echo_options(tmp_path)
    counts = run(chosen).counts
    asked = [tuple(m["content"] for m in record["messages"] if m["role"] != "assistant") for record in records(chosen)]
    assert len(set(asked)) == len(asked) == counts.num_records
    assert counts.num_records + counts.num_repeated == TOTAL
    assert [record["index"] for record in records(chosen)][: len(RECORDS)] == list(range(len(RECORDS)))


def test_prompts_that_differ_only_in_later_turns_are_all_kept(tmp_path: Path):
    chosen = options(tmp_path)
    write_prompts(chosen.prompts[0], [{"prompt": "w1"}, {"turns": ["w1", "w2"]}])
    run(chosen, Echo(is_finished=False))
    assert [len(record["messages"]) for record in records(chosen)] == [2, 2]


def killing(kill_at: int, where: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Wraps the functions that write: the process ends before, in or after the call of that number."""
    calls = iter(range(10_000))

    def wrap(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Path, content: bytes, **place: int) -> None:
            is_last = next(calls) == kill_at
            if is_last and where == "in" and place:  # half the bytes of a chunk; other files are written atomically
                write(path, content[: len(content) // 2], **place)
            elif not is_last or where == "after":
                write(path, content, **place)
            if is_last:
                raise Killed

        return wrapped

    return wrap


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_run_continues_after_a_kill_at_any_write(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    for kill_at in range(1000):
        chosen = echo_options(tmp_path, out=tmp_path / f"{kill_at}.jsonl")
        wrap = killing(kill_at, where)
        first, second = Echo(), Echo()
        with monkeypatch.context() as patched:
            patched.setattr(journal, "append_synced", wrap(journal.append_synced))
            patched.setattr(journal, "write_atomic", wrap(journal.write_atomic))
            try:
                run(chosen, first)
                break  # there were no more writes
            except Killed:
                assert not chosen.out.exists()
        outcome = run(chosen, second)
        assert chosen.out.read_bytes() == whole
        assert not part_path(chosen.out).exists()
        again = len(set(first.asked) & set(second.asked))
        assert again <= 15  # no more than the chunk that was being saved
        assert sorted({*first.asked, *second.asked}) == list(range(TOTAL))
        assert outcome.counts.num_done == TOTAL
        assert outcome.counts.num_answers == sum(len(r["messages"]) // 2 for r in records(chosen))
        assert outcome.counts.num_tokens == manifest(chosen)["counts"]["num_tokens"] == 3 * 88
    assert kill_at > 2 * TOTAL / 15


@pytest.mark.parametrize("is_killed", [True, False])
def test_of_a_complete_run_only_the_last_rename_can_be_left(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
):
    chosen = echo_options(tmp_path)
    replace = Path.replace

    def renamed(self: Path, target: Path) -> Path:
        if is_killed and self == part_path(chosen.out):
            raise Killed
        return replace(self, target)

    with monkeypatch.context() as patched, pytest.raises(Killed) if is_killed else contextlib.nullcontext():
        patched.setattr(Path, "replace", renamed)
        run(chosen)
    before = manifest_path(chosen.out).read_bytes()
    second = Echo()
    assert run(chosen, second).was_complete
    assert second.asked == []
    assert (chosen.out.read_bytes(), manifest_path(chosen.out).read_bytes()) == (whole, before)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_run_continues_after_ctrl_c(whole: bytes, tmp_path: Path):
    chosen = echo_options(tmp_path)
    with pytest.raises(DistillationInterrupted, match=f"30 of {TOTAL}"):
        run(chosen, progress=FakeProgress(34, interrupt))
    progress = FakeProgress()
    run(chosen, progress=progress)
    assert f"answering {TOTAL - 30} of {TOTAL} conversations" in progress.stages
    assert chosen.out.read_bytes() == whole


# --- another run, other files ---


def stopped(folder: Path, **changes: Any) -> DistillOptions:
    """A run that was stopped after two chunks."""
    chosen = echo_options(folder, **changes)
    with pytest.raises(DistillationInterrupted):
        run(chosen, progress=FakeProgress(34, interrupt))
    return chosen


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"temperature": (0.0, 0.7)}, r"temperature was \[0.0, 1.0\] and is \[0.0, 0.7\]"),
        ({"max_new_tokens": 13}, "max_new_tokens was 12 and is 13"),
        ({"num_self_talk": 61}, "num_self_talk was 60 and is 61"),
        ({"top_p": 0.5}, "top_p was 1.0 and is 0.5"),
    ],
)
def test_a_run_with_other_settings_prompts_or_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
):
    chosen = stopped(tmp_path)

    def refused(options: DistillOptions, named: str, source: Echo | None = None) -> None:
        before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
        with pytest.raises(InvalidSettings, match=f"{options.out} .*{named}"):
            run(options, source)
        assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before

    refused(echo_options(tmp_path, **changes), named)
    refused(chosen, "model was 'echo' and is 'other'", Echo("other"))
    run(chosen)
    refused(echo_options(tmp_path, **changes), named)
    write_prompts(chosen.prompts[0], [*RECORDS[:-1], {"prompt": "w50"}])
    refused(chosen, r"fingerprint was '[0-9a-f]{16}' and is '[0-9a-f]{16}'")


def test_settings_that_change_no_answer_may_change(whole: bytes, tmp_path: Path):
    stopped(tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "prompts.jsonl").rename(moved / "prompts.jsonl")
    prompts = (moved / "prompts.jsonl",)
    chosen = echo_options(tmp_path, prompts=prompts, batch_size=3, chunk_size=7, head="hydra", model="./echo")
    run(chosen)
    assert chosen.out.read_bytes() == whole
    assert manifest(chosen)["details"]["options"]["batch_size"] == 3


@pytest.mark.parametrize(("name", "is_stopped"), [("out.jsonl", False), ("out.jsonl.part", False), ("out.jsonl", True)])
def test_unknown_files_are_not_overwritten(tmp_path: Path, name: str, is_stopped: bool):
    chosen = stopped(tmp_path) if is_stopped else echo_options(tmp_path)
    (tmp_path / name).write_text("precious")
    with pytest.raises(InvalidSettings, match=f"{tmp_path / name} exists"):
        run(chosen)
    assert (tmp_path / name).read_text() == "precious"


def test_an_output_shorter_than_its_manifest_counts_is_an_error(tmp_path: Path):
    chosen = stopped(tmp_path)
    size = manifest(chosen)["counts"]["num_bytes"]
    os.truncate(part_path(chosen.out), size - 1)
    with pytest.raises(DataError, match=f"{size - 1:,} .*{size:,}"):
        run(chosen)
    part_path(chosen.out).unlink()
    with pytest.raises(DataError, match="has 0 bytes"):
        run(chosen)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 9}'])
def test_an_invalid_manifest_is_an_error(tmp_path: Path, content: str):
    chosen = echo_options(tmp_path)
    manifest_path(chosen.out).write_text(content)
    with pytest.raises(DataError, match=r"out.jsonl.manifest.json"):
        run(chosen)


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    chosen = echo_options(tmp_path)
    with Journal.locked(chosen.out, {}, {}), pytest.raises(StorageError, match="another process is writing"):
        run(chosen)
