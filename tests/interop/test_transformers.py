"""``generate`` with drafts gives what it gives without: texts, scores, streams; under all of its own rules."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import draftheads
from cli_world import letters_tokenizer
from distribution import LENGTH, ODDS, PROMPT, joint_distribution, p_value
from draftheads.checkpoints.checkpoint import save_head
from draftheads.decode.planner import Plan
from draftheads.drafters.mixed import MixedSession
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings, PromptTooLong
from draftheads.interop.transformers import CustomGenerate, custom_generate
from draftheads.models.model import TargetModel
from draftheads.runners.native_runner import NativeRunner
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.speculation.shapes import Sampled
from draftheads.speculation.tree import Tree
from families import HAS_RECURRENT, PROMPTS, TREES, VOCAB, PlantedDrafter, tiny_head, tiny_model, tiny_profile
from thorough import some

pytestmark = pytest.mark.usefixtures("cheap_nodes", "own_cache")
FOUR = [*PROMPTS, [22, 3, 9, 4]]
NEW_TOKENS = 28
UNUSED = 99  # an end token that no model says
World = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model of a family with the folder of a head for it."""
    made: dict[tuple[str, str], tuple[Any, Path]] = {}

    def make(family: str = "llama", method: str = "hydra") -> tuple[Any, Path]:
        if (family, method) not in made:
            base = replace(tiny_model(family), tokenizer=letters_tokenizer())
            folder = tmp_path_factory.mktemp(family) / method
            profile = tiny_profile(TREES["ragged"])
            save_head(tiny_head(method, base), folder, base=base, dtype=torch.float32, profile=profile)
            made[family, method] = base.model, folder
        return made[family, method]

    return make


@pytest.fixture(scope="module")
def loops(world: World) -> tuple[CustomGenerate, CustomGenerate]:
    """One that drafts with the head for ``world()``, and one for planted drafts."""
    _, head = world()
    return drafting(head), drafting(head, tree=TREES["ragged"])


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """On the left, as ``generate`` needs them."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


def drafting(head: Path, **options: Any) -> CustomGenerate:
    return custom_generate(head, **{"tokenizer": letters_tokenizer(), **options})


def generate(model: Any, loop: CustomGenerate | None = None, prompts: list[list[int]] = FOUR, **options: Any) -> Any:
    """The same random numbers at each call."""
    torch.manual_seed(5)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **padded(prompts), **options}
    return model.generate(**arguments) if loop is None else model.generate(**arguments, custom_generate=loop)


def planted(model: Any, loop: CustomGenerate, expected: Tensor, prompts: list[list[int]] = FOUR) -> None:
    """Replaces the head of a loop by a drafter that knows these answers, so that paths of all lengths are accepted."""
    start = max(map(len, prompts))
    answers = {tuple(ids): tuple(row[start:].tolist()) for ids, row in zip(prompts, expected, strict=True)}
    engine = loop.engine(model)
    assert engine.profile is None
    engine.drafter = PlantedDrafter(TREES["ragged"], answers)


# --- greedy text ---


RECURRENT = ["qwen3_5_text", "mamba2"]  # trees need a newer transformers
ONE_OF_EACH = ["llama", "mamba2", "qwen3", "gemma3_text", "gpt2", "mistral", "qwen3_5_text", "mixtral"]


@pytest.mark.parametrize("family", [family for family in ONE_OF_EACH if HAS_RECURRENT or family not in RECURRENT])
@pytest.mark.few(5)
def test_greedy_text_of_a_padded_batch_is_that_of_generate(world: World, family: str) -> None:
    """Rows of recurrent models have one length: what transformers computes of padding before a text is not compared."""
    model, head = world(family)
    prompts = [[*ids, 7, 8, 9, 4][:5] for ids in FOUR] if family in RECURRENT else FOUR
    loops = [drafting(head, **options) for options in ({}, {"tree": TREES["cartesian"]}, {"fast": False})]
    known = drafting(head, tree=TREES["ragged"])
    for end in (2, None) if family in RECURRENT else (2, UNUSED, None):
        expected = generate(model, prompts=prompts, eos_token_id=end)
        for loop in loops:
            assert torch.equal(generate(model, loop, prompts, eos_token_id=end), expected)
        planted(model, known, expected, prompts)
        output = generate(model, known, prompts, eos_token_id=end, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.num_steps < expected.shape[1] - max(map(len, prompts)) - 1
    if family in RECURRENT:
        name = "cache_params" if family == "mamba2" else "past_key_values"
        filled = model(torch.tensor([[3, 4]]), use_cache=True)[name]
        with pytest.raises(InvalidSettings, match=rf"{name} \(a text that was read before\)"):
            generate(model, loops[0], prompts, **{name: filled})


@pytest.mark.parametrize("method", some(["medusa", "eagle3", "small-llama"], "eagle3"))
def test_heads_with_a_history_and_other_drafters(world: World, method: str) -> None:
    model, head = world("llama", method)
    expected = generate(model)
    assert torch.equal(generate(model, drafting(head)), expected)
    for name in ("prompt-lookup", "lookahead", None):
        assert torch.equal(generate(model, custom_generate(name, tokenizer=letters_tokenizer())), expected)
    loop = custom_generate(draft_model=tiny_model("llama").model, tokenizer=letters_tokenizer(), tree=Tree.chain(3))
    output = generate(model, loop, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.num_steps <= NEW_TOKENS / 2  # it drafts with the model itself


def test_one_row_takes_as_many_steps_as_the_engine(world: World) -> None:
    """Lookahead also needs what the target predicts for its window."""
    model, head = world()
    by_head = drafting(head, tree=TREES["cartesian"], copy=False)
    by_lookahead = custom_generate("lookahead", tokenizer=letters_tokenizer())
    for loop in (by_head, by_lookahead):
        (answer,) = loop.engine(model).generate([FOUR[0]], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        output = generate(model, loop, FOUR[:1], eos_token_id=None, return_dict_in_generate=True)
        assert tuple(output.sequences[0, 3:].tolist()) == answer.token_ids
        assert output.num_steps == answer.num_steps < NEW_TOKENS - 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("rules", [{}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8}])
def test_typical_text_is_that_of_the_engine(world: World, temperature: float, rules: dict[str, Any]) -> None:
    """Whatever the seed; at temperature 0 it is greedy. Rows have one length: the engine knows no padding."""
    model, head = world()
    prompts = [[*ids, 7, 8, 9, 4][:5] for ids in FOUR]
    typical = {"acceptance": "typical", "typical_epsilon": 0.3, "typical_delta": 0.2}
    loop = drafting(head, tree=TREES["cartesian"], copy=False, **typical)
    ends = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [9, 17]}
    results = loop.engine(model).generate(prompts, temperature=temperature, **ends, **rules, **typical)
    penalty = {"repetition_penalty": rules.get("repetition_penalty", 1.0), "eos_token_id": [2, 9, 17]}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, **rules} if temperature else {}
    output = generate(model, loop, prompts, **{**penalty, **sampling})
    for row, result in zip(output[:, 5:].tolist(), results, strict=True):
        assert row == [*result.token_ids, *[0] * (len(row) - len(result.token_ids))]
    assert torch.equal(output, generate(model, None, prompts, **penalty)) == (temperature == 0)


def without_ends(told: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Without the counts of steps in which a row ends: the engine also counts accepted tokens behind the end."""
    ends = {place for place, (name, _) in enumerate(told) if name == "keep"}
    return [each for place, each in enumerate(told) if not {place + 1, place + 2} & ends]


def test_a_drafter_sees_what_it_sees_in_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts, and what the planner is told; with copies, and a head that keeps a history."""
    model, head = world("llama", "eagle3")
    loop = drafting(head)
    engine = loop.engine(model)
    told: list[tuple[str, object]] = []

    def noting(owner: type, name: str, facts: Callable[..., object]) -> None:
        method = getattr(owner, name)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            told.append((name, facts(*arguments)))
            return method(self, *arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    noting(MixedSession, "propose", lambda context, _: (context.ids, context.num_accepted.tolist()))
    noting(Plan, "note", lambda draft, *counts: [draft.num_nodes, *map(list, counts[:3])])
    noting(Plan, "keep", list)
    copying = [[20], [5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11, 12]]  # the engine reads the shortest first
    for end in ([], [10]):
        results = engine.generate(copying, max_new_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=end)
        by_engine = without_ends(told)
        told.clear()
        output = generate(model, loop, copying, eos_token_id=end or UNUSED)
        for row, result in zip(output, results, strict=True):
            assert tuple(row[10 : 10 + len(result.token_ids)].tolist()) == result.token_ids
        assert without_ends(told) == by_engine
        assert sum(result.num_copied for result in results) > 0
        assert {name for name, _ in told} >= {"propose", "note"}
        told.clear()


def test_too_few_accepted_tokens_are_warned_of_at_the_end(world: World) -> None:
    model, head = world()
    loop = drafting(head, tree=TREES["ragged"])
    check = loop.engine(model).check = Mock()
    generate(model, loop)
    check.warn.assert_called_once_with()


# --- generate's own rules ---


class Forbidding(LogitsProcessor):
    """Forbids the token that is two places back, and writes into the scores that it gets."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, input_ids[:, -2:-1], -torch.inf)


class Recorder(LogitsProcessor):
    """Keeps a state: each call changes other tokens, and each row has others."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids.tolist())
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, (len(self.texts) + 3 * rows) % (VOCAB - 3) + 3] += 4.0
        return scores


class AtTenths(StoppingCriteria):
    """Ends rows at the third token 10 of their answers, and remembers what it saw."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []
        self.scores: list[int | None] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.texts.append(input_ids.tolist())
        self.scores.append(None if scores is None else len(scores))
        return (input_ids[:, 14:] == 10).sum(1) > 2


class InTurn(StoppingCriteria):
    """Ends each row three tokens after the one before it."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= 14 + 5 + 3 * torch.arange(len(input_ids))


def every_other(row: int, input_ids: Tensor) -> list[int]:
    """Even tokens after odd ones, and the other way round, from a place that depends on the row."""
    return list(range(3 + (int(input_ids[-1]) + row) % 2, VOCAB, 2))


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.4},
    "min_new_tokens": lambda: {"min_new_tokens": 20, "eos_token_id": [5, 6, 7, 8, 9]},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda: {"bad_words_ids": [[9], [4, 5], [12]]},
    "sequence_bias": lambda: {"sequence_bias": [[[11], 3.0], [[11, 12], -3.0]]},
    "suppress_tokens": lambda: {"suppress_tokens": [7, 8, 9], "begin_suppress_tokens": [10]},
    "forced tokens": lambda: {"forced_eos_token_id": 2, "forced_bos_token_id": 4},
    "exponential_decay": lambda: {"exponential_decay_length_penalty": (3, 1.3)},
    "max_length": lambda: {"max_length": 31, "max_new_tokens": None},
    "stop_strings": lambda: {"stop_strings": ["a", "od"], "tokenizer": letters_tokenizer()},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": every_other},
    "guidance_scale": lambda: {"guidance_scale": 1.6, "negative_prompt_ids": torch.tensor([[6, 9]] * 4)},
    "a criterion that knows rows": lambda: {"stopping_criteria": StoppingCriteriaList([InTurn()])},
    "several": lambda: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "eos_token_id": [2, 9, 17],
        "logits_processor": LogitsProcessorList([Forbidding(), Recorder()]),
        "stopping_criteria": StoppingCriteriaList([AtTenths()]),
    },
}


@pytest.mark.parametrize("end", [2, None])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.few(16)
def test_greedy_text_under_each_rule_is_that_of_generate(
    world: World, loops: tuple[CustomGenerate, CustomGenerate], rule: str, end: int | None
) -> None:
    """Without an end token, ended rows go on until the last one ends."""
    model, _ = world()
    if rule == "exponential_decay":
        end = 2
    expected = generate(model, **{"eos_token_id": end, **RULES[rule]()})
    if end == 2:
        assert not torch.equal(expected, generate(model, eos_token_id=end)), "the rule changes the text"
    planted(model, loops[1], expected)
    for loop in loops:
        assert torch.equal(generate(model, loop, **{"eos_token_id": end, **RULES[rule]()}), expected)


def test_unknown_rules_see_exactly_what_they_see_in_generate(world: World) -> None:
    """The same calls in the same order, ended rows with their padding, and the scores so far."""
    model, head = world()
    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": [2, 9]}

    def seen(loop: CustomGenerate | None) -> tuple[Any, list[object]]:
        processor, criterion = Recorder(), AtTenths()
        rules: dict[str, Any] = {"logits_processor": LogitsProcessorList([processor])}
        rules["stopping_criteria"] = StoppingCriteriaList([criterion])
        output = generate(model, loop, **options, **rules)
        return output, [processor.texts, criterion.texts, criterion.scores]

    expected, by_transformers = seen(None)
    loop = drafting(head, tree=TREES["ragged"])
    planted(model, loop, expected.sequences)
    output, by_drafts = seen(loop)
    assert by_drafts == by_transformers
    length = expected.sequences.shape[1] - 14
    assert len(by_drafts[0]) == length
    assert output.num_steps < length - 1
    assert (expected.sequences == 0).any(), "a row ends before the others"


@pytest.mark.parametrize("own", [True, False])
def test_rows_are_ahead_under_transformers_rules_or_where_the_caller_says_so(world: World, own: bool) -> None:
    model, head = world()
    rules = {"logits_processor": LogitsProcessorList([Forbidding()])} if own else {"repetition_penalty": 1.4}
    rules |= {"eos_token_id": UNUSED}
    expected = generate(model, **rules)
    steps = {}
    for together in (True, False, None):
        loop = drafting(head, tree=TREES["ragged"], rows_together=together)
        planted(model, loop, expected)
        output = generate(model, loop, return_dict_in_generate=True, **rules)
        assert torch.equal(output.sequences, expected)
        steps[together] = output.num_steps
    assert steps[False] < steps[True] < NEW_TOKENS - 1
    assert steps[None] == steps[own]


# --- sampled text ---

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 8, "top_p": 0.9}


@pytest.mark.parametrize("end", [2, UNUSED, None])
def test_the_same_random_numbers_give_the_same_text(world: World, end: int | None) -> None:
    """A row alone, and rows that go together; the head is asked, and drafts of all lengths are accepted."""
    model, head = world()
    several = {"num_return_sequences": 2, "min_p": 0.05}
    for prompts, more, together in ((FOUR[:1], {}, None), (FOUR, {}, True), (FOUR, several, True)):
        arguments = {**SAMPLED, **more, "eos_token_id": end}
        expected = generate(model, None, prompts, **arguments)
        after = torch.rand(1)
        output = generate(model, drafting(head, rows_together=together), prompts, **arguments)
        assert torch.equal(output, expected)
        assert torch.equal(torch.rand(1), after), "as many random numbers were used"
    known = drafting(head, tree=TREES["ragged"], rows_together=True)
    expected = generate(model, **SAMPLED, eos_token_id=end)
    planted(model, known, expected)
    assert torch.equal(generate(model, known, **SAMPLED, eos_token_id=end), expected)


@pytest.mark.filterwarnings("ignore:.*tokens per step")  # the head is random
def test_sampled_rows_have_the_distribution_of_the_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are ahead of each other: Pearson's test on the joint distribution of three tokens."""
    model, head = world()
    accepted: Counter[int] = Counter()
    for kind in (NativeRunner, TransformersRunner):
        commit = kind.commit
        monkeypatch.setattr(kind, "commit", lambda *args, own=commit: (accepted.update(args[-1]), own(*args))[1])
    loop = drafting(head, tree=TREES["cartesian"])
    output = generate(model, loop, [PROMPT] * 3000, **SAMPLED, max_new_tokens=LENGTH, eos_token_id=UNUSED)
    assert accepted[2] > 100, "drafts are accepted"
    answers = Counter(tuple(row[3:].tolist()) for row in output)
    expected = joint_distribution(TargetModel(model, letters_tokenizer(), "tiny"))
    assert p_value(answers, expected) > ODDS
    shifted = Counter({(*answer[:2], (answer[2] + 1) % VOCAB): count for answer, count in answers.items()})
    assert p_value(shifted, expected) < ODDS


# --- what is returned and streamed ---


@pytest.mark.parametrize("together", [True, False])
def test_scores_and_logits_are_those_of_generate(world: World, together: bool) -> None:
    model, head = world()
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options = {**options, "repetition_penalty": 1.3, "eos_token_id": [2, 9, 17]}
    expected = generate(model, **options)
    loop = drafting(head, tree=TREES["ragged"], rows_together=together)
    planted(model, loop, expected.sequences)
    output = generate(model, loop, **options)
    assert torch.equal(output.sequences, expected.sequences)
    answers = output.sequences[:, 14:]
    ended = (answers == 0).int().cumsum(1).bool()  # token 0 is padding
    assert ended.any()
    for name in ("scores", "logits"):
        found, own = (torch.stack(getattr(each, name), 1) for each in (output, expected))  # (B, T, V)
        assert found.shape == own.shape
        torch.testing.assert_close(found[~ended], own[~ended], rtol=1e-4, atol=1e-4)
        assert not found[ended].any() or together
    assert not output.logits[-1][ended[:, -1]].any()
    by_transformers = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    by_drafts = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    torch.testing.assert_close(by_drafts[~ended], by_transformers[~ended], rtol=1e-4, atol=1e-4)
    assert generate(model, drafting(head), return_dict_in_generate=True).scores is None


class Stream(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("prompts", [FOUR[:1], FOUR])
@pytest.mark.parametrize("end", [2, 9, None])
def test_a_streamer_gets_the_same_tokens(
    world: World, loops: tuple[CustomGenerate, CustomGenerate], prompts: list[list[int]], end: int | None
) -> None:
    model, _ = world()
    streams = [Stream(), Stream(), Stream()]
    expected = generate(model, None, prompts, eos_token_id=end, streamer=streams[0])
    planted(model, loops[1], expected, prompts)
    for loop, stream in zip(loops, streams[1:], strict=True):
        generate(model, loop, prompts, eos_token_id=end, streamer=stream)
        assert stream.tokens == streams[0].tokens
        assert stream.ends == 1


def test_tokens_are_streamed_at_each_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = world()
    loop = drafting(head, tree=TREES["cartesian"])
    loop.engine(model)
    passes: list[int] = []
    for kind in (NativeRunner, TransformersRunner):
        verify = kind.verify
        monkeypatch.setattr(kind, "verify", lambda *args, own=verify: passes.append(1) or own(*args))

    class Clocked(Stream):
        def put(self, value: Tensor) -> None:
            self.tokens.append([len(passes)])

    stream = Clocked()
    output = generate(model, loop, FOUR[:1], streamer=stream, return_dict_in_generate=True)
    prompt, *times = (time for (time,) in stream.tokens)
    assert prompt == 0
    assert times == sorted(times)
    assert set(times) == set(range(output.num_steps + 1))


# --- the engine of a model ---


def test_a_model_is_prepared_once_and_does_not_change(world: World) -> None:
    model, head = world()
    loop = drafting(head)
    model.train().requires_grad_(requires_grad=True)
    try:
        generate(model, loop)
        engine = loop.engine(model)
        assert torch.equal(generate(model, loop), generate(model.eval()))
        assert loop.engine(model) is engine
        assert all(weight.requires_grad for weight in model.parameters())
        assert model.train().training
        assert not engine.model.model.training
    finally:
        model.eval().requires_grad_(requires_grad=False)


def all_through_data(model: Any) -> None:
    for weight in model.model.layers.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))


def one_number(model: Any) -> None:
    model.lm_head.weight[8, 1] += 9.0


def another_tensor(model: Any) -> None:
    """Of the same version, and with the same numbers but for one."""
    before = model.lm_head.weight
    is_changed = torch.arange(before.numel()).view_as(before) == 8 * before.shape[1] + 1
    model.lm_head.weight = torch.nn.Parameter(torch.where(is_changed, before + 9.0, before), requires_grad=False)


@pytest.mark.parametrize("change", [all_through_data, one_number, another_tensor])
@pytest.mark.filterwarnings("ignore:the layers of .* differ by")  # the head was trained for others
def test_after_training_the_text_is_that_of_the_new_weights(world: World, change: Callable[[Any], None]) -> None:
    _, head = world()
    model, loop = tiny_model("llama").model, drafting(head)
    before, engine = generate(model, loop), loop.engine(model)
    torch.manual_seed(1)
    change(model)
    expected = generate(model)
    assert not torch.equal(before, expected)
    assert torch.equal(generate(model, loop), expected)
    assert loop.engine(model) is not engine


def test_the_engine_goes_with_its_model(world: World) -> None:
    _, head = world()
    model, loop = tiny_model("llama").model, drafting(head)
    generate(model, loop)
    gone = weakref.ref(model), weakref.ref(loop.engine(model))
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_model_in_a_folder_brings_its_tokenizer(world: World, tmp_path: Path) -> None:
    model, head = world()
    model.save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(str(tmp_path))
    loop = draftheads.custom_generate(head)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(generate(loaded, loop), generate(model))
    with pytest.raises(InvalidSettings, match="a loaded model needs its tokenizer: give tokenizer="):
        generate(model, loop)
    assert torch.equal(generate(model, loop, tokenizer=letters_tokenizer()), generate(model))


def test_generate_in_inference_mode(world: World) -> None:
    model, head = world()
    expected = generate(model, logits_processor=LogitsProcessorList([Forbidding()]))
    with torch.inference_mode():
        found = generate(model, drafting(head), logits_processor=LogitsProcessorList([Forbidding()]))
    assert torch.equal(found, expected)


# --- what is refused ---


def read_cache(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[5, 6]]), past_key_values=cache)
    return cache


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "beams": (
        lambda _: {"num_beams": 3},
        r"cannot decode with beam search \(num_beams=3\): leave it out, or leave custom_g",
    ),
    "prompt lookup": (lambda _: {"prompt_lookup_num_tokens": 3}, "with assisted generation: leave"),
    "assistant": (lambda model: {"assistant_model": model}, r"assistant_model: give it as custom_generate\(draft_m"),
    "states": (lambda _: {"return_dict_in_generate": True, "output_hidden_states": True}, "with output_hidden_states"),
    "static cache": (lambda _: {"cache_implementation": "static"}, "with cache_implementation='static': leave it out"),
    "cache": (lambda model: {"past_key_values": read_cache(model)}, r"\(a text that was read before\)"),
    "embeddings": (
        lambda model: {"inputs_embeds": model.get_input_embeddings()(torch.tensor([FOUR[0]]))},
        "with inputs_embeds: leave it out",
    ),
    "positions": (lambda _: {"position_ids": torch.tensor([[3, 4, 5]])}, "with position_ids of your own"),
    "synced_gpus": (lambda _: {"synced_gpus": True}, "with synced_gpus: leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")  # transformers warns of some of them
def test_what_drafts_cannot_do_is_refused_by_name(world: World, case: str) -> None:
    model, head = world()
    options, message = REFUSED[case]
    with pytest.raises(InvalidSettings, match=message):
        generate(model, drafting(head), FOUR[:1], **options(model))


def test_typical_acceptance_needs_rules_that_look_at_each_row_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the text of its node. As the text depends on the drafts, these do not depend on the time of steps."""
    model, head = world()
    monkeypatch.setattr(Plan, "shape", shape := create_autospec(Plan.shape, side_effect=Plan.shape))
    options = {"do_sample": True, "logits_processor": LogitsProcessorList([Forbidding()])}
    with pytest.raises(InvalidSettings, match="give rows_together=False if yours look at each row alone"):
        generate(model, drafting(head, acceptance="typical"), **options)
    loop = drafting(head, acceptance="typical", typical_epsilon=0.01, rows_together=False)
    output = generate(model, loop, eos_token_id=UNUSED, return_dict_in_generate=True, **options)
    start = max(map(len, FOUR))
    assert (output.sequences[:, start:] != output.sequences[:, start - 2 : -2]).all()
    assert output.num_steps < NEW_TOKENS / 2, "drafts are accepted"
    assert {call.kwargs["may_follow"] for call in shape.call_args_list} == {False}


def test_an_encoder_with_a_decoder_is_refused(world: World) -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    with pytest.raises(InvalidSettings, match="T5ForConditionalGeneration, an encoder with a decoder: leave"):
        generate(T5ForConditionalGeneration(config), drafting(world()[1]), FOUR[:1])


@pytest.mark.parametrize("mask", [[1, 1, 0], [1, 0, 1], [0, 0, 0]])
def test_other_padding_than_on_the_left_is_refused(world: World, mask: list[int]) -> None:
    model, head = world()
    with pytest.raises(InvalidPrompt, match="padded on the left"):
        generate(model, drafting(head), [[5, 6, 7]], attention_mask=torch.tensor([mask]))


def test_a_text_as_long_as_the_model_allows(world: World) -> None:
    """The last token has the last position; one more is an error, and no draft is accepted beyond it."""
    model, head = world("gpt2")
    options = {"eos_token_id": None, "max_new_tokens": 12}
    prompt = [3 + place % (VOCAB - 3) for place in range(245)]
    loop = drafting(head, tree=TREES["ragged"])
    expected = generate(model, None, [prompt], **options)
    planted(model, loop, expected, [prompt])
    assert torch.equal(generate(model, loop, [prompt], **options), expected)
    with pytest.raises(PromptTooLong, match=r"a text has 257 tokens and .* takes at most 256: .*max_new_tokens"):
        generate(model, drafting(head), [prompt], **{**options, "max_new_tokens": 40})
    with pytest.raises(PromptTooLong, match=r"a prompt has 256 tokens; .* takes at most 255"):
        generate(model, drafting(head), [[*prompt, *prompt[:11]]], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "hydra", "tree": Sampled(Tree.chain(2))}, "a Sampled tree needs an acceptance rule"),
        ({"rows_together": "yes"}, "rows_together is 'yes'; it must be True or False"),
        ({"head": 3}, "head is 3; give a bundled head's name"),
        ({"acceptance": "block"}, "acceptance is 'block'; it must be 'exact', or 'typical' for"),
        ({"typical_delta": 0.2}, "acceptance is 'exact'; it must be 'exact', or 'typical' for typical_epsilon and typ"),
        ({"acceptance": "typical", "typical_epsilon": 2}, "typical_epsilon is 2; it must be a number above 0 and at"),
    ],
)
def test_wrong_values_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftHeadsError, match=message):
        custom_generate(**options)
