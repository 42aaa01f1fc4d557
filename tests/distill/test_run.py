"""Distillations: answers, self-talk, prompts that are left out, and the manifest."""

import hashlib
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill_world import RECORDS, manifest, options, records, run, write_prompts
from draftheads.data.texts import load_texts
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import prompt_ids
from draftheads.decode.request import GenerationResult
from draftheads.distill import local
from draftheads.distill import run as distillation
from draftheads.distill.conversation import SELF_TALK, Dialogue, Prompt, mixed_seed
from draftheads.distill.local import add_result
from draftheads.distill.run import distill
from draftheads.errors import ChatTemplateWarning, DataError, StorageError, UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from fake_progress import FakeProgress
from families import TREES, tiny_head
from think_world import CLOSE, OPEN, TEMPLATES, WORDS, think_model
from thorough import some
from training_world import EOS, TEMPLATE, VOCAB, KilledError, chat_model, chat_tokenizer, stop_by_crash


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model(seed=3)


def roles(record: dict[str, Any]) -> list[str]:
    return [message["role"] for message in record["messages"]]


def test_a_place_that_cannot_be_written_is_an_error_before_the_model_is_loaded(tmp_path: Path):
    with pytest.raises(StorageError, match=str(tmp_path)):
        distill(options(tmp_path, out=tmp_path), lambda: pytest.fail("the model was loaded"), FakeProgress())


# --- answers ---


def test_answers_are_the_engines_answers_to_the_conversation_so_far(target: TargetModel, tmp_path: Path):
    chosen = options(tmp_path, temperature=(0.0,))
    run(target, chosen)
    alone = Engine(target, max_batch_size=1)
    found = records(chosen)
    assert [record["index"] for record in found] == list(range(len(RECORDS)))
    for record in found:
        messages = record["messages"]
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                result = alone.generate([messages[:place]], max_new_tokens=12, skip_special_tokens=False)[0]
                is_last = place == len(messages) - 1
                assert message["content"] == result.text.removesuffix(" <e>")
                assert (result.finish_reason == "stop") == (record["finished"] or not is_last)
    assert roles(found[13])[:3] == ["system", "user", "assistant"]
    assert "never" not in chosen.out.read_text()
    assert {record["finished"] for record in found} == {True, False}  # both cases are tested


@pytest.mark.parametrize("changes", some([{"batch_size": 1}, {"batch_size": 64}], {"batch_size": 1}))
def test_neighbours_change_no_answer(tmp_path: Path, changes: dict[str, Any]):
    """In fp64: in fp32 about one draw in ten thousand is so near the border of two tokens that rounding decides."""
    target = TargetModel(chat_model(seed=3).model.double(), chat_tokenizer(), "tiny-chat")
    one = options(tmp_path, num_self_talk=10)
    other = replace(one, out=tmp_path / "other.jsonl", **changes)
    run(target, one)
    run(target, other)
    assert any(record["source"] == SELF_TALK for record in records(one))
    assert one.out.read_bytes() == other.out.read_bytes()


def test_a_head_changes_no_answer_and_saves_steps(target: TargetModel, tmp_path: Path):
    head = tiny_head("medusa", target)
    head.default_shape = TREES["cartesian"]
    one, other = options(tmp_path), options(tmp_path, out=tmp_path / "other.jsonl")
    plain, faster = run(target, one), run(target, other, drafter=head)
    assert one.out.read_bytes() == other.out.read_bytes()
    assert plain.counts["steps"] == plain.counts["tokens"] - plain.counts["generations"]
    assert faster.counts["steps"] < plain.counts["steps"]


def test_each_prompt_gets_a_temperature_by_the_seed(target: TargetModel, tmp_path: Path):
    write_prompts(tmp_path / "prompts.jsonl", [{"prompt": f"w{i % 50} w{i // 50}"} for i in range(90)])
    mixed = options(tmp_path, temperature=(0.0, 0.0, 1.5), batch_size=32)
    greedy = replace(mixed, temperature=(0.0,), out=tmp_path / "greedy.jsonl")
    other = replace(mixed, seed=1, out=tmp_path / "other.jsonl")
    for chosen in (mixed, greedy, other):
        run(target, chosen)
    warm = [record["temperature"] for record in records(mixed)]
    assert set(warm) == {0.0, 1.5}
    assert 45 <= warm.count(0.0) <= 75  # 60 expected, standard deviation 4.5
    for record, plain in zip(records(mixed), records(greedy), strict=True):
        assert (record["messages"] == plain["messages"]) == (record["temperature"] == 0.0)
    assert [record["temperature"] for record in records(other)] != warm


def read_and_written(target: TargetModel, record: dict[str, Any], chosen: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens of each prompt and answer of a chat, made again."""
    engine, found = Engine(target, max_batch_size=1), []
    for place, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            prompt = prompt_ids(target, record["messages"][:place], tools=record.get("tools", ()))
            seed = mixed_seed(record["seed"], place)
            settings = SamplingSettings(max_new_tokens=chosen.max_new_tokens, temperature=1.0, seed=seed)
            found.append((prompt, list(engine.generate([prompt], settings)[0].token_ids)))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_training_reads_what_a_reasoning_model_read_and_wrote(tmp_path: Path, name: str):
    """Token for token, in each turn: thoughts, cut off or not, special tokens, and what a template would add."""
    target = think_model(name, seed=5)
    chosen = options(tmp_path, temperature=(1.0,), max_new_tokens=30)
    write_prompts(chosen.prompts[0], [{"turns": [f"w{i} w{i + 1}", "w7", "w9"]} for i in range(20)])
    run(target, chosen)
    every = [(record, read_and_written(target, record, chosen)) for record in records(chosen)]
    texts = load_texts(target, [chosen.out], max_length=512)
    written = [ids for _, turns in every for _, ids in turns]
    assert {OPEN, CLOSE, "<unk>"} <= {WORDS[i] for ids in written for i in ids}
    assert {ids[-1] == EOS for ids in written} == {True, False}
    for number, (_, turns) in enumerate(every, 1):
        own = [text for text in texts if text.source == f"{chosen.out}:{number}"]
        for prompt, answer in turns:
            whole = (*prompt, *answer)
            (mask,) = {text.loss_mask[: len(whole)] for text in own if text.token_ids[: len(whole)] == whole}
            assert all(mask[len(prompt) :])
        assert sum(sum(text.loss_mask) for text in own) == sum(len(answer) for _, answer in turns)


def test_a_prompt_with_tools_is_answered_and_learned_with_them(tmp_path: Path):
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATE
    target = TargetModel(chat_model(seed=3).model, chat_tokenizer(template), "tiny-tools")
    tool = {"type": "function", "function": {"name": "w30"}}
    chosen = options(tmp_path, temperature=(1.0,), batch_size=1)
    write_prompts(chosen.prompts[0], [{"prompt": "w1", "tools": [tool]}, {"prompt": "w2", "tools": []}])
    run(target, chosen)
    found = records(chosen)
    assert [record.get("tools") for record in found] == [[tool], None]
    texts = load_texts(target, [chosen.out], max_length=512)
    for record, text in zip(found, texts, strict=True):
        ((prompt, answer),) = read_and_written(target, record, chosen)
        assert (*prompt, *answer) == text.token_ids
        assert text.loss_mask == (False,) * len(prompt) + (True,) * len(answer)
    assert VOCAB[texts[0].token_ids[0]] == "w30"


# --- self-talk ---


def test_self_talk_is_a_question_by_the_model_and_its_answer(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "QUESTION_TOKENS", 100)
    chosen = options(tmp_path, prompts=(), num_self_talk=30)
    counts = run(target, chosen).counts
    engine, found = Engine(target), records(chosen)
    opening = target.tokenizer("<s> user \n", add_special_tokens=False)["input_ids"]
    for record in found:
        dialogue = Dialogue(Prompt((), None, SELF_TALK), index=record["index"], options=chosen)
        settings = SamplingSettings(max_new_tokens=100, temperature=1.0, seed=dialogue.next_seed)
        asked = engine.generate([opening], settings)[0]
        assert asked.finish_reason == "stop"
        assert record["messages"][0] == {"role": "user", "content": asked.text.strip()}
        assert (roles(record), record["source"]) == (["user", "assistant"], SELF_TALK)
    assert counts["done"] == 30 == len(found) + counts["repeated"] + counts["no_question"]


@pytest.mark.parametrize(("text", "reason"), [(" \n", "stop"), ("w1 w2", "length")])
def test_empty_or_unfinished_questions_are_dropped(tmp_path: Path, text: str, reason: Any):
    dialogue = Dialogue(Prompt((), None, SELF_TALK), index=0, options=options(tmp_path, num_self_talk=1))
    result = GenerationResult(text, (9, 2), 3, 1, reason)
    add_result(dialogue, SimpleNamespace(result=lambda: result), None)  # type: ignore[arg-type]
    assert (dialogue.is_over, dialogue.stop_reason, dialogue.record()) == (True, "no_question", None)
    assert (dialogue.num_tokens, dialogue.num_steps) == (2, 1)  # they cost time all the same


# --- prompts ---


def test_equal_prompts_are_answered_once(target: TargetModel, tmp_path: Path):
    chosen = options(tmp_path)
    same = [{"prompt": "w1  w2"}, {"prompt": "w1  w2"}, {"turns": ["w1  w2"]}, {"turns": ["w1", "w2"]}]
    system = {"messages": [{"role": "system", "content": "w5"}, {"role": "user", "content": "w1  w2"}]}
    write_prompts(chosen.prompts[0], [*same, system])
    outcome = run(target, chosen)
    found = records(chosen)
    assert [record["source"] for record in found] == ["prompts.jsonl:1", "prompts.jsonl:4", "prompts.jsonl:5"]
    assert [record["index"] for record in found] == [0, 1, 2]
    assert outcome.survey.num_duplicates == manifest(chosen)["identity"]["num_duplicates"] == 2
    assert found[0]["messages"][0]["content"] == "w1  w2"  # with its own white space


def test_prompts_that_are_too_long_are_counted_and_left_out(tmp_path: Path):
    target = chat_model(seed=3)
    target.config.max_position_embeddings = 40
    long = " ".join(["w1"] * 50)
    chosen = options(tmp_path, temperature=(0.0,), max_new_tokens=30)
    write_prompts(chosen.prompts[0], [{"prompt": "w1"}, {"prompt": long}, {"prompt": "w2"}])
    outcome = run(target, chosen)
    assert [record["index"] for record in records(chosen)] == [0, 2]
    assert (outcome.counts["too_long"], outcome.counts["done"]) == (1, 3)


def test_an_error_of_the_template_names_the_prompt(tmp_path: Path):
    refusing = "{% if messages[0]['content'] == 'w5' %}{{ raise_exception('no w5') }}{% endif %}<s> "
    target = TargetModel(chat_model().model, chat_tokenizer(refusing), "tiny")
    with pytest.raises(DataError, match=r"prompts.jsonl:6: .*no w5"):
        run(target, options(tmp_path))


def test_a_model_without_a_chat_template_continues_prompts_as_texts(tmp_path: Path):
    target = TargetModel(chat_model().model, chat_tokenizer(), "tiny")
    target.tokenizer.chat_template = None
    asked = ["w5 w6", "w7"]
    lines = "".join(f'{{"prompt": "{text}"}}\n' for text in asked)
    (tmp_path / "plain.jsonl").write_text(lines, encoding="utf-8")
    chosen = options(tmp_path, prompts=(tmp_path / "plain.jsonl",), temperature=(0.0,))
    with pytest.warns(ChatTemplateWarning, match="as plain text"):
        run(target, chosen)
    with pytest.warns(ChatTemplateWarning):
        expected = Engine(target).generate(asked, max_new_tokens=chosen.max_new_tokens)
    assert [record["prompt"] for record in records(chosen)] == asked
    texts = [target.tokenizer.decode([t for t in each.token_ids if t not in target.eos_ids]) for each in expected]
    assert [record["completion"] for record in records(chosen)] == texts, "special tokens are in it, too"
    (tmp_path / "chat.jsonl").write_text('{"turns": ["w5", "w6"]}\n', encoding="utf-8")
    chats = options(tmp_path, prompts=(tmp_path / "chat.jsonl",), out=tmp_path / "chats.jsonl")
    with pytest.raises(DataError, match=r"chat.jsonl:1: a chat, and tiny has no chat template: .*--documents"):
        run(target, chats)
    with pytest.raises(UnsupportedModel, match=r"tiny has no chat template: .*--documents"):
        run(target, replace(chats, num_self_talk=1))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (100, r"(?P<seconds>1,\d\d\d) s/answer, \d\.\d tokens/s"),
        (0.01, r"(?P<rate>\d+\.\d) answers/s, (?P<tokens>[\d.]+) tokens/s"),
    ],
)
def test_slow_answers_are_shown_by_their_seconds(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, shown: str
) -> None:
    clock, progress = count(0, seconds), FakeProgress()
    monkeypatch.setattr(distillation, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    counts = run(target, options(tmp_path), progress).counts
    found = re.fullmatch(shown, progress.last[2])
    assert found
    if rate := found.groupdict().get("rate"):
        assert float(found["tokens"]) / float(rate) == pytest.approx(counts["tokens"] / counts["answers"], rel=0.05)


# --- the manifest ---


def test_the_manifest_records_settings_counts_and_digest(target: TargetModel, tmp_path: Path):
    chosen = options(tmp_path, seed=5)
    progress = FakeProgress()
    outcome = run(target, chosen, progress)
    found = manifest(chosen)
    assert found["sha256"] == hashlib.sha256(chosen.out.read_bytes()).hexdigest()
    assert found["counts"]["records"] == len(records(chosen)) == outcome.counts["records"]
    assert progress.last[2].endswith(" tokens/s")
    assert progress.last[:2] == (len(RECORDS), len(RECORDS))
    assert [found["identity"][name] for name in ("seed", "model", "dtype")] == [5, "tiny-chat", "float32"]
    assert found["options"]["batch_size"] == 4
    assert found["provenance"]["torch"]
    names = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert names == ["out.jsonl", "out.jsonl.manifest.json", "prompts.jsonl"]


def test_a_run_that_continues_on_another_day_has_the_date_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = chat_model()
    target.tokenizer.chat_template = "w{{ strftime_now('%d') | int }} \n " + TEMPLATE
    for name in ("whole", "out", "other"):
        (tmp_path / name).mkdir()
    whole, chosen, other = (options(tmp_path / name, num_self_talk=4) for name in ("whole", "out", "other"))
    for day, of in ((28, other), (29, whole), (29, chosen), (30, chosen)):
        monkeypatch.setattr(distillation, "date_now", lambda day=day: f"2026-11-{day}T12:00:00")
        if of is chosen and day == 29:
            with pytest.raises(KilledError):
                run(target, of, FakeProgress(9, stop_by_crash))
        else:
            run(target, of)
    assert records(chosen) == records(whole) != records(other)
