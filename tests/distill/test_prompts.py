"""Prompts for a distillation: from several files, each once, bad lines named."""

import gzip
from pathlib import Path

import pytest

from distill_world import options, run, write_prompts
from draftheads.distill.conversation import survey, unique_prompts
from draftheads.errors import DataError


def test_prompts_come_zipped_and_from_several_files(tmp_path: Path):
    one = tmp_path / "one.jsonl.gz"
    one.write_bytes(gzip.compress(b'{"prompt": "w1"}\n\n{"prompt": [{"role": "user", "content": "w2"}]}\n'))
    two = write_prompts(tmp_path / "two.jsonl", [{"turns": ["w3", "w4"]}, {"prompt": "w2"}])
    found = [(prompt.turns, prompt.source) for prompt in unique_prompts([one, two])]
    assert found == [(("w1",), "one.jsonl.gz:1"), (("w2",), "one.jsonl.gz:3"), (("w3", "w4"), "two.jsonl:1")]
    assert survey([one, two]).fingerprint != survey([two, one]).fingerprint


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "needs"),
        ('{"turns": ["w1", " "]}', "a turn of the user is empty"),
        ('{"messages": [{"role": "tool", "content": "w1"}, {"role": "user", "content": "w1"}]}', "'tool'"),
    ],
)
def test_a_bad_line_is_an_error_before_a_model_is_loaded(tmp_path: Path, line: str, words: str):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n' + line + "\n")
    chosen = options(tmp_path)
    with pytest.raises(DataError, match=f"prompts.jsonl, line 2: .*{words}"):
        run(None, chosen)  # type: ignore[arg-type]
    assert not chosen.out.exists()


@pytest.mark.parametrize(("content", "words"), [("\n", "no prompts in .*prompts.jsonl"), (None, "cannot be read")])
def test_files_without_prompts_are_refused(tmp_path: Path, content: str | None, words: str):
    chosen = options(tmp_path)
    chosen.prompts[0].unlink() if content is None else chosen.prompts[0].write_text(content)
    with pytest.raises(DataError, match=words):
        run(None, chosen)  # type: ignore[arg-type]
