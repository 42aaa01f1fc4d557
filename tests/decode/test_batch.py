"""Log-probabilities in results: those of the model, with any drafter, computed only for rows that ask for them."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from draftheads.decode import batch
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.drafters.mixed import Mixed
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import Sampled, Shape
from draftheads.speculation.tree import Tree
from families import FAMILIES, GROWING, PROMPTS, TREES, VOCAB, PlantedRandomTrees, needs_library, tiny_head, tiny_model
from target_rows import Target
from thorough import some

FIVE = [*PROMPTS, [4, 5], [8, 8, 8, 8]]
ON: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "seed": 5}


def expected(model: TargetModel, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """(T, V) of transformers' own logits in one pass over the text, before each token of the answer."""
    text = torch.tensor([[*prompt, *answer]])
    return model.model(text).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def check(model: TargetModel, prompts: list[list[int]], results: list[GenerationResult], num_top: int) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        table = expected(model, prompt, result.token_ids)
        own = table[torch.arange(len(table)), torch.tensor(result.token_ids)]
        assert result.logprobs == pytest.approx(own.tolist(), abs=1e-4)
        for place, scores in zip(result.top_logprobs, table, strict=True):
            tokens, found = zip(*place, strict=True)
            assert len({*tokens}) == num_top
            assert list(found) == sorted(found, reverse=True)
            assert list(found) == pytest.approx(scores.topk(num_top).values.tolist(), abs=1e-4)
            assert list(found) == pytest.approx(scores[list(tokens)].tolist(), abs=1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", some(FAMILIES, "llama", "mistral", "gpt2", "granite", "gemma2"))
def test_they_are_those_of_transformers_plain_and_drafted(family: str, temperature: float):
    model = tiny_model(family)
    plain = Engine(model, max_batch_size=2).generate(FIVE, temperature=temperature, logprobs=3, **ON)
    check(model, FIVE, plain, 3)
    answers = {tuple(prompt): result.token_ids for prompt, result in zip(FIVE, plain, strict=True)}
    for drafter in (PlantedRandomTrees(answers, max_nodes=16), Mixed(tiny_head("hydra", model))):
        results = Engine(model, drafter, max_batch_size=3).generate(FIVE, temperature=temperature, logprobs=3, **ON)
        assert sum(result.num_steps for result in results) < sum(result.num_steps for result in plain)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        check(model, FIVE, results, 3)


CHAIN = Tree.chain(3)
WAYS: dict[str, tuple[Any, Shape | None, dict[str, Any]]] = {
    "a growing tree": ("hydra", GROWING["best first"], {}),
    "copies alone": (Mixed(None), None, {}),
    "typical": ("hydra", TREES["64 nodes"], {"temperature": 1.5, "acceptance": "typical"}),
    "rejection": ("hydra", Sampled(TREES["cartesian"]), {"temperature": 1.1, "acceptance": "rejection"}),
    "block": ("hydra", Sampled(CHAIN), {"temperature": 1.1, "acceptance": "block"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graphs", [False, True])
def test_for_each_rule_of_acceptance_and_kind_of_draft(way: str, graphs: bool):
    model = tiny_model("llama")
    model.step_mode.graphs = graphs
    drafter, shape, settings = WAYS[way]
    whole: Drafter = tiny_head(drafter, model) if isinstance(drafter, str) else drafter
    results = Engine(model, whole, shape=shape, max_batch_size=3).generate(FIVE, logprobs=2, **ON, **settings)
    assert sum(sum(result.drafted) for result in results) > 3
    check(model, FIVE, results, 2)


@needs_library
def test_int8_has_those_of_the_int8_model():
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    model = model.sped_up(bits=8)
    results = [
        Engine(model, drafter, max_batch_size=2).generate(FIVE, logprobs=0, **ON)
        for drafter in (None, tiny_head("hydra", model))
    ]
    for prompt, plain, drafted in zip(FIVE, *results, strict=True):
        assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        target = Target(model)
        target.open(100)
        [(hidden, _)] = target.read([[*prompt, *plain.token_ids]])  # in one pass
        scores = model.logits(hidden)[len(prompt) - 1 : -1].log_softmax(-1)
        own = scores[torch.arange(20), torch.tensor(plain.token_ids)]
        assert plain.logprobs == pytest.approx(own.tolist(), abs=1e-5)


def test_each_row_has_what_it_asks_for():
    model = tiny_model("qwen2")
    asked = [None, 0, 5, 2, None]
    each = [SamplingSettings(**ON, logprobs=k, temperature=0.7 * (row % 2)) for row, k in enumerate(asked)]
    engine = Engine(model, tiny_head("medusa", model), max_batch_size=4)
    found = engine.generate(FIVE, each)
    assert [result.logprobs is None for result in found] == [True, False, False, False, True]
    assert [result.top_logprobs is None for result in found] == [True, True, False, False, True]
    check(model, FIVE[2:3], found[2:3], 5)
    check(model, FIVE[3:4], found[3:4], 2)
    alone = [engine.generate([prompt], own)[0] for prompt, own in zip(FIVE, each, strict=True)]
    for one, other in zip(found, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    everything = engine.generate(FIVE[:1], logprobs=20, **{**ON, "max_new_tokens": 2})[0].top_logprobs
    assert [len(place) for place in everything] == [20, 20]


def test_a_vocabulary_of_fewer_tokens_than_asked_for():
    model = tiny_model("llama", vocab_size=8)
    result = Engine(model).generate([[5, 6]], logprobs=20, max_new_tokens=3)[0]
    assert {len(place) for place in result.top_logprobs} == {8}


def test_an_answer_that_stops_inside_a_run_has_one_for_each_of_its_tokens():
    model = tiny_model("llama")
    plain = Engine(model).generate(FIVE[:2], logprobs=1, **ON)
    answers = {tuple(prompt): result.token_ids for prompt, result in zip(FIVE, plain, strict=False)}
    ids = plain[0].token_ids
    for more in ({"stop": f"<{ids[6]}><{ids[7]}>"}, {"stop_token_ids": [ids[9]]}, {"max_new_tokens": 5}):
        for seed in range(3):
            drafter = PlantedRandomTrees(answers, max_nodes=20, seed=seed)
            request = Engine(model, drafter).requests(FIVE[:1], **{**ON, "logprobs": 1, **more})[0]
            events = list(Engine(model, drafter).run([request]))
            result = request.result()
            assert len(result.token_ids) < 20
            assert result.logprobs == pytest.approx((plain[0].logprobs or ())[: len(result.token_ids)], abs=1e-4)
            assert sum((event.logprobs or () for event in events), ()) == result.logprobs
            assert sum((event.top_logprobs or () for event in events), ()) == result.top_logprobs
            for event in events:
                assert len(event.logprobs or ()) == len(event.top_logprobs or ()) == len(event.token_ids)


def test_nothing_is_computed_if_nobody_asks(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama")
    counted = Mock(wraps=batch.token_logprobs)
    monkeypatch.setattr(batch, "token_logprobs", counted)
    engine = Engine(model, tiny_head("hydra", model))
    assert {event.logprobs for event in engine.stream(FIVE[0], **ON)} == {None}
    assert not counted.called
    result = engine.generate(FIVE[:3], [SamplingSettings(**ON, logprobs=k) for k in (None, 3, None)])[1]
    rows = [len(call.args[0]) for call in counted.call_args_list]
    assert rows == [1] * (result.num_steps + 1), "one row asked, once in each of its steps"


def test_bf16_logits_are_normalised_in_fp32():
    model = tiny_model("llama", dtype=torch.bfloat16)
    result = Engine(model).generate([[5, 6]], logprobs=VOCAB - 4, max_new_tokens=8, ignore_eos=True)[0]
    logits = model.logits(model.hidden_states(torch.tensor([[5, 6]])))[0, -1]
    scores = logits.float().log_softmax(-1)
    found = dict(result.top_logprobs[0])
    assert found == pytest.approx({token: float(scores[token]) for token in found}, abs=1e-5)
