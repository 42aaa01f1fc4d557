"""Files of a corpus: what counts as a text, and the index in the cache."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftheads.data import corpus_files
from draftheads.data.corpus_files import load_corpus
from draftheads.drafters.corpus import Corpus
from draftheads.errors import CacheWarning, DataError
from draftheads.models.fingerprint import tokenizer_fingerprint


class Letters:
    """A token for each character; b is 1 more than a."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts_of(corpus: Corpus) -> list[str]:
    text = "".join("|" if token < 0 else chr(token) for token in corpus.ids.tolist())
    assert text[0] == text[-1] == "|"
    return text[1:-1].split("|")


def test_texts_chats_and_recorded_answers_of_a_folder(tmp_path: Path):
    folder = tmp_path / "texts"
    write(folder / "a.txt", "one text\nof two lines")
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    recorded = {"prompt_ids": [100], "answer_ids": [101, 102], "tokenizer": tokenizer_fingerprint(Letters())}
    write(folder / "b.jsonl", {"text": "two"}, {"messages": [*messages, *messages]}, recorded)
    write(folder / "inside" / "c.jsonl.gz", {"prompt": "ask", "completion": "answer"})
    write(folder / "d.csv", "not read")
    corpus = load_corpus(folder, Letters(), vocab_size=128)
    assert texts_of(corpus) == ["one text\nof two lines", "two", "so", "so", "ef", "answer"]
    assert corpus.match([ord(letter) for letter in "of tw"], 3) == (5, [[ord(letter) for letter in "o l"]])


def test_a_last_line_without_an_end(tmp_path: Path):
    """In a folder a server may be writing it; a file of its own is whole."""
    file = write(tmp_path / "texts" / "a.jsonl", {"text": "one"}, '{"text": "two"}')
    assert texts_of(load_corpus(file, Letters(), vocab_size=128)) == ["one", "two"]
    write(file, {"text": "one"}, '{"text": "tw')
    assert texts_of(load_corpus(file.parent, Letters(), vocab_size=128)) == ["one"]


def test_the_cache_keeps_the_corpora_that_were_used_last(tmp_path: Path, own_cache: Path):
    file = write(tmp_path / "a.txt", "first")
    made = []
    for number in range(corpus_files.MOST_KEPT + 1):
        load_corpus(write(file, "first" if number == 1 else f"text {number}"), Letters(), vocab_size=128)
        made.append({path.name for path in own_cache.iterdir()})
        for path in own_cache.iterdir():  # as if all were a minute older now
            os.utime(path, (path.stat().st_mtime - 60,) * 2)
        load_corpus(write(file, "text 0"), Letters(), vocab_size=128)  # used each time
    (lost,) = made[-2] - made[-1]
    (first,) = made[1] - made[0]
    assert lost == first, "the oldest that was not used since"
    assert len(made[-1]) == len(list(own_cache.iterdir())) == corpus_files.MOST_KEPT


def test_a_corpus_is_sorted_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path / "a.txt", "a text")
    first = load_corpus(str(file), Letters(), vocab_size=128)
    assert len(list(own_cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(corpus_files, "index_texts", None)
        again = load_corpus(write(tmp_path / "same.txt", "a text"), Letters(), vocab_size=128)
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.places, again.places)
    write(file, "another text")
    assert texts_of(load_corpus(file, Letters(), vocab_size=128)) == ["another text"]
    for damaged in own_cache.glob("*/places.npy"):
        damaged.write_bytes(b"not an array")
    assert texts_of(load_corpus(file, Letters(), vocab_size=128)) == ["another text"]


def test_models_and_readings_do_not_share_an_index(tmp_path: Path, own_cache: Path):
    class Capitals(Letters):
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return super().__call__(text.upper(), add_special_tokens=add_special_tokens)

        def get_vocab(self) -> dict[str, int]:
            return {"A": 65}

    file = write(tmp_path / "texts" / "a.txt", "a text")
    assert texts_of(load_corpus(file, Letters(), vocab_size=128)) == ["a text"]
    assert texts_of(load_corpus(file, Capitals(), vocab_size=128)) == ["A TEXT"]
    load_corpus(file, Letters(), vocab_size=129)
    load_corpus(file.parent, Letters(), vocab_size=128)
    assert len(list(own_cache.iterdir())) == 4


def test_without_a_cache_a_corpus_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(write(tmp_path / "file", "no folder")))
    with pytest.warns(CacheWarning, match="sorted again at each start"):
        corpus = load_corpus(write(tmp_path / "a.txt", "a text"), Letters(), vocab_size=128)
    assert texts_of(corpus) == ["a text"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text", r"give a \.txt, \.jsonl, \.jsonl\.gz file"),
        ("a.jsonl", '{"question": 5}\n', "a chat is an object"),
        ("a.jsonl", "{\n", "not JSON"),
        ("a.jsonl", '{"prompt_ids": [1], "answer_ids": [2], "tokenizer": "other"}\n', "tokenizer of fingerprint other"),
        ("a.txt", "", "has no text"),
        ("a.txt", "\u20ac", "the token 8364 is not in the model's vocabulary of 128 tokens"),
        ("a.jsonl", '{"text": "\\ud800 a"}\n', "half"),
    ],
)
def test_what_is_no_corpus(tmp_path: Path, name: str, content: str, words: str):
    with pytest.raises(DataError, match=words):
        load_corpus(write(tmp_path / name, content), Letters(), vocab_size=128)


def test_a_missing_or_empty_folder(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no"):
        load_corpus(tmp_path / "empty", Letters(), vocab_size=128)
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(tmp_path / "missing.txt", Letters(), vocab_size=128)


def test_a_corpus_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_files, "MOST_TOKENS", 5)
    assert texts_of(load_corpus(write(tmp_path / "a.txt", "12345"), Letters(), vocab_size=128)) == ["12345"]
    with pytest.raises(DataError, match="more than 5 tokens"):
        load_corpus(write(tmp_path / "b.txt", "123456"), Letters(), vocab_size=128)
