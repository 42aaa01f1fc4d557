"""LongRoPE: each text has the factors of its own greatest length, and equals transformers' below and above it."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftheads.data.texts import load_texts
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.errors import PromptTooLong
from draftheads.interop.transformers import custom_generate
from draftheads.loading import load
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import ModelTokenizer
from draftheads.settings import SamplingSettings
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import BestFirst
from draftheads.train.training_data import read_texts
from families import SMALL, IntegerTokenizer, PlantedRandomTrees, tiny_head
from target_rows import Target
from training_world import chat, chat_model, chat_options, chat_tokenizer, write_chats

pytestmark = pytest.mark.usefixtures("one_thread")
ORIGINAL = 48
START = {"original_max_position_embeddings": ORIGINAL}
FACTORS = {"short_factor": [1.0, 1.0, 1.1, 1.3], "long_factor": [1.0, 3.0, 6.0, 10.0]}
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **START, **FACTORS}
LONGROPE = {"max_position_embeddings": 128, **START, "rope_parameters": ROPE}
# prompts with tokens of their answers: short to the last place; long; long by its answer alone; of the greatest length
ASKED = {
    (5, 6, 7, 8): 20,
    tuple(3 + n * n % 20 for n in range(30)): ORIGINAL + 1 - 30,
    tuple(3 + 4 * n % 20 for n in range(ORIGINAL + 1)): 16,
    tuple(3 + n * n % 19 for n in range(100)): 28,
    tuple(3 + n * n % 17 for n in range(40)): 20,
    (9,): ORIGINAL - 20,
}
PROMPTS = list(map(list, ASKED))


def stock(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SMALL, **LONGROPE})).eval()


def longrope(family: str = "phi3") -> TargetModel:
    return TargetModel.of(stock(family), IntegerTokenizer())


def texts(model: TargetModel, drafter: Drafter | None = None, *, rows: int = 6, **options: Any) -> list[Any]:
    settings = [SamplingSettings(max_new_tokens=count, ignore_eos=True) for count in ASKED.values()]
    results = Engine(model, drafter, max_batch_size=rows, **options).generate(PROMPTS, settings)
    return [result.token_ids for result in results]


@cache
def expected(family: str = "phi3") -> list[tuple[int, ...]]:
    """transformers' texts without a cache: each token after a pass over the text, padded to the length that is read."""
    model, found = stock(family), []
    for prompt, count in ASKED.items():
        ids = list(prompt)
        for _ in range(count):
            whole = torch.tensor([[*ids, *[0] * (len(prompt) + count - 1 - len(ids))]])
            ids.append(int(model(whole, use_cache=False).logits[0, len(ids) - 1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [2, 6])
def test_all_texts_equal_transformers(rows: int, *, static: bool) -> None:
    """Short and long rows side by side, and draft tokens beyond the limit of each."""
    model, plain = longrope(), expected()
    model.step_mode.graphs = static
    assert texts(model, rows=rows) == plain
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}
    assert texts(model, PlantedRandomTrees(answers, max_nodes=24), rows=rows) == plain
    for drafter in (tiny_head("eagle", model), DraftModel(longrope(), model)):
        assert texts(model, drafter, rows=rows, shape=BestFirst(24)) == plain


def test_generate_of_transformers_agrees_where_it_does_not_switch() -> None:
    """It changes the factors in the middle of a text; ours has those of its end from its beginning on."""
    model, plain = stock("phi3"), expected()
    for (prompt, count), text in zip(ASKED.items(), plain, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        if len(prompt) > ORIGINAL or len(prompt) + count <= ORIGINAL + 1:
            assert tuple(whole[0, len(prompt) :].tolist()) == text


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_loaded_models(family: str, *, fast: bool) -> None:
    """Also by the native library, and the given model does not change."""
    given = stock(family)
    before = type(given.model.rotary_emb)
    engine = load(given, "lookahead", tokenizer=IntegerTokenizer(), fast=fast)
    assert texts(engine.model, engine.drafter) == texts(engine.model) == expected(family)
    assert type(given.model.rotary_emb) is before


def test_custom_generate_counts_the_longest_answer_of_each_row() -> None:
    """Rows of a batch that is padded on the left."""
    loop, model = custom_generate("prompt-lookup", tokenizer=IntegerTokenizer()), stock("phi3")
    rows, count = [PROMPTS[0], PROMPTS[3]], 28
    longest = max(map(len, rows))
    ids = torch.tensor([[*[0] * (longest - len(row)), *row] for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    drafted = model.generate(ids, attention_mask=mask, custom_generate=loop, **options)
    settings = [SamplingSettings(max_new_tokens=count, ignore_eos=True)] * 2
    alone = Engine(longrope()).generate(rows, settings)
    assert [tuple(row[longest:].tolist()) for row in drafted] == [result.token_ids for result in alone]


def test_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.runners.transformers_runner.CHUNK_TOKENS", 16)
    assert texts(longrope()) == expected()


@pytest.mark.parametrize(("counts", "is_shared"), [((18, 20), False), ((20, 18), False), ((18, 17), True)])
def test_short_and_long_texts_share_no_prefix(counts: tuple[int, int], *, is_shared: bool) -> None:
    """A prompt that was read for a short text is read again for a long one, and the other way round."""
    engine, prompt = Engine(longrope()), PROMPTS[1]
    core = EngineCore({"": engine}, CoreLimits(), keeps_answers=True)
    for number, count in enumerate(counts):
        [request] = engine.requests([prompt], max_new_tokens=count, ignore_eos=True)
        core.add(request)
        assert list(engine.events(core))
        assert bool(request.num_cached) == (is_shared and number == 1)
        [alone] = Engine(longrope()).generate([prompt], max_new_tokens=count, ignore_eos=True)
        assert tuple(request.token_ids) == alone.token_ids


def test_hidden_states_of_whole_texts_are_transformers() -> None:
    """As training reads them: short and long ones."""
    model, right = longrope(), stock("phi3").model
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        torch.testing.assert_close(model.hidden_states(ids), right(ids, use_cache=False).last_hidden_state)


def test_a_shorter_limit_by_hand_keeps_the_short_factors() -> None:
    model = TargetModel.of(stock("phi3"), IntegerTokenizer(), max_length=ORIGINAL)
    target = Target(model)
    target.prefill([[5], [6]], [ORIGINAL + 1, ORIGINAL + 2])
    assert [row.is_long for row in target.rows] == [False, True]
    with pytest.raises(PromptTooLong, match=f"has {ORIGINAL} tokens; Phi3ForCausalLM takes at most {ORIGINAL - 1}"):
        Engine(model).generate([[3] * ORIGINAL])
    [result] = Engine(model).generate([PROMPTS[1]], max_new_tokens=1000, ignore_eos=True)
    assert result.token_ids == expected()[1][: ORIGINAL - 30]


def test_training_reads_no_more_than_the_model_takes(tmp_path: Any) -> None:
    model = chat_model(max_position_embeddings=16)
    files = [write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2 " * 40)])]
    [text] = load_texts(model, files, max_length=2048)
    assert (len(text.token_ids), text.is_cut) == (16, True)
    assert [text] == load_texts(ModelTokenizer(chat_tokenizer(), model.eos_ids, max_positions=16), files, max_length=99)
    book = tmp_path / "book.txt"
    book.write_text("w1 w2 w3 " * 20)
    settings = chat_options(tmp_path, text=(book,))
    assert max(len(block.token_ids) for block in read_texts(model, settings)) == 16
