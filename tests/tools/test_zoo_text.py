"""``tools/zoo_text.py`` on a tiny model: the same chunks on each machine, and none is made twice."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftheads.models.model import TargetModel
from training_world import chat_model, tool_module

pytestmark = pytest.mark.usefixtures("one_thread")


def zipped(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes chunks of 24 questions in a folder of tmp_path."""
    target = chat_model()
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)
    sources = ("maths", "code")
    prompts = zipped(tmp_path / "p.jsonl.gz", [{"prompt": f"w{i} w{i}", "source": sources[i % 2]} for i in range(60)])
    sentences = " ".join(f"The w{i} was seen by w{i + 1} again." for i in range(50))
    texts = zipped(tmp_path / "t.jsonl.gz", [{"text": sentences}])
    tool = tool_module("zoo_text")
    small = {"chunk_size": 24, "self_talk": 2, "max_new_tokens": 6, "precision": "fp32", "batch_size": 4}
    return lambda name, **more: tool.main(prompts, texts, out=tmp_path / name, **{**small, **more})


def test_a_chunk_has_its_questions_answered_and_two_machines_make_the_same(made: Any, tmp_path: Path) -> None:
    made("one", last=2)
    made("two", first=1, last=2)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.gz"))
    assert names == ["answers-00.jsonl.gz", "answers-01.jsonl.gz"]
    name = "answers-01.jsonl.gz"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    first, second = (answers(tmp_path / "one" / f"answers-0{i}.jsonl.gz") for i in range(2))
    assert (len(first), len(second)) == (26, 26)
    sources = {line["source"].partition(".")[0] for line in first + second}
    assert {"maths", "code"} < sources, "a source is named in the text"
    assert {"passage", "self-talk"} < sources
    asked = [[turn["content"] for turn in line["messages"] if turn["role"] == "user"] for line in first + second]
    assert any(len(turns) == 2 for turns in asked), "some have a follow-up"
    assert not {tuple(line) for line in asked[:24]} & {tuple(line) for line in asked[26:50]}, "no question twice"
    assert {0.0, 0.7} < {line["temperature"] for line in first + second} <= {0.0, 0.3, 0.7, 1.0}


def test_a_chunk_that_is_there_is_kept_and_one_that_was_answered_is_only_zipped(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made("one", last=1)
    chunk = tmp_path / "one" / "answers-00.jsonl.gz"
    before = chunk.read_bytes()
    chunk.write_bytes(b"kept")
    made("one", last=1)
    assert chunk.read_bytes() == b"kept"
    chunk.unlink()
    capsys.readouterr()
    made("one", last=1)
    assert chunk.read_bytes() == before
    assert not any(capsys.readouterr()), "nothing was answered again"


def test_a_chunk_that_fails_stops_the_run(made: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="answers-00 was not finished"):
        made("one", last=1, batch_size=0)
    assert not (tmp_path / "one" / "answers-00.jsonl.gz").exists()
