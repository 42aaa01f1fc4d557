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
def tool() -> Any:
    return tool_module("zoo_text")


@pytest.fixture
def made(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes chunks of 24 questions in a folder of tmp_path."""
    target = chat_model()
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)
    sources = ("maths", "code")
    prompts = zipped(tmp_path / "p.jsonl.gz", [{"prompt": f"w{i} w{i}", "source": sources[i % 2]} for i in range(60)])
    sentences = " ".join(f"The w{i} was seen by w{i + 1} again." for i in range(50))
    texts = zipped(tmp_path / "t.jsonl.gz", [{"text": sentences}])
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


def test_each_chunk_is_made_with_the_settings_that_were_given(
    made: Any, tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def distill(arguments: list[str]) -> int:
        calls.append(arguments)
        Path(arguments[arguments.index("--out") + 1]).write_text("answers")
        return 0

    monkeypatch.setattr(tool, "draftheads", distill)
    made("one", last=2, self_talk=3, max_new_tokens=7, model="some-model", precision="bf16", batch_size=5)
    assert len(calls) == 2
    for number, call in enumerate(calls):
        work = tmp_path / "one" / f"work-0{number}"
        files = sorted(str(path) for path in work.iterdir() if "answers" not in path.name)
        assert {str(work / "code.jsonl"), str(work / "maths.jsonl")} <= {*files}
        options = {  # half of the answers greedy
            "--num-self-talk": ["3"],
            "--temperature": ["0", "0", "0", "0.3", "0.7", "1.0"],
            "--max-new-tokens": ["7"],
            "--seed": [str(number)],
            "--model": ["some-model"],
            "--precision": ["bf16"],
            "--batch-size": ["5"],
        }
        given = ["distill", "--prompts", *files, "--out", str(work / f"answers-0{number}.jsonl")]
        assert call == given + [word for name, values in options.items() for word in (name, *values)]


def test_questions_are_shuffled_and_two_of_five_get_a_follow_up(tool: Any, tmp_path: Path) -> None:
    asked = [{"prompt": str(number), "source": "maths"} for number in range(2000)]
    texts = zipped(tmp_path / "t.jsonl.gz", [{"text": "The first word was seen again. " * 30}])
    lines = list(tool.questions(zipped(tmp_path / "p.jsonl.gz", asked), texts))
    own = [line["turns"] for source, line in lines if source == "maths"]
    order = [int(turns[0]) for turns in own]
    assert sorted(order) == [*range(2000)], "all, once each"
    assert sum(number < 1000 for number in order[:1000]) < 600, "an even mixture of all"
    assert 0.35 < sum(len(turns) == 2 for turns in own) / len(own) < 0.45
    passages = len(lines) - len(own)
    assert 0.15 < passages / len(lines) < 0.25
