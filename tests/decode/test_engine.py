"""The engine's faces: generate, stream and run; rows that come and go; settings; prompts that cannot be answered."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from draftheads import Engine, SamplingSettings, StreamEvent, TargetModel
from draftheads.decode.batch import Batch
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.mixed import Mixed
from draftheads.errors import (
    ChatTemplateWarning,
    InvalidPrompt,
    InvalidSettings,
)
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import BestFirst, Shape
from fake_progress import FakeProgress
from families import (
    PROMPTS,
    TREES,
    VOCAB,
    Answer,
    IntegerTokenizer,
    PlantedDrafter,
    by_hand,
    ids,
    tiny_head,
    tiny_model,
    tiny_profile,
)

MANY = [*PROMPTS, [4, 5], [22, 3, 9, 4], [8, 8, 8], [20, 19, 18]]  # seven, no two alike
LENGTHS = [1, 9, 4, 1, 12, 2, 6]
ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def plain(model: TargetModel) -> list[Answer]:
    """Plain answers of 30 tokens to MANY, each alone."""
    engine = Engine(model, max_batch_size=1)
    return [result.token_ids for result in engine.generate(MANY, max_new_tokens=30, **ON)]


def planted(plain: list[Answer], tree: str = "chain", seed: int = 0) -> PlantedDrafter:
    """A drafter that often guesses several tokens in a row rightly."""
    answers = {tuple(prompt): answer for prompt, answer in zip(MANY, plain, strict=True)}
    return PlantedDrafter(TREES[tree], answers, seed=seed)


class HiddenStateRecorder(PlantedDrafter):
    """Also records the hidden states in its contexts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recorded: list[tuple[list[int], torch.Tensor]] = []  # a text, and the hidden states of its last tokens

    def propose(self, context: Context, shape: Shape) -> Draft:
        draft = super().propose(context, shape)
        for row, count in enumerate(context.num_accepted.tolist()):
            self.recorded.append((self.texts[row][:-1], context.hidden[row, :count]))
        return draft


@pytest.mark.parametrize("room", [1, 2, 3, 16])
def test_contexts_hold_the_hidden_states_of_accepted_tokens(model: TargetModel, plain: list[Answer], room: int):
    answers = {tuple(prompt): answer for prompt, answer in zip(MANY, plain, strict=True)}
    recorder = HiddenStateRecorder(TREES["ragged"], answers)
    results = Engine(model, recorder, max_batch_size=room).generate(MANY, lengths_as_settings())
    assert ids(results) == of_lengths(plain)
    assert sum(result.num_steps for result in results) < sum(LENGTHS) - len(LENGTHS)
    assert recorder.texts == [], "rows whose first token was the last one are not drafted for"
    assert max(len(hidden) for text, hidden in recorder.recorded if tuple(text) not in answers) > 2
    for text, hidden in recorder.recorded:
        expected = model.hidden_states(torch.tensor([text]))[0, -len(hidden) :]
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


def lengths_as_settings() -> list[SamplingSettings]:
    return [SamplingSettings(max_new_tokens=length, ignore_eos=True) for length in LENGTHS]


def of_lengths(answers: list[Answer]) -> list[Answer]:
    """What these settings leave of longer answers."""
    return [answer[:length] for answer, length in zip(answers, LENGTHS, strict=True)]


# --- rows come and go ---


def rows_per_step(lengths: list[int], room: int) -> list[int]:
    """How many rows step together when each step gives a token, the first one comes with the prompt, and who is
    done makes room for the next in line."""
    waiting, rows, sizes = list(lengths), [], []
    while waiting or rows:
        joining, waiting = waiting[: room - len(rows)], waiting[room - len(rows) :]
        rows = [left for left in [*rows, *(length - 1 for length in joining)] if left]
        if rows:
            sizes.append(len(rows))
            rows = [left - 1 for left in rows if left > 1]
    return sizes


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 16])
def test_who_is_done_makes_room_for_the_next(
    model: TargetModel, plain: list[Answer], max_batch_size: int, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: (sizes.append(len(batch.requests)), step(batch))[1])
    results = Engine(model, max_batch_size=max_batch_size).generate(MANY, lengths_as_settings())
    assert ids(results) == of_lengths(plain)
    assert sizes == rows_per_step(LENGTHS, max_batch_size)
    assert [result.num_steps for result in results] == [length - 1 for length in LENGTHS]
    assert [result.num_prompt_tokens for result in results] == [len(prompt) for prompt in MANY]


@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_requests_may_come_while_others_are_decoded(model: TargetModel, plain: list[Answer], max_batch_size: int):
    """Each answer that ends asks for the next one: the last ones are asked when nothing waits any more."""
    engine = Engine(model, max_batch_size=max_batch_size)
    requests = engine.requests(MANY, lengths_as_settings())
    core, later = engine.core(), requests[2:]
    for request in requests[:2]:
        core.add(request)
    for event in engine.events(core):
        if event.finish_reason and later:
            core.add(later.pop(0), first=len(later) % 2 == 0)
    assert [tuple(request.token_ids) for request in requests] == of_lengths(plain)


def test_no_prompts_no_answers(model: TargetModel):
    assert Engine(model).generate([]) == []


def test_texts_messages_and_token_ids_may_stand_side_by_side(model: TargetModel):
    text = "hey"
    ids = IntegerTokenizer()(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    found = Engine(model).generate([text, messages, ids, tuple(ids)], max_new_tokens=5, **ON)
    assert len({result.token_ids for result in found}) == 1
    assert {result.num_prompt_tokens for result in found} == {3}


# --- events ---


def test_events_add_up_to_the_results(model: TargetModel, plain: list[Answer]):
    engine = Engine(model, planted(plain, "cartesian"), max_batch_size=3)
    requests = engine.requests(MANY, max_new_tokens=30, **ON)
    events: list[list[StreamEvent]] = [[] for _ in MANY]
    for event in engine.run(requests):
        events[event.index].append(event)
    assert sum(event.num_drafted for each in events for event in each) > len(MANY) * 5
    for request, own in zip(requests, events, strict=True):
        result = request.result()
        assert "".join(event.text for event in own) == result.text == model.tokenizer.decode(list(result.token_ids))
        assert sum((event.token_ids for event in own), ()) == result.token_ids
        assert len(result.drafted) == len(result.token_ids)
        flags = iter(result.drafted)
        for event in own:
            drafted = [next(flags) for _ in event.token_ids]
            assert drafted == [place < event.num_drafted for place in range(len(drafted))]
        assert len(own) == result.num_steps + 1
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + ["length"]
        assert (own[0].num_drafted, len(own[0].token_ids)) == (0, 1)
        # each step adds one token that was not guessed, except where the end cut it off
        assert all(event.num_drafted == len(event.token_ids) - 1 for event in own[:-1])
        assert own[-1].num_drafted in (len(own[-1].token_ids) - 1, len(own[-1].token_ids))
        assert result.tokens_per_step == (len(result.token_ids) - 1) / result.num_steps


def test_a_stream_is_the_result_as_it_comes(model: TargetModel, plain: list[Answer]):
    stream = Engine(model, planted(plain)).stream(MANY[0], max_new_tokens=30, **ON)
    assert isinstance(stream, Iterator)
    first = next(stream)
    assert (first.token_ids, first.text, first.index) == (plain[0][:1], f"<{plain[0][0]}>", 0)
    assert first.token_ids + sum((event.token_ids for event in stream), ()) == plain[0]


# --- settings ---


def test_settings_for_each_row_and_overrides_for_all(model: TargetModel, plain: list[Answer]):
    engine = Engine(model)
    each = [SamplingSettings(max_new_tokens=3, stop_token_ids=(VOCAB + 9,)), SamplingSettings(max_new_tokens=5)]
    assert ids(engine.generate(MANY[:2], each, **ON)) == [plain[0][:3], plain[1][:5]]
    assert ids(engine.generate(MANY[:2], each, max_new_tokens=2, **ON)) == [plain[0][:2], plain[1][:2]]
    assert ids(engine.generate(MANY[:2], SamplingSettings(max_new_tokens=4), **ON)) == [plain[0][:4], plain[1][:4]]
    assert each[1] == SamplingSettings(max_new_tokens=5), "overriding made copies"
    requests = engine.requests(MANY[:2], tuple(each), temperature=0.5)
    assert [request.settings.temperature for request in requests] == [0.5, 0.5]
    assert [request.settings.stop_token_ids for request in requests] == [(VOCAB + 9,), ()]


# --- what a notebook shows ---


def test_an_engine_names_its_parts(model: TargetModel):
    medusa, half = tiny_head("medusa", model), tiny_model("llama", dtype=torch.bfloat16)
    costs = by_hand([("verify", 1, 1, 10.0), ("static", 1, 1, 1.0)])
    planned = Engine(half, Mixed(tiny_head("hydra", half)), profile=tiny_profile(TREES["chain"]), costs=costs)
    shown = {
        "fp32, cpu, plain decoding": Engine(model),
        "fp32, cpu, medusa with copies, tree: growing, 24": Engine(model, Mixed(medusa), shape=BestFirst(24)),
        "fp32, cpu, copies, trees of its own": Engine(model, Mixed(None)),
        "fp32, cpu, tiny-llama, tree: static, 5": Engine(model, DraftModel(model, model)),
        "bf16, cpu, hydra with copies, trees by profile": planned,
    }
    assert {repr(engine) for engine in shown.values()} == {f"Engine(tiny-llama, {parts})" for parts in shown}


def test_progress_counts_answers(model: TargetModel):
    progress = FakeProgress()
    engine = Engine(model, max_batch_size=3)
    found = engine.generate(MANY, lengths_as_settings(), progress=progress)
    assert progress.stages == ["answering 7 prompts"]
    assert progress.done == [*range(1, 8)]
    assert progress.last == (7, 7, "")
    assert found == engine.generate(MANY, lengths_as_settings())


# --- prompts and settings that cannot be ---

SETTINGS = SamplingSettings()
OUTSIDE = f"token ids must lie in 0 … {VOCAB - 1}"
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "blanks": ([" \n\t"], "the prompt is empty"),
    "one of two has no tokens": ([[5, 6], []], "the prompt is empty"),
    "one text, no list": ("Hello", "list of prompts: write [prompt] for a single one; found str: 'Hello'"),
    "one message, no list": ({"role": "user", "content": "hi"}, "list of prompts: write [prompt]"),
    "a number": (3, "list of prompts: write [prompt] for a single one; found int: 3"),
    "a tensor of a prompt": (torch.tensor([5, 6]), "a list of token ids, not Tensor: tensor(5)"),
    "one conversation, no list": ([{"role": "user", "content": "hi"}], "not dict: {'role': 'user'"),
    "a prompt of bytes": ([b"hi"], "not bytes"),
    "texts in a prompt": ([["hi", "you"]], "message 0 is 'hi'; it must be an object"),
    "a role that is no text": ([[{"role": 1, "content": "hi"}]], "message 0: role is 1"),
    "fractions": ([[5.0, 6.0]], "message 0 is 5.0; it must be an object"),
    "flags": ([[True, False]], "message 0 is True; it must be an object"),
    "a negative token": ([[5, -1]], f"the prompt has token id -1; {OUTSIDE}"),
    "a token beyond the vocabulary": ([[5, VOCAB]], f"the prompt has token id {VOCAB}; {OUTSIDE}"),
    "too long": ([[5] * 256], "has 256 tokens; tiny-llama takes at most 255"),
    "half a character": (["w1 \ud800"], "half a character, '\\ud800' as its number "),
}
BAD_SETTINGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a typing error": (None, {"temprature": 1.0}, "no setting 'temprature'; did you mean temperature?"),
    "transformers' name": (None, {"max_length": 5}, "no setting 'max_length'; did you mean max_new_tokens?"),
    "a name like no other": (None, {"n": 2}, "no setting 'n'; choose among acceptance, frequency_penalty, grammar, "),
    "too few": ([SETTINGS], {}, "1 settings for 2 prompts"),
    "a dict": ({"temperature": 1.0}, {}, "settings are SamplingSettings, not dict: {'temperature': 1.0}"),
    "a text": ("ab", {}, "settings are SamplingSettings, not str: 'ab'"),
    "one None": ([SETTINGS, None], {}, "settings are SamplingSettings, not NoneType"),
    "one out of range": ([SETTINGS, SETTINGS], {"top_p": 0.0}, "top_p is 0.0"),
}
# how an engine gets it, and what the message must contain; further ones are in tests/test_bad_inputs.py
BAD_INPUTS: dict[str, tuple[Callable[[Engine], object], str]] = {
    **{name: (partial(Engine.generate, prompts=given), words) for name, (given, words) in BAD_PROMPTS.items()},
    **{
        f"settings: {name}": (partial(Engine.generate, prompts=[[5], [6]], settings=own, **more), words)
        for name, (own, more, words) in BAD_SETTINGS.items()
    },
    "a stream's prompt": (lambda engine: engine.stream([5, VOCAB]), OUTSIDE),
    "a stream's settings": (lambda engine: engine.stream([5], {"seed": 1}), "not dict"),
    "an id to encode": (lambda engine: engine.encode([5, 10**20]), f"token id {10**20}"),
}


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input must show before any work is done."""
    monkeypatch.setattr(TransformersRunner, "read", lambda *_: pytest.fail("the model was asked"))


@pytest.mark.parametrize("name", BAD_INPUTS)
@pytest.mark.usefixtures("no_decoding")
def test_bad_inputs(model: TargetModel, name: str):
    give, words = BAD_INPUTS[name]
    with pytest.raises(InvalidSettings if "settings" in name else InvalidPrompt) as caught:
        give(Engine(model))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_and_ids_of_other_types(model: TargetModel, plain: list[Answer]):
    engine = Engine(model)
    numpy_ids = [np.int64(token) for token in MANY[1]]
    found = engine.generate(iter([MANY[0], numpy_ids]), max_new_tokens=np.int64(5), **ON)
    assert ids(found) == [answer[:5] for answer in plain[:2]]
    assert {type(token) for token in engine.encode(numpy_ids)} == {int}


def test_the_longest_prompt_leaves_room_for_one_token(model: TargetModel):
    result = Engine(model, tiny_head("medusa", model)).generate([[5] * 255], **ON)[0]
    assert (len(result.token_ids), result.finish_reason, result.num_steps) == (1, "length", 0)
    assert result.tokens_per_step == 1.0


# --- chat templates ---


class ChatTokenizer(IntegerTokenizer):
    """Counts as having a template; adds a start token where it is not told not to."""

    chat_template = "a program"

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + super().__call__(text)["input_ids"]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        if messages[0]["role"] == "system":
            raise ValueError("no system messages, please")
        turns = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return turns + "assistant:" * add_generation_prompt


def with_tokenizer(model: TargetModel, tokenizer: Any) -> Engine:
    return Engine(TargetModel(model.model, tokenizer, model.model_id))


def test_a_chat_template_is_used_where_there_is_one(model: TargetModel):
    engine = with_tokenizer(model, ChatTokenizer())
    expected = IntegerTokenizer()("user:hi;assistant:")["input_ids"]
    messages: list[Mapping[str, str]] = [{"role": "user", "content": "hi"}]
    assert engine.encode("hi") == engine.encode(messages) == expected
    longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    expected = IntegerTokenizer()("user:hi;assistant:yes;user:go;assistant:")["input_ids"]
    assert engine.encode(longer) == expected
    assert engine.encode([5, 6]) == [5, 6]


def test_a_template_that_refuses(model: TargetModel):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(InvalidPrompt, match="the model's chat template refuses these messages: no system messages"):
        with_tokenizer(model, ChatTokenizer()).encode(messages)


def test_without_a_template_the_words_stand_as_they_are_and_a_warning_says_so(model: TargetModel):
    tokenizer = ChatTokenizer()
    tokenizer.chat_template = None
    engine = with_tokenizer(model, tokenizer)
    words = r"tiny-.* has no chat template: .* --chat-template .* chatml, hermes, llama-2, vicuna"
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]
    for prompt, text in (("hi", "hi"), (messages, "hi\nyou")):
        with pytest.warns(ChatTemplateWarning, match=words):
            assert engine.encode(prompt) == [1, *IntegerTokenizer()(text)["input_ids"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.encode([5, 6]) == [5, 6]
