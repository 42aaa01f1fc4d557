"""Recorded traffic: whole lines within the budget, also after a kill, which training reads token by token."""

import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from draftheads.data.files import check_readable
from draftheads.data.texts import load_texts
from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.serve import recorder as module
from draftheads.serve.recorder import Exchange, Recorder
from serve_process import wait_until
from training_world import chat_model

MB = 1 << 20


def exchange(number: int = 0, **changes: object) -> Exchange:
    messages, tokenizer = (
        [{"role": "user", "content": f"w{number % 50}"}],
        tokenizer_fingerprint(chat_model().tokenizer),
    )
    usual = Exchange("m", tokenizer, [1, 5, 3, 7 + number % 50], [8, 9, 2], "w1 w2", finished=True, messages=messages)
    return replace(usual, **changes)


def record(folder: Path, *exchanges: Exchange, max_bytes: int = MB) -> Recorder:
    """All of them, and the recorder is closed."""
    recorder = Recorder(folder, max_bytes=max_bytes)
    for one in exchanges:
        recorder.add(one)
    recorder.close()
    return recorder


def lines_in(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("*/traffic-*.jsonl"), key=lambda path: path.name)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_training_reads_the_very_tokens(tmp_path: Path) -> None:
    # a prompt of token ids, and a call of a tool: no chat template could give these tokens
    of_ids = exchange(4, messages=None, prompt_ids=[9, 9], answer_ids=[3, 3, 3])
    of_call = exchange(5, messages=[{"role": "user", "content": None, "tool_calls": []}], finished=False)
    recorder = record(tmp_path / "out", exchange(3), of_ids, of_call, exchange(6, model="org/other model"))
    texts = load_texts(chat_model(), [recorder.folder_of("m")], max_length=64)
    assert [text.token_ids for text in texts] == [(1, 5, 3, 10, 8, 9, 2), (9, 9, 3, 3, 3), (1, 5, 3, 12, 8, 9, 2)]
    assert texts[1].loss_mask == (False, False, True, True, True)
    assert texts[0].source.endswith("traffic-000001.jsonl:1")
    assert load_texts(chat_model(), [recorder.folder_of("m")], max_length=6)[0].is_cut
    first = lines_in(tmp_path / "out")[0]
    assert first["messages"] == [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w1 w2"}]
    assert (first["model"], first["finished"]) == ("m", True)
    assert recorder.folder_of("org/other model").name == "org_other_model"
    with pytest.raises(DataError, match=r"has no file .*; give a folder in it: m, org_other_model"):
        check_readable([tmp_path / "out"])


def test_folders_that_are_made_are_private_and_others_keep_their_mode(tmp_path: Path) -> None:
    """What is recorded is for its user only, also in files that others could read."""
    (tmp_path / "there").mkdir(mode=0o755)
    modes = []
    for folder in (tmp_path / "new", tmp_path / "there"):
        for _ in range(2):
            record(folder, exchange())
            [file] = folder.glob("*/*.jsonl")
            modes.append([oct(stat.S_IMODE(place.stat().st_mode)) for place in (folder, file.parent, file)])
            file.chmod(0o644)
    assert modes == [["0o700", "0o700", "0o600"]] * 2 + [["0o755", "0o700", "0o600"]] * 2


def test_records_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    recorder = record(tmp_path, exchange(tokenizer="0123456789abcdef"))
    with pytest.raises(
        DataError, match="1 chat was left out: recorded with a tokenizer of fingerprint 0123456789abcdef"
    ):
        load_texts(chat_model(), [recorder.folder_of("m")], max_length=64)


@pytest.mark.parametrize("change", [{"prompt_ids": [1, "2"]}, {"answer_ids": []}, {"tokenizer": None}])
def test_records_of_bad_token_ids_are_left_out(tmp_path: Path, change: dict) -> None:
    file = tmp_path / "bad.jsonl"
    line = json.loads(exchange().line())
    file.write_text(json.dumps(line) + "\n" + json.dumps(line | change) + "\n")
    left_out: dict[str, list[str]] = {}
    assert len(load_texts(chat_model(), [file], max_length=64, left_out=left_out)) == 1
    assert list(left_out.values()) == [[f"{file}:2"]]


def _size(folder: Path) -> int:
    """Of all files that are there; one may go meanwhile."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
    return _size(folder)


def test_the_oldest_file_goes_when_the_budget_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_BUDGET", 1)
    budget = 16_000  # eight files of 2 kB
    recorder = Recorder(tmp_path, max_bytes=budget)
    for number in range(160):
        recorder.add(exchange(number, text=str(number), model="ab"[number % 2]))
        assert _size(tmp_path) <= budget
    recorder.add(exchange(text="x" * 5000))  # larger than a file
    recorder.close()
    kept = [int(line["messages"][-1]["content"]) for line in lines_in(tmp_path)]
    assert max(kept) == 159
    assert min(kept) > 60
    assert len(kept) > 30
    assert recorder.counts == module.RecorderCounts(recorded=160, dropped=1, num_bytes=_size(tmp_path))
    record(tmp_path, exchange(text="301", model="a"), max_bytes=budget)  # goes on in the same files
    assert "301" in [line["messages"][-1]["content"] for line in lines_in(tmp_path)]


def test_a_torn_line_is_skipped_by_readers_and_removed_at_the_next_start(tmp_path: Path) -> None:
    record(tmp_path, exchange(1))
    file = next(tmp_path.glob("m/*.jsonl"))
    whole = file.read_bytes()
    for torn in (exchange(2).line()[:-2], exchange(2, text="ä").line()[:120], exchange(2).line()[:1]):
        file.write_bytes(whole + torn)
        assert len(load_texts(chat_model(), [tmp_path / "m"], max_length=64)) == 1
        record(tmp_path, exchange(3))
        assert file.read_bytes().startswith(whole)
        assert [text.token_ids[3] for text in load_texts(chat_model(), [tmp_path / "m"], max_length=64)] == [8, 10]
    file.write_bytes(b"{")
    record(tmp_path)
    assert not file.exists()


def test_after_a_kill_all_lines_are_whole(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from serve.test_recorder import exchange
from draftheads.serve.recorder import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), max_bytes=1 << 24)
one = exchange(text="x" * 20000)
print("ready", flush=True)
while True:
    recorder.add(one)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        wait_until(lambda: len(list(tmp_path.glob("m/*.jsonl"))) > 1)
        process.send_signal(signal.SIGKILL)
    assert len(load_texts(chat_model(), [tmp_path / "m"], max_length=64)) > 10
    record(tmp_path, exchange(), max_bytes=1 << 24)  # the lock of the dead process is free
    assert lines_in(tmp_path)[-1]["messages"][-1]["content"] == "w1 w2"


def test_a_full_disk_or_a_deleted_file_costs_answers_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, max_bytes=MB)
    recorder.add(exchange(1))
    wait_until(lambda: recorder.counts.recorded == 1)
    next(tmp_path.glob("m/*.jsonl")).unlink()
    recorder.add(exchange(2))
    wait_until(lambda: recorder.counts.recorded == 2)
    assert len(lines_in(tmp_path)) == 1

    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left on the disk")

    with monkeypatch.context() as patch:
        patch.setattr(module, "append_synced", full)
        recorder.add(exchange(3))
        recorder.add(exchange(4))
        wait_until(lambda: recorder.counts.dropped == 2)
    assert sum("no space left" in message for message in caplog.messages) == 1
    recorder.add(exchange(5))
    recorder.close()
    assert len(lines_in(tmp_path)) == 2


def test_impossible_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"--record-gib is 4\.6"):
        Recorder(tmp_path, max_bytes=5)
    first = Recorder(tmp_path / "one", max_bytes=MB)
    with pytest.raises(StorageError, match="another process is writing"):
        Recorder(tmp_path / "one", max_bytes=MB)
    first.close()
    record(tmp_path / "one")
    if os.geteuid():
        (tmp_path / "no").mkdir(mode=0o500)
        with pytest.raises(StorageError):
            Recorder(tmp_path / "no" / "sub", max_bytes=MB)
