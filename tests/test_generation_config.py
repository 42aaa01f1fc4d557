"""The model's generation configuration: plain and drafted texts are those of ``model.generate`` under it."""

import random
import re
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import structured_world
from draftheads.bench.timing import engine_way, stock_way
from draftheads.decode.engine import Engine
from draftheads.decode.token_rules import has_rules
from draftheads.drafters.mixed import Mixed
from draftheads.errors import GenerationWarning, UnsupportedModel
from draftheads.interop.transformers import custom_generate
from draftheads.loading import load
from draftheads.models import generation
from draftheads.models.model import TargetModel
from draftheads.settings import Grammar, SamplingSettings
from draftheads.speculation.shapes import BestFirst, Sampled
from draftheads.speculation.tree import Tree
from families import TREES, VOCAB, IntegerTokenizer, PlantedDrafter, tiny_head, tiny_model
from serve_world import NAME, running, tiny_engines
from structured_world import EOS, json_tokenizer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Unfeasible length:UserWarning"),
]

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPTS = [[5, 6, 7, 5, 6], [9, 10, 11, 12, 13, 14, 2, 9, 10], [3], [4, 8]]
NEW = 16
FAMILIES = ["llama", "gpt_neox", "gemma2"]


def with_config(family: str, **settings: Any) -> TargetModel:
    model = tiny_model(family)
    model.model.generation_config = GenerationConfig(**{**SPECIAL, **settings})
    return TargetModel(model.model, model.tokenizer, model.model_id)


def theirs(model: TargetModel, prompt: list[int], **arguments: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    arguments = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    whole = model.model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return tuple(whole[0, len(prompt) :].tolist())


def ours(engine: Engine, **settings: Any) -> list[tuple[int, ...]]:
    results = engine.generate(PROMPTS, **{"max_new_tokens": NEW, **settings})
    return [result.token_ids for result in results]


def some_tokens(rng: random.Random, most: int = 4) -> list[int]:
    return rng.sample(range(VOCAB), rng.randint(1, most))


RANDOM_VALUES: dict[str, Any] = {
    "suppress_tokens": lambda rng: some_tokens(rng, 8),
    "begin_suppress_tokens": some_tokens,
    "bad_words_ids": lambda rng: [some_tokens(rng, 2) for _ in range(6)],
    "no_repeat_ngram_size": lambda rng: rng.randint(1, 3),
    "encoder_no_repeat_ngram_size": lambda rng: rng.randint(1, 2),
    "sequence_bias": lambda rng: [[some_tokens(rng, 2), rng.uniform(-9, 9)] for _ in range(5)],
    "repetition_penalty": lambda rng: rng.uniform(0.6, 2.0),
    "encoder_repetition_penalty": lambda rng: rng.uniform(0.6, 2.0),
    "min_new_tokens": lambda rng: rng.randint(1, NEW + 5),
    "min_length": lambda rng: rng.randint(1, NEW),
    "forced_eos_token_id": lambda rng: rng.choice([2, [2, 7]]),
    "forced_bos_token_id": lambda rng: rng.randrange(VOCAB),
    "exponential_decay_length_penalty": lambda rng: (rng.randint(0, 8), rng.uniform(1.01, 1.4)),
    "remove_invalid_values": lambda _: True,
    "renormalize_logits": lambda _: True,
    "eos_token_id": lambda rng: rng.choice([2, [2, 11]]),
}


def random_config(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)  # noqa: S311
    names = rng.sample(sorted(RANDOM_VALUES), rng.randint(1, 5))
    return {name: RANDOM_VALUES[name](rng) for name in names}


@pytest.mark.few(37)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(30))
def test_texts_are_those_of_generate(family: str, seed: int) -> None:
    """With copies, a head, and drafts of which paths of all lengths are accepted; rows of different lengths."""
    model = with_config(family, **random_config(seed))
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    assert ours(Engine(model)) == expected
    answers = {tuple(prompt): text for prompt, text in zip(PROMPTS, expected, strict=True)}
    drafters = PlantedDrafter(TREES["ragged"], answers), tiny_head("hydra", model), Mixed(None)
    assert ours(Engine(model, drafters[seed % 3])) == expected


def test_most_random_configurations_change_texts() -> None:
    """Else the test above says little."""
    plain = [theirs(with_config("llama"), prompt) for prompt in PROMPTS]
    changed = [
        [theirs(with_config("llama", **random_config(seed)), prompt) for prompt in PROMPTS] != plain
        for seed in range(30)
    ]
    assert sum(changed) > 20


def test_every_setting_of_transformers_is_known() -> None:
    """One that a new version adds is applied, named as not applied, or changes no text."""
    without_effect = {  # lengths, outputs, caches, speed, special tokens
        *("max_length", "max_new_tokens", "early_stopping", "length_penalty", "diversity_penalty", "do_sample"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_mtp"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile"),
        *("continuous_batching_config", "transformers_version"),
    }
    named = {*generation._NOT_APPLIED, *generation._NOT_SAMPLED, *generation._SAMPLING}
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert settings - without_effect - named - set(RANDOM_VALUES) == set()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"guidance_scale": 1.7}, "guidance_scale=1.7"),
        ({"watermarking_config": {"bias": 4.0}}, "watermarking_config="),
        ({"stop_strings": ["<9>"]}, "stop_strings="),
        ({"do_sample": True, "typical_p": 0.4, "temperature": 0.9}, "typical_p=0.4"),
        ({"do_sample": True, "eta_cutoff": 0.01}, "eta_cutoff=0.01"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ],
)
def test_what_is_not_applied_is_named_once(settings: dict[str, Any], name: str) -> None:
    model = with_config("llama", **settings)
    with pytest.warns(GenerationWarning, match=name) as told:
        engine = Engine(model)
    Engine(model, Mixed(None)).generate(PROMPTS, max_new_tokens=3)
    assert len(told) == 1
    assert ours(engine) == ours(Engine(tiny_model("llama")))
    # the baseline of benchmarks does the same work
    [answers] = stock_way(model)(PROMPTS, NEW)
    assert list(answers.token_ids) == ours(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 1, "guidance_scale": 1.0, "penalty_alpha": 0.0, "cache_implementation": "static"},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "typical_p": 1.0},
        {"typical_p": 0.4, "max_length": 4096, "assistant_early_exit": None},
        {"top_k": -1, "top_p": 0.0, "temperature": 0},
    ],
)
def test_usual_configurations_change_nothing_and_cost_nothing(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GenerationWarning)
        engine = Engine(with_config("llama", **settings))
    request = engine.request(PROMPTS[0], SamplingSettings())
    assert (request.processors, request.bias) == (None, {})
    assert not has_rules(request)
    assert ours(engine) == ours(Engine(tiny_model("llama")))


@pytest.mark.parametrize("more", [{}, {"no_repeat_ngram_size": 2}])
def test_what_a_request_gives_wins(more: dict[str, Any]) -> None:
    """Also where all is done by transformers' processors."""
    model = with_config("llama", repetition_penalty=1.7, min_new_tokens=12, suppress_tokens=[9], **more)
    engine, kept = Engine(model), [theirs(model, prompt) for prompt in PROMPTS]
    given = {"repetition_penalty": 1.0, "min_new_tokens": 0}
    expected = [theirs(model, prompt, **given) for prompt in PROMPTS]
    assert ours(engine, **given) == expected != kept
    assert ours(engine) == kept
    [request] = engine.requests([PROMPTS[0]], max_new_tokens=7)
    assert (request.settings.repetition_penalty, request.settings.min_new_tokens) == (1.7, 7)
    # a bias, too
    engine = Engine(with_config("llama", suppress_tokens=list(range(3, VOCAB))))
    assert {token for text in ours(engine) for token in text} <= {0, 1, 2}
    [text, *_] = ours(engine, logit_bias={9: 90.0})
    assert set(text) == {9}


RULED = {"no_repeat_ngram_size": 2, "sequence_bias": [[[7, 8], 4.0]], "repetition_penalty": 1.2}


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block", "typical"])
def test_sampled_texts_keep_the_rules(acceptance: Any) -> None:
    """Exactly accepted ones are those of plain decoding, number for number."""
    model = with_config("llama", **RULED)
    how = {"temperature": 0.9, "seed": 5, "acceptance": acceptance, "frequency_penalty": 0.3}
    drafted = ours(Engine(model, tiny_head("hydra", model), shape=Sampled(Tree.cartesian([2, 2, 1]))), **how)
    for prompt, text in zip(PROMPTS, drafted, strict=True):
        ids = [*prompt, *text]
        pairs = list(pairwise(ids))
        assert all(pair not in pairs[:place] for place, pair in enumerate(pairs) if place >= len(prompt) - 1)
    if acceptance == "exact":
        assert drafted == ours(Engine(model), **how)


@pytest.mark.parametrize("fast", [False, True])
def test_loaded_models_with_their_faster_modules_and_few_rows(fast: bool) -> None:
    model = with_config("llama", **RULED, suppress_tokens=[5, 11], min_new_tokens=18)
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    eagle = Engine(model, tiny_head("eagle", model), shape=BestFirst(8), max_batch_size=1 + fast)
    assert ours(eagle) == expected
    for drafter in (None, "lookahead"):
        engine = load(model.model, drafter, tokenizer=IntegerTokenizer(), fast=fast)
        assert ours(engine) == expected


def test_custom_generate_follows_the_whole_configuration() -> None:
    """It gets generate's own processors, so nothing is named as not applied."""
    model = with_config("llama", **RULED, watermarking_config={"bias": 3.0, "seeding_scheme": "lefthash"})
    loop = custom_generate("prompt-lookup", tokenizer=IntegerTokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GenerationWarning)
        drafted = [theirs(model, prompt, custom_generate=loop) for prompt in PROMPTS]
    assert drafted == [theirs(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("ends", [[-1, 2], [VOCAB, 2, 10**6]])
def test_end_tokens_outside_of_the_vocabulary_end_nothing(ends: list[int]) -> None:
    """They are no end, and none of the last tokens is banned in their place."""
    model = with_config("llama", eos_token_id=ends, min_new_tokens=15, suppress_tokens=list(range(VOCAB - 1)))
    assert model.eos_ids == {2}
    assert ours(Engine(model)) == [(VOCAB - 1,) * NEW] * len(PROMPTS)


def test_a_grammar_comes_first() -> None:
    """Something that it allows is written, also where the configuration bans it."""
    sizes = {"vocab_size": structured_world.VOCAB, "eos_token_id": EOS, "bos_token_id": EOS, "pad_token_id": EOS}
    model = tiny_model("llama", **sizes)
    config = {"no_repeat_ngram_size": 1, "min_new_tokens": 30, "suppress_tokens": list(range(5, 40))}
    model.model.generation_config = GenerationConfig(eos_token_id=EOS, **config)
    ruled = TargetModel(model.model, json_tokenizer(), "ruled")
    for engine in (Engine(ruled), Engine(ruled, tiny_head("medusa", ruled), shape=BestFirst(12))):
        [result] = engine.generate([[7, 8, 9]], grammar=Grammar.regex("(ab){3}|c{6}"))
        assert result.text in ("ababab", "cccccc")


WRONG = {"no_repeat_ngram_size": [2.5], "temperature": ["hot", True], "top_k": [2.5], "top_p": [[1]], "min_p": [7]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_configuration_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"is wrong: .*(ngram|{name} is {re.escape(repr(value))}; it must be)"):
        Engine(with_config("llama", **{name: value}))


def test_benchmarks_time_the_same_work() -> None:
    model = with_config("llama", **RULED, top_k=3, min_p=0.2, do_sample=True)
    for sampling in (SamplingSettings(), SamplingSettings(ignore_eos=True)):
        [stock], [own] = stock_way(model, sampling)(PROMPTS, NEW), engine_way(Engine(model), sampling)(PROMPTS, NEW)
        assert stock.token_ids == own.token_ids


def test_a_server_answers_as_generate_does() -> None:
    engine = tiny_engines()[NAME]
    rules = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 9, "top_k": 1, "temperature": 0.5}
    config = GenerationConfig(eos_token_id=0, pad_token_id=0, **rules)
    engine.model.model.generation_config = config
    model = TargetModel(engine.model.model, engine.model.tokenizer, NAME)
    ids = model.tokenizer("the cat sat")["input_ids"]
    with running({NAME: Engine(model, tiny_head("medusa", model), shape=BestFirst(12))}) as server:
        for fields in ({"temperature": 0}, {}, {"min_tokens": 3, "repetition_penalty": 1.1}):
            answer = server.complete(prompt=ids, max_tokens=NEW, **fields).json()["choices"][0]["text"]
            of_generate = {"min_new_tokens": fields.get("min_tokens", 9)}
            of_generate["repetition_penalty"] = fields.get("repetition_penalty", 1.3)
            assert answer == model.tokenizer.decode(theirs(model, ids, **of_generate), skip_special_tokens=True)
