"""Prompts for a distillation: from several files, each once, bad lines named."""

import gzip
from pathlib import Path

import pytest

from distill_world import options, run, write_prompts
from draftheads.data.lines import LeftOut
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
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "no question"),
        ('{"prompt": "w1', "not JSON"),
        ('{"turns": ["w1", " "]}', "a turn of the user is empty"),
        ('{"messages": [{"role": "tool", "content": "w1"}, {"role": "user", "content": "w1"}]}', "'tool'"),
    ],
)
def test_a_bad_line_is_left_out_and_if_there_are_only_such_it_is_an_error(tmp_path: Path, line: str, words: str):
    """Before a model is loaded."""
    chosen = options(tmp_path)
    chosen.prompts[0].write_text('{"prompt": "w1"}\n' + line + '\n{"prompt": "w2"}\n')
    left_out: LeftOut = {}
    assert survey(chosen.prompts, left_out=left_out).num_prompts == 2
    ((reason, places),) = left_out.items()
    assert words in reason
    assert places == [f"{chosen.prompts[0]}:2"]
    chosen.prompts[0].write_text(line + "\n")
    with pytest.raises(DataError, match=f"prompts.jsonl.* line 1|1 prompt was left out: .*{words}"):
        run(None, chosen)  # type: ignore[arg-type]
    assert not chosen.out.exists()


def test_prompts_that_the_model_reads_in_other_ways_are_different(tmp_path: Path):
    code = {"prompt": "if a:\n    b"}
    system = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    lines = [
        code,
        {"prompt": "if a:\nb"},
        {**code, "tools": [{"name": "f"}]},
        {"messages": system},
        {"turns": ["w1", "w2"]},
    ]
    found = survey([write_prompts(tmp_path / "a.jsonl", [*lines, *lines])])
    assert (found.num_prompts, found.num_duplicates) == (5, 5)


@pytest.mark.parametrize(("content", "words"), [("\n", "no prompt in .*prompts.jsonl"), (None, "cannot be read")])
def test_files_without_prompts_are_refused(tmp_path: Path, content: str | None, words: str):
    chosen = options(tmp_path)
    chosen.prompts[0].unlink() if content is None else chosen.prompts[0].write_text(content)
    with pytest.raises(DataError, match=words):
        run(None, chosen)  # type: ignore[arg-type]
