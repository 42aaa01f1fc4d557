"""Documents that the model continues: their beginnings, the completions, and what training reads of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distill_world import manifest, options, records, run
from draftheads.data.texts import load_texts
from draftheads.decode.engine import Engine
from draftheads.distill import local
from draftheads.errors import DistillationInterrupted, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from fake_progress import FakeProgress
from training_world import EOS, chat_model, chat_tokenizer

TEXTS = [" ".join(f"w{(3 * i + j) % 57}" for j in range(3 + i)) for i in range(9)]  # of 3 to 11 tokens


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model(seed=3)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local, "DOCUMENT_TOKENS", 5)
    path = tmp_path / "book.jsonl"
    lines = [*TEXTS, TEXTS[2], "  "]  # one of them twice, and nothing
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return path


def test_the_model_continues_the_beginning_of_each_text(target: TargetModel, book: Path, tmp_path: Path):
    chosen = options(tmp_path, prompts=(), documents=(book,), temperature=(0.0,))
    bare = replace(target, tokenizer=chat_tokenizer(""))  # it needs no chat template
    bare.tokenizer.chat_template = None
    run(bare, chosen)
    found = records(chosen)
    assert [record["prompt"] for record in found] == [" ".join(text.split()[:5]) for text in TEXTS]
    assert [record["source"] for record in found] == [f"book.jsonl:{i + 1}" for i in range(9)]
    settings = SamplingSettings(max_new_tokens=12, skip_special_tokens=False)
    for record in found:
        ids = target.tokenizer(record["prompt"])["input_ids"]  # without a chat template
        result = Engine(target).generate([ids], settings)[0]
        assert record["completion"] == result.text.removesuffix(" <e>")
        assert record["finished"] == (result.finish_reason == "stop")
    assert manifest(chosen)["counts"]["records"] == len(TEXTS)
    texts = load_texts(target, [chosen.out], max_length=100)  # training learns the completions only
    for text, record in zip(texts, found, strict=True):
        prompt = target.tokenizer(record["prompt"])["input_ids"]
        answer = target.tokenizer(record["completion"])["input_ids"] + [EOS] * record["finished"]
        assert list(text.token_ids) == prompt + answer
        assert list(text.loss_mask) == [False] * len(prompt) + [True] * len(answer)


def test_documents_follow_the_prompts_and_a_stopped_run_goes_on(target: TargetModel, book: Path, tmp_path: Path):
    whole = options(tmp_path, documents=(book,))
    run(target, whole)
    kinds = ["messages" in record for record in records(whole)]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count(False) == len(TEXTS)
    stopped = options(tmp_path, documents=(book,), out=tmp_path / "again.jsonl")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(DistillationInterrupted):
        run(target, stopped, FakeProgress(len(kinds) - 2, interrupt))
    run(target, stopped)
    assert stopped.out.read_bytes() == whole.out.read_bytes()
    book.write_text(json.dumps({"text": "w1 w2"}) + "\n")
    with pytest.raises(InvalidSettings, match="fingerprint was"):
        run(target, stopped)
